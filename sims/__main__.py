"""`python -m sims`."""

from __future__ import annotations

import signal
import sys

from .cli import main

if __name__ == "__main__":
    # `| head` ends the printing, without a traceback.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
