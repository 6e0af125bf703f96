"""Target local with `serve = "always"`: production is found by its port, restored, left serving."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pytest_dsv41.hosts import LocalHost

from .running import assert_ended_well, run, status

# A production that always serves has its HOLD where every campaign of the machine sees it.
HOLD = "/var/tmp/dsv41-HOLD-{}"

TINY = Path(__file__).parents[2] / "pytest_dsv41/window/examples/demo-tiny.toml"
WORDS = ("-m", "pytest_dsv41", "stub", "--round-ms", "2.0", "--draft-tokens", "3")


@contextlib.contextmanager
def serving(port: int, *more: str) -> Iterator[int]:
    """A production that somebody has started; whatever serves the port afterwards is ended."""
    words = [sys.executable, *WORDS, "--port", str(port), *more]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as first:
        assert first.stdout is not None
        assert first.stdout.readline()
        try:
            yield first.pid
        finally:
            for pid in {first.pid, *listeners(port)}:
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).send_signal(signal.SIGTERM)


def listeners(port: int) -> set[int]:
    return {
        c.pid
        for c in psutil.net_connections("tcp")
        if c.status == "LISTEN" and c.laddr and c.laddr.port == port and c.pid
    }


def window(folder: Path, port: int, more: str = "") -> str:
    head = TINY.read_text().partition("[target]")[0]
    words = ", ".join(f'"{word}"' for word in ("{python}", *WORDS, "--port", "{port}"))
    production = f"[target.production]\nport = {port}\n{more}"
    target = f'[target]\nkind = "local"\nengine = "vllm"\ncommand = [{words}]\n\n{production}'
    (folder / "w.toml").write_text(head + target)
    return str(folder / "w.toml")


def answers(port: int) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as reply:
        return bool(reply.status == 200)


@pytest.mark.parametrize(
    ("at", "do", "code"),
    [
        pytest.param("", "", 0, marks=pytest.mark.slow),
        pytest.param("production-stop:end", "SIGKILL", -9, marks=pytest.mark.slow),
        pytest.param("cell:I1-decode-b1-r0", "SIGTERM", 12, marks=pytest.mark.slow),
    ],
)
def test_production_serves_before_and_after(at: str, do: str, code: int, tmp_path: Path) -> None:
    port = LocalHost.free_port()
    with serving(port) as before:
        ended = run(tmp_path / "out", window=window(tmp_path, port), at=at, do=do)
        assert ended.returncode == code, ended.output
        assert answers(port)
        (after,) = listeners(port)
        assert after != before
        assert psutil.Process(after).cmdline()[1:4] == ["-m", "pytest_dsv41", "stub"]
        assert_ended_well(ended)
        assert not Path(HOLD.format(port)).exists()


def test_another_command_line_is_refused_and_left_alone(tmp_path: Path) -> None:
    port = LocalHost.free_port()
    with serving(port, "--noise", "0.1") as before:
        seeded = 'args = ["--seed", "{seed}"]\n'
        ended = run(tmp_path / "out", window=window(tmp_path, port, seeded))
        assert ended.returncode == 13, ended.output
        assert "the target would start" in ended.summary["stopped"]
        assert "({seed} is another in every window)" in ended.summary["stopped"]
        assert not (ended.folder / "journal.jsonl").exists()
        assert listeners(port) == {before}
        assert_ended_well(ended, touched=False)


def test_a_production_that_is_down_is_refused(tmp_path: Path) -> None:
    ended = run(tmp_path / "out", window=window(tmp_path, LocalHost.free_port()))
    assert ended.returncode == 13, ended.output
    assert "production is down" in ended.output
    assert not (ended.folder / "journal.jsonl").exists()


@pytest.mark.slow
def test_a_restored_production_with_other_answers_is_an_alert(tmp_path: Path) -> None:
    port = LocalHost.free_port()
    file = Path(window(tmp_path, port))
    # The restored server reads its model's name from a file that changes while it is down.
    profile = tmp_path / "profile.toml"
    profile.write_text('model = "one"\n')
    file.write_text(
        file.read_text().replace('"--round-ms"', f'"--profile", "{profile}", "--round-ms"')
    )
    words = list(WORDS)
    words[3:3] = ["--profile", str(profile)]
    command = [sys.executable, *words, "--port", str(port)]
    (tmp_path / "my_cells.py").write_text(
        "from pathlib import Path\n"
        "from pytest_dsv41 import Cell, for_cells\n\n"
        "@for_cells(Cell('mine', prompts=('demo-1',), max_tokens=96))\n"
        "def test_mine(measure, endpoint):\n"
        "    measure()\n"
        f"    Path({str(profile)!r}).write_text('model = \"two\"\\n')\n"
    )
    text = file.read_text().replace('name = "decode-b1"', 'name = "mine"')
    file.write_text(text.replace("[window]", '[window]\ncell_modules = ["my_cells.py"]'))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as first:
        assert first.stdout is not None
        assert first.stdout.readline()
        try:
            ended = run(tmp_path / "out", window=str(file))
            assert ended.returncode == 21, ended.output
            assert ended.summary["restore"]["status"] == "FAILED"
            assert ended.summary["promotion"] is None
            assert Path(HOLD.format(port)).exists()
            assert (tmp_path / "out" / "intent.json").exists()
            code, facts = status(tmp_path / "out")
            assert code == 21, facts
            assert facts["command"] == f"dsv41 recover --campaign {tmp_path / 'out'}"
        finally:
            Path(HOLD.format(port)).unlink(missing_ok=True)
            for pid in listeners(port):
                psutil.Process(pid).send_signal(signal.SIGTERM)
            first.terminate()
