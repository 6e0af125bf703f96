"""`dsv41 dist-gate` from the first cut to the verdict, against the stub's two models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from wire_groups import stub

from pytest_dsv41.cli import main
from pytest_dsv41.errors import MeasurementRefused
from pytest_dsv41.measure import Endpoint
from pytest_dsv41.quality.bands import load_band
from pytest_dsv41.quality.cell import plan_quality, run_quality
from pytest_dsv41.quality.probe import ProbeProgress, load_probe
from pytest_dsv41.quality.prompts import DIST_PROMPTS


@pytest.fixture(scope="module")
def production() -> Iterator[str]:
    with stub(round_ms=0.0, prefill_ms=0.0, prefill_ms_per_token=0.0, perturb=0.3) as running:
        yield running.url


@pytest.fixture(scope="module")
def band(production: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A band of three comparisons over four short prompts."""
    folder = tmp_path_factory.mktemp("band")
    probes = [str(folder / f"p{number}.json") for number in range(6)]
    for path in probes:
        assert probe(production, path, "--subset", "short", "--each", "4") == 0
    out = folder / "band.json"
    assert main(["dist-gate", "band", *probes, "--out", str(out)]) == 0
    return out


def probe(url: str, out: str | Path, *more: str) -> int:
    return main(["dist-gate", "probe", url, "--out", str(out), *more])


def gate(band: Path, control: Path, candidate: Path, *more: str) -> int:
    words = ["dist-gate", "gate", str(control), str(candidate), "--band", str(band), *more]
    return main(words)


@pytest.mark.parametrize(("perturb", "code"), [(0.3, 0), (0.6, 2)])
def test_the_same_model_passes_and_another_one_is_a_loss(
    production: str,
    band: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    perturb: float,
    code: int,
) -> None:
    control, candidate = tmp_path / "control.json", tmp_path / "candidate.json"
    assert probe(production, control, "--band", str(band)) == 0
    with stub(round_ms=0.0, prefill_ms=0.0, perturb=perturb) as other:
        assert probe(other.url, candidate, "--band", str(band), "--candidate") == 0
    capsys.readouterr()
    assert gate(band, control, candidate) == code
    shown = capsys.readouterr().out
    assert shown.startswith("LOSS:" if code else "PASS:")
    assert "literal rule" in shown
    assert "worst prompt" in shown
    assert "the A/A is exact" in shown
    assert gate(band, control, candidate, "--json") == code
    result = json.loads(capsys.readouterr().out)
    assert result["positions"] == 32
    assert result["k"] == 3
    assert (result["mean_kl"] > 1e-6) == bool(code)
    assert list(result["by_subset"]) == ["short"]


def test_a_band_registered_after_the_candidates_probe_is_refused(
    production: str, band: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    candidate = tmp_path / "candidate.json"
    assert probe(production, candidate, "--band", str(band), "--candidate") == 0
    more = [tmp_path / f"{name}.json" for name in "abc"]
    for path in more:
        assert probe(production, path, "--band", str(band)) == 0
    late = tmp_path / "late.json"
    assert main(["dist-gate", "band", *map(str, more[:2]), "--out", str(late)]) == 0
    capsys.readouterr()
    assert gate(late, more[2], candidate) == 4
    assert "REFUSED band-late:" in capsys.readouterr().err


def test_refusals_are_one_line_with_their_name_and_code_4(
    production: str, band: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control, candidate = tmp_path / "control.json", tmp_path / "candidate.json"
    assert probe(production, control, "--band", str(band)) == 0
    assert probe(production, candidate, "--band", str(band), "--candidate") == 0
    other, cold = tmp_path / "other.json", tmp_path / "cold.json"
    assert probe(production, other, "--subset", "short", "--each", "3") == 0
    assert probe(production, cold, "--subset", "short", "--each", "4", "--cache", "cold") == 0
    edited = tmp_path / "edited.json"
    edited.write_text(band.read_text().replace('"seed": 41', '"seed": 42'))
    paths = [str(control), str(candidate)]
    new = str(tmp_path / "new.json")
    for words, name in (
        (["gate", *paths, "--band", str(edited)], "band-edited"),
        (["gate", str(other), str(candidate), "--band", str(band)], "other-prompts"),
        (["gate", str(cold), str(candidate), "--band", str(band)], "conditions"),
        (["gate", *reversed(paths), "--band", str(band)], "role"),
        (["band", str(control), str(control), "--out", new], "band-overlap"),
        (["band", *paths, "--out", new], "band-candidate"),
        (["band", str(control), str(cold), "--out", new], "conditions"),
    ):
        capsys.readouterr()
        assert main(["dist-gate", *words]) == 4, name
        said = capsys.readouterr()
        assert said.err.startswith(f"dsv41 dist-gate {words[0]}: REFUSED {name}: ")
        assert said.err.count("\n") == 1
        assert not said.out
    assert not Path(new).exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--candidate"], "--candidate needs --band"),
        (["--subset", "tiny"], "valid: short, 32k, 150k"),
        (["--each", "0"], "--each: at least 1"),
        (["--subset", "32k"], "dist-32k-01: in no corpus"),
        (["--subset", "short", "--concurrency", "0"], "concurrency 0: valid: 1 to 256"),
        (["--top-n", "0"], "--top-n: 1 to 1000"),
    ],
)
def test_wrong_use_is_one_line_and_code_4_and_nothing_is_asked(
    production: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    says: str,
) -> None:
    assert probe(production, tmp_path / "p.json", *words) == 4
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_what_a_band_registered_is_not_given_again(
    production: str, band: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--band", str(band), "--subset", "short", "--cache", "cold")
    assert probe(production, tmp_path / "p.json", *words) == 4
    assert "--subset, --cache: the band has registered it" in capsys.readouterr().err


def test_a_probe_inside_a_git_work_tree_is_refused_before_anything_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".git").mkdir()
    # Nobody listens there: the path is looked at first.
    assert probe("http://127.0.0.1:9", tmp_path / "p.json", "--subset", "short") == 4
    assert "git work tree" in capsys.readouterr().err


def test_a_server_that_does_not_answer_fails_the_probe_with_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert probe("http://127.0.0.1:9", tmp_path / "p.json", "--subset", "short") == 1
    said = capsys.readouterr().err
    assert said.startswith("dsv41 dist-gate probe: ")
    assert said.count("\n") == 1
    assert not (tmp_path / "p.json").exists()


def test_a_windows_probe_is_refused_before_its_first_request_where_the_tokens_are_others(
    production: str, band: Path
) -> None:
    plan = plan_quality(band)
    prefixes = ("0" * 64, *plan.band.prefixes[1:])
    other = replace(plan, band=replace(plan.band, prefixes=prefixes))
    asked: list[ProbeProgress] = []
    with pytest.raises(MeasurementRefused, match="dist-short-01") as refused:
        run_quality(
            Endpoint(production), other, role="control", deadline_s=20, salt="w",
            progress=asked.append,
        )  # fmt: skip
    assert refused.value.kind == "other-prompts"
    assert not asked


def test_a_text_that_is_none_is_named(
    production: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "book.txt"
    text.write_bytes("Straße".encode("latin-1"))
    words = ["dist-gate", "cuts", production, str(tmp_path / "corpus"), str(text)]
    assert main(words) == 4
    assert "book.txt: byte 4 is no UTF-8" in capsys.readouterr().err
    assert not (tmp_path / "corpus").exists()


def test_long_prompts_are_cut_pinned_and_probed(
    production: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = tmp_path / "book.txt"
    text.write_text(" ".join(f"word {number} of the book" for number in range(2000)))
    folder = tmp_path / "corpus"
    words = ["dist-gate", "cuts", production, str(folder), str(text), "--each", "2"]
    words += ["--tokens", "32k=60", "--tokens", "150k=90"]
    assert main(words) == 0
    cut = capsys.readouterr().out
    names = [*DIST_PROMPTS["32k"][:2], *DIST_PROMPTS["150k"][:2]]
    assert all(name in cut for name in names)
    # Again: nothing is cut anew, the same pins are told.
    assert main(words) == 0
    assert capsys.readouterr().out == cut
    # Other lengths are other prompts: a corpus of both would be neither's.
    for lengths in (("32k=50", "150k=90"), ("32k=60", "150k=95")):
        more = [word for length in lengths for word in ("--tokens", length)]
        assert main([*words[:-4], *more]) == 4
        said = capsys.readouterr().err
        assert "tokens, " in said
        assert "are asked: name another folder" in said
    # The pieces follow one another in the text.
    pieces = [(folder / f"{name}.txt").read_text() for name in names]
    assert text.read_text().startswith("".join(pieces))
    monkeypatch.setenv("DSV41_CORPUS", str(folder))
    out = tmp_path / "p.json"
    assert probe(production, out, "--subset", "32k,150k", "--each", "2") == 0
    found = load_probe(out)
    assert [prompt.tokens for prompt in found.prompts] == [60, 60, 90, 90]
    assert found.subset == "32k,150k"
    # A changed text is not the pinned one.
    (folder / f"{names[0]}.txt").write_text("another")
    assert probe(production, tmp_path / "q.json", "--subset", "32k", "--each", "2") == 1
    assert "REFUSED prompt-pin" in capsys.readouterr().err


def test_the_registered_prompts_are_64_and_the_short_ones_travel_with_the_package() -> None:
    assert {name: len(prompts) for name, prompts in DIST_PROMPTS.items()} == {
        "short": 32,
        "32k": 24,
        "150k": 8,
    }


def test_the_band_says_what_it_covers(band: Path) -> None:
    found, _ = load_band(band)
    assert (found.k, found.subset, len(found.prefixes)) == (3, "short", 32)
