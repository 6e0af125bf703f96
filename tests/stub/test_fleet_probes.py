"""Fleet probes against servers that offer, refuse, ignore or spoil what is asked beside text."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pytest_dsv41.cli import main
from pytest_dsv41.errors import MeasurementRefused, UsageError
from pytest_dsv41.measure.probes.laws import VISION_TOKENS
from pytest_dsv41.quality.fleet import PROBES, Probe, fleet_probe, solid_png
from pytest_dsv41.stub import serve

ALL = ("vision", "tools", "json", "efforts")
FAST = {"round_ms": 0.1, "prefill_ms": 0.1, "prefill_ms_per_token": 0.0, "realtime": False}


def statuses(answers: list[Probe]) -> dict[str, str]:
    return {answer.name: answer.status for answer in answers}


def told(answers: list[Probe], name: str) -> str:
    return next(answer.evidence for answer in answers if answer.name == name)


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_a_server_that_offers_everything_passes(engine: str) -> None:
    with serve(engine=engine, offer=ALL, reasoning_tokens=20, **FAST) as stub:
        answers = fleet_probe(stub.url, engine=engine)
    assert statuses(answers) == dict.fromkeys(PROBES, "PASS"), answers
    assert "red 512 px: 'Red'" in told(answers, "vision")
    assert 'calculate({"expr": "23 * 47"}), finish tool_calls' in told(answers, "tools")
    assert "low 200, medium 200, high 200, xhigh 200" in told(answers, "efforts")
    assert told(answers, "reasoning").startswith("reasoning")
    assert "draft tokens accepted" in told(answers, "drafts")


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_a_server_that_refuses_does_not_offer(engine: str) -> None:
    with serve(engine=engine, deny=ALL, draft_tokens=0, **FAST) as stub:
        answers = fleet_probe(stub.url, engine=engine)
    assert statuses(answers) == dict.fromkeys(PROBES, "NOT OFFERED"), answers
    assert "image input is not supported" in told(answers, "vision")
    assert "no reasoning field" in told(answers, "reasoning")
    assert "draft" in told(answers, "drafts")


def test_a_server_that_takes_everything_and_does_nothing_fails() -> None:
    """What is ignored in silence is a failure; an effort that changes nothing is not offered."""
    with serve(**FAST) as stub:
        answers = fleet_probe(stub.url, engine="vllm", probes=("vision", "tools", "efforts"))
        assert statuses(answers) == {"vision": "FAIL", "tools": "FAIL", "efforts": "NOT OFFERED"}
        assert "an unknown one 200 too" in told(answers, "efforts")
        (answer,) = fleet_probe(stub.url, engine="vllm", probes=("json_object",))
        assert answer.status == "FAIL"


def test_what_a_server_declares_not_to_have_is_not_offered() -> None:
    with serve(engine="llamacpp", **FAST) as stub:
        (answer,) = fleet_probe(stub.url, engine="llamacpp", probes=("vision",))
    assert answer.status == "NOT OFFERED"
    assert answer.evidence.startswith("/props: no vision")


def test_law_vision_budget_leaves_an_answer_room_beside_thinking() -> None:
    """At 64 tokens thinking spends them all and the content comes back empty."""
    budgets = []

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        budgets.append(body["max_tokens"])
        image = body["messages"][0]["content"][1]["image_url"]["url"]
        colour = "red" if image == _link((255, 0, 0)) else "blue"
        spent = body["max_tokens"] < 256
        return {"content": "" if spent else colour, "reasoning_content": "I look at the image"}

    with scripted(reply) as url:
        (answer,) = fleet_probe(url, engine="vllm", probes=("vision",))
    assert answer.status == "PASS"
    assert min(budgets) >= VISION_TOKENS == 256


@pytest.mark.parametrize("tokens", [0, 64, 255])
def test_law_vision_budget_refuses_by_its_name(tokens: int) -> None:
    """Fewer than 256 tokens are refused before anybody is asked."""
    with pytest.raises(MeasurementRefused) as refused:
        fleet_probe("http://127.0.0.1:9", engine="vllm", vision_tokens=tokens)
    assert refused.value.kind == "law-vision-budget"
    assert f"{tokens} tokens for a vision probe; it needs 256" in str(refused.value)


def test_a_budget_that_thinking_spent_is_named_and_a_larger_one_passes() -> None:
    def reply(body: dict[str, Any]) -> dict[str, Any]:
        image = body["messages"][0]["content"][1]["image_url"]["url"]
        colour = "red" if image == _link((255, 0, 0)) else "blue"
        if body["max_tokens"] < 300:
            return {"content": "", "reasoning_content": "I look at it", "finish": "length"}
        return {"content": colour, "reasoning_content": "I look at it"}

    with scripted(reply) as url:
        (answer,) = fleet_probe(url, engine="vllm", probes=("vision",))
        assert answer.status == "FAIL"
        assert "law-vision-budget: all 256 tokens went before an answer" in answer.evidence
        words = ["fleet-probe", url, "--engine", "vllm", "--probe", "vision", "--vision-tokens"]
        assert main([*words, "512"]) == 0
        assert main([*words, "64"]) == 4


def test_an_answer_spent_in_the_reasoning_is_read_there() -> None:
    """The document's vision law: the content is empty, the reasoning has the answer."""

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        image = body["messages"][0]["content"][1]["image_url"]["url"]
        colour = "red" if image == _link((255, 0, 0)) else "blue"
        return {"content": "", "reasoning_content": f"It is {colour}."}

    with scripted(reply) as url:
        (answer,) = fleet_probe(url, engine="vllm", probes=("vision",))
    assert answer.status == "PASS"
    assert "(reasoning)" in answer.evidence


def _link(rgb: tuple[int, int, int]) -> str:
    import base64

    return "data:image/png;base64," + base64.b64encode(solid_png(rgb, 512)).decode()


def _say(**message: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda _body: message


def _call(name: str, arguments: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return _say(tool_calls=[{"function": {"name": name, "arguments": arguments}}])


@pytest.mark.parametrize(
    ("probe", "reply", "status", "evidence"),
    [
        ("vision", _say(content="red"), "FAIL", "blue 512 px: 'red'"),
        ("vision", _say(content="red or blue"), "FAIL", ""),
        ("tools", _call("calculate", '{"expr": "47*23"}'), "PASS", "calculate("),
        ("tools", _call("calculate", '{"expr": "23 + 47"}'), "FAIL", "23 + 47"),
        ("tools", _call("calculate", '{"expr": "23 * 4"}'), "FAIL", ""),
        ("tools", _call("other", '{"expr": "23 * 47"}'), "FAIL", "other("),
        ("tools", _call("calculate", '{"x": 1}'), "FAIL", "no JSON object with 'expr'"),
        ("tools", _call("calculate", "{"), "FAIL", "no JSON object"),
        ("tools", _call("calculate", None), "FAIL", "no JSON object"),
        ("tools", _say(tool_calls=[{"function": 3}]), "FAIL", "no JSON object"),
        ("tools", _say(content="1081"), "FAIL", "no call; '1081'"),
        ("reasoning", _say(content="3", reasoning="r..r..r"), "PASS", "reasoning: 7 characters"),
        ("reasoning", _say(content="<think>x</think>3"), "FAIL", "stands in the content"),
        ("reasoning", _say(content="", reasoning_content=""), "FAIL", "both channels are empty"),
        ("reasoning", _say(content="3"), "NOT OFFERED", "no reasoning field"),
        ("json_object", _say(content='{"name": "kiwi"}'), "PASS", "kiwi"),
        ("json_object", _say(content='["kiwi"]'), "FAIL", "kiwi"),
        ("json_object", _say(content='```json\n{"a": 1}\n```'), "FAIL", "no JSON"),
        ("json_object", _say(content="\x1b[2Jevil"), "FAIL", "\\x1b"),
        ("drafts", _say(content="1, 2", timings=(9, 5)), "PASS", "5 of 9 draft tokens accepted"),
        ("drafts", _say(content="1, 2", timings=(5, 9)), "FAIL", "9 of 5"),
        ("drafts", _say(content="1, 2"), "NOT OFFERED", "neither timings nor /metrics"),
    ],
)
def test_each_answer_is_judged_by_what_it_holds(
    probe: str, reply: Callable[[dict[str, Any]], dict[str, Any]], status: str, evidence: str
) -> None:
    with scripted(reply) as url:
        (answer,) = fleet_probe(url, engine="vllm", probes=(probe,))
    assert (answer.name, answer.status) == (probe, status)
    assert evidence in answer.evidence
    assert "\n" not in answer.evidence
    assert "\x1b" not in answer.evidence


@pytest.mark.parametrize(
    ("code", "text", "status"),
    [
        (400, "no", "NOT OFFERED"),
        (501, "no", "NOT OFFERED"),
        (500, "tools param requires --jinja flag", "NOT OFFERED"),
        (500, "CUDA error", "FAIL"),
        (503, "Loading model", "FAIL"),
        (429, "later", "FAIL"),
        (401, "key", "FAIL"),
    ],
)
def test_a_refusal_is_told_from_a_broken_server(code: int, text: str, status: str) -> None:
    with scripted(lambda _body: (code, text)) as url:
        (answer,) = fleet_probe(url, engine="vllm", probes=("tools",))
        (efforts,) = fleet_probe(url, engine="vllm", probes=("efforts",))
    assert answer == Probe("tools", status, f"answered {code}: {text}")
    assert efforts.status == status


def test_one_effort_that_is_refused_is_a_failure() -> None:
    def reply(body: dict[str, Any]) -> Any:
        effort = body["reasoning_effort"]
        return (400, "unknown effort") if effort == "xhigh" else {"content": effort}

    with scripted(reply) as url:
        (answer,) = fleet_probe(url, engine="vllm", probes=("efforts",))
    assert answer.status == "FAIL"
    assert answer.evidence == "low 200, medium 200, high 200, xhigh 400; unknown effort"


@pytest.mark.parametrize("count", [float("inf"), float("nan"), "x", [3], 10**400, True])
def test_a_count_that_is_none_ends_no_probe(count: Any) -> None:
    with scripted(_say(content="3", usage={"prompt_tokens": count})) as url:
        answers = fleet_probe(url, engine="vllm", probes=("efforts", "json_object"))
    assert statuses(answers) == {"efforts": "NOT OFFERED", "json_object": "FAIL"}


def test_a_server_that_does_not_answer_fails_by_the_deadline() -> None:
    with scripted(lambda _body: None) as url:
        (answer,) = fleet_probe(url, engine="vllm", probes=("tools",), deadline_s=0.5)
    assert (answer.status, answer.evidence) == ("FAIL", "no answer in time")


def test_nobody_there_and_unknown_names_are_one_line() -> None:
    with pytest.raises(MeasurementRefused, match="did not answer"):
        fleet_probe("http://127.0.0.1:9", engine="vllm")
    with pytest.raises(UsageError, match="valid: vision, tools"):
        fleet_probe("http://127.0.0.1:9", engine="vllm", probes=("visoin",))


def test_the_image_is_the_one_it_says() -> None:
    """Read back by hand, from the format's description."""
    raw = solid_png((1, 2, 3), 5)
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    at, parts = 8, {}
    while at < len(raw):
        size, kind = struct.unpack_from(">I4s", raw, at)
        data = raw[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", raw, at + 8 + size)[0] == zlib.crc32(kind + data)
        parts[kind] = data
        at += 12 + size
    assert struct.unpack(">IIBBBBB", parts[b"IHDR"]) == (5, 5, 8, 2, 0, 0, 0)
    assert zlib.decompress(parts[b"IDAT"]) == (b"\0" + b"\1\2\3" * 5) * 5


@pytest.mark.slow
def test_the_command_answers_0_and_2_and_names_what_is_required() -> None:
    def dsv41(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest_dsv41", "fleet-probe", stub.url, *words],
            capture_output=True,
            text=True,
            check=False,
        )

    with serve(offer=("tools",), deny=("vision", "json"), **FAST) as stub:
        done = dsv41("--probe", "tools", "--probe", "vision", "--json")
        assert done.returncode == 0, done.stderr
        assert [row["status"] for row in json.loads(done.stdout)] == ["PASS", "NOT OFFERED"]
        done = dsv41("--probe", "vision", "--require", "vision")
        assert done.returncode == 2
        assert done.stdout.startswith("NOT OFFERED  vision")
        assert "vision NOT OFFERED" in done.stderr
        assert dsv41("--probe", "vision", "--require", "tools").returncode == 4


# -- a server that says what a test wants ---------------------------------------------------------


class scripted:
    """Answers every chat with `reply(body)`: a message, (status, text), or None: never."""

    def __init__(self, reply: Callable[[dict[str, Any]], Any]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

            def do_GET(self) -> None:
                if self.path == "/v1/models":
                    self.answer(200, {"data": [{"id": "m"}]})
                else:
                    self.answer(404, {"error": "none"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                said = reply(body)
                if said is None:
                    held.wait(30)
                elif isinstance(said, tuple):
                    self.answer(said[0], {"error": {"message": said[1]}})
                else:
                    message = dict(said)
                    whole: dict[str, Any] = {}
                    if "timings" in message:
                        drafted, accepted = message.pop("timings")
                        whole["timings"] = {"draft_n": drafted, "draft_n_accepted": accepted}
                    whole["usage"] = message.pop("usage", None)
                    finish = message.pop("finish", "stop")
                    whole["choices"] = [{"message": message, "finish_reason": finish}]
                    self.answer(200, whole)

            def answer(self, code: int, body: Any) -> None:
                raw = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

        held = self._held = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *exc: object) -> None:
        self._held.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
