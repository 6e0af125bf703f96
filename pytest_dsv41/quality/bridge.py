"""The bridge: what links today's production to the acceptance that older prompts once had.

Report-only. Its cells are seeded, three pairs each, and run in start A of the A/A pilot. A
reference counts only for the very prompt it was measured on, which its hash says; length (512
against 1,500 tokens of the same prompt on the same day) is kept apart from date (WIN2 "Seeded A/A
pilot recipe", the bridging table).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..measure.cell import Sampling
from ..measure.seeded import SeededCell

__all__ = [
    "BRIDGE_CELLS",
    "BRIDGE_SAMPLING",
    "REFERENCES",
    "Reference",
    "bridge_report",
    "pin_fault",
]

BRIDGE_SAMPLING: Final = Sampling(temperature=1.0, thinking=True, priority=10)
"""The settings of the production whose references these are: T 1, thinking, priority 10."""

_ESTIMATED_S_PER_TOKEN: Final = 38 / 6 / 256
"""WIN2's estimate of a seeded short pair, a token."""

_PINNED: Final = ("bridge-bench2-legal-1500", "bridge-bench2-summary32k-1500")
"""Cells that stand for one prompt only: another text under its name is never sent."""

H4_CELL: Final = "bridge-bench2-summary32k-1500"
_H4_CHANGED: Final = 1.06


@dataclass(frozen=True)
class Reference:
    """Accepted per round as it once was. `prompt` is the beginning of the prompt's sha256."""

    prompt: str
    value: float
    when: str
    low: float | None = None
    high: float | None = None


REFERENCES: Final[dict[str, Reference]] = {
    "bridge-bench2-legal-1500": Reference("dbc88a4f5274", 1.002, "10-22 to 10-24", 0.986, 1.018),
    H4_CELL: Reference("82a1d8a1d7e7", 1.589, "10-22 to 10-24", 1.563, 1.615),
    "bridge-short-512": Reference("932db59f8e4c", 1.294, "10-27"),
    "bridge-short-1500": Reference("932db59f8e4c", 1.146, "10-26"),
    "bridge-32k0-512": Reference("0ac74617c153", 1.048, "10-27"),
    "bridge-32k0-1500": Reference("0ac74617c153", 0.949, "10-26"),
}
"""Each bridge cell's reference, of its own prompt alone."""


def _cell(name: str, prompt: str, max_tokens: int, seed_base: int, description: str) -> SeededCell:
    return SeededCell(
        name,
        (prompt,),
        max_tokens,
        api="chat",
        sampling=BRIDGE_SAMPLING,
        seed_base=seed_base,
        pairs=3,
        report_only=True,
        estimated_s=max_tokens * _ESTIMATED_S_PER_TOKEN,
        description=description,
    )


BRIDGE_CELLS: Final[dict[str, SeededCell]] = {
    cell.name: cell
    for cell in (
        _cell("bridge-bench2-legal-1500", "bench2-legal-short", 1500, 60_000, "bench2 legal-short"),
        _cell(H4_CELL, "bench2-summary-32k", 1500, 61_000, "bench2 summary-32K"),
        _cell("bridge-short-512", "short", 512, 62_000, "corpus short"),
        _cell("bridge-short-1500", "short", 1500, 63_000, "corpus short"),
        _cell("bridge-32k0-512", "32k-0", 512, 64_000, "corpus 32k-0"),
        _cell("bridge-32k0-1500", "32k-0", 1500, 65_000, "corpus 32k-0"),
    )
}
"""The bridge's cells by name; the bench2 prompts come from a corpus of yours, under these names."""

_LENGTHS: Final = {
    "short": ("bridge-short-512", "bridge-short-1500"),
    "32k-0": ("bridge-32k0-512", "bridge-32k0-1500"),
}


def pin_fault(cell: str, prompt_sha256: str) -> str | None:
    """Why a bridge cell must not run on this prompt; None: it may.

    The two bench prompts are the reference's own or none (WIN2: refused unless they hash to it).
    """
    pin = REFERENCES[cell].prompt
    if cell not in _PINNED or prompt_sha256.startswith(pin):
        return None
    return f"prompt-pin: the prompt hashes to {prompt_sha256[:12]}…, pinned is {pin}…"


def bridge_report(cells: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Set what the bridge read beside its references. It never decides anything.

    Args:
        cells: cell to its record in start A (`pilot.cell_record`), or to `{"refused": why}`.

    Returns:
        `cells`: each cell's accepted per round (pooled: all accepted over all rounds), its
        reference where the prompt is the reference's own, and what is missing; `lengths`: each
        corpus prompt's 512 minus 1,500 tokens; `h4`: one line, and `production_changed` (None:
        not read).
    """
    rows = {name: _row(name, cells.get(name)) for name in BRIDGE_CELLS}
    read = {name: row["accepted_per_round"] for name, row in rows.items()}
    lengths: dict[str, float | None] = {}
    for prompt, (short, long) in _LENGTHS.items():
        one, two = read[short], read[long]
        lengths[prompt] = None if one is None or two is None else one - two
    return {"cells": rows, "lengths": lengths, **_h4(rows[H4_CELL])}


def _row(name: str, record: Mapping[str, Any] | None) -> dict[str, Any]:
    known = REFERENCES[name]
    row: dict[str, Any] = {
        "accepted_per_round": None,
        "pairs": 0,
        "reference": None,
        "difference": None,
        "missing": None,
    }
    if record is None or "pairs" not in record:
        return {**row, "missing": str((record or {}).get("refused", "not run"))}
    accepted = [pair.get("accepted") for pair in record["pairs"]]
    rounds = [pair.get("rounds") for pair in record["pairs"]]
    if any(value is None for value in (*accepted, *rounds)) or not sum(rounds):
        return {**row, "missing": "the server does not tell rounds and accepted drafts"}
    if not record.get("speculates", True):
        return {**row, "missing": "the server does not speculate"}
    reading = sum(accepted) / sum(rounds)
    row |= {"accepted_per_round": reading, "pairs": len(rounds)}
    if not str(record["prompt_sha256"]).startswith(known.prompt):
        return {**row, "missing": "no reference: it is of another prompt"}
    reference = {"value": known.value, "low": known.low, "high": known.high, "when": known.when}
    return {**row, "reference": reference, "difference": reading - known.value}


def _h4(row: Mapping[str, Any]) -> dict[str, Any]:
    """The H4 line: nearer 1.06 than 1.589 flags a change of production between the two dates."""
    unchanged = REFERENCES[H4_CELL].value
    if row["reference"] is None:
        return {"h4": f"H4: not read ({row['missing']})", "production_changed": None}
    reading = float(row["accepted_per_round"])
    changed = abs(reading - _H4_CHANGED) < abs(reading - unchanged)
    if changed:
        told = f"nearer {_H4_CHANGED} than {unchanged}: production changed between 10-24 and 10-26"
    else:
        told = f"not nearer {_H4_CHANGED} than {unchanged}: no change of production is flagged"
    return {
        "h4": f"H4: summary-32K reads {reading:.3f} accepted per round, {told}",
        "production_changed": changed,
    }
