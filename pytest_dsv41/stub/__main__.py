"""`python -m pytest_dsv41.stub …` is `dsv41 stub …`."""

from __future__ import annotations

import sys

from pytest_dsv41.cli import main

sys.exit(main(["stub", *sys.argv[1:]]))
