"""`dsv41 calib push`: a corpus through a server that records a calibration."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..text import counted, one_line
from .arguments import seconds

HELP = "push a corpus through a server that records a calibration; 0 enough tokens, 1 not"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    acts = parser.add_subparsers(dest="act", metavar="ACTION", required=True)
    one = acts.add_parser("push", help="push until the threshold; 0 enough tokens, 1 not")
    one.add_argument(
        "corpus", type=Path, metavar="CORPUS", help='a line a prompt: {"prompt": …, "source": …}'
    )
    one.add_argument("url", metavar="URL", help="http://host:port, https://… or unix:PATH")
    one.add_argument(
        "--until-tokens", type=int, required=True, metavar="N", help="the server's threshold"
    )
    one.add_argument("--engine", default="", help="default: as the server says")
    one.add_argument("--model", default="", help="default: the first of /v1/models")
    one.add_argument(
        "--in-flight", type=int, default=1, metavar="N", help="prompts at once (default: 1)"
    )
    one.add_argument(
        "--timeout", type=seconds, default=3600.0, metavar="S", help="of one prompt (default: 3600)"
    )
    one.add_argument(
        "--run",
        dest="step",
        type=Path,
        metavar="DIR",
        help="journal and receipt; default: CORPUS.run",
    )
    one.add_argument("--resume", action="store_true", help="go on after the last answered prompt")
    one.add_argument("--again", action="store_true", help="begin anew although there is a receipt")
    one.add_argument(
        "--same-server",
        action="store_true",
        help="with --resume: it is the same process, though its counters do not tell",
    )


def run(args: argparse.Namespace) -> int:
    """Push, and say what was counted."""
    from ..engines import detect_engine
    from ..errors import MeasurementFailed, MeasurementRefused, UsageError, WindowStopped
    from ..payload.calib import KIND, push, read_corpus
    from ..payload.runner import from_copy, swept
    from ..payload.shown import Shown
    from ..payload.step import Step
    from ..payload.stopping import stop_on_signals

    if args.resume and args.again:
        raise UsageError("--resume and --again exclude each other")
    corpus = read_corpus(args.corpus)
    folder = args.step or args.corpus.with_name(f"{args.corpus.name}.run")
    code = from_copy(folder, args.words) if args.alone else ""
    with swept(folder), stop_on_signals() as stop:
        try:
            with Step(folder, KIND, code=code) as step, Shown(sys.stderr) as show:
                done = push(
                    corpus,
                    args.url,
                    step,
                    until_tokens=args.until_tokens,
                    engine=args.engine or detect_engine(args.url),
                    model=args.model,
                    in_flight=args.in_flight,
                    timeout_s=args.timeout,
                    resume=args.resume,
                    again=args.again,
                    same_server=args.same_server,
                    stop=stop.event,
                    progress=show,
                )
        except WindowStopped as error:
            print(f"calib push: STOPPED: {error}; --resume goes on", file=sys.stderr)
            return stop.code or 1
        except (MeasurementFailed, MeasurementRefused) as error:
            print(f"calib push: FAILED: {one_line(str(error), 500)}", file=sys.stderr)
            return 1
    how = {
        "enough": "enough was pushed; the server still answers",
        "closed": "the server closed at its threshold",
        "before": "an earlier push had done it",
    }[done.ended]
    print(f"{counted(done.tokens, 'token')} of {counted(done.prompts, 'prompt')}: {how}")
    for source, row in done.sources.items():
        print(
            f"  {one_line(source, 60):<40} {counted(row['prompts'], 'prompt'):>15} "
            f"{counted(row['tokens'], 'token'):>20}"
        )
    print(f"receipt: {folder / 'receipt.json'}")
    return 0
