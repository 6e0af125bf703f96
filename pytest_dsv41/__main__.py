"""`python -m pytest_dsv41 …` is `dsv41 …`."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
