"""A pytest plugin for the lab: a window waits at a named step while its test breaks something.

LAB_FAULT_AT is `<step>:<event>` of the journal. The window writes `reached` into LAB_FAULT_FOLDER
and goes on when `go` lies there, so the fault has struck before the step's next act.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

AT = os.environ.get("LAB_FAULT_AT", "")
FOLDER = Path(os.environ.get("LAB_FAULT_FOLDER", "."))


def pytest_dsv41_step(name: str, event: str) -> None:
    if f"{name}:{event}" == AT and not (FOLDER / "reached").exists():
        (FOLDER / "reached").touch()
        while not (FOLDER / "go").exists():
            time.sleep(0.005)
