"""`dsv41 unit`: wrong words and wrong lists end with 4 and one line, before anything is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_dsv41.cli import main
from pytest_dsv41.errors import SpecError
from pytest_dsv41.unit.checklist import CHECKS, load_checklist
from pytest_dsv41.unit.drift import KINDS
from pytest_dsv41.unit.why import CAUSES


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["drift", "a", "--checkout", "none.service"], "none.service: no such file"),
        (["drift", "a", "--env-file", "shape.env"], "valid: /PATH/ON/THE/HOST=FILE"),
        (["drift", "a", "--own", "x.conf"], "--own x.conf"),
        (["drift", "a", "--key", "k"], "only with --host"),
        (["drift", "a", "--host", "u@"], "valid: [USER@]ADDRESS[:PORT]"),
        (["why", "a", "--host", "h:0"], "valid: [USER@]ADDRESS[:PORT]"),
        (["why", "a", "--user", "--sudo"], "exclude each other"),
        (["verify", "a", "--checklist", "none.toml"], "none.toml: no such file"),
        (["verify", "a"], "--checklist"),
        (["mend", "a"], "invalid choice"),
        ([], "ACT"),
    ],
)
def test_wrong_words(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code: object = main(["unit", *words])
    except SystemExit as ending:
        code = ending.code
    shown = capsys.readouterr()
    assert code == 4
    assert said in shown.err
    assert not shown.out
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r":1: no \[\[check\]\]"),
        ("check = 3\n", r"no \[\[check\]\]"),
        ("[[check]]\n", r":1: check\[0\].check: 'None'|None.*valid: state, restarts, health"),
        ('[[check]]\ncheck = "stat"\n', r":2: check\[0\].check: 'stat'.*valid: state"),
        ('[[check]]\ncheck = "state"\nactiv = "x"\n', r":3: check\[0\].activ: .*keys of state: "),
        ('[[check]]\ncheck = "port"\nport = 70000\n', r":3: check\[0\].port: "),
        ('[[check]]\ncheck = "health"\n', r"needs a url"),
        ('url = "ftp://x"\n[[check]]\ncheck = "health"\n', r"not a server's address"),
        ('[[check]]\ncheck = "models"\nurl = "x"\nids = ["a"]\n', r":3: check\[0\].url: "),
        ('engine = "nope"\n[[check]]\ncheck = "state"\n', r"valid: "),
        ('colour = 1\n[[check]]\ncheck = "state"\n', r":1: colour: unknown key"),
        ('[[check]]\ncheck = "argv"\n', r"needs flags or absent"),
        ('[[check]]\ncheck = "argv"\nflags = { "--x" = false }\n', r"belongs to absent"),
        ('[[check]]\ncheck = "environment"\n', r"needs values or absent"),
        ('[[check]]\ncheck = "ledger"\ndialect = "none"\n', r"valid: llamacpp, radiance"),
        ('[[check]]\ncheck = "ledger"\ndialect = "radiance"\nfact = "x"\n', r"belong together"),
        ('[[check]]\ncheck = "file"\npath = "/a"\nsha256 = "12"\n', r":4: check\[0\].sha256: "),
        ('[[check]]\ncheck = "fleet"\nurl = "http://h:1"\nprobes = ["x"]\n', r"valid: vision"),
        ('[[check]]\ncheck = "command"\nargv = []\n', r":3: check\[0\].argv: "),
    ],
)
def test_a_wrong_list_names_file_line_and_key(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "list.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=said) as caught:
        load_checklist(path)
    assert str(caught.value).startswith(f"{path}:")
    assert "\n" not in str(caught.value)


def test_the_pages_list_is_a_list(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "units.md").read_text("utf-8")
    text = page.partition('```toml title="cutover.toml"\n')[2].partition("```")[0]
    path = tmp_path / "cutover.toml"
    path.write_text(text)
    assert len(load_checklist(path).checks) == text.count("[[check]]")


def test_the_page_names_every_kind_and_key() -> None:
    page = (Path(__file__).parents[2] / "docs" / "units.md").read_text("utf-8")
    for kind in KINDS:
        assert f"`{kind}`" in page
    for cause in CAUSES:
        assert cause in page
    for kind, model in CHECKS.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{kind}` | `"))
        for key in set(model.model_fields) - {"check", "name"}:
            assert f"`{key}`" in row, (kind, key)
