"""A `dsv41-topk-1` reference recorded from a server, position by position.

Every position of a document is asked for with the document's own tokens before it, so that the
answers of two servers stand on the same text whatever either would have said.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import numpy as np
from numpy.typing import NDArray

from pytest_dsv41.errors import MeasurementFailed, MeasurementRefused, UsageError
from pytest_dsv41.measure.group import Endpoint, control_client, ended_by
from pytest_dsv41.quality.asking import AskedServer
from pytest_dsv41.quality.kl import TOP_N, Vector
from pytest_dsv41.quality.reference.kld import KldRecording
from pytest_dsv41.quality.reference.manifest import Manifest, fingerprint
from pytest_dsv41.quality.reference.recording import Recording
from pytest_dsv41.quality.reference.topk import TopkRecording, TopkWriter
from pytest_dsv41.text import one_line

__all__ = ["Plan", "corpus_plan", "plan_like", "record_topk"]

_UNPROVED: Final = (
    "whether each answer belongs to its position: the server does not repeat the prompt"
)


@dataclass(frozen=True)
class Plan:
    """What is recorded: documents as (source, token ids, score_from), and where they come from."""

    corpus: str
    corpus_fnv1a64: str
    documents: Sequence[tuple[str, NDArray[np.int32], int]]

    @property
    def rows(self) -> int:
        """How many positions are asked for."""
        return sum(len(ids) - 1 - start for _, ids, start in self.documents)


def corpus_plan(path: Path, tokenize: Callable[[str], Sequence[int]]) -> Plan:
    """Plan the recording of a corpus: JSON lines of `prompt`, `source` and `score_from` (FORMATS).

    `tokenize` is the server's own; the tokens that it puts in front belong to the document.

    Raises:
        UsageError: a line is none, or leaves nothing to score; the message is `file:line: …`.
    """
    documents = []
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: not a regular file: it is read twice")
    with path.open("rb") as lines:
        corpus = fingerprint(lines)
        lines.seek(0)
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            prompt, source, start = _corpus_line(f"{path}:{number}", line)
            ids = np.asarray(tokenize(prompt), np.int32)
            if len(ids) - 1 - start < 1:
                raise UsageError(
                    f"{path}:{number}: {len(ids)} tokens leave nothing to score from position "
                    f"{start}"
                )
            documents.append((source, ids, start))
    if not documents:
        raise UsageError(f"{path}: holds no documents")
    return Plan(str(path), corpus, documents)


def _corpus_line(where: str, line: bytes) -> tuple[str, str, int]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where}: is not JSON") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise UsageError(f"{where}: has no text 'prompt'")
    _refuse_halves(f"{where}: prompt", entry["prompt"])
    source, start = entry.get("source", ""), entry.get("score_from", 0)
    if not isinstance(source, str):
        raise UsageError(f"{where}: source: {one_line(str(source), 40)} is no text")
    _refuse_halves(f"{where}: source", source)
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise UsageError(
            f"{where}: score_from: {one_line(str(start), 40)}; an integer of at least 0 is needed"
        )
    return entry["prompt"], source, start


def _refuse_halves(where: str, text: str) -> None:
    """JSON can write half of a surrogate pair, which is in no text that could be sent or kept."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise UsageError(
            f"{where}: character {error.start + 1} is {half}, half of a surrogate pair: no text"
        ) from None


def plan_like(recording: Recording) -> Plan:
    """Plan the recording of the tokens that another recording holds.

    Raises:
        UsageError: a base file, which keeps no lists to be compared with.
    """
    if not isinstance(recording, (KldRecording, TopkRecording)):
        raise UsageError(f"{recording.path}: a base file keeps no lists; convert it first")
    documents = []
    first = 0
    for one in recording.documents:
        documents.append((one.source, recording.tokens[first : first + one.tokens], one.score_from))
        first += one.tokens
    return Plan(recording.corpus, recording.manifest.fields["corpus_fnv1a64"], documents)


def record_topk(
    endpoint: Endpoint,
    plan: Plan,
    folder: Path,
    *,
    deadline_s: float,
    top_n: int = TOP_N,
    cache: str = "cached",
    concurrency: int = 1,
    progress: Callable[[int, int], None] | None = None,
    stop: threading.Event | None = None,
    context: ssl.SSLContext | None = None,
) -> Manifest:
    """Record `plan` into `folder`. Nothing is retried; what ends it leaves it unfinished.

    Args:
        endpoint: the server; it must take prompts of token ids and give log-probabilities by id.
        plan: see `corpus_plan` and `plan_like`.
        folder: a new one, or that of an unfinished recording.
        deadline_s: everything is over by then.
        top_n: entries of a list.
        cache: `cached` (one salt a document: a position builds on those before it) or `cold`.
        concurrency: documents at a time.
        progress: called with (positions done, in all), one call at a time.
        stop: ends the recording within a fraction of a second once it is set.
        context: TLS settings; None for the system's.

    Raises:
        UsageError: a setting is none, or the folder cannot be used.
        MeasurementFailed: a request did not deliver; kinds `connection`, `status`, `stopped`,
            `deadline`.
        MeasurementRefused: kinds of `AskedServer`.
    """
    if cache not in ("cached", "cold"):
        raise UsageError(f"cache {one_line(cache, 40)!r}: valid: cached, cold")
    if not 1 <= concurrency <= 256 or not 1 <= top_n <= 1000:
        raise UsageError("valid: a concurrency of 1 to 256, lists of 1 to 1000 tokens")
    deadline_ns = time.monotonic_ns() + int(deadline_s * 1e9)
    with (
        ended_by(stop, deadline_ns),
        control_client(endpoint, stop=stop, deadline_ns=deadline_ns, context=context) as client,
    ):
        server = AskedServer(endpoint, client)
        facts = {
            "engine": server.engine.name,
            "version": server.version,
            "conditions": {"cache": cache, "concurrency": concurrency},
        }
        run = _Run(server, top_n, cache, plan.rows, progress)
        writer = TopkWriter(
            folder,
            model=server.model,
            corpus=plan.corpus,
            corpus_fnv1a64=plan.corpus_fnv1a64,
            top_n=top_n,
            documents=plan.documents,
            facts=facts,
        )
        with writer, contextlib.ExitStack() as clients, ThreadPoolExecutor(concurrency) as pool:
            own = threading.local()

            def ask(number: int) -> list[Vector]:
                if not hasattr(own, "client"):
                    # Its own connection, closed with all others when the recording ends.
                    opened = control_client(
                        endpoint, stop=stop, deadline_ns=deadline_ns, context=context
                    )
                    with run.lock:
                        own.client = clients.enter_context(opened)
                return run.document(number, plan.documents[number], own.client)

            asked = [pool.submit(ask, number) for number in range(len(plan.documents))]
            try:
                for document in asked:
                    for vector in document.result():
                        writer.append(vector)
            except BaseException:
                run.over.set()
                for document in asked:
                    document.cancel()
                if run.first is not None:
                    # What ended the recording is said, not that it ended the others.
                    raise run.first from None
                raise
            server.prove_same(client)
            return writer.finish(*(() if run.echoed else (_UNPROVED,)))


class _Run:
    """One recording: what stays the same from position to position."""

    def __init__(
        self,
        server: AskedServer,
        top_n: int,
        cache: str,
        total: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.first: BaseException | None = None
        self.echoed = True
        self._server = server
        self._top_n = top_n
        self._cold = cache == "cold"
        self._salt = f"kl-{secrets.token_hex(8)}"
        self._total = total
        self._progress = progress
        self._done = 0

    def document(
        self, number: int, document: tuple[str, NDArray[np.int32], int], client: httpx.Client
    ) -> list[Vector]:
        """Ask for every scored position of one document, one after the other."""
        _, ids, start = document
        try:
            return [
                self._ask(number, ids[: at + 1].tolist(), at == start, client)
                for at in range(start, len(ids) - 1)
            ]
        except BaseException as error:
            with self.lock:
                self.first = self.first or error
            self.over.set()
            raise

    def _ask(self, number: int, prefix: list[int], first: bool, client: httpx.Client) -> Vector:
        if self.over.is_set():
            raise MeasurementFailed("stopped", "another document ended the recording")
        cache = "cold" if self._cold else "fill" if first else "warm"
        # A document's own: what it shares with another is not taken from that one's cache.
        salt = f"{self._salt}-{len(prefix)}-{number}" if self._cold else f"{self._salt}-{number}"
        where = f"document {number}, {len(prefix)} tokens"
        try:
            found = self._server.next_token(
                prefix, self._top_n, cache=cache, salt=salt, client=client
            )
        except MeasurementRefused as error:
            raise MeasurementRefused(error.kind, f"{where}: {error}") from None
        except MeasurementFailed as error:
            raise MeasurementFailed(error.kind, f"{where}: {error}") from None
        with self.lock:
            self.echoed &= found.echoed
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, self._total)
        return found.top
