"""`dsv41 ab URL_A URL_B`: the shortest way to an answer between two servers that already run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..engines import check_url, detect_engine, unix_path
from ..errors import UsageError

HELP = (
    "Compares two servers that already run: A is the control, B the candidate. Requests alternate "
    "between them, so that both are never loaded at once. Writes the window file it runs, and "
    "leaves the window's folder. Exit code: 0 CANDIDATE, 10 INCONCLUSIVE, 11 NOT A CANDIDATE, 12 "
    "INCOMPLETE, 13 REFUSED."
)

_TEMPLATE = """\
# Written by `dsv41 ab`. The same comparison again: pytest --window=THIS_FILE

[window]
lane = "AB"
name = "ab"
hypothesis = {hypothesis}
schedule = "{schedule}"
repeats = 1
pairing = "adjacent"
out = {out}
start_estimate_s = 0.1

[arms.a]
role = "control"
symbol = "K"
settings = {{ url = {a_url} }}

[arms.b]
role = "candidate"
symbol = "I"
settings = {{ url = {b_url} }}

[[cells]]
name = {cell}
decision = true
primary = {primary}
guards = {guards}

[target]
kind = "endpoints"
engine = {engine}
model = {model}
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("url_a", metavar="URL_A", help="the control's server")
    parser.add_argument("url_b", metavar="URL_B", help="the candidate's server")
    parser.add_argument("--engine", default="auto", help="vllm, llamacpp, … (default: found out)")
    parser.add_argument("--model", default="", help="the served model's name (default: asked)")
    parser.add_argument("--cell", default="decode-b1", help="the cell (default: decode-b1)")
    parser.add_argument(
        "--primary", default="", help="the metric that decides (default: ms_per_round, or ttft_ms)"
    )
    parser.add_argument("--repeats", type=int, default=6, help="pairs, at least 3 (default: 6)")
    parser.add_argument("--seed", type=int, default=None, help="the window's seed")
    parser.add_argument(
        "--window-override",
        metavar="REASON",
        help="open it although the window cap of lane AB refuses; the reason is recorded",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("dsv41-windows"),
        help="where the folder is made (default: dsv41-windows)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the window file and run it; the exit code is the window's."""
    if not 3 <= arguments.repeats <= 1000:
        raise UsageError(f"--repeats {arguments.repeats}: valid: 3 to 1000")
    a, b = _url(arguments.url_a, "URL_A"), _url(arguments.url_b, "URL_B")
    engine = arguments.engine
    if engine == "auto":
        engine = detect_engine(a)
        other = detect_engine(b)
        if other != engine:
            raise UsageError(f"{a} speaks {engine} and {b} speaks {other}; compare equal engines")
    prefill = arguments.cell.startswith("prefill")
    primary = arguments.primary or ("ttft_ms" if prefill else "ms_per_round")
    guards = [] if prefill else ["client_tok_s"]
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    number = 1
    while (file := out / (f"ab-{number}.toml" if number > 1 else "ab.toml")).exists():
        number += 1
    file.write_text(
        _TEMPLATE.format(
            hypothesis=json.dumps(f"{b} against {a}"),
            schedule="/".join(["K/I"] * arguments.repeats),
            out=json.dumps(str(out)),
            a_url=json.dumps(a),
            b_url=json.dumps(b),
            cell=json.dumps(arguments.cell),
            primary=json.dumps(primary),
            guards=json.dumps([guard for guard in guards if guard != primary]),
            engine=json.dumps(engine),
            model=json.dumps(arguments.model),
        ),
        encoding="utf-8",
    )
    import pytest

    words = [f"--window={file}", f"--rootdir={out}", "-p", "no:cacheprovider", "-q"]
    # This process has imported the plugin already, which pytest would warn of.
    words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    if arguments.seed is not None:
        words.append(f"--window-seed={arguments.seed}")
    if arguments.window_override is not None:
        words.append(f"--window-override={arguments.window_override}")
    return int(pytest.main(words))


def _url(text: str, name: str) -> str:
    try:
        check_url(text)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    if unix_path(text):
        raise UsageError(f"{name} {text}: write a server's address like http://127.0.0.1:8000")
    return text.rstrip("/")
