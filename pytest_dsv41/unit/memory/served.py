"""What a boot ledger says of the shape that is served: slots, window, KV dtype."""

from __future__ import annotations

from pytest_dsv41.engines.served import Served, whole_above
from pytest_dsv41.unit.memory.ledger import Ledger
from pytest_dsv41.unit.memory.plan import printed_dtype
from pytest_dsv41.unit.memory.shipped import read_law

__all__ = ["ledger_shape"]


def ledger_shape(ledger: Ledger, source: str) -> Served:
    """Return the shape a ledger tells, by `source`; what it does not tell is left out."""

    def whole(subject: str, name: str) -> int | None:
        value = ledger.number(subject, name)
        return None if value is None else whole_above(round(value))

    if ledger.dialect == "radiance":
        return Served.of(
            source,
            slots=whole("kv cache", "sequences"),
            window=whole("kv cache", "tokens each"),
            kv_dtype=printed_dtype(read_law("radiance"), ledger),
        )
    dtypes = {str(fact.value) for fact in ledger.facts if fact.name in ("K dtype", "V dtype")}
    return Served.of(
        source, window=whole("context", "n_ctx_seq"), kv_dtype="/".join(sorted(dtypes))
    )
