"""Both starts of an A/A pilot over real sockets, on a stub that serves the same model twice."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_dsv41.cli import main
from pytest_dsv41.errors import MeasurementFailed, UsageError
from pytest_dsv41.measure import Endpoint, Sampling, corpus, seeded
from pytest_dsv41.quality.aa_compare import compare_starts
from pytest_dsv41.quality.pilot import plan_pilot, probe_path, run_start
from pytest_dsv41.quality.probe import load_probe
from pytest_dsv41.stub import Serving, serve

NAMES = ("short", "32k-0", "32k-1", "32k-2", "32k-3", "dist-short-01", "dist-short-02")


@pytest.fixture(autouse=True)
def _corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts under the registered names, pinned for this test alone."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    cuts = {}
    for number, name in enumerate(NAMES):
        text = (
            f"{name} lies {number} miles down the river, and its people ring a bell at dusk. " * 4
        )
        (folder / f"{name}.txt").write_text(text)
        cuts[name] = {"tokens": None, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (folder / "cuts.json").write_text(json.dumps(cuts))
    monkeypatch.setenv("DSV41_CORPUS", str(folder))
    pins: dict[str, str] = {}
    for module in (corpus, seeded):
        monkeypatch.setattr(module, "PROMPT_SHA256", pins)


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serve(
        round_ms=0.1, prefill_ms=0.0, draft_tokens=16, acceptance=(0.95,), realtime=False
    ) as running:
        yield running


def at(served: Serving) -> Endpoint:
    return Endpoint(served.url, "vllm", "stub")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["aa-pilot", *words])
    told = capsys.readouterr()
    return code, told.out + told.err


SOME = ("seeded-short-b1", "seeded-32k-b2")
ALL = ("seeded-short-b1", "seeded-32k-b1", "seeded-32k-b2", "seeded-32k-b3")


@pytest.mark.parametrize(
    ("cells", "bridge"), [(SOME, False), pytest.param(ALL, True, marks=pytest.mark.slow)]
)
def test_the_whole_pilot_runs_and_its_record_passes(
    cells: tuple[str, ...],
    bridge: bool,
    served: Serving,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [word for cell in cells for word in ("--cell", cell)] if cells != ALL else []
    words += [] if bridge else ["--no-bridge"]
    files = {start: tmp_path / f"{start}.json" for start in "AB"}
    for start, path in files.items():
        code, told = run(
            capsys, "run", "--execute", "--url", served.url, "--start", start, "--out", str(path),
            "--subset", "short", "--each", "2", "--commit", "c" * 40, *words,
        )  # fmt: skip
        assert code == 0, told
    a = json.loads(files["A"].read_text())
    assert list(a["cells"]) == list(cells)
    assert a["cells"]["seeded-32k-b2"]["pairs"][5]["seeds"] == [30_050, 30_051]
    assert json.loads(files["B"].read_text())["bridge"] is None
    for start in files:
        probe = load_probe(probe_path(files[start]))
        assert len(probe.positions) == 16
        assert probe.sha256 == json.loads(files[start].read_text())["probe"]["sha256"]

    out = tmp_path / "pilot.json"
    code, told = run(capsys, "compare", str(files["A"]), str(files["B"]), "--out", str(out))
    assert code == 0, told
    assert told.startswith("PASSED: ")
    # One stub served both: no restart lay between them.
    assert "note: both starts were measured on one and the same server process" in told
    pilot = json.loads(out.read_text())
    assert pilot["definition"]["commit"] == "c" * 40
    assert pilot["definition"]["version"] == "0.33.0"
    for cell in pilot["cells"].values():
        # The stub draws by seed and text alone: the streams are identical at every batch.
        assert (cell["pairs"], cell["outputs_identical"], cell["rounds_identical"]) == (6, 6, 6)
    assert "seeded-32k-b2/ms_per_round" in pilot["diff_cv"]
    report = pilot["bridge"]
    assert (report is not None) is bridge
    if report is not None:
        assert report["cells"]["bridge-short-512"]["pairs"] == 3
        assert report["cells"]["bridge-short-512"]["reference"] is None
        assert report["lengths"]["short"] is not None
        missing = report["cells"]["bridge-bench2-legal-1500"]["missing"]
        assert missing.startswith("not run: prompt bench2-legal-short")
        assert report["h4"].startswith("H4: not read (not run: prompt bench2-summary-32k")
    code, told = run(capsys, "accumulate", str(out))
    assert code == 0
    assert "to register under [window], start_sd with 1 df:" in told


def test_no_text_of_prompt_or_answer_is_kept(served: Serving) -> None:
    plan = plan_pilot(("seeded-short-b1",), subset=None, bridge=False)
    record, probe = run_start(at(served), plan, start="B", deadline_s=60)
    assert probe is None
    kept = json.dumps(record)
    assert "lies 0 miles" not in kept
    assert all(
        len(pair["outputs"][0]) == 64 for pair in record["cells"]["seeded-short-b1"]["pairs"]
    )


def test_a_cell_with_foreign_traffic_is_refused_and_the_others_run(served: Serving) -> None:
    plan = plan_pilot(("seeded-short-b1", "seeded-32k-b1"), subset=None, bridge=False)
    told: list[str] = []

    def watch(line: str) -> None:
        # Foreign requests come while the first cell runs and have left before the second.
        if not told:
            served.faults("/v1/completions:foreign=4")
        elif "seeded-32k-b1" in line:
            served.faults()
        told.append(line)

    try:
        record, _ = run_start(at(served), plan, start="A", deadline_s=60, progress=watch)
    finally:
        served.faults()
    assert record["cells"]["seeded-short-b1"]["refused"].startswith("foreign-request: ")
    assert len(record["cells"]["seeded-32k-b1"]["pairs"]) == 6
    good, _ = run_start(at(served), plan, start="B", deadline_s=60)
    pilot = compare_starts(record, good)
    assert not pilot["passed"]
    assert pilot["reasons"][0].startswith("seeded-short-b1: start A: foreign-request")


def test_a_prompt_that_is_nowhere_is_told_before_anything_is_sent(tmp_path: Path) -> None:
    (tmp_path / "corpus" / "32k-3.txt").unlink()
    nobody = Endpoint("http://127.0.0.1:9", "vllm", "")
    with pytest.raises(UsageError, match=r"32k-3\.txt"):
        run_start(nobody, plan_pilot(subset=None), start="A", deadline_s=60)


def test_a_stop_and_a_deadline_end_the_run(served: Serving) -> None:
    plan = plan_pilot(("seeded-short-b1",), subset="short", each=1, bridge=False)
    stop = threading.Event()

    def ask(_line: str) -> None:
        stop.set()

    with pytest.raises(MeasurementFailed) as stopped:
        run_start(at(served), plan, start="A", deadline_s=60, stop=stop, progress=ask)
    assert stopped.value.kind == "stopped"
    with pytest.raises(MeasurementFailed) as late:
        run_start(at(served), plan, start="A", deadline_s=0.0)
    assert late.value.kind == "deadline"


def test_a_server_that_is_not_there_is_one_line_and_exit_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = run(
        capsys, "run", "--execute", "--url", "http://127.0.0.1:9", "--start", "A", "--no-bridge",
        "--subset", "none", "--out", str(tmp_path / "a.json"),
    )  # fmt: skip
    assert code == 1
    assert told.startswith("dsv41 aa-pilot run: REFUSED models: ")
    assert told.count("\n") == 1
    assert not (tmp_path / "a.json").exists()


def test_the_bridge_takes_productions_own_settings() -> None:
    plan = plan_pilot(subset=None, bridge_sampling=Sampling(temperature=0.6))
    assert {cell.sampling for cell in plan.bridge} == {Sampling(temperature=0.6)}
    with pytest.raises(UsageError, match="named twice"):
        plan_pilot(("seeded-short-b1", "seeded-short-b1"), subset=None)


def test_a_record_is_not_written_over_and_a_probe_stays_out_of_git(
    served: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words: list[Any] = ["run", "--execute", "--url", served.url, "--start", "A", "--no-bridge"]
    words += ["--subset", "short", "--each", "1", "--cell", "seeded-short-b1", "--out"]
    (tmp_path / "a.json").write_text("{}")
    code, told = run(capsys, *words, str(tmp_path / "a.json"))
    assert code == 4
    assert "never replaced" in told
    repository = tmp_path / "repository"
    (repository / ".git").mkdir(parents=True)
    code, told = run(capsys, *words, str(repository / "a.json"))
    assert code == 4
    assert "inside the git work tree" in told
    assert list(repository.iterdir()) == [repository / ".git"]
