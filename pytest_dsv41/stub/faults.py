"""The named faults: every way a server's answer can mislead a client, switched on by name.

A fault is `name` or `name=arg`; parts of an argument are joined by `:`, lists by `;`. It comes
with a request (header `x-stub-fault`, a comma between faults, or the body's field `x_stub_fault`,
a text or a list), or holds for every request (setting `fault`, or POST /stub/faults). There a
path may stand before it and narrows it: `/metrics:metrics-lag=50`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pytest_dsv41.errors import UsageError
from pytest_dsv41.stub.http import BadRequest

__all__ = ["FAULTS", "NONE", "Fault", "Faults", "describe", "faults_of", "parse"]


class Fault(NamedTuple):
    """What a fault takes and does. `arg` names the parts; `default` is used without one."""

    arg: str
    default: str
    help: str


FAULTS: Mapping[str, Fault] = {
    # pace: the request's own engine settings
    "round-ms": Fault("ms", "8", "this request's round time"),
    "prefill-ms": Fault("ms", "4", "this request's prefill time, whatever its length"),
    "acceptance": Fault("p[;p…]", "0.7", "this request's acceptance by position"),
    "draft-tokens": Fault("k", "3", "this request's draft tokens a round"),
    "at": Fault("ms[;ms…]", "100", "steps come out so long after arrival; later ones by rounds"),
    "step-tokens": Fault("n[;n…]", "1", "steps deliver so many tokens; later ones as drawn"),
    # the prompt
    "recall": Fault("own|other", "own", "it answers what followed its last three words before"),
    "no-salt": Fault("", "", "the cache is used whatever the request asks"),
    "truncate": Fault("n", "0", "a prompt over n tokens (0: the window's) is cut and not refused"),
    # before the stream
    "status": Fault("code[:times[:key]]", "503:1", "so many times this status, then good"),
    "slow-headers": Fault("ms", "200", "the head of the answer comes late"),
    "json-body": Fault("", "", "a stream was asked for, a JSON body comes"),
    "plain-body": Fault("", "", "no chunks: the body ends with the connection"),
    # roles, channels, events
    "role-early": Fault("ms", "0", "the role chunk comes so long after the request"),
    "role-late": Fault("", "", "the role chunk comes after the first token"),
    "role-absent": Fault("", "", "no role chunk"),
    "role-null": Fault("", "", "the role chunk's content is null"),
    "role-bare": Fault("", "", "the role chunk has no content"),
    "role-with-token": Fault("", "", "the role stands in the first token's delta"),
    "reasoning": Fault("n", "4", "the first n tokens are reasoning"),
    "reasoning-only": Fault("", "", "every token is reasoning"),
    "reasoning-field": Fault("name|both", "reasoning_content", "name of the reasoning's field"),
    "tokens-per-event": Fault("k", "3", "k tokens an event (stream interval), the first at once"),
    "hold-text": Fault("n", "3", "n events carry tokens and no text, the next all of it"),
    "swallow": Fault("n", "2", "n tokens after the first event come with no event"),
    "finish-own": Fault("ms", "0", "the finish comes as an event of its own, so much later"),
    "finish-early": Fault("n[:reason]", "2:length", "the answer ends after n tokens"),
    "finish-reason": Fault("reason", "abort", "the finish names this reason"),
    "no-finish": Fault("", "", "no finish reason at all"),
    "endless": Fault("", "", "the answer never ends"),
    # usage
    "usage": Fault(
        "final|last-choice|continuous|null|absent|wrong[:n]|nonmonotonic|delta",
        "absent",
        "where usage stands and whether it is right",
    ),
    "usage-late": Fault("ms", "160", "the usage chunk comes so much later"),
    # log-probabilities of an answer that is not streamed
    "logprobs": Fault(
        "duplicate|zeros|fewer|nan|positive|absent|other|cut",
        "zeros",
        "its log-probabilities are wrong; other: an earlier request's answer; cut: half the JSON",
    ),
    # errors and ends
    "error": Fault("first|mid[:n]|after-finish", "mid:2", "an error event in the 200 stream"),
    "no-done": Fault("", "", "no [DONE]"),
    "double-done": Fault("", "", "[DONE] twice"),
    "done-late": Fault("ms", "100", "[DONE] comes so much later"),
    "eof": Fault("n", "2", "the body ends in order after n events"),
    "chunk-cut": Fault("n", "2", "the connection ends inside a chunk after n events"),
    "reset": Fault("n", "2", "the connection is reset after n events"),
    "stall": Fault("ms[:n]", "1000:1", "the engine stands still so long after n events"),
    "hold": Fault("ms[:n]", "200:1", "events after the nth are held so long, then all come"),
    "flood": Fault("long|drip|line:bytes", "line:1048576", "so many bytes before the answer"),
    # framing
    "crlf": Fault("", "", "lines end with CR LF"),
    "cr": Fault("", "", "lines end with CR"),
    "data-spaces": Fault("n", "0", "spaces after `data:`"),
    "sse-event": Fault("name", "message", "an `event:` line before the data"),
    "sse-id": Fault("before|after", "before", "an `id:` line beside the data"),
    "sse-retry": Fault("ms", "3000", "a `retry:` line before the data"),
    "comment": Fault("", "", "a comment block before every event"),
    "comment-in-block": Fault("before|after", "before", "a comment line in the data's block"),
    "ping": Fault("ms", "20", "a comment block so often while nothing else comes"),
    "bom": Fault("", "", "the body begins with a byte order mark"),
    "no-final-blank": Fault("", "", "the last event has no blank line"),
    # packets
    "cut": Fault("byte[:ms]", "10:1", "each event in two writes, cut there, so long apart"),
    "cut-utf8": Fault("ms", "1", "events are cut inside their first multi-byte character"),
    "cut-crlf": Fault("ms", "1", "events are cut between the CR and the LF of their first line"),
    "drip": Fault("", "", "every byte by a write of its own"),
    "events-per-packet": Fault("k", "3", "k events a write"),
    "burst": Fault("", "", "the whole stream in one write at its end"),
    # metrics
    "metrics-two-engines": Fault("", "", "a second engine in the exposition"),
    "engine": Fault("index", "1", "this request counts on another engine"),
    "metrics-restart": Fault("n", "0", "the counters begin again after n events (or now)"),
    "metrics-missing": Fault("family", "vllm:generation_tokens_total", "a family is left out"),
    "metrics-nan": Fault("family", "vllm:generation_tokens_total", "a family's values are NaN"),
    "metrics-inf": Fault("family", "vllm:generation_tokens_total", "a family's values are +Inf"),
    "metrics-no-created": Fault("", "", "no `_created` families"),
    "metrics-alternate": Fault("", "", "every second scrape comes from another process"),
    "metrics-garbage": Fault("", "", "the exposition cannot be parsed"),
    "metrics-lag": Fault("ms", "100", "this request's counters move so much later"),
    "count-cut-drafts": Fault("", "", "accepted drafts that max_tokens cuts off count as accepted"),
    "preempt": Fault("n", "1", "this request is preempted n times"),
    "foreign": Fault("tokens", "4", "another request starts and ends inside this one"),
    "foreign-running": Fault("ms", "500", "another request runs until so long after this one"),
    # other endpoints, clocks
    "tokenize-404": Fault("", "", "/tokenize is not there"),
    "tokenize-count": Fault("n", "1", "/tokenize counts so many too many"),
    "reset-false": Fault("", "", "the prefix cache is not reset"),
    "wall-step": Fault("s[:n]", "-3:1", "the server's wall clock steps after n events"),
}

_PACE = ("round-ms", "prefill-ms", "acceptance", "draft-tokens")


def describe() -> str:
    """Return one line a fault, as `dsv41 stub --list-faults` prints them."""
    lines = []
    for name, fault in FAULTS.items():
        shown = f"{name}={fault.arg}" if fault.arg else name
        default = f" (default {fault.default})" if fault.default else ""
        lines.append(f"{shown:<28} {fault.help}{default}")
    return "\n".join(lines)


class Faults:
    """The faults of one request. An absent one answers None."""

    __slots__ = ("_args",)

    def __init__(self, args: Mapping[str, str]) -> None:
        self._args = dict(args)

    def __contains__(self, name: str) -> bool:
        return name in self._args

    def __bool__(self) -> bool:
        return bool(self._args)

    def text(self, name: str) -> str | None:
        """Return the argument as it is."""
        return self._args.get(name)

    def parts(self, name: str) -> list[str]:
        """Return the argument's parts, those of the default behind those given."""
        given = self._args[name].split(":")
        return given + FAULTS[name].default.split(":")[len(given) :]

    def number(self, name: str, part: int = 0) -> float:
        """Return one part as a number; BadRequest when it is none."""
        text = self.parts(name)[part]
        try:
            return float(text)
        except ValueError:
            raise BadRequest(f"fault {name}: {text!r} is not a number") from None

    def count(self, name: str, part: int = 0) -> int:
        """Return one part as a whole number."""
        return int(self.number(name, part))

    def seconds(self, name: str, part: int = 0) -> float:
        """Return one part, given in milliseconds, as seconds."""
        return self.number(name, part) / 1000.0

    def numbers(self, name: str) -> list[float]:
        """Return a `;` list; empty without the fault."""
        if name not in self._args:
            return []
        try:
            return [float(text) for text in self._args[name].split(";")]
        except ValueError:
            raise BadRequest(f"fault {name}: {self._args[name]!r} is no list of numbers") from None

    def pace(self) -> dict[str, Any]:
        """Return the settings of the request's own pace, by their profile names."""
        return {
            name.replace("-", "_"): self._args[name].replace(";", ",")
            for name in _PACE
            if name in self._args
        }


NONE = Faults({})


def parse(texts: Iterable[str], path: str = "") -> Faults:
    """Return the faults of `texts` that hold for `path`. UsageError names an unknown one."""
    args: dict[str, str] = {}
    for text in texts:
        rest = text.strip()
        if rest.startswith("/"):
            where, _, rest = rest.partition(":")
            if path and where != path:
                continue
        name, equals, arg = rest.partition("=")
        fault = FAULTS.get(name)
        if fault is None:
            raise UsageError(f"unknown fault {name!r}; valid: {', '.join(FAULTS)}")
        if equals and not fault.arg:
            raise UsageError(f"fault {name} takes no argument")
        args[name] = arg if equals else fault.default
        _check(name, fault.arg, args[name])
    return Faults(args)


_NUMBERS = ("ms", "n", "k", "s", "p", "byte", "bytes", "times", "tokens", "code", "index")


def _check(name: str, form: str, arg: str) -> None:
    """Raise UsageError when `arg` does not have the form that the table gives."""
    if not form:
        return
    bad = UsageError(f"fault {name}={arg}; valid: {name}={form}")
    if "…" in form:
        parts = [("p", text) for text in arg.split(";")]
    else:
        names = form.replace("[", "").replace("]", "").split(":")
        if "|" in form and "[:n]" in form:
            # The number belongs to one of the words only: first|mid[:n]|after-finish.
            names = [form.replace("[:n]", ""), "n"]
        given = arg.split(":") if ":" in form else [arg]
        heads = names[0].split("|")
        if len(given) > len(names) or (
            len(heads) > 1 and "name" not in heads and given[0] not in heads
        ):
            raise bad
        parts = list(zip(names, given, strict=False))
    for kind, text in parts:
        if kind in _NUMBERS:
            try:
                float(text)
            except ValueError:
                raise bad from None


def faults_of(header: str, field: Any, always: Iterable[str], path: str) -> Faults:
    """Return the faults of one request: those that always hold, the header's and the body's."""
    texts = list(always)
    texts += [text for text in header.split(",") if text.strip()]
    if isinstance(field, str):
        texts += [text for text in field.split(",") if text.strip()]
    elif isinstance(field, list):
        texts += [str(text) for text in field]
    if not texts:
        return NONE
    try:
        return parse(texts, path)
    except UsageError as error:
        raise BadRequest(str(error)) from None
