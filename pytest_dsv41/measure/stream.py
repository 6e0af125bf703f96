"""One answer stream: what came when, read from the bytes after the stream ended.

Token counts come from usage, then token ids, then logprobs entries; never from the number of
events, never from the text. What makes a stream fail fails it by name; it is never averaged.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pytest_dsv41.durable import dump_json
from pytest_dsv41.engines import InBand
from pytest_dsv41.errors import MeasurementFailed, MeasurementRefused
from pytest_dsv41.measure.clock import Stamp, stamps
from pytest_dsv41.measure.sse import Event, SseParser, TooLongError
from pytest_dsv41.measure.wire import Finished, Read
from pytest_dsv41.text import one_line

__all__ = [
    "EventRecord",
    "StreamRecord",
    "check_answer",
    "read_pieces",
    "read_stream",
    "whole",
]

_UNTOLD: Final = 8
"""Most tokens of an answer's end that no event tells of: those of a stop string."""
_TIMED_COUNTS: Final = ("predicted_n", "prompt_n", "cache_n", "draft_n", "draft_n_accepted")
_NO_TEXT: Final = frozenset({"role", "tool_calls", "function_call"})


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One event: when its last byte came, how many tokens it brought, and how that is known."""

    t_ns: int
    size: int
    tokens: int | None
    """New tokens in it; None where the server does not tell per event."""
    kind: str
    """`role`, `token`, `finish`, `usage`, `other`."""
    channels: tuple[str, ...] = ()
    source: str = "kernel"
    burst: bool = False
    """Other events came in the same read, with the same time."""
    merged: bool = False
    """It lay unread beside later events: its own time is not known."""


@dataclass(frozen=True)
class StreamRecord:
    """One answer. Times are ns of the monotonic clock; text is in memory only."""

    start_ns: int
    """The first byte of the request was written."""
    send_ns: int
    """How long writing it took."""
    end_ns: int
    prompt_tokens: int | None
    completion_tokens: int
    count_source: str
    """`usage`, `token_ids` or `logprobs`."""
    cached_tokens: int | None
    finish_reason: str | None
    events: tuple[EventRecord, ...]
    role_ns: int | None
    first_token_ns: int
    first_content_ns: int | None
    last_token_ns: int
    finish_ns: int | None
    usage_ns: int | None
    first_tokens: int | None
    first_merged: bool
    first_source: str
    output_sha256: str
    prompt_sha256: str
    timings: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    text: str = field(default="", repr=False, compare=False)
    """The content channel's text; never in a redacted record."""
    reasoning: str = field(default="", repr=False, compare=False)
    """The reasoning channel's text, under whichever name it came; never in a redacted record."""

    @property
    def ttft_ms(self) -> float:
        """First token of any channel after the request was written."""
        return (self.first_token_ns - self.start_ns) / 1e6

    @property
    def last_source(self) -> str:
        """Which clock the last token's time is from; see `first_source`."""
        return next(e.source for e in reversed(self.events) if e.kind == "token")

    @property
    def ms_per_event(self) -> float | None:
        """Mean distance of token events; None with fewer than two."""
        count = sum(1 for event in self.events if event.kind == "token")
        if count < 2:
            return None
        return (self.last_token_ns - self.first_token_ns) / 1e6 / (count - 1)

    @property
    def ms_per_token(self) -> float | None:
        """Decode time over the tokens after the first event; None where it is not known."""
        if self.first_tokens is None or self.completion_tokens <= self.first_tokens:
            return None
        later = self.completion_tokens - self.first_tokens
        return (self.last_token_ns - self.first_token_ns) / 1e6 / later

    @property
    def in_band(self) -> InBand:
        """What the stream itself said about the server's work."""
        return InBand(
            self.prompt_tokens,
            self.completion_tokens,
            self.cached_tokens,
            self.timings,
            self.metrics,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the redacted record: sizes, times from `start_ns` on, counts, hashes."""
        zero = self.start_ns

        def since(time_ns: int | None) -> int | None:
            return None if time_ns is None else time_ns - zero

        return {
            "start_ns": zero,
            "send_ns": self.send_ns,
            "end_ns": since(self.end_ns),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "count_source": self.count_source,
            "cached_tokens": self.cached_tokens,
            "finish_reason": self.finish_reason,
            "role_ns": since(self.role_ns),
            "first_token_ns": since(self.first_token_ns),
            "first_content_ns": since(self.first_content_ns),
            "last_token_ns": since(self.last_token_ns),
            "finish_ns": since(self.finish_ns),
            "usage_ns": since(self.usage_ns),
            "first_tokens": self.first_tokens,
            "first_merged": self.first_merged,
            "first_source": self.first_source,
            "output_sha256": self.output_sha256,
            "prompt_sha256": self.prompt_sha256,
            "timings": dict(self.timings),
            "metrics": dict(self.metrics),
            "notes": list(self.notes),
            "events": [
                [
                    event.t_ns - zero,
                    event.size,
                    event.tokens,
                    event.kind,
                    list(event.channels),
                    event.source,
                    (1 if event.burst else 0) | (2 if event.merged else 0),
                ]
                for event in self.events
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StreamRecord:
        """Read a record back; the text stays empty."""
        zero = int(data["start_ns"])

        def at(name: str) -> int | None:
            value = data[name]
            return None if value is None else zero + int(value)

        first, last, end = at("first_token_ns"), at("last_token_ns"), at("end_ns")
        if first is None or last is None or end is None:
            raise ValueError("a record without token times")
        return cls(
            start_ns=zero,
            send_ns=data["send_ns"],
            end_ns=end,
            prompt_tokens=data["prompt_tokens"],
            completion_tokens=data["completion_tokens"],
            count_source=data["count_source"],
            cached_tokens=data["cached_tokens"],
            finish_reason=data["finish_reason"],
            events=tuple(
                EventRecord(
                    zero + t, size, tokens, kind, tuple(channels), source,
                    bool(flags & 1), bool(flags & 2),
                )
                for t, size, tokens, kind, channels, source, flags in data["events"]
            ),
            role_ns=at("role_ns"),
            first_token_ns=first,
            first_content_ns=at("first_content_ns"),
            last_token_ns=last,
            finish_ns=at("finish_ns"),
            usage_ns=at("usage_ns"),
            first_tokens=data["first_tokens"],
            first_merged=data["first_merged"],
            first_source=data["first_source"],
            output_sha256=data["output_sha256"],
            prompt_sha256=data["prompt_sha256"],
            timings=data["timings"],
            metrics=data["metrics"],
            notes=tuple(data["notes"]),
        )  # fmt: skip


def read_stream(
    exchange: Finished, *, prompt_sha256: str, max_tokens: int, exact: bool
) -> StreamRecord:
    """Make the record of a finished exchange.

    Args:
        exchange: a streamed request of `measure.wire`, at its end.
        prompt_sha256: the identity of what was sent.
        max_tokens: how many tokens were asked for.
        exact: exactly that many were asked for (ignore_eos).

    Raises:
        MeasurementFailed: the request did not deliver; `kind` says how.
        MeasurementRefused: it delivered and its counts contradict each other.
    """
    check_answer(exchange)
    record = read_pieces(
        exchange.pieces,
        exchange.reads,
        offset_ns=exchange.offset_ns,
        start_ns=exchange.write_start_ns,
        send_ns=exchange.write_end_ns - exchange.write_start_ns,
        end_ns=exchange.end_ns,
        prompt_sha256=prompt_sha256,
    )
    if exact and record.completion_tokens != max_tokens:
        raise MeasurementFailed(
            "delivered", f"{record.completion_tokens} tokens came, {max_tokens} were asked for"
        )
    if record.completion_tokens > max_tokens:
        raise MeasurementFailed(
            "delivered", f"{record.completion_tokens} tokens came, at most {max_tokens} were asked"
        )
    if record.finish_reason == "length" and record.completion_tokens != max_tokens:
        raise MeasurementFailed(
            "delivered",
            f"finished for length after {record.completion_tokens} of {max_tokens} tokens",
        )
    return record


def read_pieces(
    pieces: Sequence[tuple[int, bytes]],
    reads: Sequence[Read],
    *,
    offset_ns: int,
    start_ns: int,
    send_ns: int,
    end_ns: int,
    prompt_sha256: str,
) -> StreamRecord:
    """Make a stream's record from its body's pieces, each with the index of its read.

    Raises:
        MeasurementFailed, MeasurementRefused: as `read_stream`.
    """
    reader = _Reader()
    times = stamps(reads, offset_ns=offset_ns, start_ns=start_ns)
    reader.read(pieces, times)
    if any(stamp.stepped for stamp in times):
        reader.notes.append("clock-stepped")
    return reader.record(start_ns, send_ns, end_ns, prompt_sha256)


def check_answer(exchange: Finished) -> None:
    """Raise where an exchange failed or its answer is no stream.

    Raises:
        MeasurementFailed: as `read_stream`.
    """
    if exchange.failure is not None:
        raise MeasurementFailed(exchange.failure.kind, exchange.failure.message)
    status = exchange.status
    if status != 200:
        raise MeasurementFailed(f"http-{status}", f"HTTP {status}: {_message(exchange.body)}")
    encoding = exchange.headers.get("content-encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        raise MeasurementFailed("encoded", f"the stream came as {one_line(encoding, 40)}")
    kind = exchange.headers.get("content-type", "")
    if not kind.lower().startswith("text/event-stream"):
        said = _message(exchange.body)
        raise MeasurementFailed(
            "not-a-stream", f"200 with {one_line(kind, 60) or 'no content type'}: {said}"
        )


def _message(body: bytes) -> str:
    """What an error body says, in one line."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return one_line(body[:200].decode("utf-8", "replace"), 200) or "empty body"
    error = data.get("error", data) if isinstance(data, dict) else data
    text = error.get("message", error) if isinstance(error, dict) else error
    return one_line(str(text), 200)


class _Reader:
    """Walks the events once and books what each of them says."""

    def __init__(self) -> None:
        self.events: list[EventRecord] = []
        self.notes: list[str] = []
        self.done = False
        self.total: int | None = None
        self.ids = 0
        self.entries = 0
        self.saw_ids = False
        self.saw_entries = False
        self.cumulative = 0
        self.running = False
        self.uncounted = False
        self.prompt_tokens: int | None = None
        self.cached: int | None = None
        self.finish: str | None = None
        self.role_ns: int | None = None
        self.finish_ns: int | None = None
        self.usage_ns: int | None = None
        self.content_ns: int | None = None
        self.texts: dict[str, list[str]] = {}
        self.timings: dict[str, float] = {}
        self.metrics: dict[str, Any] = {}

    def read(self, pieces: Sequence[tuple[int, bytes]], times: Sequence[Stamp]) -> None:
        """Parse everything."""
        parser = SseParser()
        by_read: dict[int, list[Event]] = {}
        try:
            for index, piece in pieces:
                found = parser.feed(piece)
                if found:
                    by_read.setdefault(index, []).extend(found)
        except TooLongError as error:
            raise MeasurementFailed("too-long", str(error)) from None
        for index, events in by_read.items():
            stamp = times[index]
            # A [DONE] behind the last event brings no token and merges nothing.
            several = sum(1 for event in events if event.data != b"[DONE]") > 1
            for place, event in enumerate(events):
                last = all(later.data.strip() == b"[DONE]" for later in events[place + 1 :])
                self._event(event, stamp, several, merged=several and stamp.spread and not last)
        if not self.done and parser.tail().strip() == b"[DONE]":
            self.notes.append("unterminated-done")
            self.done = True
        if not self.done:
            raise MeasurementFailed("no-end", "the stream ended without [DONE]")

    def _event(self, event: Event, stamp: Stamp, burst: bool, merged: bool) -> None:
        if event.data.strip() == b"[DONE]":
            if self.done:
                self.notes.append("done-twice")
            self.done = True
            return
        if event.name == b"error":
            raise MeasurementFailed("error-event", _message(event.data))
        try:
            data = _JSON.decode(event.data.decode())
        except (ValueError, RecursionError):
            raise MeasurementFailed(
                "bad-event",
                f"an event is not JSON: {one_line(event.data[:80].decode('utf-8', 'replace'))}",
            ) from None
        if not isinstance(data, dict):
            raise MeasurementFailed("bad-event", "an event is not a JSON object")
        if data.get("error") is not None or data.get("object") == "error":
            raise MeasurementFailed("error-event", _message(event.data))
        if self.done:
            raise MeasurementFailed("after-done", "the stream went on after [DONE]")
        choices = data.get("choices") or []
        if not isinstance(choices, list) or not all(isinstance(row, dict) for row in choices):
            raise MeasurementFailed("bad-event", "an event's choices are not a list of objects")
        usage = data.get("usage")
        self._book_extras(data, usage, stamp.t_ns)
        tokens: int | None = 0
        kind = "usage" if usage is not None else "other"
        channels: tuple[str, ...] = ()
        if choices:
            tokens, kind, channels = self._choices(choices, usage, data, stamp.t_ns)
        self.events.append(
            EventRecord(stamp.t_ns, event.size, tokens, kind, channels, stamp.source, burst, merged)
        )

    def _book_extras(self, data: dict[str, Any], usage: Any, now: int) -> None:
        timings = data.get("timings")
        if isinstance(timings, dict):
            for name in _TIMED_COUNTS:
                whole(timings, name)
            self.timings = {
                name: value
                for name, value in timings.items()
                if isinstance(value, int | float)
                and not isinstance(value, bool)
                and abs(value) < 1e15
            }
        if isinstance(data.get("metrics"), dict):
            self.metrics = data["metrics"]
        usage = _table(usage, "usage")
        count = whole(usage, "completion_tokens")
        prompt = whole(usage, "prompt_tokens")
        both = whole(usage, "total_tokens")
        if None not in (both, count, prompt) and both != (prompt or 0) + (count or 0):
            raise MeasurementRefused(
                "usage", f"usage says {prompt} and {count} tokens, and {both} in total"
            )
        if count == 0 and data.get("choices"):
            count = None  # a role chunk's usage: no token yet, whenever it comes
        if count is not None:
            if self.total is not None and count < self.total:
                raise MeasurementRefused(
                    "usage", f"usage fell from {self.total} to {count} tokens: not cumulative"
                )
            self.total = count
            self.usage_ns = now
        if prompt is not None:
            self.prompt_tokens = prompt
        details = _table(usage.get("prompt_tokens_details"), "prompt_tokens_details")
        cached = whole(details, "cached_tokens")
        if cached is not None:
            self.cached = cached

    def _choices(
        self, choices: list[Any], usage: Any, data: dict[str, Any], now: int
    ) -> tuple[int | None, str, tuple[str, ...]]:
        if len(choices) > 1 or choices[0].get("index", 0) != 0:
            raise MeasurementFailed("choices", "more than one choice in the stream")
        choice = choices[0]
        delta = choice.get("delta")
        channels = self._book_text(choice, delta, now)
        if isinstance(delta, dict) and "role" in delta and self.role_ns is None:
            self.role_ns = now
        if choice.get("finish_reason") is not None:
            if not isinstance(choice["finish_reason"], str):
                raise MeasurementFailed("bad-event", "an event's finish_reason is not a string")
            self.finish, self.finish_ns = choice["finish_reason"], now
            if self.finish in ("abort", "error"):
                raise MeasurementFailed(
                    f"finish-{self.finish}", f"the server ended the stream with {self.finish}"
                )
        tokens = self._count(choice, usage, data)
        if tokens == 0 and channels:
            raise MeasurementRefused(
                "usage", "an event carries text and usage does not count it: not cumulative"
            )
        if tokens or (tokens is None and channels):
            # From here on a count in a later event is a total, not that event's own tokens.
            self.uncounted = self.uncounted or tokens is None
            return tokens, "token", channels
        if self.finish_ns == now and choice.get("finish_reason") is not None:
            return 0, "finish", channels
        return 0, "role" if isinstance(delta, dict) and "role" in delta else "other", channels

    def _book_text(self, choice: dict[str, Any], delta: Any, now: int) -> tuple[str, ...]:
        """Book each channel's text; both names of one reasoning text count once."""
        texts: dict[str, str] = {}
        if isinstance(delta, dict):
            for name, value in delta.items():
                if name in _NO_TEXT:
                    if name != "role" and value:
                        texts[name] = dump_json(value)
                elif isinstance(value, str) and value:
                    texts[name] = value
        elif isinstance(choice.get("text"), str) and choice["text"]:
            texts["content"] = choice["text"]
        if texts.get("reasoning") is not None and texts.get("reasoning") == texts.get(
            "reasoning_content"
        ):
            del texts["reasoning_content"]
        for name, value in texts.items():
            self.texts.setdefault(name, []).append(value)
        if "content" in texts and self.content_ns is None:
            self.content_ns = now
        return tuple(texts)

    def _count(self, choice: dict[str, Any], usage: Any, data: dict[str, Any]) -> int | None:
        """New tokens in one event, by the best source it has."""
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            self.saw_ids = True
            self.ids += len(ids)
        entries = _entries(choice.get("logprobs"))
        if entries is not None:
            self.saw_entries = True
            self.entries += entries
        reached: Any = None
        if isinstance(usage, dict):
            reached = usage.get("completion_tokens") or None
        timings = data.get("timings")
        if reached is None and isinstance(timings, dict):
            reached = timings.get("predicted_n")
        if isinstance(reached, int) and not self.uncounted:
            new, self.cumulative = reached - self.cumulative, reached
            if new < 0:
                raise MeasurementRefused("usage", "a token count fell in mid-stream")
            self.running = True
            return new
        if isinstance(ids, list):
            return len(ids)
        return entries

    def record(self, start_ns: int, send_ns: int, end_ns: int, prompt_sha256: str) -> StreamRecord:
        """Put the pieces together and hold them against each other."""
        total, source = self._total()
        token_events = [event for event in self.events if event.kind == "token"]
        if not token_events:
            raise MeasurementFailed("no-token", "the stream ended well and carried no token")
        first, last = token_events[0], token_events[-1]
        if last.merged:
            self.notes.append("last-merged")
        output = {name: "".join(parts) for name, parts in self.texts.items()}
        return StreamRecord(
            start_ns=start_ns,
            send_ns=send_ns,
            end_ns=end_ns,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=total,
            count_source=source,
            cached_tokens=self._cached(),
            finish_reason=self.finish,
            events=tuple(self.events),
            role_ns=self.role_ns,
            first_token_ns=first.t_ns,
            first_content_ns=self.content_ns,
            last_token_ns=last.t_ns,
            finish_ns=self.finish_ns,
            usage_ns=self.usage_ns,
            first_tokens=first.tokens,
            first_merged=first.merged,
            first_source=first.source,
            output_sha256=hashlib.sha256(dump_json(output).encode()).hexdigest(),
            prompt_sha256=prompt_sha256,
            timings=self.timings,
            metrics=self.metrics,
            notes=tuple(self.notes),
            text=output.get("content", ""),
            reasoning=output.get("reasoning") or output.get("reasoning_content", ""),
        )

    def _cached(self) -> int | None:
        cached = self.cached
        if cached is None:
            cached = whole(self.timings, "cache_n")
        if cached is not None and self.prompt_tokens is not None and cached > self.prompt_tokens:
            raise MeasurementRefused(
                "usage", f"{cached} of {self.prompt_tokens} prompt tokens were cached"
            )
        return cached

    def _total(self) -> tuple[int, str]:
        counts = {
            "usage": self.total,
            "token_ids": self.ids if self.saw_ids else None,
            "logprobs": self.entries if self.saw_entries else None,
        }
        if self.finish is None:
            raise MeasurementFailed("no-finish", "the stream ended without a finish reason")
        known = {name: value for name, value in counts.items() if value is not None}
        if not known:
            raise MeasurementRefused(
                "no-usage", "the stream tells no token count (no usage, token ids or logprobs)"
            )
        if self.total is not None and self.saw_ids and self.total != self.ids:
            raise MeasurementRefused(
                "usage", f"usage says {self.total} tokens, {self.ids} token ids came"
            )
        untold = 0 if self.total is None else self.total - self.cumulative
        if self.running and self.finish == "stop" and 0 < untold <= _UNTOLD:
            # What ended the answer (an end of text, a stop string) was sent in no event.
            self.notes.append("untold-end")
        elif self.running and untold:
            raise MeasurementRefused(
                "usage", f"usage ends at {self.total}, its running count at {self.cumulative}"
            )
        predicted = self.timings.get("predicted_n")
        if self.total is not None and predicted is not None and self.total != predicted:
            raise MeasurementRefused(
                "usage", f"usage says {self.total} tokens, the timings {predicted:g}"
            )
        source = next(iter(known))
        return known[source], source


def _refuse(word: str) -> float:
    raise ValueError(f"{word} is no number of JSON's")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits} is too large for a number")
    return value


_JSON: Final = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
"""Numbers of JSON only: Python's own reads NaN and infinity, which no record can hold."""


def _table(value: Any, name: str) -> dict[str, Any]:
    """Return an object of an event, an empty one for null; refuse anything else."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise MeasurementRefused("usage", f"{name} is not an object: {one_line(str(value), 40)}")
    return value


def whole(table: Mapping[str, Any], name: str) -> int | None:
    """Return a server's count, None where there is none.

    Raises:
        MeasurementRefused: kind `usage`: it is no whole number from 0 to 2^53.
    """
    value = table.get(name)
    if value is None:
        return None
    # Beyond 2^53 a float, which every rate is, no longer holds each whole number.
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 2**53:
        raise MeasurementRefused(
            "usage", f"{name} is not a whole number from 0 to 2^53: {one_line(str(value), 40)}"
        )
    return value


def _entries(logprobs: Any) -> int | None:
    """How many tokens a logprobs object lists, in any of its three forms."""
    if not isinstance(logprobs, dict):
        return None
    for name in ("content", "tokens", "token_logprobs"):
        if isinstance(logprobs.get(name), list):
            return len(logprobs[name])
    return None
