"""A command between gates: every check, its receipt, a kill at each step, copies of its scripts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pytest_dsv41
from pytest_dsv41.cli import main
from pytest_dsv41.errors import RefusedByWorld, SpecError, UsageError, WindowStopped
from pytest_dsv41.hosts import ended
from pytest_dsv41.payload.gates import KIND, Outcome, load_gate, run_gate
from pytest_dsv41.payload.step import Step
from tests.unit.payload_kills import Killer

MIB = 2**20
CONVERT = """\
#!/bin/sh
# a comment may say --reuse
echo "converting"
head -c "$(cat size)" /dev/zero > model.rad
echo "gptq receipt: 49 layers"
"""
GATE = """\
command = ["./convert.sh", "now"]
scripts = ["convert.sh"]
inputs = ["recipe", "size"]
outputs = ["model.rad"]

[[before]]
check = "count"
name = "Grams are there"
files = "calib/gram.*.bin"
at_least = 3
[[before]]
check = "absent"
files = "bf16.rad"
[[before]]
check = "free"
folder = "."
at_least_mib = 1
[[before]]
check = "flag-absent"
flag = "--reuse"

[[after]]
check = "size"
file = "model.rad"
at_least_mib = 2
[[after]]
check = "output-contains"
text = "gptq receipt"
[[after]]
check = "output-contains"
name = "the container says so too"
command = ["wc", "-c", "model.rad"]
text = "model.rad"
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "calib").mkdir()
    for number in range(3):
        (tmp_path / "calib" / f"gram.{number}.bin").write_bytes(b"g")
    (tmp_path / "convert.sh").write_text(CONVERT)
    (tmp_path / "convert.sh").chmod(0o755)
    (tmp_path / "recipe").write_text("recipe\n")
    (tmp_path / "size").write_text(str(2 * MIB))
    (tmp_path / "gate.toml").write_text(GATE)
    return tmp_path


def go(place: Path, **more: Any) -> Outcome:
    with Step(place / "run", KIND) as step:
        return run_gate(load_gate(place / "gate.toml"), step, **more)


def answers(outcome: Outcome) -> dict[str, bool]:
    return {found.name: found.passed for found in (*outcome.before, *outcome.after)}


def test_a_step_that_holds_leaves_a_receipt(place: Path) -> None:
    done = go(place)
    assert (done.status, done.returncode) == ("complete", 0)
    assert list(answers(done).values()) == [True] * 7
    body = json.loads((place / "run" / "receipt.json").read_text())
    assert body["complete"] is True
    digests = {Path(row["path"]).name: row["sha256"] for row in body["inputs"]}
    assert digests == {
        name: hashlib.sha256((place / name).read_bytes()).hexdigest()
        for name in ("gate.toml", "convert.sh", "recipe", "size")
    }
    (output,) = body["outputs"]
    assert output["bytes"] == 2 * MIB
    assert output["sha256"] == hashlib.sha256(bytes(2 * MIB)).hexdigest()
    assert "gptq receipt: 49 layers" in (place / "run" / "output.log").read_text()


def test_all_checks_before_are_evaluated_and_nothing_is_run(place: Path) -> None:
    (place / "calib" / "gram.0.bin").unlink()
    (place / "bf16.rad").write_bytes(b"")
    text = CONVERT.replace("echo conv", "rad-convert --reuse=old x\necho conv")
    (place / "convert.sh").write_text(text.replace('echo "conv', 'tool --reuse=old\necho "conv'))
    done = go(place)
    assert done.status == "refused"
    assert answers(done) == {
        "Grams are there": False,
        "absent bf16.rad": False,
        "free .": True,
        "flag-absent --reuse": False,
    }
    told = {found.name: found.found for found in done.before}
    assert told["Grams are there"] == "2 files, at least 3 asked"
    assert "bf16.rad" in told["absent bf16.rad"]
    assert told["flag-absent --reuse"] == "stands in convert.sh:3"
    assert not (place / "model.rad").exists()
    assert not (place / "run" / "receipt.json").exists()


@pytest.mark.parametrize("name", ["convert.sh", "recipe"])
def test_an_input_that_is_missing_costs_no_receipt(place: Path, name: str) -> None:
    assert go(place).status == "complete"
    kept = {p.name: p.read_bytes() for p in (place / "run").iterdir() if p.is_file()}
    (place / name).rename(place / "elsewhere")
    with pytest.raises(UsageError, match=f"{name}: "):
        go(place, again=True)
    assert kept == {p.name: p.read_bytes() for p in (place / "run").iterdir() if p.is_file()}


def test_a_converter_that_writes_too_little_gets_no_receipt(place: Path) -> None:
    (place / "size").write_text(str(2 * MIB - 1))
    done = go(place)
    assert (done.status, done.returncode) == ("failed", 0)
    assert [f.found for f in done.after if not f.passed] == [
        "2.0 MiB (2,097,151 bytes), at least 2 MiB asked"
    ]
    assert not (place / "run" / "receipt.json").exists()
    # Put right, the step runs anew, and only then is it done.
    (place / "size").write_text(str(2 * MIB))
    assert go(place, resume=True).status == "complete"
    assert go(place, resume=True).status == "trusted"


def test_a_command_that_fails_gets_no_receipt_whatever_it_wrote(place: Path) -> None:
    (place / "convert.sh").write_text(CONVERT + "exit 3\n")
    done = go(place)
    assert (done.status, done.returncode, done.after) == ("command", 3, ())
    assert not (place / "run" / "receipt.json").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda p: (p / "recipe").write_text("recipe2"),
        lambda p: (p / "recipe").unlink(),
        lambda p: (p / "convert.sh").write_text(CONVERT + "\n"),
        lambda p: (p / "gate.toml").write_text(GATE + "\n"),
        lambda p: (p / "gate.toml").write_text(GATE.replace('"recipe", ', "")),
        lambda p: (p / "model.rad").write_bytes(b"other"),
        lambda p: _edit(p, lambda t: t.replace('"bytes": 7', '"bytes": 8')),
        lambda p: _edit(p, lambda t: t[:-9]),
        lambda p: _edit(p, lambda t: t.replace("gate run", "calib push")),
        lambda p: _edit(p, lambda _: "{}"),
    ],
)
def test_resume_trusts_only_a_whole_receipt_whose_inputs_hash(place: Path, change: Any) -> None:
    assert go(place).status == "complete"
    assert go(place, resume=True).status == "trusted"
    change(place)
    if (place / "recipe").exists():
        done = go(place, resume=True)
        assert done.status == "complete"
        assert "not trusted" in done.note
    else:
        with pytest.raises(UsageError, match="recipe"):
            go(place, resume=True)


def _edit(place: Path, change: Any) -> None:
    path = place / "run" / "receipt.json"
    path.write_text(change(path.read_text()))


def test_an_output_that_a_later_step_took_away_is_no_reason_to_run_again(place: Path) -> None:
    assert go(place).status == "complete"
    (place / "model.rad").unlink()
    assert go(place, resume=True).status == "trusted"


def test_a_done_step_is_not_run_twice_unasked(place: Path) -> None:
    assert go(place).status == "complete"
    with pytest.raises(RefusedByWorld, match="--resume trusts the receipt, --again runs it"):
        go(place)
    assert go(place, again=True).status == "complete"


def test_an_input_that_changes_while_the_step_runs_is_found(place: Path) -> None:
    (place / "convert.sh").write_text(CONVERT + "echo more >> recipe\n")
    with pytest.raises(RefusedByWorld, match="recipe: was changed while the step ran"):
        go(place)
    assert not (place / "run" / "receipt.json").exists()


def test_the_command_runs_from_copies_of_its_scripts(place: Path) -> None:
    """The script replaces itself in mid-run, as a copy over the network would."""
    poison = "#!/bin/sh\\necho poisoned\\nexit 9\\n"
    (place / "convert.sh").write_text(
        f"#!/bin/sh\nprintf '{poison}' > convert.sh\nprintf '{poison}' > helper.sh\n"
        + CONVERT.partition("\n")[2]
    )
    outside = place / "gate.toml"
    outside.write_text(GATE.replace('inputs = ["recipe", "size"]', 'inputs = ["size"]'))
    with pytest.raises(RefusedByWorld, match=r"convert\.sh: was changed while the step ran"):
        go(place)
    # It went on to its own end all the same; and said that what is there now is another script.
    assert "gptq receipt" in (place / "run" / "output.log").read_text()
    assert "poisoned" not in (place / "run" / "output.log").read_text()
    assert (place / "convert.sh").read_text() == "#!/bin/sh\necho poisoned\nexit 9\n"


def test_a_stop_ends_the_command_and_all_it_started(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ended, "_GRACE_S", 0.5)
    (place / "convert.sh").write_text(
        "#!/bin/sh\ntrap '' TERM\nsleep 600 & echo $! > child\nwait\n"
    )
    stop = threading.Event()

    def watch(_text: str) -> None:
        if (place / "child").exists() and (place / "child").read_text().strip():
            stop.set()

    with pytest.raises(WindowStopped, match="stopped"):
        go(place, stop=stop, progress=watch)
    _wait_until_gone(int((place / "child").read_text()))


def test_a_deadline_ends_the_command(place: Path) -> None:
    (place / "convert.sh").write_text("#!/bin/sh\nexec sleep 600\n")
    (place / "gate.toml").write_text("deadline_s = 0.3\n" + GATE)
    with pytest.raises(WindowStopped, match=r"deadline of 0\.3 s"):
        go(place)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until_gone(pid: int) -> None:
    limit = time.monotonic() + 60
    while _alive(pid):
        assert time.monotonic() < limit, f"process {pid} still lives"
        threading.Event().wait(0.02)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.replace("at_least = 3", "at_leats = 3"), "gate.toml:10: before[0].at_leats"),
        (lambda t: t.replace("at_least = 3", ""), "gate.toml:6: before[0]: needs one of at_least"),
        (lambda t: t.replace('"absent"', '"gone"'), "gate.toml:12: before[1].check: 'gone'; valid"),
        (lambda t: t.replace("at_least_mib = 1\n", ""), "before[2].at_least_mib: missing"),
        (lambda t: t.replace("--reuse", "reuse"), "before[3].flag"),
        (lambda t: t.replace("command", "comand", 1), "comand: unknown key; valid"),
        (lambda t: t.replace('["./convert.sh", "now"]', "[]"), "gate.toml:1"),
        (lambda t: t.partition("[[before]]")[0], "a gate needs a check"),
        (lambda t: t + '[[after]]\ncheck = "size"\nfile = "model.rad"\nexactly_bytes = 1\n', "two"),
        (
            lambda t: t.replace("[[after]]", '[[before]]\ncheck="output-contains"\ntext="x"\n'
                                "[[after]]", 1),
            "before[4].check: needs a command of its own",
        ),
        (lambda t: "before = 3\n" + t.replace("[[before]]", "[[x]]"), "expected [[before]] tables"),
        (lambda t: t + "[", "invalid TOML"),
        (lambda t: t.replace('"absent"', '["absent"]'), "before[1].check: ['absent']; valid"),
        (lambda t: 'env = { "A=B" = "x" }\n' + t, "gate.toml:1: env.'A=B'"),
        (lambda t: 'env = { A = "\\u0000" }\n' + t, "gate.toml:1: env.A: holds a null character"),
        (lambda t: t.replace('"now"', '"\\u0000"'), "gate.toml:1: command[1]: holds a null"),
        (lambda t: t.replace('"recipe"', '"\\u0000"'), "gate.toml:3: inputs[0]: holds a null"),
        (lambda t: t.replace('"."', '"\\u0000"'), "before[2].folder: holds a null character"),
    ],
)  # fmt: skip
def test_a_wrong_gate_file_is_one_line(place: Path, change: Any, told: str) -> None:
    (place / "gate.toml").write_text(change(GATE))
    with pytest.raises(SpecError) as refused:
        load_gate(place / "gate.toml")
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["../out.sh", "none.sh", "calib", "loop.sh", "/bin/sh"])
def test_a_script_that_cannot_be_copied_is_refused(place: Path, name: str) -> None:
    (place.parent / "out.sh").write_text("")
    (place / "loop.sh").symlink_to("loop.sh")
    text = GATE.replace('scripts = ["convert.sh"]', f'scripts = ["{name}"]')
    (place / "gate.toml").write_text(text)
    with pytest.raises(UsageError, match=Path(name).name):
        go(place)


def test_what_cannot_be_seen_is_no_pass(place: Path) -> None:
    text = GATE.replace('folder = "."', 'folder = "nowhere"').replace('"wc", "-c"', '"no-tool"')
    (place / "gate.toml").write_text(text)
    assert answers(go(place))["free nowhere"] is False
    (place / "gate.toml").write_text(text.replace('folder = "nowhere"', 'folder = "."'))
    done = go(place)
    assert done.status == "failed"
    assert "cannot be seen" in next(f.found for f in done.after if not f.passed)


@pytest.mark.parametrize("ending", ["deadline", "stop"])
def test_a_checks_command_is_ended_with_all_it_started(
    place: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """It ends at once, and leaves a child behind that holds its output."""
    monkeypatch.setattr(ended, "_GRACE_S", 0.5)
    asks = '["sh", "-c", "trap \'\' TERM; sleep 600 & echo $! > child"]'
    deadline = "deadline_s = 0.3\n" if ending == "deadline" else ""
    text = GATE.replace('["wc", "-c", "model.rad"]', asks) + deadline
    (place / "gate.toml").write_text(text)
    stop = threading.Event()

    def watch() -> None:
        _wait_for(place / "child")
        stop.set()

    if ending == "stop":
        watching = threading.Thread(target=watch)
        watching.start()
        with pytest.raises(WindowStopped, match="the check's command was ended"):
            go(place, stop=stop)
        watching.join()
    else:
        done = go(place)
        assert done.status == "failed"
        assert "timed out after 0.3 seconds" in done.after[-1].found
    _wait_until_gone(int((place / "child").read_text()))
    assert not (place / "run" / "receipt.json").exists()


def test_a_checks_command_that_says_gigabytes_costs_none(place: Path) -> None:
    """Two hundred megabytes and the word; what is kept of it is its end."""
    asks = '["sh", "-c", "head -c 200000000 /dev/zero; echo model.rad"]'
    (place / "gate.toml").write_text(GATE.replace('["wc", "-c", "model.rad"]', asks))
    tracemalloc.start()
    try:
        assert go(place).status == "complete"
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 20_000_000


def test_a_stop_while_inputs_are_hashed_runs_nothing(place: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(WindowStopped, match="hashing inputs"):
        go(place, stop=stop)
    assert not (place / "model.rad").exists()
    stop.clear()
    assert go(place).status == "complete"
    stop.set()
    with pytest.raises(WindowStopped, match="holding inputs against the receipt"):
        go(place, stop=stop, resume=True)
    assert (place / "run" / "receipt.json").exists()


def test_a_stop_in_the_last_check_before_starts_no_command(place: Path) -> None:
    stop = threading.Event()

    def watch(text: str) -> None:
        if text.startswith("check: flag-absent"):
            stop.set()

    with pytest.raises(WindowStopped, match="the command was not started"):
        go(place, stop=stop, progress=watch)
    assert not (place / "model.rad").exists()


def test_an_output_that_was_not_made_is_a_failure_by_its_name(place: Path) -> None:
    (place / "gate.toml").write_text(GATE.replace('outputs = ["model.rad"]', 'outputs = ["m"]'))
    done = go(place)
    assert done.status == "failed"
    assert answers(done)["output m"] is False
    assert not (place / "run" / "receipt.json").exists()


def test_a_gate_file_that_is_changed_before_its_turn_is_not_run(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All are read before the first command: a receipt must not hold bytes that were never read."""
    (place / "one.toml").write_text(
        'command = ["sh", "-c", "sed -i s/model/other/ gate.toml"]\n'
        '[[before]]\ncheck = "absent"\nfiles = "none"\n'
    )
    assert main(["gate", "run", str(place / "one.toml"), str(place / "gate.toml")]) == 13
    assert "gate.toml: was changed since it was read" in capsys.readouterr().err
    assert not (place / "model.rad").exists()


def test_a_folder_of_the_users_is_never_a_steps(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step begins by removing the copies of the last one's scripts: the user's own stay."""
    (place / "scripts").mkdir()
    (place / "scripts" / "convert.sh").write_text(CONVERT)
    for folder in (place, place / "scripts"):
        words = ["gate", "run", str(place / "gate.toml"), "--run", str(folder)]
        assert main(words) == 4
        assert "which no run has put there" in capsys.readouterr().err
    assert (place / "scripts" / "convert.sh").read_text() == CONVERT


def test_a_checks_name_reaches_no_terminal_as_it_is(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = GATE.replace("Grams are there", "Grams \\u001b[2J are there")
    (place / "gate.toml").write_text(text)
    assert main(["gate", "run", str(place / "gate.toml")]) == 0
    told = capsys.readouterr().out
    assert "Grams \\x1b[2J are there: 3 files" in told
    assert "\x1b" not in told


def test_several_files_run_in_order_and_the_first_that_fails_ends_it(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def gate(name: str, command: str, text: str) -> str:
        path = place / f"{name}.toml"
        path.write_text(
            f'command = ["sh", "-c", "echo {command} | tee -a ran"]\n'
            f'[[after]]\ncheck = "output-contains"\ntext = "{text}"\n'
        )
        return str(path)

    files = [
        gate("one", "one", "one"),
        gate("two", "two", "other"),
        gate("three", "three", "three"),
    ]
    assert main(["gate", "run", *files]) == 2
    assert (place / "ran").read_text() == "one\ntwo\n"
    assert "two.toml: FAILED after the command" in capsys.readouterr().err
    gate("two", "two", "two")
    assert main(["gate", "run", *files, "--resume"]) == 0
    assert (place / "ran").read_text() == "one\ntwo\ntwo\nthree\n"
    out = capsys.readouterr().out
    assert "one.toml: DONE BEFORE" in out
    assert "three.toml: DONE, " in out
    # A file that is wrong is found before the first command runs.
    (place / "three.toml").write_text("")
    assert main(["gate", "run", *files, "--again"]) == 4
    assert (place / "ran").read_text().count("one") == 1


# -- the command ----------------------------------------------------------------------------------


def dsv41(place: Path, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest_dsv41", *words],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
        **more,
    )


@pytest.mark.slow
def test_the_command_says_each_check_and_its_codes(place: Path) -> None:
    done = dsv41(place, "gate", "run", "gate.toml")
    assert done.returncode == 0, done.stderr
    assert "before PASS  Grams are there: 3 files" in done.stdout
    body = json.loads((place / "gate.toml.run" / "receipt.json").read_text())
    assert len(body["code_sha256"]) == 64
    # Nothing of the runner's own copy is left.
    assert sorted(p.name for p in (place / "gate.toml.run").iterdir()) == [
        "journal.jsonl", "lock", "output.log", "receipt.json", "scripts",
    ]  # fmt: skip
    assert dsv41(place, "gate", "run", "gate.toml").returncode == 13
    assert "DONE BEFORE" in dsv41(place, "gate", "run", "gate.toml", "--resume").stdout
    (place / "bf16.rad").write_bytes(b"")
    done = dsv41(place, "gate", "run", "gate.toml", "--again")
    assert done.returncode == 2
    assert "REFUSED before the command" in done.stderr
    (place / "bf16.rad").unlink()
    (place / "convert.sh").write_text("#!/bin/sh\nexit 5\n")
    assert dsv41(place, "gate", "run", "gate.toml").returncode == 1
    assert dsv41(place, "gate", "run", "gate.toml", "--resume", "--again").returncode == 4


@pytest.fixture
def held(place: Path) -> Iterator[Path]:
    """A converter that waits on a pipe until it may go on."""
    os.mkfifo(place / "pipe")
    (place / "convert.sh").write_text(
        CONVERT.replace('echo "converting"\n', "echo $$ > pid\ncat pipe > /dev/null\n")
    )
    yield place
    if (place / "pid").exists():
        pid = int((place / "pid").read_text())
        if _alive(pid) and b"convert.sh" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.killpg(pid, signal.SIGKILL)


def _wait_for(path: Path) -> None:
    limit = time.monotonic() + 60
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < limit, f"{path} did not come"
        threading.Event().wait(0.02)


def test_the_runner_works_from_a_copy_of_itself(held: Path) -> None:
    """The package it was started from is gone in mid-run; it still ends with its receipt."""
    package = held / "site" / "pytest_dsv41"
    shutil.copytree(Path(pytest_dsv41.__file__).parent, package)
    runner = subprocess.Popen(
        [sys.executable, "-P", "-m", "pytest_dsv41", "gate", "run", "gate.toml"],
        cwd=held,
        env={**os.environ, "PYTHONPATH": str(held / "site")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _wait_for(held / "pid")
    environment = Path(f"/proc/{(held / 'pid').read_text().strip()}/environ").read_bytes()
    for path in package.rglob("*.py"):
        path.write_text("raise SystemExit('replaced in mid-run')\n")
    shutil.rmtree(package / "payload")
    (held / "pipe").write_text("go")
    out, err = runner.communicate(timeout=60)
    assert runner.returncode == 0, out + err
    assert json.loads((held / "gate.toml.run" / "receipt.json").read_text())["complete"] is True
    # The command has the environment that the runner was started with.
    assert f"PYTHONPATH={held / 'site'}\0".encode() in environment + b"\0"
    assert b"DSV41_RUNNER_COPY" not in environment


@pytest.mark.slow
def test_a_command_that_outlives_a_killed_runner_keeps_the_step_taken(held: Path) -> None:
    runner = subprocess.Popen(
        [sys.executable, "-m", "pytest_dsv41", "gate", "run", "gate.toml"],
        cwd=held, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    _wait_for(held / "pid")
    runner.kill()
    runner.wait()
    done = dsv41(held, "gate", "run", "gate.toml", "--resume")
    assert done.returncode == 13
    assert "is still at work" in done.stderr
    (held / "pipe").write_text("go")
    pid = int((held / "pid").read_text())
    _wait_until_gone(pid)
    (held / "convert.sh").write_text(CONVERT)
    assert dsv41(held, "gate", "run", "gate.toml", "--resume").returncode == 0


@pytest.mark.slow
def test_a_signal_ends_the_runner_with_its_code_and_the_command_too(held: Path) -> None:
    runner = subprocess.Popen(
        [sys.executable, "-m", "pytest_dsv41", "gate", "run", "gate.toml"],
        cwd=held, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    _wait_for(held / "pid")
    runner.terminate()
    _, err = runner.communicate(timeout=60)
    assert runner.returncode == 128 + signal.SIGTERM
    assert "STOPPED" in err
    _wait_until_gone(int((held / "pid").read_text()))


@pytest.mark.slow
def test_a_kill_at_each_step_and_a_resume_ends_the_same(place: Path) -> None:
    """The runner is killed before and after each durable act; then it is run with --resume."""
    run = place / "gate.toml.run"
    with Killer(place, "gate", "run", "gate.toml") as killer:
        for number in range(1, 200):
            shutil.rmtree(run, ignore_errors=True)
            (place / "model.rad").unlink(missing_ok=True)
            ended = killer.run(number)
            if ended == 77:
                break
            assert ended == -signal.SIGKILL
            whole = (run / "receipt.json").exists()
            with Step(run, KIND) as step:
                outcome = run_gate(load_gate(place / "gate.toml"), step, resume=True)
            # What exists as a receipt is whole and trusted; without one the step runs anew.
            assert outcome.status == ("trusted" if whole else "complete")
            assert (place / "model.rad").stat().st_size == 2 * MIB
        else:
            pytest.fail("the runner never came to its end")
    assert number > 20
