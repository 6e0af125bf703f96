"""`dsv41 measure`, `replay` and `corpus`: what they print and how they end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from wire_groups import stub

from pytest_dsv41.cli import corpus, main, measure, replay
from pytest_dsv41.measure.corpus import Corpus


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(words)
    out = capsys.readouterr()
    return code, out.out + out.err


def test_values_come_with_unit_and_source_and_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    with stub(draft_tokens=3, round_ms=6.0) as served:
        code, out = run(capsys, "measure", served.url, "--max-tokens", "24")
    assert code == 0
    lines = {line.split()[0]: line.split() for line in out.splitlines()}
    assert lines["ms_per_round"][2:] == ["ms", "server"]
    assert lines["client_tok_s"][2:] == ["tokens/s", "client"]
    assert "24 tokens" in out


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_json_holds_every_repeat_and_the_record_gives_it_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, engine: str
) -> None:
    with stub(engine=engine, round_ms=6.0) as served:
        code, out = run(
            capsys, "measure", served.url, "--engine", engine, "--chat", "--concurrency", "2",
            "--repeats", "2", "--seed", "5", "--max-tokens", "12", "--json",
            "--record", str(tmp_path),
        )  # fmt: skip
    assert code == 0
    repeats = json.loads(out)["repeats"]
    assert [row["outcome"] for row in repeats] == ["measured", "measured"]
    assert [row["server"]["tokens"] for row in repeats] == [24, 24]
    assert len(repeats[0]["prompt_members"]) == 2
    assert run(capsys, "replay", str(tmp_path), "measure-r1")[0] == 0
    code, out = run(capsys, "replay", str(tmp_path / "measure-r0.jsonl"), "--json")
    again = json.loads(out)
    assert (code, again["same"]) == (0, True)
    assert again["values"]["ms_per_round"] == repeats[0]["values"]["ms_per_round"]


def test_a_folder_that_cannot_take_the_records_is_said_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "old").mkdir()
    kept = tmp_path / "old" / "measure-r0.jsonl"
    kept.write_text("kept")
    for place in ("file", "file/in", "old"):
        where = str(tmp_path / place)
        code, out = run(capsys, "measure", "http://127.0.0.1:1", "--record", where)
        assert (code, len(out.strip().splitlines())) == (4, 1)
        assert f"--record {where}: " in out
    assert kept.read_text() == "kept"


def test_a_failure_is_named_and_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    with stub() as served:
        served.faults("/v1/completions:error=mid:2")
        code, out = run(capsys, "measure", served.url)
    assert code == 1
    assert out.startswith("FAILED error-event: ")


def test_a_refusal_is_named_and_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    with stub() as served:
        served.faults("/v1/completions:foreign=4")
        code, out = run(capsys, "measure", served.url, "--json")
    assert code == 1
    (row,) = json.loads(out)["repeats"]
    assert (row["outcome"], row["kind"]) == ("refused", "foreign-request")


def test_a_prompt_file_and_messages_are_what_is_sent(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("Hello there, é.")
    (tmp_path / "m.json").write_text('[{"role": "user", "content": "Hello there, é."}]')
    hashes = set()
    with stub(round_ms=4.0) as served:
        for words in (["--prompt-file", str(tmp_path / "p.txt")],
                      ["--messages", str(tmp_path / "m.json")]):  # fmt: skip
            code, out = run(capsys, "measure", served.url, *words, "--max-tokens", "4", "--json")
            assert code == 0
            hashes.add(json.loads(out)["repeats"][0]["prompt_sha256"])
    assert len(hashes) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--max-tokens", "0"],
        ["--repeats", "0"],
        ["--engine", "nothing"],
        ["--prompt", "nowhere"],
        ["--temperature", "-1"],
        ["--prompt-file", "/nonexistent/file"],
        ["--deadline", "inf"],
        ["--deadline", "nan"],
        ["--deadline", "0"],
        ["--concurrency", "100000000"],
    ],
)
def test_wrong_use_is_one_line_and_exit_4(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    code, out = run(capsys, "measure", "http://127.0.0.1:1", *words)
    assert code == 4
    assert len(out.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["measure", "ab", "fleet-probe"])
@pytest.mark.parametrize(
    "url", ["http://[::1", "http://127.0.0.1:1?a=1", "http://127.0.0.1:1#a", "unix:",
            "http://u:hush@127.0.0.1:1"],
)  # fmt: skip
def test_a_wrong_address_is_one_line_and_exit_4(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, url: str
) -> None:
    more = ["http://127.0.0.1:1", "--out", str(tmp_path / "out")] if command == "ab" else []
    code, out = run(capsys, command, url, *more)
    assert (code, len(out.strip().splitlines())) == (4, 1)
    assert "valid: http://HOST:PORT" in out
    assert "hush" not in out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("option", "content"),
    [
        ("--prompt-file", b"caf\xe9"),
        ("--messages", b'[{"role": "user", "content": "caf\xe9"}]'),
        ("--messages", b'[{"role": "user", "content": "\\ud800"}]'),
        ("--messages", b"[" * 99999),
        ("--messages", b'[{"role": "user", "content": "a", "x": NaN}]'),
        ("--messages", b"[]"),
    ],
    ids=["latin-1", "latin-1-json", "surrogate", "deep", "nan", "none"],
)
def test_a_file_that_cannot_be_sent_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str, content: bytes
) -> None:
    file = tmp_path / "asked"
    file.write_bytes(content)
    code, out = run(capsys, "measure", "http://127.0.0.1:1", option, str(file))
    assert (code, len(out.strip().splitlines())) == (4, 1)
    assert f"{file}: not " in out


def test_an_interrupt_ends_it_at_once_and_says_so() -> None:
    with stub(round_ms=50.0) as served:
        client = subprocess.Popen(
            [sys.executable, "-m", "pytest_dsv41", "measure", served.url, "--max-tokens", "9000"],
            stdout=subprocess.PIPE,
        )
        started = threading.Event()
        while not any(line["tokens"] for line in served.truth()):
            assert client.poll() is None
            started.wait(0.05)
        client.send_signal(signal.SIGINT)
        out, _ = client.communicate(timeout=30)
    assert client.returncode == 1
    assert out.startswith(b"FAILED stopped")


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_a_corpus_is_cut_by_the_servers_own_tokenizer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, engine: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word{i}" for i in range(300)))
    folder = tmp_path / "corpus"
    with stub(engine=engine) as served:
        code, _ = run(
            capsys, "corpus", "cut", served.url, str(text), str(folder), "--engine", engine,
            "--cut", "a=40", "--cut", "b=60",
        )  # fmt: skip
        assert code == 0
        assert run(capsys, "corpus", "cut", served.url, str(text), str(folder),
                   "--engine", engine, "--cut", "c=99999")[0] == 4  # fmt: skip
    cuts = Corpus.load(folder)
    assert [cuts.prompt(name).tokens for name in ("a", "b")] == [40, 60]
    assert run(capsys, "corpus", "check", str(folder))[0] == 0
    (folder / "a.txt").write_text("changed")
    assert run(capsys, "corpus", "check", str(folder))[0] != 0


@pytest.mark.parametrize(
    ("fault", "told"), [("tokenize-404", "answered 404"), ("tokenize-count=3", "and lists")]
)
def test_a_tokenizer_that_cannot_be_trusted_cuts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, fault: str, told: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"word{i}" for i in range(300)))
    with stub() as served:
        served.faults(f"/tokenize:{fault}")
        code, out = run(
            capsys, "corpus", "cut", served.url, str(text), str(tmp_path / "c"), "--cut", "a=40"
        )
    assert code != 0
    assert told in out
    assert len(out.strip().splitlines()) == 1
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--cut", "a=\u0663"], "write NAME=TOKENS"),
        (["--cut", "a=0"], "write NAME=TOKENS"),
        (["--cut", "a/b=3"], "no name"),
        (["--cut", "a=3", "--cut", "a=4"], "of this name"),
    ],
)
def test_a_wrong_cut_is_one_line_before_anything_is_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], told: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a b c")
    there = ["corpus", "cut", "http://127.0.0.1:1", str(text), str(tmp_path / "c")]
    code, out = run(capsys, *there, *words)
    assert (code, len(out.strip().splitlines())) == (4, 1)
    assert told in out
    text.write_bytes(b"caf\xe9")
    code, out = run(capsys, *there, "--cut", "a=3")
    assert (code, len(out.strip().splitlines())) == (4, 1)
    assert f"{text}: not UTF-8" in out


def test_what_the_server_does_not_tell_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    with stub(draft_tokens=0, round_ms=4.0) as served:
        code, out = run(capsys, "measure", served.url, "--max-tokens", "6")
    assert code == 0
    assert "None" not in out
    assert "accepted of" not in out
    assert "6 tokens, 5 rounds, 0 of " in out


def test_every_command_says_what_it_does() -> None:
    assert all(module.HELP for module in (measure, replay, corpus))
