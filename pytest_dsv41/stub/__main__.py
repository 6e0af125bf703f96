"""`python -m pytest_dsv41.stub`: the same as `dsv41 stub`."""

from __future__ import annotations

import argparse
import sys

from pytest_dsv41.cli import stub


def main() -> int:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="dsv41 stub", description=stub.HELP)
    stub.configure(parser)
    return stub.run(parser.parse_args())


sys.exit(main())
