"""llama.cpp: timings inside each stream, counters without a request count, no cache salt.

The decode time and the accepted drafts come from each stream's own `timings`; the counters only
prove that nobody else used the server: predicted and prompt tokens must move by exactly the
streams' own, and no slot may be busy before or after. Its server needs `--metrics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import httpx

from pytest_dsv41.engines.base import Engine, InBand, Server, Snapshot, base_url, refuse_drafts
from pytest_dsv41.engines.next_token import (
    Greedy,
    NextToken,
    aligned,
    read_ids,
    read_indexed,
    read_model,
    read_object,
)
from pytest_dsv41.engines.served import Served, agreed, whole_above
from pytest_dsv41.errors import MeasurementRefused

__all__ = ["LlamaCpp"]

_RUNNING: Final = "llamacpp:requests_processing"
_WAITING: Final = "llamacpp:requests_deferred"
_TOKENS: Final = "llamacpp:tokens_predicted_total"
_PROMPT: Final = "llamacpp:prompt_tokens_total"
_CACHED: Final = "llamacpp:prompt_tokens_cached_total"
_STEPS: Final = "llamacpp:n_decode_total"
_DRAFTS: Final = "llamacpp:spec_decode_num_drafts_total"
_DRAFT_TOKENS: Final = "llamacpp:spec_decode_num_draft_tokens_total"
_ACCEPTED: Final = "llamacpp:spec_decode_num_accepted_tokens_total"
_NEEDED: Final = (_TOKENS, _PROMPT)
_COUNTERS: Final = (_TOKENS, _PROMPT, _CACHED, _STEPS, _DRAFTS, _DRAFT_TOKENS, _ACCEPTED)


class LlamaCpp(Engine):
    """The dialect of llama.cpp's `llama-server`."""

    name: ClassVar[str] = "llamacpp"
    gauges: ClassVar[tuple[str, str]] = (_RUNNING, _WAITING)
    counters: ClassVar[tuple[str, ...]] = _COUNTERS
    needed: ClassVar[tuple[str, ...]] = _NEEDED
    counters_hint: ClassVar[str] = "start the server with --metrics"
    version_path: ClassVar[str] = "/props"
    version_field: ClassVar[str] = "build_info"
    next_path: ClassVar[str] = "/completion"
    """The native form: it repeats the prompt's text."""
    preempted: ClassVar[int | None] = 0
    """Requests put back while they ran: this server takes no slot from a running one."""

    def dress(self, body: dict[str, Any], *, cache: str, salt: str | None) -> dict[str, Any]:  # noqa: ARG002
        """Ask for timings on every event; a cold request turns the prompt cache off."""
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True}
            body["timings_per_token"] = True
        if cache != "any":
            body["cache_prompt"] = cache == "warm"
        return body

    def settled(self, before: Snapshot, after: Snapshot, asked: Sequence[InBand]) -> str | None:
        """See `Engine.settled`."""
        own = sum(_timing(row, "predicted_n") for row in asked)
        moved = after.values[_TOKENS] - before.values[_TOKENS]
        if 0 <= moved < own:
            return f"{_TOKENS} moved by {moved:g} of {own}"
        return None

    def account(self, before: Snapshot, after: Snapshot, done: Sequence[InBand]) -> Server:
        """See `Engine.account`."""
        old, new = before.values, after.values
        self.same_server(before, after)

        def moved(name: str) -> int:
            return round(new.get(name, 0.0) - old.get(name, 0.0))

        tokens = sum(_timing(row, "predicted_n") for row in done)
        prompt = sum(_timing(row, "prompt_n") for row in done)
        cached = sum(_timing(row, "cache_n") for row in done)
        for name, own in ((_TOKENS, tokens), (_PROMPT, prompt), (_CACHED, cached)):
            if name in new and moved(name) != own:
                raise MeasurementRefused(
                    "foreign-request",
                    f"{name} moved by {moved(name)}, the streams' own are {own}: "
                    "somebody else used the server",
                )
        for row in done:
            _check_prompt(row)
        accepted = sum(_timing(row, "draft_n_accepted", 0) for row in done)
        drafted = sum(_timing(row, "draft_n", 0) for row in done)
        for name, own in ((_ACCEPTED, accepted), (_DRAFT_TOKENS, drafted)):
            if name in new and moved(name) != own:
                raise MeasurementRefused(
                    "identity", f"{name} moved by {moved(name)}, the timings say {own}"
                )
        server = Server(
            requests=len(done),
            tokens=tokens,
            decode_ms=sum(_number(row, "predicted_ms") for row in done),
            accepted=accepted,
            drafts=moved(_DRAFTS) if _DRAFTS in new else None,
            draft_tokens=drafted,
            cached_tokens=cached,
            prompt_tokens=prompt + cached,
            steps=moved(_STEPS) if _STEPS in new else None,
            speculates=drafted > 0 or new.get(_DRAFTS, 0.0) > 0,
            preemptions=self.preempted,
        )
        refuse_drafts(server)
        if len(done) == 1 and server.steps is not None and server.steps < (server.rounds or 0):
            raise MeasurementRefused(
                "identity", f"{server.rounds} rounds in {server.steps} steps of the engine"
            )
        return server

    def served(self, url: str, timeout: float = 10.0, client: httpx.Client | None = None) -> Served:
        """See `Engine.served`: `/props`, and each slot of `/slots`."""
        props = self._told(url, "/props", timeout, client)
        props = props if isinstance(props, dict) else {}
        settings = props.get("default_generation_settings")
        settings = settings if isinstance(settings, dict) else {}
        found = [
            super().served(url, timeout, client),
            Served.of(
                "/props",
                slots=whole_above(props.get("total_slots")),
                window=whole_above(settings.get("n_ctx")),
            ),
        ]
        slots = self._told(url, "/slots", timeout, client)
        if isinstance(slots, list) and slots and all(isinstance(slot, dict) for slot in slots):
            found.append(Served.of("/slots", slots=len(slots)))
            found += [
                Served.of(f"/slots {index}", window=whole_above(slot.get("n_ctx")))
                for index, slot in enumerate(slots)
            ]
        return agreed(*found)

    def chat_tokens(
        self,
        url: str,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        timeout: float = 60.0,
        client: httpx.Client | None = None,
    ) -> int:
        """See `Engine.chat_tokens`: the template's text, tokenised as a prompt is."""
        body = {
            "messages": [dict(message) for message in messages],
            "chat_template_kwargs": dict(kwargs),
        }
        where = f"{base_url(url)}/apply-template"
        answer = self._post(url, "/apply-template", body, timeout, client)
        text = read_object(answer.content, where).get("prompt")
        if not isinstance(text, str):
            raise MeasurementRefused("tokenize", f"{where}: no text of a chat")
        return len(self.tokenize(url, model, text, timeout, client))

    def _tokenize_body(self, model: str, text: str) -> dict[str, Any]:  # noqa: ARG002
        return {"content": text, "add_special": True}

    def _next_body(self, model: str, ids: Sequence[int], top_n: int) -> dict[str, Any]:
        # The probabilities are those before any bias. Without it the server may choose a token
        # that is a part of a character, of which it then tells no probabilities.
        return {
            "model": model,
            "prompt": list(ids),
            "n_predict": 1,
            "n_probs": top_n,
            "temperature": 1.0,
            "logit_bias": [["a", 1000.0]],
            "seed": 0,
        }

    def _next_read(
        self,
        data: Mapping[str, Any],
        ids: Sequence[int],  # noqa: ARG002
        where: str,
        text_of_prompt: Callable[[], str],
    ) -> NextToken:
        try:
            (token,) = data["completion_probabilities"]
            top = token["top_logprobs"]
        except (KeyError, TypeError, ValueError):
            raise MeasurementRefused(
                "no-logprobs", f"{where}: the answer has no log-probabilities of one token"
            ) from None
        return NextToken(
            read_indexed(top, where),
            _in_band(data),
            _echoed(data, where, text_of_prompt),
            read_model(data),
        )

    def _greedy_body(
        self, model: str, ids: Sequence[int], max_tokens: int, top_n: int
    ) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": list(ids),
            "n_predict": max_tokens,
            "n_probs": top_n,
            "temperature": 0.0,
            "return_tokens": True,
        }

    def _greedy_read(
        self,
        data: Mapping[str, Any],
        ids: Sequence[int],  # noqa: ARG002
        where: str,
        text_of_prompt: Callable[[], str],
    ) -> Greedy:
        tokens = read_ids(data.get("tokens"), where)
        told = data.get("completion_probabilities")
        rows = told if isinstance(told, list) else []
        try:
            ids_told = read_ids([row["id"] for row in rows], where)
            known = [
                (i, read_indexed(r["top_logprobs"], where))
                for i, r in zip(ids_told, rows, strict=True)
            ]
        except (KeyError, TypeError):
            raise MeasurementRefused(
                "bad-answer", f"{where}: a token's probabilities without its id"
            ) from None
        tops: list[tuple[tuple[int, float], ...] | None] = [None] * len(tokens)
        places = aligned(tokens, [token for token, _ in known])
        for place, (_, top) in zip(places, known, strict=True):
            if place is not None:
                tops[place] = top
        reason = {"limit": "length", "eos": "stop", "word": "stop"}
        return Greedy(
            tokens,
            tuple(tops),
            reason.get(str(data.get("stop_type")), str(data.get("stop_type"))),
            _in_band(data),
            _echoed(data, where, text_of_prompt),
            read_model(data),
        )


def _echoed(data: Mapping[str, Any], where: str, text_of_prompt: Callable[[], str]) -> bool:
    """Hold the server's repetition of the prompt against the prompt; False where it has none."""
    echo = data.get("prompt")
    if isinstance(echo, str) and echo != text_of_prompt():
        raise MeasurementRefused("other-prompt", f"{where}: the answer is to another prompt")
    return isinstance(echo, str)


def _in_band(data: Mapping[str, Any]) -> InBand:
    timings = data.get("timings")
    told = {
        name: float(value)
        for name, value in (timings if isinstance(timings, Mapping) else {}).items()
        if isinstance(value, int | float) and -1e15 < value < 1e15
    }
    cached = told.get("cache_n")
    return InBand(
        prompt_tokens=round(told["prompt_n"] + cached)
        if "prompt_n" in told and cached is not None
        else None,
        completion_tokens=round(told["predicted_n"]) if "predicted_n" in told else None,
        cached_tokens=None if cached is None else round(cached),
        timings=told,
    )


def _timing(row: InBand, name: str, default: int | None = None) -> int:
    if name not in row.timings and default is not None:
        return default
    return round(_number(row, name))


def _number(row: InBand, name: str) -> float:
    value = row.timings.get(name)
    if value is None or value < 0:
        said = "no" if value is None else f"{value:g} as"
        raise MeasurementRefused("no-timings", f"the stream carried {said} timings.{name}")
    return float(value)


def _check_prompt(row: InBand) -> None:
    prompt = _timing(row, "prompt_n") + _timing(row, "cache_n")
    if row.prompt_tokens not in (None, prompt):
        raise MeasurementRefused(
            "identity", f"usage says {row.prompt_tokens} prompt tokens, the timings {prompt}"
        )
