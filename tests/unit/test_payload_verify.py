"""A payload against its manifest: every kind of damage by name, resumed after a kill, progress."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_dsv41.cli import main
from pytest_dsv41.errors import RefusedByWorld, SpecError, UsageError
from pytest_dsv41.payload import manifest as manifests
from pytest_dsv41.payload import runner
from pytest_dsv41.payload.manifest import KIND, Verified, make_manifest, verify_payload
from pytest_dsv41.payload.step import Step
from pytest_dsv41.quality.sealed import write_sealed
from tests.unit.payload_kills import Killer

FILES = {"a.bin": b"a" * 5000, "b.bin": b"b" * 7000, "deep/c.json": b"{}", "empty": b""}


def sums(files: dict[str, bytes]) -> dict[str, Any]:
    return {
        "schema": "dsv41-manifest-v1",
        "files": [
            {"path": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in files.items()
        ],
    }


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name, data in FILES.items():
        path = tmp_path / "payload" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "m.json").write_text(json.dumps(sums(FILES)))
    return tmp_path


def verify(place: Path, **more: Any) -> Verified:
    with Step(place / "m.json.run", KIND) as step:
        return verify_payload(place / "payload", place / "m.json", step, **more)


def test_a_whole_payload_is_verified_and_leaves_a_receipt(place: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = verify(place, progress=lambda _text, done, total: seen.append((done, total)))
    assert (found.problems, found.files, found.hashed) == ((), 4, 4)
    assert seen[-1] == (12002, 12002)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    body = json.loads((place / "m.json.run" / "receipt.json").read_text())
    assert {row["path"]: row["sha256"] for row in body["outputs"]} == {
        name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()
    }


def test_its_own_manifest_is_the_one_made_by_hand(place: Path) -> None:
    made = make_manifest(place / "payload")
    assert made == sums(dict(sorted(FILES.items())))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda p: (p / "a.bin").unlink(), ["3 files, the manifest has 4", "a.bin: missing"]),
        (lambda p: (p / "x").touch(), ["5 files, the manifest has 4", "x: not in the manifest"]),
        (lambda p: (p / "a.bin").write_bytes(b"a"), ["a.bin: 1 byte, the manifest says 5,000"]),
        (lambda p: (p / "a.bin").rename(p / "z"), ["z: not in the manifest", "a.bin: missing"]),
        (lambda p: (p / "b.bin").write_bytes(b"B" + b"b" * 6999), ["b.bin: sha256 "]),
        (
            lambda p: [(p / n).write_bytes(b"x" * len(FILES[n])) for n in ("a.bin", "b.bin")],
            ["a.bin: sha256 ", "b.bin: sha256 "],
        ),
    ],
)
def test_each_damage_is_named_and_leaves_no_receipt(
    place: Path, damage: Any, told: list[str]
) -> None:
    assert not verify(place).problems
    damage(place / "payload")
    found = verify(place)
    assert len(found.problems) == len(told)
    for problem, start in zip(found.problems, told, strict=True):
        assert problem.startswith(start)
    assert not (place / "m.json.run" / "receipt.json").exists()


def test_a_flipped_byte_with_the_old_times_is_found_by_resume(place: Path) -> None:
    assert not verify(place).problems
    path = place / "payload" / "a.bin"
    before = path.stat()
    path.write_bytes(b"A" + b"a" * 4999)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = verify(place, resume=True)
    assert found.problems[0].startswith("a.bin: sha256 ")
    assert found.hashed == 1


def test_a_done_verification_is_told_without_reading(place: Path) -> None:
    assert verify(place).hashed == 4
    again = verify(place, resume=True)
    assert (again.problems, again.hashed) == ((), 0)
    assert "no file was changed since" in again.notes[0]
    assert verify(place).hashed == 4


def test_an_ended_verification_goes_on_where_it_was(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = manifests.hash_file

    def hashing(path: Path, progress: Any = None) -> str:
        if path.suffix == ".bin":
            read.append(path.name)
            if read == ["a.bin", "b.bin"]:
                raise KeyboardInterrupt
        return real(path, progress)

    monkeypatch.setattr(manifests, "hash_file", hashing)
    with pytest.raises(KeyboardInterrupt):
        verify(place)
    seen: list[int] = []
    found = verify(place, resume=True, progress=lambda _t, done, _total: seen.append(done))
    assert (found.problems, found.hashed) == ((), 3)
    assert read == ["a.bin", "b.bin", "b.bin"]
    assert seen[0] == 5000
    # Another manifest, and nothing of it counts.
    (place / "m.json").write_text(json.dumps(sums(FILES), indent=1))
    assert verify(place, resume=True).hashed == 4


def test_a_file_that_changes_while_it_is_read_is_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = manifests.hash_file

    def hashing(path: Path, progress: Any = None) -> str:
        digest = real(path, progress)
        if path.name == "a.bin":
            path.write_bytes(b"c" * 5000)
        return digest

    monkeypatch.setattr(manifests, "hash_file", hashing)
    with pytest.raises(RefusedByWorld, match=r"a\.bin: was changed while it was read"):
        verify(place)


def test_two_at_once_are_refused(place: Path) -> None:
    with Step(place / "m.json.run", KIND), pytest.raises(RefusedByWorld, match="still at work"):
        verify(place)


def test_what_is_ignored_is_no_part_of_it(place: Path) -> None:
    (place / "payload" / ".cache").mkdir()
    (place / "payload" / ".cache" / "x").touch()
    assert verify(place).problems
    assert not verify(place, ignore=[".cache/*"]).problems


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda b: b["files"][0].update(path="/etc/passwd"), "files.0.path: '/etc/passwd'"),
        (lambda b: b["files"][0].update(path="../a"), "files.0.path"),
        (lambda b: b["files"][0].update(path="a//b"), "files.0.path"),
        (lambda b: b["files"].append(b["files"][0]), "files.4.path: a.bin twice"),
        (lambda b: b["files"][1].update(sha256="AB"), "files.1.sha256"),
        (lambda b: b["files"][1].update(bytes=-1), "files.1.bytes"),
        (lambda b: b["files"][1].pop("bytes"), "files.1.bytes"),
        (lambda b: b["files"][1].update(more=1), "files.1.more"),
        (lambda b: b.update(files=[]), "files: "),
        (lambda b: b.update(schema="x"), "schema: "),
        (lambda b: b["files"][0].update(path="a\udcff"), "files.0.path"),
        (lambda b: b["files"][0].update(path="a\0"), "files.0.path"),
        (lambda b: b["files"][1].update(bytes=1.5), "files.1.bytes"),
    ],
)
def test_a_wrong_manifest_is_one_line(place: Path, change: Any, told: str) -> None:
    body = sums(FILES)
    change(body)
    (place / "m.json").write_text(json.dumps(body))
    with pytest.raises(SpecError) as refused:
        verify(place)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_no_folder_no_manifest_no_json(place: Path) -> None:
    (place / "m.json").rename(place / "n.json")
    with pytest.raises(SpecError, match="no such file"):
        verify(place)
    (place / "m.json").write_text("[")
    with pytest.raises(SpecError, match="not JSON"):
        verify(place)
    (place / "m.json").write_text(json.dumps(sums(FILES)))
    shutil.rmtree(place / "payload")
    with pytest.raises(UsageError, match="no such folder"):
        verify(place)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"schema": 1, "schema": 2}', "the key 'schema' stands there twice"),
        ("[" * 100_000, "nested too deep"),
        ("\0", "not JSON"),
    ],
)
def test_a_damaged_manifest_is_one_line(place: Path, text: str, told: str) -> None:
    (place / "m.json").write_text(text)
    with pytest.raises(SpecError, match=told):
        verify(place)


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_manifest_that_is_no_file_holds_nothing_up_and_leaves_nothing(
    place: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = place / "odd"
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    before = sorted(place.rglob("*"))
    assert main(["payload", "verify", str(place / "payload"), str(path)]) == 4
    assert f"{path}: not a regular file" in capsys.readouterr().err
    missing = place / "typo" / "m.json"
    assert main(["payload", "verify", str(place / "payload"), str(missing)]) == 4
    assert main(["payload", "verify", str(place / "none"), str(place / "m.json")]) == 4
    assert sorted(place.rglob("*")) == before


def test_all_that_is_wrong_is_named_whatever_it_is(place: Path) -> None:
    """A pipe, a link to nowhere and a link to a folder do not end the list."""
    payload = place / "payload"
    (payload / "a.bin").unlink()
    os.mkfifo(payload / "a.bin")
    (payload / "b.bin").unlink()
    (payload / "b.bin").symlink_to("gone")
    (payload / "to-deep").symlink_to("deep")
    (payload / "empty").write_bytes(b"x")
    problems = "\n".join(verify(place).problems)
    assert "a.bin: no regular file" in problems
    assert "b.bin: No such file" in problems
    assert "to-deep: not in the manifest" in problems
    assert "empty: 1 byte, the manifest says 0" in problems
    with pytest.raises(UsageError, match=r"(a\.bin|to-deep): no regular file|b\.bin: No such file"):
        make_manifest(payload)


def test_a_folder_that_cannot_be_listed_makes_no_shorter_manifest(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("deep"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UsageError, match="deep: cannot be listed: Permission denied"):
        make_manifest(place / "payload")
    with pytest.raises(UsageError, match="deep: cannot be listed: Permission denied"):
        verify(place)


def test_a_name_that_is_no_text_is_refused_when_the_manifest_is_made(place: Path) -> None:
    """No manifest could name it: JSON is text."""
    (place / "payload" / "a.bin").rename(place / "payload" / "\udcff")
    with pytest.raises(UsageError, match=r"udcff'*: its name is not UTF-8"):
        make_manifest(place / "payload")
    body = make_manifest(place / "payload", ignore=["\udcff"])
    assert [row["path"] for row in body["files"]] == ["b.bin", "deep/c.json", "empty"]


def test_names_reach_no_terminal_as_they_are(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = "a\x1b[2Jb"
    (place / "payload" / "a.bin").rename(place / "payload" / strange)
    (place / "m.json").write_text(json.dumps(sums({**FILES, strange: b"", "c\x1b[2J": b""})))
    assert main(["payload", "verify", str(place / "payload"), str(place / "m.json")]) == 2
    told = "".join(capsys.readouterr())
    assert "\x1b" not in told
    assert "a\\x1b[2Jb: 5,000 bytes, the manifest says 0" in told
    assert "c\\x1b[2J: missing" in told


def test_a_file_that_changes_while_its_manifest_is_made_is_refused(place: Path) -> None:
    def grow(_text: str, done: int, _total: int) -> None:
        if done == len(FILES["a.bin"]):
            with (place / "payload" / "a.bin").open("ab") as file:
                file.write(b"x")

    with pytest.raises(RefusedByWorld, match=r"a\.bin: was changed while it was read"):
        make_manifest(place / "payload", progress=grow)


def test_a_manifest_that_lies_in_its_payload_is_no_part_of_it(place: Path) -> None:
    inside = place / "payload" / "m.json"
    (place / "m.json").rename(inside)
    words = ["payload", "verify", str(place / "payload"), str(inside)]
    assert main(words) == 0
    assert (place / "payload" / "m.json.run" / "receipt.json").exists()
    assert main([*words, "--resume"]) == 0


def test_a_manifest_has_a_place_before_anything_is_read(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "make_manifest", lambda *_a, **_k: pytest.fail("it was read"))
    words = ["payload", "manifest", str(place / "payload")]
    (place / "dangling").symlink_to("gone")
    assert main([*words, str(place / "dangling")]) == 4
    assert "exists; a manifest is never overwritten" in capsys.readouterr().err
    assert main([*words, str(place / "none" / "m.json")]) == 4
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    "row",
    [
        {"event": "file"},
        {"event": "file", "path": "a.bin", "identity": 7},
        {"event": "file", "path": "a.bin", "identity": [1], "sha256": None},
        {"event": "begin"},
        {"event": ["file"]},
    ],
)
def test_a_damaged_journal_only_costs_the_reading(place: Path, row: dict[str, Any]) -> None:
    verify(place)
    (place / "m.json.run" / "receipt.json").unlink()
    with (place / "m.json.run" / "journal.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    assert not verify(place, resume=True).problems


@pytest.mark.parametrize("change", [{"outputs": 7}, {"inputs": [7]}, {"inputs": [{}]}])
def test_a_receipt_that_lists_no_files_is_not_trusted(place: Path, change: dict[str, Any]) -> None:
    """Sealed anew, as a later version or a person's hand may have written it."""
    verify(place)
    path = place / "m.json.run" / "receipt.json"
    body = {**json.loads(path.read_text()), **change}
    del body["sha256"]
    path.unlink()
    write_sealed(path, body)
    found = verify(place, resume=True)
    assert (found.problems, found.notes) == ((), ())


@pytest.mark.parametrize(
    "own", [{"runner-up/mine": ""}, {"mine": ""}, {"scripts/mine": ""}, {"receipt.json": "mine"}]
)
def test_a_folder_that_is_no_steps_is_left_alone(
    place: Path, capsys: pytest.CaptureFixture[str], own: dict[str, str]
) -> None:
    """A run begins by taking away what the last one left: of a person's folder nothing."""
    folder = place / "my-folder"
    for name, text in own.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    words = ["payload", "verify", str(place / "payload"), str(place / "m.json")]
    assert main([*words, "--run", str(folder)]) == 4
    assert "which no run has put there" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_the_folder_of_another_command_keeps_its_receipt(place: Path) -> None:
    verify(place)
    path = place / "m.json.run" / "receipt.json"
    before = path.read_bytes()
    with pytest.raises(UsageError, match=r"that of another command \(payload verify\)"):
        Step(place / "m.json.run", "gate run").__enter__()
    assert path.read_bytes() == before
    assert not verify(place, resume=True).problems


def test_a_copy_that_finds_no_room_is_one_line_and_leaves_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copytree(_source: Path, target: Path, **_more: Any) -> None:
        target.mkdir(parents=True)
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device: 'b'")])

    monkeypatch.setattr(shutil, "copytree", copytree)
    with pytest.raises(UsageError, match=r"cannot be copied there.*No space left"):
        runner.from_copy(place / "m.json.run", ["payload"])
    assert list((place / "m.json.run").iterdir()) == []


def test_a_lock_that_is_no_file_is_one_line(place: Path) -> None:
    (place / "m.json.run").mkdir()
    os.mkfifo(place / "m.json.run" / "lock")
    with pytest.raises(UsageError, match="not a regular file"):
        verify(place)


def dsv41(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest_dsv41", "payload", *words],
        cwd=place, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_the_command_answers_0_2_and_4(place: Path) -> None:
    assert dsv41(place, "manifest", "payload", "m.json").returncode == 4
    done = dsv41(place, "verify", "payload", "m.json")
    assert done.returncode == 0, done.stderr
    assert "verified, 4 files, 4 read now" in done.stdout
    (place / "payload" / "a.bin").write_bytes(b"")
    done = dsv41(place, "verify", "payload", "m.json", "--resume")
    assert done.returncode == 2
    assert "WRONG a.bin: 0 bytes" in done.stderr
    for words in (("payload", "mistyped"), ("mistyped", "m.json")):
        done = dsv41(place, "verify", *words)
        assert done.returncode == 4
        assert done.stderr.startswith("dsv41 payload: mistyped: ")
    assert not (place / "mistyped.run").exists()


@pytest.mark.slow
def test_a_kill_at_each_step_and_a_resume_ends_the_same(place: Path) -> None:
    """The runner is killed before and after each durable act; then it is run with --resume."""
    run = place / "m.json.run"
    most_saved = 0
    with Killer(place, "payload", "verify", "payload", "m.json") as killer:
        for number in range(1, 200):
            shutil.rmtree(run, ignore_errors=True)
            ended = killer.run(number)
            if ended == 77:
                break
            assert ended == -signal.SIGKILL
            whole = (run / "receipt.json").exists()
            found = verify(place, resume=True)
            assert not found.problems
            assert (found.hashed == 0) >= whole
            most_saved = max(most_saved, 4 - found.hashed)
            assert (run / "receipt.json").exists()
        else:
            pytest.fail("the runner never came to its end")
    assert (number > 15, most_saved) == (True, 4)
