"""What a server offers beside plain text, each with its evidence: PASS, FAIL or NOT OFFERED.

Six probes, as they are run before a server goes into a fleet (FRANK-ARCHON "Gates"): vision, a
tool call, the reasoning efforts, the field reasoning comes in, JSON answers, the counters of
drafts. PASS says that it was seen to work; NOT OFFERED that the server said no, or declares that it
cannot; FAIL that it said yes and did something else. A field that is taken and changes nothing is
not offered: a server that answers 200 to anything proves nothing.

Every chat leaves room for reasoning and reads both channels: at 64 tokens an answer can be spent
before its content begins, and the content is then empty (the document's probe law).
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import re
import struct
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from pytest_dsv41.engines import Engine, base_url, fetch, get_engine, unix_path
from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.measure.probes.laws import VISION_TOKENS, check_vision
from pytest_dsv41.text import error_line, one_line

__all__ = ["FAIL", "NOT_OFFERED", "PASS", "PROBES", "Probe", "fleet_probe", "solid_png"]

PASS: Final = "PASS"  # noqa: S105 - an answer, no secret
FAIL: Final = "FAIL"
NOT_OFFERED: Final = "NOT OFFERED"

_TOKENS: Final = VISION_TOKENS  # leaves an answer room beside reasoning
_SHORT: Final = 128  # where only the kind of answer counts
_SIDE: Final = 512  # pixels; a tiny image is refused by some vision towers
_COLOURS: Final = {"red": (255, 0, 0), "blue": (0, 0, 255)}
_EFFORTS: Final = ("low", "medium", "high", "xhigh")
_UNKNOWN_EFFORT: Final = "no-such-effort"
_REFUSALS: Final = frozenset((400, 404, 405, 415, 422, 501))
_SAYS_NO: Final = re.compile(r"not support|unsupported|not enabled|not available|requires? .*--")
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute an arithmetic expression exactly.",
        "parameters": {
            "type": "object",
            "properties": {"expr": {"type": "string", "description": "such as 1 + 2"}},
            "required": ["expr"],
        },
    },
}
_BODY_MAX: Final = 16 << 20


@dataclass(frozen=True)
class Probe:
    """One probe's answer: `status` is one of the three, `evidence` a line of what was seen."""

    name: str
    status: str
    evidence: str


@dataclass(frozen=True)
class _Reply:
    """One chat: the HTTP status, and of a good one the message and what stands beside it."""

    status: int
    error: str = ""
    content: str = ""
    reasoning: str = ""
    field: str = ""
    """The name under which reasoning came."""
    finish: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()
    prompt_tokens: int = -1
    timings: Mapping[str, Any] | None = None

    @property
    def said(self) -> str:
        """The answer; where the content is empty, the reasoning."""
        return self.content.strip() or self.reasoning.strip()

    def refusal(self, name: str) -> Probe | None:
        """The probe's answer where the server did not take the request; None where it did."""
        if self.status == 200:
            return None
        told = f"answered {self.status}: {self.error}" if self.status else self.error
        says_no = self.status == 500 and _SAYS_NO.search(self.error)
        if self.status in _REFUSALS or says_no:
            return Probe(name, NOT_OFFERED, told)
        return Probe(name, FAIL, told)


class _Server:
    """The server under probe, and what it declares of itself."""

    def __init__(
        self,
        url: str,
        engine: Engine,
        model: str,
        client: httpx.Client,
        deadline: float,
        vision_tokens: int,
    ) -> None:
        self.url = url
        self.engine = engine
        self.model = model
        self.client = client
        self.vision_tokens = vision_tokens
        self._deadline = deadline
        self.props = self._object("/props")

    def chat(self, content: Any, *, tokens: int = _TOKENS, **more: Any) -> _Reply:
        """Ask one user message, greedily."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": tokens,
            "temperature": 0.0,
            **more,
        }
        try:
            status, raw = self._post("/v1/chat/completions", body)
        except httpx.TimeoutException:
            return _Reply(0, "no answer in time")
        except httpx.HTTPError as error:
            return _Reply(0, f"no answer: {error_line(error, 100)}")
        return _reply(raw) if status == 200 else _Reply(status, _error_text(raw))

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Answer with status and body, whole by the deadline and of bounded length."""
        where = f"{base_url(self.url)}{path}"
        answer = fetch(self.client, where, self.left(), body=body, most=_BODY_MAX)
        return answer.status_code, answer.content

    def slots(self) -> list[Any]:
        """What `/slots` says; empty where there is none."""
        found = self._get("/slots")
        return found if isinstance(found, list) else []

    def declares(self, *path: str) -> bool | None:
        """What `/props` says under `path`; None where it does not speak of it."""
        found: Any = self.props
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, bool) else None

    def _object(self, path: str) -> dict[str, Any]:
        found = self._get(path)
        return found if isinstance(found, dict) else {}

    def _get(self, path: str) -> Any:
        where = f"{base_url(self.url)}{path}"
        with contextlib.suppress(httpx.HTTPError, ValueError, RecursionError):
            answer = fetch(self.client, where, self.left(10.0), most=_BODY_MAX)
            if answer.status_code == 200:
                return answer.json()
        return None

    def left(self, most: float = math.inf) -> float:
        """Seconds until the deadline of all probes, at most `most`, and never none."""
        return min(most, max(0.1, self._deadline - time.monotonic()))


def fleet_probe(
    url: str,
    *,
    engine: str,
    model: str = "",
    probes: Sequence[str] = (),
    deadline_s: float = 600.0,
    vision_tokens: int = VISION_TOKENS,
    progress: Callable[[str], None] | None = None,
) -> list[Probe]:
    """Run the probes one after the other and return their answers.

    Args:
        url: the server.
        engine: its dialect.
        model: the served name; empty: the first of `/v1/models`.
        probes: names of `PROBES`; none: all.
        deadline_s: of all probes together; what is not asked in time has failed.
        vision_tokens: budget of each vision answer; a model that thinks long needs more.
        progress: called with each probe's name before it runs.

    Raises:
        UsageError: an unknown probe or engine.
        MeasurementRefused: kind `law-vision-budget`: too few `vision_tokens`; kind `models`: nobody
            answers there.
    """
    for name in probes:
        if name not in PROBES:
            raise UsageError(f"--probe {one_line(name, 40)}: valid: {', '.join(PROBES)}")
    check_vision(vision_tokens)
    dialect = get_engine(engine)
    deadline = time.monotonic() + deadline_s
    transport = httpx.HTTPTransport(
        uds=unix_path(url), trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
    )
    with httpx.Client(transport=transport, trust_env=False) as client:
        served = model or dialect.models(url, min(5.0, deadline_s), client)[0]
        server = _Server(url, dialect, served, client, deadline, vision_tokens)
        answers = []
        for name in probes or PROBES:
            if progress is not None:
                progress(name)
            answers.append(PROBES[name](server))
    return answers


# -- the probes -----------------------------------------------------------------------------------


def _vision(server: _Server) -> Probe:
    """Two images of one colour each: whoever does not look cannot name both."""
    told = []
    for colour, rgb in _COLOURS.items():
        image = base64.b64encode(solid_png(rgb, _SIDE)).decode()
        reply = server.chat(
            [
                {"type": "text", "text": "Which colour fills this image? Answer with one word."},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
            ],
            tokens=server.vision_tokens,
        )
        refusal = reply.refusal("vision")
        if refusal is not None:
            return refusal
        said = reply.said.lower()
        others = [name for name in _COLOURS if name != colour]
        right = colour in said and not any(name in said for name in others)
        spent = not right and reply.finish == "length" and not reply.content.strip()
        why = f" (law-vision-budget: all {server.vision_tokens} tokens went before an answer)"
        told.append((right, f"{colour} {_SIDE} px: {_quoted(reply)}{why if spent else ''}"))
    evidence = "; ".join(text for _, text in told)
    if all(right for right, _ in told):
        return Probe("vision", PASS, evidence)
    if server.declares("modalities", "vision") is False:
        return Probe("vision", NOT_OFFERED, f"/props: no vision; {evidence}")
    return Probe("vision", FAIL, evidence)


def _tools(server: _Server) -> Probe:
    reply = server.chat("What is 23 * 47? Use the calculate tool.", tools=[_TOOL])
    refusal = reply.refusal("tools")
    if refusal is not None:
        return refusal
    if not reply.calls:
        evidence = f"no call; {_quoted(reply)}"
        if server.declares("chat_template_caps", "supports_tool_calls") is False:
            return Probe(
                "tools", NOT_OFFERED, f"/props: the template has no tool calls; {evidence}"
            )
        return Probe("tools", FAIL, evidence)
    function = reply.calls[0].get("function")
    function = function if isinstance(function, Mapping) else {}
    name, arguments = function.get("name"), function.get("arguments")
    seen = f"{one_line(str(name), 40)}({one_line(str(arguments), 120)}), finish {reply.finish}"
    try:
        expression = str(json.loads(str(arguments))["expr"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return Probe("tools", FAIL, f"{seen}: no JSON object with 'expr'")
    factors = sorted(re.findall(r"\d+", expression))
    good = name == "calculate" and factors == ["23", "47"] and re.search("[*×x·]", expression)
    return Probe("tools", PASS if good else FAIL, seen)


def _efforts(server: _Server) -> Probe:
    """Each effort must be taken, and the field must do something."""
    question = "Is 7 a prime number?"
    replies = {
        effort: server.chat(question, tokens=_SHORT, reasoning_effort=effort)
        for effort in (*_EFFORTS, _UNKNOWN_EFFORT)
    }
    unknown = replies.pop(_UNKNOWN_EFFORT)
    refused = {effort: reply for effort, reply in replies.items() if reply.status != 200}
    codes = ", ".join(f"{effort} {reply.status}" for effort, reply in replies.items())
    first_refused = next(iter(refused.values()), None)
    if first_refused is not None:
        refusal = first_refused.refusal("efforts")
        assert refusal is not None
        whole = len(refused) == len(replies)
        status = refusal.status if whole else FAIL
        return Probe("efforts", status, f"{codes}; {first_refused.error}")
    empty = [effort for effort, reply in replies.items() if not reply.said]
    if empty:
        return Probe("efforts", FAIL, f"{codes}; empty in both channels: {', '.join(empty)}")
    if unknown.status != 200:
        return Probe("efforts", PASS, f"{codes}; an unknown one {unknown.status}")
    kinds = {(r.prompt_tokens, r.content, r.reasoning) for r in replies.values()}
    if len(kinds) > 1:
        return Probe("efforts", PASS, f"{codes}; {len(kinds)} different prompts or answers")
    return Probe(
        "efforts", NOT_OFFERED, f"{codes}, an unknown one 200 too, and all answers are the same"
    )


def _reasoning(server: _Server) -> Probe:
    reply = server.chat("How many times does the letter r stand in strawberry? Think first.")
    refusal = reply.refusal("reasoning")
    if refusal is not None:
        return refusal
    if reply.reasoning.strip():
        return Probe(
            "reasoning", PASS, f"{reply.field}: {len(reply.reasoning)} characters; {_quoted(reply)}"
        )
    if re.search("</?think", reply.content):
        return Probe("reasoning", FAIL, f"reasoning stands in the content: {_quoted(reply)}")
    if not reply.content.strip():
        return Probe("reasoning", FAIL, f"both channels are empty, finish {reply.finish}")
    return Probe("reasoning", NOT_OFFERED, f"no reasoning field; {_quoted(reply)}")


def _json_object(server: _Server) -> Probe:
    reply = server.chat(
        "Name a fruit and its colour as a JSON object with the keys name and colour.",
        response_format={"type": "json_object"},
    )
    refusal = reply.refusal("json_object")
    if refusal is not None:
        return refusal
    try:
        value = json.loads(reply.content)
    except (ValueError, RecursionError):
        why = "cut at its limit" if reply.finish == "length" else "no JSON"
        return Probe("json_object", FAIL, f"{why}: {_quoted(reply)}")
    good = isinstance(value, dict)
    return Probe("json_object", PASS if good else FAIL, _quoted(reply))


def _drafts(server: _Server) -> Probe:
    before = _spec_counters(server)
    reply = server.chat("Count from one to sixty, in digits, with commas.", tokens=_SHORT)
    refusal = reply.refusal("drafts")
    if refusal is not None:
        return refusal
    after = _spec_counters(server)
    timings = reply.timings or {}
    drafted, accepted = timings.get("draft_n"), timings.get("draft_n_accepted")
    where = "timings"
    if drafted is None and before is not None and after is not None:
        drafted, accepted = (int(new - old) for new, old in zip(after, before, strict=True))
        where = "/metrics"
    if not isinstance(drafted, int) or not isinstance(accepted, int) or drafted == 0:
        seen = f"{where}: no draft" if drafted == 0 else "neither timings nor /metrics count drafts"
        slots = server.slots()
        if any(isinstance(slot, dict) and slot.get("speculative") is True for slot in slots):
            return Probe("drafts", FAIL, f"{seen}, though /slots says that it speculates")
        if drafted == 0 and server.engine.name == "vllm":
            # This one has the counters only where a drafter is configured.
            return Probe("drafts", FAIL, f"{seen}, though the counters are there")
        return Probe("drafts", NOT_OFFERED, seen)
    seen = f"{where}: {accepted} of {drafted} draft tokens accepted"
    good = 0 <= accepted <= drafted
    return Probe("drafts", PASS if good else FAIL, seen)


PROBES: Final[dict[str, Callable[[_Server], Probe]]] = {
    "vision": _vision,
    "tools": _tools,
    "efforts": _efforts,
    "reasoning": _reasoning,
    "json_object": _json_object,
    "drafts": _drafts,
}
"""The probes by name, in the order in which they run."""


# -- parts ----------------------------------------------------------------------------------------


def solid_png(rgb: tuple[int, int, int], side: int) -> bytes:
    """Return a PNG of `side` x `side` pixels in one colour."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes(rgb) * side) * side
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _spec_counters(server: _Server) -> tuple[float, float] | None:
    """Draft tokens and accepted ones so far; None where the server does not count them."""
    try:
        looked = server.engine.scrape(server.url, timeout=server.left(5.0), client=server.client)
    except MeasurementRefused:
        return None
    values, found = looked.values, []
    for ending in ("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"):
        named = [value for name, value in values.items() if name.endswith(ending)]
        if not named:
            return None
        found.append(named[0])
    return found[0], found[1]


def _error_text(raw: bytes) -> str:
    try:
        error = json.loads(raw)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError, RecursionError):
        text = raw[:1000].decode("utf-8", "replace")
    return one_line(str(text), 160)


def _reply(raw: bytes) -> _Reply:
    try:
        body = json.loads(raw)
        choice = body["choices"][0]
        message = choice["message"]
        calls = message.get("tool_calls") or []
        field = next((f for f in ("reasoning_content", "reasoning") if message.get(f)), "")
        usage = body.get("usage") or {}
        return _Reply(
            200,
            content=_text(message.get("content")),
            reasoning=_text(message.get(field)) if field else "",
            field=field,
            finish=one_line(str(choice.get("finish_reason")), 40),
            calls=tuple(call for call in calls if isinstance(call, dict)),
            prompt_tokens=_count(usage.get("prompt_tokens")),
            timings=body.get("timings") if isinstance(body.get("timings"), dict) else None,
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        told = one_line(raw[:1000].decode("utf-8", "replace"), 100)
        return _Reply(0, f"the answer is no chat: {told}")


def _count(value: Any) -> int:
    """A count of tokens, -1 where the server tells none."""
    whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53
    return value if whole else -1


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _quoted(reply: _Reply) -> str:
    """The answer as evidence: cut, on one line, with its channel and its end."""
    channel = "" if reply.content.strip() or not reply.reasoning.strip() else " (reasoning)"
    return f"'{one_line(reply.said, 80)}'{channel}, finish {reply.finish}"
