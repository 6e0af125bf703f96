"""What a window runs beside its measured cells: quality cells, and start A of the A/A pilot."""

from __future__ import annotations

from pytest_dsv41.fixtures import Pilot, Probed
from pytest_dsv41.measure.cell import runs_beside


@runs_beside("quality")
def test_quality(probed: Probed) -> None:
    """The distributional probe over the band's prompts, under the band's conditions."""
    probed()


@runs_beside("pilot")
def test_pilot(pilot: Pilot) -> None:
    """Production's configuration, measured to be measured again once production is back."""
    pilot()
