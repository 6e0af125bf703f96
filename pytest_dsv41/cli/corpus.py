"""`dsv41 corpus cut`: texts cut to token lengths by the server's own tokenizer, and pinned."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = "Build a corpus: texts cut to asked lengths by the server's tokenizer, each pinned by hash."


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    cut = actions.add_parser("cut", help="cut prompts out of a text and add them to a corpus")
    cut.add_argument("url", metavar="URL", help="a server with /tokenize")
    cut.add_argument("text", type=Path, metavar="TEXT", help="the text to cut from")
    cut.add_argument("folder", type=Path, metavar="FOLDER", help="the corpus; made where missing")
    cut.add_argument(
        "--cut",
        action="append",
        required=True,
        metavar="NAME=TOKENS",
        help="a prompt and its length; several follow one another in the text",
    )
    cut.add_argument("--engine", default="vllm", help="vllm (default), llamacpp or radiance")
    cut.add_argument("--model", default="", help="default: the first of /v1/models")
    made = actions.add_parser("prose", help="write made-up prose to cut rehearsal prompts from")
    made.add_argument("text", type=Path, metavar="TEXT", help="the file to write; not overwritten")
    made.add_argument("--words", type=int, default=250_000, metavar="N", help="default: 250000")
    made.add_argument("--seed", type=int, default=0, metavar="N", help="another text (default: 0)")
    check = actions.add_parser("check", help="hold every text of a corpus against its pin")
    check.add_argument("folder", type=Path, metavar="FOLDER", help="the corpus")


def run(args: argparse.Namespace) -> int:
    """Cut, check, or write something to cut from."""
    from ..measure.corpus import Corpus

    if args.action == "prose":
        return _prose(args.text, args.words, args.seed)

    if args.action == "check":
        corpus = Corpus.load(args.folder)
        for name in sorted(corpus.cuts):
            prompt = corpus.prompt(name)
            print(f"{name:<20}{prompt.tokens or '–':>10} tokens  {prompt.sha256}")
        return 0
    return _cut(args)


def _cut(args: argparse.Namespace) -> int:
    from ..engines import get_engine
    from ..errors import UsageError
    from ..measure.cut import cut_texts
    from ..payload.shown import Shown
    from ..text import one_line

    wanted: list[tuple[str, int]] = []
    for pair in args.cut:
        name, equals, count = pair.partition("=")
        if not equals or not name or not count.isascii() or not count.isdigit() or not int(count):
            raise UsageError(f"--cut {one_line(pair, 80)}: write NAME=TOKENS")
        wanted.append((name, int(count)))
    engine = get_engine(args.engine)
    try:
        text = args.text.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{args.text}: not UTF-8: {error}") from None
    # Asked for by the first count: what the words, the text or the folder forbid is said before.
    model: list[str] = [args.model] if args.model else []

    def tokens(piece: str) -> int:
        if not model:
            model.append(engine.models(args.url)[0])
        return len(engine.tokenize(args.url, model[0], piece))

    with Shown(sys.stderr) as shown:
        cuts = cut_texts(text, wanted, tokens, args.folder, told=shown)
    for prompt in cuts:
        print(f"{prompt.name:<20}{prompt.tokens:>10} tokens  {prompt.sha256}")
    folder = one_line(str(args.folder))
    print(f"measure with them: DSV41_CORPUS={folder} dsv41 measure … --prompt NAME")
    return 0


def _prose(file: Path, words: int, seed: int) -> int:
    from ..durable import create_exclusive
    from ..errors import UsageError
    from ..measure.corpus import text_sha256
    from ..measure.prose import prose

    text = prose(words, seed)
    try:
        create_exclusive(file, text)
    except FileExistsError:
        raise UsageError(f"{file}: exists; it is not overwritten") from None
    print(f"{file}: {len(text.split())} words, {text_sha256(text)}")
    return 0
