"""A server's memory by law and by ledger: what a shape needs, and what a boot says it got.

`law` reads a dialect's data file and computes what a KV pool backs and needs; `ledger` reads the
lines that a server prints as it starts, checks that they agree with themselves and with the flags,
and sets two of them side by side; `plan` holds a wanted shape against both before a restart.
"""

from __future__ import annotations

from pytest_dsv41.unit.memory.law import Group, Law, law_from
from pytest_dsv41.unit.memory.ledger import (
    Change,
    Fact,
    Ledger,
    budget_ceiling,
    check_ledger,
    diff_ledgers,
    parse_ledger,
)
from pytest_dsv41.unit.memory.plan import (
    Alternative,
    LawCheck,
    MemoryPlan,
    Shape,
    alternatives,
    law_against,
    make_plan,
    printed_dtype,
)
from pytest_dsv41.unit.memory.served import ledger_shape
from pytest_dsv41.unit.memory.shipped import read_law, shipped_laws

__all__ = [
    "Alternative",
    "Change",
    "Fact",
    "Group",
    "Law",
    "LawCheck",
    "Ledger",
    "MemoryPlan",
    "Shape",
    "alternatives",
    "budget_ceiling",
    "check_ledger",
    "diff_ledgers",
    "law_against",
    "law_from",
    "ledger_shape",
    "make_plan",
    "parse_ledger",
    "printed_dtype",
    "read_law",
    "shipped_laws",
]
