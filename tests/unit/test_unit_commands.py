"""`dsv41 unit`: wrong words and wrong lists end with 4 and one line, before anything is asked."""

from __future__ import annotations

import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from pytest_dsv41.cli import main
from pytest_dsv41.errors import SpecError
from pytest_dsv41.unit.checklist import CHECKS, load_checklist
from pytest_dsv41.unit.drift import KINDS
from pytest_dsv41.unit.why import CAUSES
from tests.unit.odd_server import ODD, odd_server


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
        ("[[check]]\ncheck = []\n", r":2: check\[0\].check: \[\]; valid: state"),
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
        (
            '[[check]]\ncheck = "file"\npath = "/a"\nsha256 = "12"\n',
            r":4: check\[0\].sha256: '12'; valid: 64 hex digits; keys of file: name, path, sha256",
        ),
        ('[[check]]\ncheck = "fleet"\nurl = "http://h:1"\nprobes = ["x"]\n', r"valid: vision"),
        ('[[check]]\ncheck = "command"\nargv = []\n', r":3: check\[0\].argv: "),
        ('[[check]]\ncheck = "command"\nargv = ["\\u0000"]\n', r"argv\[0\]: holds a null char"),
        ('[[check]]\ncheck = "http"\nurl = "ht!tp://[::"\n', r":3: check\[0\].url: "),
        ('url = "http://h:1"\n[[check]]\ncheck = "http"\nurl = ""\n', r":4: check\[0\].url: "),
    ],
)
def test_a_wrong_list_names_file_line_and_key(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "list.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=said) as caught:
        load_checklist(path)
    assert str(caught.value).startswith(f"{path}:")
    assert "\n" not in str(caught.value)


def verified(tmp_path: Path, body: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    path = tmp_path / "list.toml"
    path.write_text(f"[[check]]\n{body}\n")
    code = main(["unit", "verify", "a", "--checklist", str(path)])
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    return code, shown.out


def test_a_command_here_ends_with_all_it_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends at once, and leaves a child behind that holds its output."""
    child = tmp_path / "child"
    body = 'check = "command"\non = "here"\ndeadline_s = 0.3\n'
    body += 'argv = ["sh", "-c", "sleep 600 & echo $! > child"]'
    code, out = verified(tmp_path, body, capsys)
    assert code == 2
    assert "no answer within 0.3 s" in out
    stat = Path("/proc", child.read_text().strip(), "stat")
    limit = time.monotonic() + 60
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < limit
        threading.Event().wait(0.02)


def test_a_command_here_that_says_gigabytes_costs_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracemalloc.start()
    try:
        body = 'check = "command"\non = "here"\ncontains = "end"\n'
        body += 'argv = ["sh", "-c", "head -c 200000000 /dev/zero; echo end"]'
        code, _ = verified(tmp_path, body, capsys)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert code == 0
    assert most < 20_000_000


@pytest.mark.parametrize(
    "name",
    [
        "trickled-headers",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("trickled-body", "headers", "endless-body")
        ),
    ],
)
def test_an_address_that_never_ends_its_answer_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with odd_server({"*": ODD[name]}) as url:
        body = f'check = "http"\nurl = "{url}/x"\ndeadline_s = 0.5'
        code, out = verified(tmp_path, body, capsys)
    assert code == 2
    assert "cannot be told" in out


def test_a_password_in_an_address_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = 'check = "http"\nurl = "http://user:canary@127.0.0.1:1/up"'
    code, out = verified(tmp_path, body, capsys)
    assert code == 2
    assert "canary" not in out
    assert "http http://127.0.0.1:1/up: cannot be told" in out


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
