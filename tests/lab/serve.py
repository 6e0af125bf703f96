"""The embedded stub on every address of a lab host: `dsv41 stub` itself keeps to loopback."""

from __future__ import annotations

import argparse

from pytest_dsv41.stub.profile import add_arguments, from_arguments
from pytest_dsv41.stub.server import serve_process

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    profile = from_arguments(parser.parse_args())
    raise SystemExit(serve_process(profile._replace(host="0.0.0.0")))
