"""`dsv41 stub`: a server on loopback that speaks vLLM's or llama.cpp's formats."""

from __future__ import annotations

import argparse

from pytest_dsv41.stub.profile import add_arguments, from_arguments

__all__ = ["HELP", "configure", "run"]

HELP = "serve a simulated engine on loopback, with known speed and counters"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the settings of the stub to `parser`."""
    add_arguments(parser)
    parser.add_argument("--list-faults", action="store_true", help="print the faults and end")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT and return 0. UsageError: a wrong setting, or a taken port.

    What follows is imported when it is needed: a start takes about 0.1 s, and must.
    """
    if args.list_faults:
        from pytest_dsv41.stub.faults import describe

        print(describe())
        return 0
    from pytest_dsv41.stub.server import serve_process

    return serve_process(from_arguments(args))
