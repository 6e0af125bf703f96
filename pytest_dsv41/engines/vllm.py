"""vLLM: counters with a success count, decode seconds and speculation totals.

Deltas are taken by exact sample name and summed over the `engine` label. The success counter
must move by exactly as many requests as were sent; then every other delta belongs to them.

The counter of accepted drafts also holds those that max_tokens then cut off; without them, rounds
are tokens − accepted − requests again, and equal the engine's own steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pytest_dsv41.engines.base import Engine, InBand, Server, Snapshot, refuse_drafts
from pytest_dsv41.engines.served import Served, agreed, whole_above
from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.text import one_line

__all__ = ["Vllm"]

_RUNNING: Final = "vllm:num_requests_running"
_WAITING: Final = "vllm:num_requests_waiting"
_SUCCESS: Final = "vllm:request_success_total"
_TOKENS: Final = "vllm:generation_tokens_total"
_PROMPT: Final = "vllm:prompt_tokens_total"
_QUERIES: Final = "vllm:prefix_cache_queries_total"
_HITS: Final = "vllm:prefix_cache_hits_total"
_PREEMPT: Final = "vllm:num_preemptions_total"
_DECODE_S: Final = "vllm:request_decode_time_seconds_sum"
_DECODE_N: Final = "vllm:request_decode_time_seconds_count"
_STEPS: Final = "vllm:iteration_tokens_total_count"
_OUTPUTS: Final = "vllm:inter_token_latency_seconds_count"
_DRAFTS: Final = "vllm:spec_decode_num_drafts_total"
_DRAFT_TOKENS: Final = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED: Final = "vllm:spec_decode_num_accepted_tokens_total"
_PER_POS: Final = "vllm:spec_decode_num_accepted_tokens_per_pos_total"

_CACHE: Final = "vllm:cache_config_info"

_NEEDED: Final = (_SUCCESS, _TOKENS, _PROMPT, _DECODE_S, _DECODE_N)
_DRAFTING: Final = (_DRAFTS, _DRAFT_TOKENS, _ACCEPTED)
_COUNTERS: Final = (
    _SUCCESS, _TOKENS, _PROMPT, _QUERIES, _HITS, _PREEMPT, _DECODE_S, _DECODE_N, _STEPS, _OUTPUTS,
    _DRAFTS, _DRAFT_TOKENS, _ACCEPTED, _PER_POS,
)  # fmt: skip


class Vllm(Engine):
    """The dialect of vLLM's OpenAI server."""

    name: ClassVar[str] = "vllm"
    gauges: ClassVar[tuple[str, str]] = (_RUNNING, _WAITING)
    counters: ClassVar[tuple[str, ...]] = _COUNTERS
    needed: ClassVar[tuple[str, ...]] = _NEEDED
    by_label: ClassVar[Mapping[str, str]] = {_PER_POS: "position"}

    def dress(self, body: dict[str, Any], *, cache: str, salt: str | None) -> dict[str, Any]:
        """Ask for usage on every event, and for the cache salt; see `Engine.dress`."""
        if body.get("stream"):
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if salt is not None and cache != "any":
            body["cache_salt"] = salt
        return body

    def settled(self, before: Snapshot, after: Snapshot, asked: Sequence[InBand]) -> str | None:
        """See `Engine.settled`."""
        finished = after.values[_SUCCESS] - before.values[_SUCCESS]
        if 0 <= finished < len(asked):
            return f"{_SUCCESS} moved by {finished:g} of {len(asked)}"
        decoded = after.values[_DECODE_N] - before.values[_DECODE_N]
        if 0 <= decoded < len(asked):
            return f"{_DECODE_N} moved by {decoded:g} of {len(asked)}"
        counts = [row.completion_tokens for row in asked]
        if None not in counts:
            own = sum(count for count in counts if count is not None)
            tokens = after.values[_TOKENS] - before.values[_TOKENS]
            if 0 <= tokens < own:
                return f"{_TOKENS} moved by {tokens:g} of {own}"
        return None

    def account(self, before: Snapshot, after: Snapshot, done: Sequence[InBand]) -> Server:
        """See `Engine.account`."""
        old, new = before.values, after.values
        self.same_server(before, after)
        there = [name for name in (*_DRAFTING, _PER_POS) if name in new]
        lost = [name for name in _DRAFTING if name not in new]
        if there and lost:
            # Without it every draft would count as a round.
            raise MeasurementRefused("missing-family", f"{', '.join(lost)} beside {there[0]}")

        def delta(name: str) -> float | None:
            return None if name not in new else new[name] - old.get(name, 0.0)

        def count(name: str) -> int | None:
            value = delta(name)
            return None if value is None else round(value)

        finished = count(_SUCCESS)
        if finished != len(done):
            raise MeasurementRefused(
                "foreign-request" if (finished or 0) > len(done) else "unsettled",
                f"{_SUCCESS} moved by {finished}, {len(done)} sent: somebody else used the server",
            )
        tokens = count(_TOKENS) or 0
        for name, counts in (
            (_TOKENS, [row.completion_tokens for row in done]),
            (_PROMPT, [row.prompt_tokens for row in done]),
        ):
            own = sum(value for value in counts if value is not None)
            if None not in counts and count(name) != own:
                raise MeasurementRefused(
                    "foreign-request",
                    f"{name} moved by {count(name)}, the streams' own are {own}: another request "
                    "ran beside them",
                )
        looked, prompt = count(_QUERIES), count(_PROMPT) or 0
        if len(done) == 1 and looked is not None and looked > prompt:
            # Nothing else tells of a request that left before its first token. (Beside others a
            # request that waits is looked up again.)
            raise MeasurementRefused(
                "foreign-request",
                f"{_QUERIES} moved by {looked}, the prompt has {prompt} tokens: another request "
                "came and left",
            )
        accepted, drafts = count(_ACCEPTED), count(_DRAFTS)
        positions = {
            name: new[name] - old.get(name, 0.0) for name in new if name.startswith(_PER_POS + "{")
        }
        _check_positions(positions, accepted)
        cached = [row.cached_tokens for row in done]
        hits = count(_HITS)
        outputs = count(_OUTPUTS)
        cut = _cut(tokens, accepted or 0, len(done), outputs, len(positions))
        server = Server(
            requests=len(done),
            tokens=tokens,
            decode_ms=1000.0 * (delta(_DECODE_S) or 0.0),
            accepted=0 if accepted is None else accepted - cut,
            accepted_cut=cut,
            drafts=drafts,
            draft_tokens=count(_DRAFT_TOKENS),
            cached_tokens=(
                sum(value for value in cached if value is not None) if None not in cached else hits
            ),
            prompt_tokens=count(_PROMPT),
            steps=count(_STEPS),
            speculates=accepted is not None,
            preemptions=count(_PREEMPT),
            notes=("rounds-unproved",) if accepted and outputs is None else (),
        )
        refuse_drafts(server)
        return server

    def served(self, url: str, timeout: float = 10.0, client: httpx.Client | None = None) -> Served:
        """See `Engine.served`: the model list, the cache's gauge, and in dev mode `/server_info`.

        A dtype of `auto` is the model's own and says nothing.
        """
        found = [super().served(url, timeout, client)]
        metrics = self._get(url, "/metrics", timeout, client, kind="shape")
        if metrics.status_code == 200:
            dtype = _cache_dtype(metrics.text)
            found.append(Served.of(f"{_CACHE} cache_dtype", kv_dtype=dtype))
        # Its first answer describes the whole machine, which takes it many seconds.
        info = self._told(url, "/server_info?config_format=json", max(timeout, 60.0), client)
        config = info.get("vllm_config") if isinstance(info, dict) else None
        scheduler = config.get("scheduler_config") if isinstance(config, dict) else None
        if isinstance(scheduler, dict):
            found.append(
                Served.of(
                    "/server_info",
                    slots=whole_above(scheduler.get("max_num_seqs")),
                    window=whole_above(scheduler.get("max_model_len")),
                )
            )
        return agreed(*found)

    def _tokenize_body(self, model: str, text: str) -> dict[str, Any]:
        return {"model": model, "prompt": text, "add_special_tokens": True}


def _cache_dtype(text: str) -> str:
    lines = [line for line in text.split("\n") if line.startswith(_CACHE)]
    try:
        families = list(text_string_to_metric_families("\n".join(lines) + "\n"))
    except ValueError:
        return ""
    dtypes = {s.labels.get("cache_dtype", "") for family in families for s in family.samples}
    return dtypes.pop() if len(dtypes) == 1 and "auto" not in dtypes else ""


def _cut(tokens: int, accepted: int, requests: int, outputs: int | None, positions: int) -> int:
    """How many accepted drafts the token limit cut off, which the counter holds all the same.

    Each request's output after its first is observed once in the inter-token latency: that is the
    number of rounds. At most a whole draft a request can be cut off.
    """
    if outputs is None:
        return 0
    cut = outputs - (tokens - accepted - requests)
    if not 0 <= cut <= requests * positions:
        raise MeasurementRefused(
            "identity",
            f"{_OUTPUTS} moved by {outputs}; {tokens} tokens with {accepted} accepted in "
            f"{requests} requests make {tokens - accepted - requests} rounds, and at most "
            f"{positions} more a request",
        )
    return cut


def _check_positions(positions: dict[str, float], accepted: int | None) -> None:
    """Accepted by position adds up to the accepted tokens and never rises."""
    if not positions or accepted is None:
        return
    places = {name: name.partition("{")[2].rstrip("}") for name in positions}
    strange = [place for place in places.values() if not (place.isascii() and place.isdigit())]
    if strange:
        said = one_line(strange[0], 40)
        raise MeasurementRefused("identity", f"{_PER_POS}: {said!r} is no position")
    ordered = [positions[name] for name in sorted(positions, key=lambda name: int(places[name]))]
    if round(sum(ordered)) != accepted:
        raise MeasurementRefused(
            "identity", f"accepted by position adds up to {sum(ordered):g}, not {accepted}"
        )
    if any(later > earlier for earlier, later in itertools.pairwise(ordered)):
        raise MeasurementRefused("identity", "a later draft position was accepted more often")
