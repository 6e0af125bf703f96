"""vLLM's API: the bodies and streams of 0.33, on the simulated engine."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from pytest_dsv41.stub.chat import (
    check_stop,
    cut_prompt,
    encode_beside,
    integer,
    real,
    render_chat,
    token_list,
)
from pytest_dsv41.stub.engine import Ask, Job, Step
from pytest_dsv41.stub.faults import Faults
from pytest_dsv41.stub.fleet import chat_body, fleet_answer, with_effort
from pytest_dsv41.stub.generation import generate
from pytest_dsv41.stub.http import BadRequest, Request, dumps, respond
from pytest_dsv41.stub.language import Choice, decode, token_bytes
from pytest_dsv41.stub.loop import Connection, Wait
from pytest_dsv41.stub.metrics import CONTENT_TYPE
from pytest_dsv41.stub.profile import Profile
from pytest_dsv41.stub.shape import Shaper
from pytest_dsv41.stub.vllm_metrics import VllmLedger
from pytest_dsv41.stub.wire import Event

if TYPE_CHECKING:
    from pytest_dsv41.stub.server import Server

__all__ = ["Vllm"]

_FIGURES = (
    "time_to_first_token_ms",
    "generation_time_ms",
    "queue_time_ms",
    "mean_itl_ms",
    "tokens_per_second",
    "speculative_decoding",
)
_ERROR_TYPES = {404: "NotFoundError", 500: "InternalServerError", 503: "ServiceUnavailableError"}


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return vLLM's error object."""
    kind = _ERROR_TYPES.get(status, "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


class Vllm:
    """The routes. One instance a server."""

    def __init__(self, server: Server, ledger: VllmLedger) -> None:
        self.server = server
        self.profile: Profile = server.profile
        self.ledger = ledger
        # 0.33 added these to streamed chunks, and took created_cache_tokens out of them.
        self.since_033 = _version(self.profile.version) >= (0, 33)
        self.fingerprint = f"vllm-{self.profile.version}-stub"
        self.routes = {
            ("GET", "/health"): self.health,
            ("GET", "/ping"): self.health,
            ("GET", "/version"): self.version,
            ("GET", "/v1/models"): self.models,
            ("GET", "/load"): self.load,
            ("GET", "/metrics"): self.metrics,
            ("GET", "/server_info"): self.server_info,
            ("POST", "/tokenize"): self.tokenize,
            ("POST", "/detokenize"): self.detokenize,
            ("POST", "/v1/completions"): self.completions,
            ("POST", "/v1/chat/completions"): self.chat,
            ("POST", "/reset_prefix_cache"): self.reset_prefix_cache,
            ("POST", "/start_profile"): self.start_profile,
            ("POST", "/stop_profile"): self.stop_profile,
        }

    def error(self, connection: Connection, error: BadRequest) -> None:
        """Answer with vLLM's error object, or its web framework's for an unknown route."""
        if error.form == "route":
            respond(connection, error.status, dumps({"detail": str(error)}))
            return
        body = error_body(error.status, str(error), error.param)
        if error.form == "type":
            body["error"]["type"] = "Bad Request"
        respond(connection, error.status, dumps(body))

    def not_ready(self, connection: Connection) -> None:
        """Answer while the model loads: vLLM's port is open only afterwards; a proxy says 503."""
        respond(connection, 503)

    # ---- small endpoints -------------------------------------------------------------------

    def health(self, connection: Connection, _request: Request) -> None:
        """200 with an empty body."""
        respond(connection, 200)

    def version(self, connection: Connection, _request: Request) -> None:
        """The version the profile names."""
        respond(connection, 200, dumps({"version": self.profile.version}))

    def models(self, connection: Connection, _request: Request) -> None:
        """The one served model."""
        permission = {
            "id": "modelperm-stub",
            "object": "model_permission",
            "created": self.server.started,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        model = {
            "id": self.profile.model,
            "object": "model",
            "created": self.server.started,
            "owned_by": "vllm",
            "root": self.profile.model,
            "parent": None,
            "max_model_len": self.profile.max_model_len,
            "permission": [permission],
        }
        respond(connection, 200, dumps({"object": "list", "data": [model]}))

    def load(self, connection: Connection, _request: Request) -> None:
        """Requests in the server; 0 unless load tracking is on."""
        engine = self.server.engine
        count = len(engine.running) + engine.waiting if self.profile.load_tracking else 0
        respond(connection, 200, dumps({"server_load": count}))

    def metrics(self, connection: Connection, request: Request) -> None:
        """The exposition."""
        text = self.server.exposition(request.faults)
        respond(connection, 200, text.encode(), CONTENT_TYPE)

    def server_info(self, connection: Connection, request: Request) -> None:
        """The configuration, as text or JSON; only in dev mode."""
        if not self.profile.dev_mode:
            raise BadRequest("Not Found", 404, form="route")
        config = {k: v for k, v in self.profile._asdict().items() if k not in ("truth", "uds")}
        config["scheduler_config"] = {"max_num_seqs": self.profile.max_running}
        as_json = "config_format=json" in request.query
        shown: Any = config if as_json else ", ".join(f"{k}={v!r}" for k, v in config.items())
        answer = {"vllm_config": shown, "vllm_env": {}, "system_env": {}}
        respond(connection, 200, dumps(answer))

    def start_profile(self, connection: Connection, _request: Request) -> None:
        """Begin profiling: the stub only notes it."""
        if not self.profile.profiler:
            raise BadRequest("Not Found", 404, form="route")
        self.server.profiling = True
        respond(connection, 200)

    def stop_profile(self, connection: Connection, _request: Request) -> None:
        """End profiling."""
        if not self.profile.profiler:
            raise BadRequest("Not Found", 404, form="route")
        self.server.profiling = False
        respond(connection, 200)

    def reset_prefix_cache(self, connection: Connection, request: Request) -> None:
        """Empty the prefix cache; `false` while requests hold blocks. Only in dev mode."""
        if not self.profile.dev_mode:
            raise BadRequest("Not Found", 404, form="route")
        done = "reset-false" not in request.faults and self.server.engine.forget()
        respond(connection, 200, dumps({"success": done}))

    def tokenize(self, connection: Connection, request: Request) -> Generator[Wait, None, None]:
        """Token ids and their count, of a prompt or of messages."""
        if "tokenize-404" in request.faults:
            raise BadRequest("Not Found", 404, form="route")
        body = request.json()
        self._check_model(body)
        if "messages" in body:
            text = render_chat(body, generate=body.get("add_generation_prompt", True) is not False)
        else:
            prompt = body.get("prompt")
            if not isinstance(prompt, str):
                raise BadRequest("prompt must be a string")
            text = prompt
        tokens = yield from encode_beside(self.server.loop, text)
        extra = request.faults.count("tokenize-count") if "tokenize-count" in request.faults else 0
        strings = [decode([token]) for token in tokens] if body.get("return_token_strs") else None
        answer = {
            "count": len(tokens) + extra,
            "max_model_len": self.profile.max_model_len,
            "tokens": tokens,
            "token_strs": strings,
        }
        respond(connection, 200, dumps(answer))

    def detokenize(self, connection: Connection, request: Request) -> None:
        """The text of token ids."""
        body = request.json()
        self._check_model(body)
        respond(connection, 200, dumps({"prompt": decode(token_list(body.get("tokens")))}))

    # ---- generation ------------------------------------------------------------------------

    def completions(self, connection: Connection, request: Request) -> Generator[Wait, None, None]:
        """POST /v1/completions."""
        body = request.json()
        self._check_model(body)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, str):
            tokens = yield from encode_beside(self.server.loop, prompt)
        else:
            tokens = token_list(prompt)
        tokens = cut_prompt(tokens, self.profile.max_model_len, request.faults)
        top = integer(body, "logprobs", -1, low=0)
        if top > self.profile.max_logprobs:
            raise BadRequest(
                f"Requested sample logprobs of {top}, which is greater than max allowed: "
                f"{self.profile.max_logprobs}",
                param="logprobs",
            )
        limit = integer(body, "max_tokens", 16, low=1)
        ask = self._ask(body, tokens, limit, natural=False, top=top)
        writer = Writer(self, body, ask, top, request.faults, chat=False)
        yield from self._answer(connection, request, body, writer)

    def chat(self, connection: Connection, request: Request) -> Generator[Wait, None, None]:
        """POST /v1/chat/completions."""
        body = request.json()
        self._check_model(body)
        special = None if body.get("stream") else fleet_answer(self.profile, body)
        body = with_effort(self.profile, body)
        tokens = yield from encode_beside(self.server.loop, render_chat(body))
        if special is not None:
            respond(connection, 200, dumps(chat_body(self.profile.model, len(tokens), *special)))
            return
        tokens = cut_prompt(tokens, self.profile.max_model_len, request.faults)
        top = -1
        if body.get("logprobs"):
            top = integer(body, "top_logprobs", 0, low=0)
        if top > self.profile.max_logprobs:
            raise BadRequest(
                f"Requested sample logprobs of {top}, which is greater than max allowed: "
                f"{self.profile.max_logprobs}",
                param="logprobs",
            )
        room = max(1, self.profile.max_model_len - len(tokens))
        asked = body.get("max_completion_tokens", body.get("max_tokens"))
        key = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        limit = room if asked is None else integer(body, key, 16, low=1)
        ask = self._ask(body, tokens, limit, natural=asked is None, top=top)
        writer = Writer(self, body, ask, top, request.faults, chat=True)
        yield from self._answer(connection, request, body, writer)

    def _check_model(self, body: dict[str, Any]) -> None:
        name = body.get("model", self.profile.model)
        if name != self.profile.model:
            raise BadRequest(f"The model `{name}` does not exist.", 404, "model")

    def _ask(
        self, body: dict[str, Any], tokens: list[int], limit: int, *, natural: bool, top: int
    ) -> Ask:
        if not tokens:
            raise BadRequest("the prompt has no tokens", param="prompt")
        if integer(body, "n", 1, low=1) != 1:
            raise BadRequest("n must be 1")
        if body.get("stream") and body.get("prompt_logprobs") is not None:
            raise BadRequest("`prompt_logprobs` are not available when `stream=True`.")
        if len(tokens) + (1 if natural else limit) > self.profile.max_model_len:
            raise BadRequest(
                f"This model's maximum context length is {self.profile.max_model_len} tokens; "
                f"the prompt has {len(tokens)} and {limit} were asked for.",
                param="max_tokens",
            )
        check_stop(body)
        if body.get("stop_token_ids"):
            raise BadRequest("the stub knows no stop tokens")
        if body.get("echo") or body.get("prompt_logprobs") is not None:
            raise BadRequest("the stub knows neither echo nor prompt_logprobs")
        seed = None if body.get("seed") is None else integer(body, "seed", 0, low=-(2**63))
        return Ask(
            prompt=tokens,
            max_tokens=limit,
            temperature=real(body, "temperature", 1.0),
            top_p=real(body, "top_p", 1.0),
            top_k=max(0, integer(body, "top_k", 0, low=-1)),
            seed=seed,
            ignore_eos=bool(body.get("ignore_eos")),
            min_tokens=integer(body, "min_tokens", 0, low=0),
            priority=integer(body, "priority", 0, low=-(2**31)),
            salt=str(body.get("cache_salt") or ""),
            want_top=top >= 0,
            natural_end=natural,
        )

    def _answer(
        self, connection: Connection, request: Request, body: dict[str, Any], writer: Writer
    ) -> Generator[Wait, None, None]:
        streamed = bool(body.get("stream"))
        yield from generate(self.server, connection, request, writer, streamed=streamed)


class Writer:
    """Makes the JSON of one answer: its events when streamed, its whole body otherwise."""

    done_mark = True
    ping_seconds = 0

    def __init__(
        self,
        api: Vllm,
        body: dict[str, Any],
        ask: Ask,
        top: int,
        faults: Faults,
        *,
        chat: bool,
    ) -> None:
        self.api = api
        self.ask = ask
        self.chat = chat
        self.top = top
        self.body = body
        options = body.get("stream_options") or {}
        force = api.profile.force_include_usage
        include = bool(options.get("include_usage")) or force
        self.shaper = Shaper(faults, lambda: error_body(500, "the stub was told to fail"))
        self.include_usage, self.continuous = self.shaper.want_usage(
            include, include and (bool(options.get("continuous_usage_stats")) or force)
        )
        self.token_ids = bool(body.get("return_token_ids"))
        self.as_ids = bool(body.get("return_tokens_as_token_ids"))
        self.reasoning_left = api.profile.reasoning_tokens if chat else 0
        if chat and "reasoning" in faults:
            self.reasoning_left = faults.count("reasoning")
        if chat and "reasoning-only" in faults:
            self.reasoning_left = ask.max_tokens
        self.reasoning_count = 0
        self.offset = 0
        self.count = 0
        self.first_chunk = True
        self.texts: list[str] = []
        self.reasoning: list[str] = []
        self.choices: list[Choice] = []

    def begin(self, job: Job, request_id: str) -> None:
        """Take the job the engine made, and name the answer."""
        self.job = job
        name = request_id or f"{job.number:032x}"
        self.id = f"chatcmpl-{name}" if self.chat else f"cmpl-{name}"
        self.created = int(self.api.ledger.wall())

    # ---- streamed --------------------------------------------------------------------------

    def _chunk(
        self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, **more: Any
    ) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": self.created,
            "model": self.api.profile.model,
            "choices": choices,
        }
        if usage is not None:
            chunk["usage"] = usage
        return {**chunk, **more}

    def _usage(self) -> dict[str, Any]:
        prompt = len(self.ask.prompt)
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + self.count,
            "completion_tokens": self.count,
        }

    def _running_usage(self) -> dict[str, Any] | None:
        if not self.continuous:
            return None
        usage = self._usage()
        if self.chat:
            usage["completion_tokens_details"] = None
        return usage

    def events(self, step: Step) -> list[Event]:
        """Return the events of one engine step."""
        out = []
        if self.chat and self.first_chunk:
            out.append(self.role())
        out.append(self._tokens(step))
        return out

    def role(self) -> Event:
        """Return the role chunk."""
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        prompt = list(self.ask.prompt) if self.token_ids else None
        self.first_chunk = False
        usage = self._running_usage()
        return Event(
            "role", self._chunk([choice], usage, prompt_token_ids=prompt, prompt_text=None)
        )

    def _tokens(self, step: Step) -> Event:
        self.choices.extend(step.choices)
        self.count += len(step.choices)
        ids = [choice.token for choice in step.choices] if self.token_ids else None
        finished = step.finish is not None
        logprobs = self._logprobs(step.choices) if self.top >= 0 else None
        choice: dict[str, Any]
        if self.chat:
            choice = {
                "index": 0,
                "delta": self._delta(step.choices),
                "logprobs": logprobs,
                "finish_reason": step.finish,
            }
            if finished:
                choice["stop_reason"] = self.job.stop_reason
            choice["token_ids"] = ids
            if finished and self.api.since_033:
                choice["weight_versions"] = None
        else:
            text = decode([c.token for c in step.choices])
            self.texts.append(text)
            choice = {
                "index": 0,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": step.finish,
                "stop_reason": self.job.stop_reason if finished else None,
                "prompt_token_ids": (
                    list(self.ask.prompt) if self.token_ids and self.first_chunk else None
                ),
                "token_ids": ids,
            }
            if self.api.since_033:
                choice["weight_versions"] = None
            self.first_chunk = False
        chunk = self._chunk([choice], self._running_usage())
        if self.api.since_033:
            chunk["kv_transfer_params"] = None
        if finished and not self.include_usage:
            chunk["system_fingerprint"] = self.api.fingerprint
        return Event("finish" if finished else "token", chunk, len(step.choices))

    def _delta(self, choices: Sequence[Choice]) -> dict[str, str]:
        tokens = [choice.token for choice in choices]
        thought = tokens[: self.reasoning_left]
        said = tokens[self.reasoning_left :]
        self.reasoning_left -= len(thought)
        self.reasoning_count += len(thought)
        delta = {}
        if thought:
            delta["reasoning"] = decode(thought)
            self.reasoning.append(delta["reasoning"])
        if said or not thought:
            delta["content"] = decode(said)
            self.texts.append(delta["content"])
        return delta

    def needs_record(self, step: Step) -> bool:
        """Nothing in vLLM's events tells the time of the step."""
        del step
        return False

    def seal(self, events: list[Event]) -> list[Event]:
        """Return the events as they are."""
        return events

    def tail(self) -> list[Event]:
        """Return what follows the finish event: usage when asked for, and the end mark."""
        out = []
        if self.include_usage:
            chunk = self._chunk([], self._final_usage())
            chunk["system_fingerprint"] = self.api.fingerprint
            figures = self._figures()
            if figures:
                chunk["metrics"] = figures
            out.append(Event("usage", chunk))
        out.append(Event("done", None))
        return out

    def _final_usage(self) -> dict[str, Any]:
        usage = self._usage()
        if self.api.profile.prompt_tokens_details:
            details = {"cached_tokens": self.job.cached}
            if self.chat and not self.api.since_033:
                details["created_cache_tokens"] = 0
            usage["prompt_tokens_details"] = details
        if self.reasoning_count:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_count}
        return usage

    def _whole_usage(self) -> dict[str, Any]:
        """Return usage as a whole answer has it: with its nulls."""
        usage = self._final_usage()
        details = usage.get("prompt_tokens_details")
        if details is not None:
            details.setdefault("created_cache_tokens", None)
            details["multimodal_tokens"] = None
        usage.setdefault("prompt_tokens_details", None)
        usage.setdefault("completion_tokens_details", None)
        return usage

    def _figures(self) -> dict[str, Any]:
        """Return the `metrics` object of the usage chunk, empty when it is switched off."""
        profile, job = self.api.profile, self.job
        figures: dict[str, Any] = {}
        scheduled, first, last = job.scheduled, job.first, job.last
        if profile.per_request_metrics and None not in (scheduled, first, last):
            assert scheduled is not None
            assert first is not None
            assert last is not None
            figures["time_to_first_token_ms"] = (first - scheduled) * 1e3
            figures["generation_time_ms"] = (last - first) * 1e3
            figures["queue_time_ms"] = (scheduled - job.arrival) * 1e3
            figures["mean_itl_ms"] = (last - first) * 1e3 / max(1, self.count - 1)
            figures["tokens_per_second"] = self.count / max(1e-9, last - scheduled)
        if profile.per_request_spec != "none" and profile.draft_tokens:
            histogram = [0] * (profile.draft_tokens + 1)
            for _, accepted in job.steps:
                histogram[accepted] += 1
            rounds = max(1, job.rounds)
            spec: dict[str, Any] = {
                "mean_acceptance_length": 1 + job.accepted / rounds,
                "draft_acceptance_rate": job.accepted / max(1, job.drafted),
                "acceptance_histogram": histogram,
                "num_spec_steps": job.rounds,
                "num_accepted_draft_tokens": job.accepted,
                "num_draft_tokens": job.drafted,
                "num_spec_tokens": profile.draft_tokens,
            }
            if profile.per_request_spec == "detailed":
                spec["per_step_accepted"] = [accepted for _, accepted in job.steps]
                spec["per_step_drafted"] = [drafted for drafted, _ in job.steps]
            figures["speculative_decoding"] = spec
        return figures

    def _whole_figures(self) -> dict[str, Any] | None:
        """Return the `metrics` object as a whole answer has it: with its nulls."""
        figures = self._figures()
        if not figures:
            return None
        spec = figures.get("speculative_decoding")
        if spec is not None:
            spec.setdefault("per_step_accepted", None)
            spec.setdefault("per_step_drafted", None)
        return {name: figures.get(name) for name in _FIGURES}

    # ---- whole -----------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        job = self.job
        text = "".join(self.texts)
        ids = [choice.token for choice in self.choices] if self.token_ids else None
        prompt = list(self.ask.prompt) if self.token_ids else None
        self.offset = 0
        logprobs = self._logprobs(self.choices) if self.top >= 0 else None
        if self.chat:
            message: dict[str, Any] = {
                "role": "assistant",
                "content": text if text or not self.reasoning else None,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": "".join(self.reasoning) or None,
            }
            choice = {
                "index": 0,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": job.finish,
                "stop_reason": job.stop_reason,
                "token_ids": ids,
                "routed_experts": None,
            }
        else:
            choice = {
                "index": 0,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": job.finish,
                "stop_reason": job.stop_reason,
                "token_ids": ids,
                "prompt_logprobs": None,
                "prompt_token_ids": prompt,
                "routed_experts": None,
            }
        body: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": self.created,
            "model": self.api.profile.model,
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": self.api.fingerprint,
            "usage": self._whole_usage(),
        }
        if self.chat:
            body["prompt_logprobs"] = None
            body["prompt_token_ids"] = prompt
            body["prompt_text"] = None
        body["kv_transfer_params"] = None
        body["ec_transfer_params"] = None
        body["metrics"] = self._whole_figures()
        return body

    # ---- logprobs --------------------------------------------------------------------------

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else decode([token])

    def _ranked(self, choice: Choice) -> list[tuple[int, float]]:
        """Return the sampled token first, then the best `top`: up to `top` + 1 entries."""
        best = [pair for pair in choice.top[: self.top] if pair[0] != choice.token]
        return [(choice.token, choice.logprob), *best]

    def _logprobs(self, choices: Sequence[Choice]) -> dict[str, Any]:
        if self.chat:
            return {"content": [self._entry(choice) for choice in choices]}
        offsets, names, values, tops = [], [], [], []
        for choice in choices:
            name = self._name(choice.token)
            offsets.append(self.offset)
            self.offset += len(name)
            names.append(name)
            values.append(max(choice.logprob, -9999.0))
            ranked: dict[str, float] = {}
            for token, value in self._ranked(choice):
                ranked.setdefault(self._name(token), max(value, -9999.0))
            tops.append(ranked)
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": names,
            "top_logprobs": tops,
        }

    def _entry(self, choice: Choice) -> dict[str, Any]:
        def one(token: int, value: float) -> dict[str, Any]:
            name = self._name(token)
            raw = list(name.encode()) if self.as_ids else list(token_bytes(token))
            return {"token": name, "logprob": max(value, -9999.0), "bytes": raw}

        entry = one(choice.token, choice.logprob)
        entry["top_logprobs"] = [one(*pair) for pair in self._ranked(choice)[: self.top]]
        return entry


def _version(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; of one that has none, the newest known."""
    numbers = [int(part) for part in text.split(".")[:2] if part.isdecimal()]
    return tuple(numbers) if len(numbers) == 2 else (0, 33)
