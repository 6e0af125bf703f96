"""Pushing a calibration corpus: threshold, a server that closes, a bad line, kill and resume."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_dsv41.cli import main
from pytest_dsv41.errors import (
    MeasurementFailed,
    MeasurementRefused,
    RefusedByWorld,
    SpecError,
    UsageError,
    WindowStopped,
)
from pytest_dsv41.payload.calib import KIND, Pushed, push, read_corpus
from pytest_dsv41.payload.step import Step
from pytest_dsv41.quality.sealed import write_sealed
from tests.unit.calib_server import CalibServer, calib_server
from tests.unit.payload_kills import Killer

PROMPTS = [f"p{n} " + "w " * 9 for n in range(20)]
"""Twenty prompts of ten words; the even ones are chat, the odd ones code."""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [{"prompt": p, "source": ("chat", "code")[n % 2]} for n, p in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def go(corpus: Path, server: CalibServer, until: int, **more: Any) -> Pushed:
    with Step(corpus.parent / "run", KIND) as step:
        return push(
            read_corpus(corpus), server.url, step, until_tokens=until, engine="radiance", **more
        )


def receipt(corpus: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((corpus.parent / "run" / "receipt.json").read_text())
    return body


@pytest.mark.parametrize("in_flight", [1, 4])
def test_it_stops_at_the_threshold_and_counts_by_source(corpus: Path, in_flight: int) -> None:
    with calib_server() as server:
        done = go(corpus, server, 65, in_flight=in_flight)
    assert (done.tokens, done.prompts, done.ended) == (70, 7, "enough")
    assert done.sources == {
        "chat": {"prompts": 4, "tokens": 40},
        "code": {"prompts": 3, "tokens": 30},
    }
    assert sorted(server.seen) == sorted(PROMPTS[:7])
    assert receipt(corpus)["sources"] == done.sources


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("answers", [True, False])
def test_a_server_that_closes_at_the_threshold_is_success(
    corpus: Path, in_flight: int, answers: bool
) -> None:
    with calib_server(100, answers=answers) as server:
        done = go(corpus, server, 100, in_flight=in_flight)
    assert server.tokens >= 100
    body = receipt(corpus)
    assert done.tokens + body["in_flight_tokens"] >= 100
    if in_flight == 1:
        assert done.tokens == (100 if answers else 90)
        assert done.ended == ("enough" if answers else "closed")


@pytest.mark.parametrize("in_flight", [1, 4])
def test_a_server_that_closes_before_is_failure(corpus: Path, in_flight: int) -> None:
    with calib_server(60) as server, pytest.raises(MeasurementFailed, match="before its thr") as e:
        go(corpus, server, 101, in_flight=in_flight)
    assert e.value.kind == "closed"
    assert not (corpus.parent / "run" / "receipt.json").exists()


def test_a_prompt_that_was_never_sent_does_not_count(corpus: Path) -> None:
    """The server closes after the answer; the next prompt would have made the threshold."""
    with calib_server(90, answers=True) as server, pytest.raises(MeasurementFailed) as failed:
        go(corpus, server, 100)
    assert "at 90 of 100 tokens" in str(failed.value)


def test_without_a_tokenizer_a_prompt_in_flight_counts_nothing(corpus: Path) -> None:
    with calib_server(100, tokenizer=False) as server, pytest.raises(MeasurementFailed) as failed:
        go(corpus, server, 100)
    assert "at 90 of 100 tokens" in str(failed.value)
    assert "/tokenize" in str(failed.value)


def test_cached_tokens_were_not_seen(corpus: Path) -> None:
    with calib_server(cached=4) as server:
        done = go(corpus, server, 60)
    assert (done.tokens, done.prompts) == (60, 10)


def test_the_corpus_ends_before_the_threshold(corpus: Path) -> None:
    with calib_server() as server, pytest.raises(MeasurementFailed) as failed:
        go(corpus, server, 201)
    assert "ended at 200 of 201 tokens" in str(failed.value)


def test_a_prompt_the_server_refuses_is_named_by_its_line(corpus: Path) -> None:
    with calib_server(refuses="p3") as server, pytest.raises(MeasurementFailed) as failed:
        go(corpus, server, 100)
    assert "corpus.jsonl:4: " in str(failed.value)
    assert "answered 400" in str(failed.value)


def test_a_server_that_is_not_there_is_one_line(corpus: Path) -> None:
    with calib_server() as server:
        pass
    with pytest.raises(MeasurementRefused, match="did not answer"):
        go(corpus, server, 10)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("", "an empty line"),
        ("{", "not JSON"),
        ("[1]", 'valid: {"prompt"'),
        ('{"prompt": "x"}', "source: missing"),
        ('{"prompt": "", "source": "s"}', "prompt: ''; valid: a text that is not empty"),
        ('{"prompt": 3, "source": "s"}', "prompt: 3; valid"),
        ('{"prompt": "x", "source": "s", "score_from": true}', "score_from: True; valid: a whole"),
        ('{"prompt": "x", "source": "s", "prmpt": "y"}', "unknown key 'prmpt'"),
        ('{"prompt": "\\ud800", "source": "s"}', "half a character"),
        ('{"prompt": "x", "source": "\\ud800"}', "source: half a character"),
        ('{"prompt": "x", "prompt": "y", "source": "s"}', "the key 'prompt' stands there twice"),
        ("[" * 100_000, "nested too deep"),
        ("\xff", "not JSON"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_sent(corpus: Path, line: str, told: str) -> None:
    lines = corpus.read_text().splitlines()
    lines[12] = line
    corpus.write_bytes("\n".join([*lines, ""]).encode("latin-1"))
    with calib_server() as server:
        with pytest.raises(SpecError) as refused:
            go(corpus, server, 10)
        assert server.seen == []
    assert str(refused.value).startswith(f"{corpus}:13: ")
    assert told in str(refused.value)
    assert not (corpus.parent / "run" / "journal.jsonl").exists()


def test_an_empty_corpus_and_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("")
    with pytest.raises(SpecError, match="holds no prompt"):
        read_corpus(tmp_path / "c")
    with pytest.raises(SpecError, match="No such file"):
        read_corpus(tmp_path / "d")


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_a_corpus_that_is_no_file_holds_nothing_up(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "corpus"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(SpecError, match="no regular file"):
        read_corpus(path)


def test_a_corpus_that_changes_while_it_is_pushed_leaves_no_receipt(corpus: Path) -> None:
    with calib_server() as server:

        def change(_text: str, share: float) -> None:
            if share >= 0.4:
                corpus.write_text(corpus.read_text().replace("p19", "q19"))

        with pytest.raises(RefusedByWorld, match="was changed while it was pushed"):
            go(corpus, server, 100, progress=change)
        assert not (corpus.parent / "run" / "receipt.json").exists()
        # Written anew with the bytes it had, it is the same corpus.
        assert go(corpus, server, 100, again=True, progress=lambda *_: corpus.touch()).prompts == 10


def test_a_damaged_journal_is_no_count(corpus: Path) -> None:
    damaged: list[dict[str, Any]] = [
        {"event": "prompt"},
        {"event": "prompt", "line": "1", "tokens": 10},
        {"event": "prompt", "line": 1, "tokens": -10},
        {"event": "prompt", "line": 1, "tokens": True},
        {"event": "closed"},
        {"event": "begin", "server": 7},
    ]
    with calib_server() as server:
        _stopped_after(corpus, server, 4)
        path = corpus.parent / "run" / "journal.jsonl"
        whole = path.read_text().splitlines()
        for row in damaged:
            line = {**json.loads(whole[0]), **row} if row["event"] == "begin" else row
            path.write_text("\n".join([*whole[1:], json.dumps(line), ""]))
            with pytest.raises(RefusedByWorld, match=r"damaged line .*--again begins anew"):
                go(corpus, server, 100, resume=True)
        assert len(server.seen) == 4


def test_a_receipt_that_counts_nothing_is_not_trusted(corpus: Path) -> None:
    """Sealed anew, as a person's hand may have written it; the journal still counts."""
    changes: list[dict[str, Any]] = [
        {"tokens": None}, {"tokens": "9"}, {"sources": [1]}, {"sources": {"chat": 7}},
    ]  # fmt: skip
    with calib_server() as server:
        go(corpus, server, 100)
        path = corpus.parent / "run" / "receipt.json"
        for change in changes:
            body = {**json.loads(path.read_text()), **change}
            del body["sha256"]
            path.unlink()
            write_sealed(path, body)
            done = go(corpus, server, 100, resume=True)
            assert (done.tokens, done.ended, len(server.seen)) == (100, "enough", 10)


@pytest.mark.parametrize("in_flight", [0, -1, 1025, 10**9])
def test_more_prompts_at_once_than_there_are_connections_are_refused(
    corpus: Path, capsys: pytest.CaptureFixture[str], in_flight: int
) -> None:
    words = ["calib", "push", str(corpus), "http://127.0.0.1:1", "--engine", "radiance"]
    assert main([*words, "--until-tokens", "9", f"--in-flight={in_flight}"]) == 4
    assert f"--in-flight {in_flight}: valid: 1 to 1,024" in capsys.readouterr().err


def _stopped_after(corpus: Path, server: CalibServer, prompts: int, **more: Any) -> None:
    stop = threading.Event()

    def watch(_text: str, share: float) -> None:
        if share >= prompts / 10:
            stop.set()

    with pytest.raises(WindowStopped):
        go(corpus, server, 100, stop=stop, progress=watch, **more)


def test_a_stopped_push_goes_on_and_sends_each_prompt_once(corpus: Path) -> None:
    with calib_server() as server:
        _stopped_after(corpus, server, 4)
        with pytest.raises(RefusedByWorld, match="--resume goes on, --again begins anew"):
            go(corpus, server, 100)
        with pytest.raises(UsageError, match="had until_tokens '100', now '200'"):
            go(corpus, server, 200, resume=True)
        done = go(corpus, server, 100, resume=True)
        assert (done.tokens, done.prompts) == (100, 10)
        assert server.seen == PROMPTS[:10]
        assert go(corpus, server, 100, resume=True).ended == "before"
        with pytest.raises(RefusedByWorld, match="this step is done"):
            go(corpus, server, 100)
        assert len(server.seen) == 10
        assert go(corpus, server, 100, again=True).ended == "enough"
        assert server.seen == PROMPTS[:10] * 2


def test_another_process_has_not_seen_the_first_part(corpus: Path) -> None:
    with calib_server() as server:
        _stopped_after(corpus, server, 4)
        server.created = 2.0
        with pytest.raises(RefusedByWorld, match="first 40 tokens, which are gone with it"):
            go(corpus, server, 100, resume=True)
        assert len(server.seen) == 4


def test_a_process_that_cannot_be_told_needs_the_callers_word(corpus: Path) -> None:
    with calib_server(created=0.0) as server:
        _stopped_after(corpus, server, 4)
        with pytest.raises(RefusedByWorld, match="--same-server"):
            go(corpus, server, 100, resume=True)
        assert go(corpus, server, 100, resume=True, same_server=True).tokens == 100


def test_a_changed_corpus_is_another_push(corpus: Path) -> None:
    with calib_server() as server:
        _stopped_after(corpus, server, 4)
        corpus.write_text(corpus.read_text().replace("p7", "q7"))
        with pytest.raises(UsageError, match="had corpus_sha256"):
            go(corpus, server, 100, resume=True)


def test_a_stop_does_not_wait_for_a_server_that_hangs(corpus: Path) -> None:
    with calib_server(hangs=True) as server:
        stop = threading.Event()
        threading.Thread(target=lambda: server.asked.wait() and stop.set()).start()
        began = time.monotonic()
        with pytest.raises(WindowStopped, match="stopped at 0 of 100 tokens"):
            go(corpus, server, 100, stop=stop, in_flight=3)
        assert time.monotonic() - began < 50


def test_a_silent_server_is_a_failure_after_the_timeout(corpus: Path) -> None:
    with calib_server(hangs=True) as server, pytest.raises(MeasurementFailed) as failed:
        go(corpus, server, 100, timeout_s=0.3)
    assert failed.value.kind == "timeout"


@pytest.mark.slow
def test_the_command_counts_by_source_and_answers_0_1_and_4(corpus: Path) -> None:
    def dsv41(server: CalibServer, until: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                *(sys.executable, "-m", "pytest_dsv41", "calib", "push", str(corpus), server.url),
                *("--until-tokens", until, *words),
            ],
            capture_output=True,
            text=True,
            check=False,
        )

    with calib_server(100) as server:
        done = dsv41(server, "100")
    assert done.returncode == 0, done.stderr
    assert "90 tokens of 9 prompts: the server closed at its threshold" in done.stdout
    assert "chat" in done.stdout
    with calib_server(60) as server:
        done = dsv41(server, "100", "--again")
    assert done.returncode == 1
    assert "before its threshold" in done.stderr
    corpus.write_text("{\n")
    assert dsv41(server, "100").returncode == 4


@pytest.mark.slow
def test_a_kill_at_each_step_and_a_resume_ends_the_same(corpus: Path) -> None:
    """A prompt is sent twice only if the kill came between its answer and its journal line."""
    run = corpus.parent / "corpus.jsonl.run"
    words = ("calib", "push", str(corpus))
    with calib_server() as server:
        with Killer(corpus.parent, *words, server.url, "--until-tokens", "40") as killer:
            for number in range(1, 200):
                shutil.rmtree(run, ignore_errors=True)
                server.seen.clear()
                ended = killer.run(number)
                if ended == 77:
                    break
                assert ended == -signal.SIGKILL
                whole = (run / "receipt.json").exists()
                sent = len(server.seen)
                with Step(run, KIND) as step:
                    done = push(
                        read_corpus(corpus), server.url, step, until_tokens=40,
                        engine="radiance", resume=True,
                    )  # fmt: skip
                assert (done.tokens, done.prompts) == (40, 4)
                assert (done.ended == "before") == whole
                assert set(server.seen) == set(PROMPTS[:4])
                assert len(server.seen) in (4, 5)
                if len(server.seen) == 5:
                    assert server.seen[sent] == server.seen[sent - 1]
            else:
                pytest.fail("the runner never came to its end")
        assert number > 15
