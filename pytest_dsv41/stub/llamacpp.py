"""llama.cpp's API: one event a token, a round's events in one write, `timings`, slots."""

from __future__ import annotations

import time
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
from pytest_dsv41.stub.language import CANDIDATES, EOS, VOCABULARY, Choice, decode, token_bytes
from pytest_dsv41.stub.llamacpp_metrics import LlamaLedger
from pytest_dsv41.stub.loop import Connection, Wait
from pytest_dsv41.stub.profile import Profile
from pytest_dsv41.stub.shape import Shaper
from pytest_dsv41.stub.wire import Event

if TYPE_CHECKING:
    from pytest_dsv41.stub.server import Server

__all__ = ["LlamaCpp"]

_JSON = "application/json; charset=utf-8"
_LOWEST = -3.4028235e38
_ERROR_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return llama.cpp's error object."""
    kind = _ERROR_TYPES.get(status, "server_error")
    return {"error": {"code": status, "message": message, "type": kind}}


class _TooLong(BadRequest):
    """The prompt does not fit the context."""

    def __init__(self, tokens: int) -> None:
        super().__init__("the request exceeds the available context size")
        self.tokens = tokens


class LlamaCpp:
    """The routes. One instance a server."""

    def __init__(self, server: Server, ledger: LlamaLedger) -> None:
        self.server = server
        self.profile: Profile = server.profile
        self.ledger = ledger
        self.routes = {
            ("GET", "/health"): self.health,
            ("GET", "/v1/health"): self.health,
            ("GET", "/models"): self.models,
            ("GET", "/v1/models"): self.models,
            ("GET", "/metrics"): self.metrics,
            ("GET", "/props"): self.props,
            ("GET", "/slots"): self.slots,
            ("POST", "/tokenize"): self.tokenize,
            ("POST", "/detokenize"): self.detokenize,
            ("POST", "/apply-template"): self.apply_template,
            ("POST", "/completion"): self.completion,
            ("POST", "/completions"): self.completion,
            ("POST", "/v1/completions"): self.completions,
            ("POST", "/chat/completions"): self.chat,
            ("POST", "/v1/chat/completions"): self.chat,
            **{("POST", f"/slots/{i}"): self.slot for i in range(self.profile.max_running)},
        }

    def error(self, connection: Connection, error: BadRequest) -> None:
        """Answer with llama.cpp's error object; its HTTP layer orders the fields otherwise."""
        body = error_body(error.status, str(error))
        if error.form == "route":
            # A wrong method is an unknown path here.
            body = error_body(404, "File Not Found")
            inner = body["error"]
            body["error"] = {name: inner[name] for name in ("message", "type", "code")}
            respond(connection, 404, dumps(body), _JSON)
            return
        if isinstance(error, _TooLong):
            body["error"]["type"] = "exceed_context_size_error"
            body["error"]["n_prompt_tokens"] = error.tokens
            body["error"]["n_ctx"] = self.profile.max_model_len
        respond(connection, error.status, dumps(body), _JSON)

    def not_ready(self, connection: Connection) -> None:
        """Answer while the model loads."""
        self.error(connection, BadRequest("Loading model", 503))

    # ---- small endpoints -------------------------------------------------------------------

    def health(self, connection: Connection, _request: Request) -> None:
        """Say ok."""
        respond(connection, 200, dumps({"status": "ok"}), _JSON)

    def models(self, connection: Connection, _request: Request) -> None:
        """The one model, in both of llama.cpp's lists."""
        name = self.profile.model
        listed = {"name": name, "model": name, "type": "model", "capabilities": ["completion"]}
        model = {
            "id": name,
            "aliases": [],
            "tags": [],
            "object": "model",
            "created": int(time.time()),
            "owned_by": "llamacpp",
            "meta": {
                "vocab_type": 1,
                "n_vocab": VOCABULARY,
                "n_ctx": self.profile.max_model_len,
                "n_ctx_train": self.profile.max_model_len,
                "n_embd": 64,
                "n_params": 1000000,
                "size": 1000000,
                "ftype": "stub",
            },
        }
        respond(
            connection, 200, dumps({"models": [listed], "object": "list", "data": [model]}), _JSON
        )

    def metrics(self, connection: Connection, request: Request) -> None:
        """The exposition."""
        text = self.server.exposition(request.faults)
        extra = {"process-start-time-unix": str(self.ledger.started)}
        respond(connection, 200, text.encode(), "text/plain; version=0.0.4", extra)

    def props(self, connection: Connection, _request: Request) -> None:
        """What the server is."""
        params = self._params(None)
        answer = {
            "default_generation_settings": {"params": params, "n_ctx": self.profile.max_model_len},
            "total_slots": self.profile.max_running,
            "model_alias": self.profile.model,
            "model_path": f"/models/{self.profile.model}.gguf",
            "modalities": {"vision": False, "video": False, "audio": False},
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "chat_template": "<|role|>content",
            "bos_token": "",
            "eos_token": "",
            "build_info": f"{self.profile.version}-stub",
            "is_sleeping": False,
        }
        respond(connection, 200, dumps(answer), _JSON)

    def slots(self, connection: Connection, _request: Request) -> None:
        """One object a slot, with the request it works on or worked on last."""
        running = {job.slot: job for job in self.server.engine.running.values()}
        out = []
        for index in range(self.profile.max_running):
            slot: dict[str, Any] = {
                "id": index,
                "n_ctx": self.profile.max_model_len,
                "speculative": self.profile.draft_tokens > 0,
                "is_processing": index in running,
            }
            job = self.ledger.slots.get(index)
            if job is not None:
                made = len(job.tokens)
                slot["id_task"] = job.number
                slot["n_prompt_tokens"] = len(job.ask.prompt)
                slot["n_prompt_tokens_processed"] = len(job.ask.prompt) - job.cached
                slot["n_prompt_tokens_cache"] = job.cached
                slot["params"] = self._params(job.ask)
                slot["next_token"] = [
                    {
                        "has_next_token": index in running,
                        "has_new_line": False,
                        "n_remain": job.ask.max_tokens - made,
                        "n_decoded": made,
                    }
                ]
            out.append(slot)
        respond(connection, 200, dumps(out), _JSON)

    def slot(self, connection: Connection, request: Request) -> None:
        """POST /slots/N?action=erase: forget the prompt cache."""
        if "action=erase" not in request.query.split("&"):
            raise BadRequest("Invalid action")
        index = int(request.path.rpartition("/")[2])
        job = self.ledger.slots.get(index)
        held = len(job.ask.prompt) + len(job.tokens) if job is not None else 0
        done = "reset-false" not in request.faults and self.server.engine.forget()
        respond(connection, 200, dumps({"id_slot": index, "n_erased": held if done else 0}), _JSON)

    def tokenize(self, connection: Connection, request: Request) -> Generator[Wait, None, None]:
        """Token ids of `content`; no count."""
        if "tokenize-404" in request.faults:
            raise BadRequest("File Not Found", 404, form="route")
        content = request.json().get("content", "")
        if not isinstance(content, str):
            raise BadRequest("content must be a string")
        tokens = yield from encode_beside(self.server.loop, content)
        if "tokenize-count" in request.faults:
            tokens = tokens + [EOS] * request.faults.count("tokenize-count")
        respond(connection, 200, dumps({"tokens": tokens}), _JSON)

    def detokenize(self, connection: Connection, request: Request) -> None:
        """The text of token ids."""
        tokens = token_list(request.json().get("tokens"))
        respond(connection, 200, dumps({"content": decode(tokens)}), _JSON)

    def apply_template(self, connection: Connection, request: Request) -> None:
        """The prompt text of messages."""
        respond(connection, 200, dumps({"prompt": render_chat(request.json())}), _JSON)

    # ---- generation ------------------------------------------------------------------------

    def completion(self, connection: Connection, request: Request) -> Generator[Wait, None, None]:
        """POST /completion: the native form."""
        yield from self._generate(connection, request, "native")

    def completions(self, connection: Connection, request: Request) -> Generator[Wait, None, None]:
        """POST /v1/completions."""
        yield from self._generate(connection, request, "text")

    def chat(self, connection: Connection, request: Request) -> Generator[Wait, None, None]:
        """POST /v1/chat/completions."""
        yield from self._generate(connection, request, "chat")

    def _generate(
        self, connection: Connection, request: Request, form: str
    ) -> Generator[Wait, None, None]:
        body = request.json()
        if form == "chat":
            special = None if body.get("stream") else fleet_answer(self.profile, body)
            body = with_effort(self.profile, body)
            tokens = yield from encode_beside(self.server.loop, render_chat(body))
            if special is not None:
                answer = chat_body(self.profile.model, len(tokens), *special)
                respond(connection, 200, dumps(answer), _JSON)
                return
        elif isinstance(body.get("prompt"), str):
            tokens = yield from encode_beside(self.server.loop, body["prompt"])
        else:
            tokens = token_list(body.get("prompt"))
        tokens = cut_prompt(tokens, self.profile.max_model_len, request.faults)
        ask = self._ask(body, tokens, form)
        writer = Writer(self, body, ask, request.faults, form)
        yield from generate(
            self.server,
            connection,
            request,
            writer,
            streamed=bool(body.get("stream")),
            joined=True,
            content_type="text/event-stream",
            whole_type=_JSON,
        )

    def _ask(self, body: dict[str, Any], tokens: list[int], form: str) -> Ask:
        if not tokens:
            raise BadRequest("the prompt has no tokens")
        check_stop(body)
        limit = -1
        for name in ("n_predict", "max_tokens", "max_completion_tokens"):
            limit = integer(body, name, limit, low=-1)
        room = self.profile.max_model_len - len(tokens)
        if room < 1:
            raise _TooLong(len(tokens))
        seed = integer(body, "seed", -1, low=-1)
        names = {"native": ("n_probs",), "text": ("logprobs", "n_probs")}.get(
            form, ("top_logprobs", "n_probs")
        )
        top = max(integer(body, name, 0, low=-1) for name in names)
        return Ask(
            prompt=tokens,
            max_tokens=room if limit < 0 else max(1, min(limit, room)),
            temperature=real(body, "temperature", 0.8),
            top_p=real(body, "top_p", 0.95),
            top_k=max(0, integer(body, "top_k", 40, low=-1)),
            seed=None if seed in (-1, 0xFFFFFFFF) else seed,
            ignore_eos=bool(body.get("ignore_eos")),
            use_cache=body.get("cache_prompt", True) is not False,
            want_top=top > 0 or bool(body.get("logprobs")),
            natural_end=limit < 0,
        )

    def _params(self, ask: Ask | None) -> dict[str, Any]:
        ask = ask or Ask((), -1, temperature=0.8, top_p=0.95, top_k=40)
        return {
            "seed": 0xFFFFFFFF if ask.seed is None else ask.seed,
            "temperature": ask.temperature,
            "top_k": ask.top_k,
            "top_p": ask.top_p,
            "max_tokens": ask.max_tokens,
            "n_predict": ask.max_tokens,
            "ignore_eos": ask.ignore_eos,
            "speculative.types": "draft" if self.profile.draft_tokens else "none",
        }


class Writer:
    """Makes the JSON of one answer in one of the three forms: chat, text, native."""

    def __init__(
        self, api: LlamaCpp, body: dict[str, Any], ask: Ask, faults: Faults, form: str
    ) -> None:
        self.api = api
        self.ask = ask
        self.form = form
        self.done_mark = False
        self.ping_seconds = max(0, integer(body, "sse_ping_interval", 0, low=-1))
        options = body.get("stream_options") or {}
        self.shaper = Shaper(faults, lambda: error_body(500, "the stub was told to fail"))
        self.include_usage, _ = self.shaper.want_usage(bool(options.get("include_usage")), False)
        self.per_token = bool(body.get("timings_per_token"))
        self.progress = bool(body.get("return_progress"))
        self.return_tokens = bool(body.get("return_tokens"))
        self.post_probs = bool(body.get("post_sampling_probs"))
        self.top = min(
            CANDIDATES,
            max(
                integer(body, "n_probs", 0, low=-1),
                integer(body, "top_logprobs", 0, low=-1) if form == "chat" else 0,
                integer(body, "logprobs", 0, low=-1) if form == "text" else 0,
            ),
        )
        self.want_probs = self.top > 0 or (form == "chat" and bool(body.get("logprobs")))
        self.reasoning_left = api.profile.reasoning_tokens if form == "chat" else 0
        if form == "chat" and "reasoning" in faults:
            self.reasoning_left = faults.count("reasoning")
        if form == "chat" and "reasoning-only" in faults:
            self.reasoning_left = ask.max_tokens
        self.first = True
        self.text: list[str] = []
        self.thought: list[str] = []
        self.choices: list[Choice] = []
        self.known: list[Choice] = []
        self.finish = "limit"

    def begin(self, job: Job, request_id: str) -> None:
        """Take the job the engine made, and name the answer."""
        del request_id
        self.job = job
        self.id = f"chatcmpl-{job.number:032d}"

    # ---- streamed --------------------------------------------------------------------------

    def _now(self) -> int:
        return int(self.api.server.wall())

    def _chat_chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "choices": choices,
            "created": self._now(),
            "id": self.id,
            "model": self.api.profile.model,
            "system_fingerprint": f"{self.api.profile.version}-stub",
            "object": "chat.completion.chunk",
        }

    def _text_chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {
            "choices": [choice],
            "created": self._now(),
            "model": self.api.profile.model,
            "system_fingerprint": f"{self.api.profile.version}-stub",
            "object": "text_completion",
        }

    def role(self) -> Event | None:
        """Return the role chunk of a chat."""
        self.first = False
        if self.form != "chat":
            return None
        return self._role()

    def _role(self) -> Event:
        delta = {"role": "assistant", "content": None}
        return Event(
            "role", self._chat_chunk([{"finish_reason": None, "index": 0, "delta": delta}])
        )

    def events(self, step: Step) -> list[Event]:
        """Return the events of one engine step: one a token, then the finish."""
        out = []
        if step.first and self.progress:
            out += self._progress()
        if self.form == "chat" and self.first:
            out.append(self._role())
        self.first = False
        for choice in step.choices:
            self.choices.append(choice)
            # The server keeps no probabilities of a step in which it verified drafts.
            known = self.want_probs and not step.drafted
            if known:
                self.known.append(choice)
            if choice.token != EOS:
                out.append(self._token(choice, known))
        if step.finish is not None:
            self.finish = "eos" if step.finish == "stop" else "limit"
            out.append(self._finish())
        return out

    def _progress(self) -> list[Event]:
        total = len(self.ask.prompt)
        facts = {
            "total": total,
            "cache": self.job.cached,
            "processed": total,
            "time_ms": round(self.job.prefill_seconds * 1000),
        }
        if self.form == "chat":
            event = self._role()
            assert event.body is not None
            return [event._replace(body={**event.body, "prompt_progress": facts})]
        if self.form == "text":
            chunk = self._text_chunk(
                {"text": "", "index": 0, "logprobs": None, "finish_reason": None}
            )
            return [Event("progress", {**chunk, "id": self.id, "prompt_progress": facts})]
        return [Event("progress", {**self._native("", [0]), "prompt_progress": facts})]

    def _token(self, choice: Choice, known: bool) -> Event:
        text = decode([choice.token])
        probs = self._probs([choice]) if known else None
        body: dict[str, Any]
        if self.form == "chat":
            name = "content"
            if self.reasoning_left > 0:
                self.reasoning_left -= 1
                name = "reasoning_content"
            (self.text if name == "content" else self.thought).append(text)
            one: dict[str, Any] = {"finish_reason": None, "index": 0, "delta": {name: text}}
            if probs is not None:
                one["logprobs"] = {"content": probs}
            body = self._chat_chunk([one])
        elif self.form == "text":
            self.text.append(text)
            shown = {"content": probs} if probs is not None else None
            body = self._text_chunk(
                {"text": text, "index": 0, "logprobs": shown, "finish_reason": None}
            )
            body["id"] = self.id
        else:
            self.text.append(text)
            body = self._native(text, [choice.token])
        if self.form == "native" and probs is not None:
            body["completion_probabilities"] = probs
        return Event("token", body, 1)

    def _native(self, text: str, tokens: list[int]) -> dict[str, Any]:
        return {
            "index": 0,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(self.choices),
            "tokens_evaluated": len(self.ask.prompt),
        }

    def _finish(self) -> Event:
        reason = "stop" if self.finish == "eos" else "length"
        if self.form == "chat":
            return Event(
                "finish", self._chat_chunk([{"finish_reason": reason, "index": 0, "delta": {}}])
            )
        if self.form == "text":
            chunk = self._text_chunk(
                {"text": "", "index": 0, "logprobs": None, "finish_reason": reason}
            )
            return Event("finish", {**chunk, "usage": self._usage(), "id": self.id})
        return Event("finish", self._final_native("", streamed=True))

    def needs_record(self, step: Step) -> bool:
        """Events with `timings` tell of the step itself: they are made when it is recorded."""
        return step.finish is not None or self.per_token

    def seal(self, events: list[Event]) -> list[Event]:
        """Put `timings` where they belong: on the last event, or on each when asked for."""
        made = len(self.job.tokens) - sum(event.tokens for event in events)
        for event in events:
            if event.body is None or event.kind not in ("token", "finish"):
                continue
            made += event.tokens
            last = event.kind == "finish" and not (self.form == "chat" and self.include_usage)
            if last or (self.per_token and event.kind == "token"):
                event.body["timings"] = self.timings(made)
        return events

    def tail(self) -> list[Event]:
        """Return what follows the finish: usage when asked for, and `[DONE]`."""
        out = []
        if self.form == "chat" and self.include_usage:
            chunk = {**self._chat_chunk([]), "usage": self._usage(), "timings": self.timings()}
            out.append(Event("usage", chunk))
        if self.form != "native":
            out.append(Event("done", None))
        return out

    # ---- whole -----------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        text = "".join(self.text)
        reason = "stop" if self.finish == "eos" else "length"
        probs = {"content": self._probs(self.known)} if self.known else None
        if self.form == "native":
            return self._final_native(text, streamed=False)
        common = {
            "created": self._now(),
            "model": self.api.profile.model,
            "system_fingerprint": f"{self.api.profile.version}-stub",
        }
        ending = {"usage": self._usage(), "id": self.id, "timings": self.timings()}
        if self.form == "text":
            choice = {"text": text, "index": 0, "logprobs": probs, "finish_reason": reason}
            return {"choices": [choice], **common, "object": "text_completion", **ending}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.thought:
            message["reasoning_content"] = "".join(self.thought)
        choice = {"finish_reason": reason, "index": 0, "message": message}
        if probs is not None:
            choice["logprobs"] = probs
        return {"choices": [choice], **common, "object": "chat.completion", **ending}

    def _final_native(self, text: str, *, streamed: bool) -> dict[str, Any]:
        tokens = [choice.token for choice in self.choices] if self.return_tokens else []
        final = {
            "index": 0,
            "content": text,
            "tokens": tokens if not streamed else [],
            "id_slot": self.job.slot,
            "stop": True,
            "model": self.api.profile.model,
            "tokens_predicted": len(self.choices),
            "tokens_evaluated": len(self.ask.prompt),
            "generation_settings": self.api._params(self.ask),
            "prompt": decode(self.ask.prompt),
            "has_new_line": False,
            "truncated": False,
            "stop_type": self.finish,
            "stopping_word": "",
            "tokens_cached": len(self.ask.prompt) + len(self.choices) - 1,
            "timings": self.timings(),
        }
        if self.known and not streamed:
            final["completion_probabilities"] = self._probs(self.known)
        return final

    def _usage(self) -> dict[str, Any]:
        made, prompt = len(self.choices), len(self.ask.prompt)
        return {
            "completion_tokens": made,
            "prompt_tokens": prompt,
            "total_tokens": made + prompt,
            "prompt_tokens_details": {"cached_tokens": self.job.cached},
        }

    def timings(self, made: int | None = None) -> dict[str, Any]:
        """Return the `timings` object: what the engine recorded so far, of `made` tokens."""
        job = self.job
        fresh = len(self.ask.prompt) - job.cached
        made = len(job.tokens) if made is None else made
        prompt_ms = (job.first - job.scheduled) * 1e3 if job.first and job.scheduled else 0.0
        predicted_ms = (job.last - job.first) * 1e3 if job.first and job.last else 0.0
        steps = max(0, made - 1)
        out: dict[str, Any] = {
            "cache_n": job.cached,
            "prompt_n": fresh,
            "prompt_ms": round(prompt_ms, 3),
            "prompt_per_token_ms": prompt_ms / fresh if fresh else 0.0,
            "prompt_per_second": fresh * 1e3 / prompt_ms if prompt_ms else 0.0,
            "predicted_n": made,
            "predicted_ms": round(max(predicted_ms, 0.001), 3) if made else 0.0,
            "predicted_per_token_ms": predicted_ms / steps if steps else 0.0,
            "predicted_per_second": steps * 1e3 / predicted_ms if predicted_ms else 0.0,
        }
        if job.drafted:
            out["draft_n"] = job.drafted
            out["draft_n_accepted"] = job.accepted
        return out

    def _probs(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        value_name, top_name = (
            ("prob", "top_probs") if self.post_probs else ("logprob", "top_logprobs")
        )

        def one(token: int, value: float) -> dict[str, Any]:
            shown = _exp(value) if self.post_probs else max(value, _LOWEST)
            return {
                "id": token,
                "token": decode([token]),
                "bytes": list(token_bytes(token)),
                value_name: shown,
            }

        return [
            {
                **one(choice.token, choice.logprob),
                top_name: [one(*pair) for pair in choice.top[: self.top]],
            }
            for choice in choices
        ]


def _exp(value: float) -> float:
    from math import exp

    return exp(value)
