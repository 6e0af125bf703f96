"""The examples of the documentation do what the page says: files, commands and their exit codes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
RUN = re.compile(r"^(?P<command>\S.*?)\s+# exit (?P<code>\d+)(?:: (?P<says>.+))?$")


def _pages() -> list[Path]:
    return [p for p in sorted(DOCS.glob("*.md")) if "```sh run" in p.read_text("utf-8")]


def test_there_are_pages_with_commands() -> None:
    assert {"own-cell.md", "own-target.md"} <= {p.name for p in _pages()}


@pytest.mark.slow  # whole windows
@pytest.mark.parametrize("page", _pages(), ids=lambda p: p.stem)
def test_the_pages_commands_end_as_it_says(page: Path, tmp_path: Path) -> None:
    scripts = str(Path(sys.executable).parent)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env = {**kept, "PATH": f"{scripts}:{os.environ['PATH']}", "NO_COLOR": "1"}
    ran = 0
    for language, info, text in BLOCK.findall(page.read_text("utf-8")):
        title = re.search(r'title="([A-Za-z0-9._-]+)"', info)
        if title:
            (tmp_path / title[1]).write_text(text, encoding="utf-8")
        if language != "sh" or "run" not in info.split():
            continue
        for line in text.replace("\\\n", " ").strip().splitlines():
            found = RUN.match(line)
            assert found, f"{page.name}: {line!r} does not say how it ends"
            done = subprocess.run(
                shlex.split(found["command"]),
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                check=False,
            )
            ran += 1
            told = f"{done.stdout}\n{done.stderr}"
            assert done.returncode == int(found["code"]), f"{line}\n{told}"
            assert (found["says"] or "") in told, f"{line}\n{told}"
    assert ran


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda p: p.stem)
def test_python_examples_run(page: Path) -> None:
    """Blocks without a title are scripts with asserts; each page's share one namespace."""
    namespace: dict[str, object] = {"__name__": "docs"}
    for language, info, text in BLOCK.findall(page.read_text("utf-8")):
        if language == "python" and not info.strip():
            exec(compile(text, str(page), "exec"), namespace)


@pytest.mark.parametrize(
    "page", [DOCS.parent / "README.md", *sorted(DOCS.glob("*.md"))], ids=lambda p: p.stem
)
def test_links_point_to_something(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
