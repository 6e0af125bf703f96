"""Whatever a server answers, `calib push` and `fleet-probe` end in time, in plain lines."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pytest_dsv41.cli import main
from tests.unit.odd_server import ODD, Bytes, http, odd_server, said

MODELS = said({"data": [{"id": "m", "owned_by": "x"}]})
TOKENS = said({"tokens": [1, 2, 3], "count": 3})


SOME = ("html", "deep", "error-ansi")
NAMES = [pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in ODD]
"""Some by default, all of them in the slow tests."""


def plain(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said on both streams: lines that a terminal only shows."""
    told = "".join(capsys.readouterr())
    assert not re.search(r"[^\n\x20-\x7e\xa0-\u200f\u2010-\u2027\ufffd]", told), repr(told)
    assert "Traceback" not in told
    return told


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"prompt": "one two three", "source": "s"}) + "\n")
    return path


def push(corpus: Path, url: str) -> int:
    words = ["calib", "push", str(corpus), url, "--until-tokens", "3", "--engine", "radiance"]
    return main([*words, "--timeout", "0.3", "--again"])


@pytest.mark.parametrize("name", NAMES)
def test_a_push_fails_by_name_whatever_is_answered(
    corpus: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    answers = {"/v1/models": MODELS, "/tokenize": TOKENS, "/v1/completions": ODD[name]}
    with odd_server(answers) as url:
        code = push(corpus, url)
    told = plain(capsys)
    # A server that goes away with the last prompt it needed has seen it.
    assert (code, "closed at its threshold" in told) in ((1, False), (0, True)), told
    assert (corpus.parent / "corpus.jsonl.run" / "receipt.json").exists() == (code == 0)


@pytest.mark.parametrize(
    "name", ["trickled-headers", pytest.param("trickled-body", marks=pytest.mark.slow)]
)
def test_a_byte_now_and_then_is_no_answer(
    corpus: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    answers = {"/v1/models": MODELS, "/tokenize": TOKENS, "/v1/completions": ODD[name]}
    with odd_server(answers) as url:
        assert push(corpus, url) == 1
    assert f"{corpus}:1: no answer in 0.3 s" in plain(capsys)


def test_counts_that_are_none_count_nothing(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usages = [
        ({"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 9}}, "9 of 3 prompt tok"),
        ({"prompt_tokens": -3}, "prompt_tokens is -3, no count"),
        ({"prompt_tokens": 3.0}, "prompt_tokens is 3.0, no count"),
        ({"prompt_tokens": True}, "prompt_tokens is True, no count"),
        ({"prompt_tokens": 10**30}, "no count"),
        ({"prompt_tokens": "\x1b[2J"}, "no count"),
        ({}, "does not count its tokens"),
        ([], "does not count its tokens"),
    ]
    answers = {"/v1/models": MODELS}
    with odd_server(answers) as url:
        for usage, told in usages:
            answers["/v1/completions"] = said({"usage": usage})
            assert push(corpus, url) == 1
            assert told in plain(capsys)


@pytest.mark.parametrize("name", NAMES)
def test_fleet_probes_say_what_they_saw_whatever_is_answered(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """By the deadline of all of them, which the first may use up."""
    answers = {"/v1/models": MODELS, "*": ODD[name]}
    probes = [word for probe in ("tools", "efforts", "drafts") for word in ("--probe", probe)]
    with odd_server(answers) as url:
        code = main(["fleet-probe", url, "--engine", "vllm", "--deadline", "0.5", *probes])
    told = plain(capsys)
    assert code == (0 if name == "error-ansi" else 2), told
    assert len(re.findall("^(FAIL|NOT OFFERED) ", told, re.MULTILINE)) == 3, told


def test_arguments_nested_beyond_any_call_are_no_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    call = {"function": {"name": "calculate", "arguments": "[" * 100_000}}
    answer = said({"choices": [{"message": {"content": "", "tool_calls": [call]}}]})
    with odd_server({"/v1/models": MODELS, "/v1/chat/completions": answer}) as url:
        assert main(["fleet-probe", url, "--engine", "vllm", "--probe", "tools"]) == 2
    assert "no JSON object with 'expr'" in plain(capsys)


@pytest.mark.parametrize("command", ["fleet-probe", "calib"])
def test_a_server_that_names_no_model_is_one_line(
    corpus: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    answers: dict[str, Bytes] = {}
    with odd_server(answers) as url:
        for models in (
            http("<html>\x1b[2J"),
            said({"data": []}),
            said({"data": [{"id": "\ud800"}]}),
            said({"data": [{"id": 7}]}),
        ):
            answers["/v1/models"] = models
            if command == "calib":
                assert push(corpus, url) == 1
            else:
                assert main(["fleet-probe", url, "--engine", "vllm"]) == 4
            assert len(plain(capsys).splitlines()) == 1


@pytest.mark.slow
def test_a_server_that_never_ends_its_list_of_models_is_one_line(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with odd_server({"/v1/models": ODD["trickled-headers"]}) as url:
        assert push(corpus, url) == 1
        assert main(["fleet-probe", url, "--engine", "vllm"]) == 4
    assert len(plain(capsys).splitlines()) == 2
