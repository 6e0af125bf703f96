"""The probe: what a server says of the next token at fixed positions of fixed prompts.

A prompt's last tokens are the fixed continuation: position i of n asks for the token after the
prompt's first (length - n + i) tokens, so that every answer stands on the same text whatever the
model would have said. What is kept: token ids with log-probabilities, the hash of each prefix,
and the conditions; never a text. ENGINES section 5 says why conditions matter: the same server,
asked cold or from its cache, alone or beside others, gives answers as far apart as a
requantisation does.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Final, Literal

import httpx

from pytest_dsv41.durable import dump_json
from pytest_dsv41.engines import InBand, Snapshot
from pytest_dsv41.errors import MeasurementFailed, MeasurementRefused, UsageError
from pytest_dsv41.measure.corpus import text_sha256
from pytest_dsv41.measure.group import Endpoint, at_rest, control_client, ended_by
from pytest_dsv41.quality.asking import AskedServer
from pytest_dsv41.quality.kl import TOP_N, Vector, checked_vector
from pytest_dsv41.quality.prompts import ProbePrompt
from pytest_dsv41.quality.sealed import outside_git, read_sealed, seal_of, write_sealed

__all__ = [
    "POSITIONS",
    "SCHEMA",
    "Conditions",
    "Position",
    "Probe",
    "ProbeProgress",
    "ProbedPrompt",
    "load_probe",
    "run_probe",
    "save_probe",
]

SCHEMA: Final = "dsv41-probe-1"
POSITIONS: Final = 8
"""Positions of a prompt: its last tokens."""
_STRICT: Final = {"extra": "forbid", "allow_inf_nan": False}
_SETTLE_S: Final = 5.0


@dataclass(frozen=True)
class Conditions:
    """Under which conditions a probe ran; two probes are compared only where these agree.

    `cache`: `cached` (one salt a run: a prompt's first position is cold, the others build on it) or
    `cold` (every position without cached tokens). `concurrency`: how many positions are asked at a
    time, 1 is alone. `others`: `none` (the counters prove that nobody else was served) or
    `allowed` (other traffic may have run beside the probe).
    """

    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT

    cache: Literal["cached", "cold"] = "cached"
    concurrency: int = 1
    others: Literal["none", "allowed"] = "none"

    def __post_init__(self) -> None:
        if self.cache not in ("cached", "cold"):
            raise UsageError(f"cache {self.cache!r}: valid: cached, cold")
        if self.others not in ("none", "allowed"):
            raise UsageError(f"others {self.others!r}: valid: none, allowed")
        if not 1 <= self.concurrency <= 256:
            raise UsageError(f"concurrency {self.concurrency}: valid: 1 to 256")

    def __str__(self) -> str:
        beside = "alone" if self.concurrency == 1 else f"{self.concurrency} at a time"
        others = "nobody else served" if self.others == "none" else "others may be served"
        return f"{self.cache}, {beside}, {others}"


@dataclass(frozen=True)
class ProbedPrompt:
    """A prompt that was probed: name, subset, the sha256 of its text, its tokens."""

    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT

    name: str
    subset: str
    sha256: str
    tokens: int


@dataclass(frozen=True)
class Position:
    """One answer: the candidates for the token after a prefix of `prefix_tokens` tokens.

    `prefix_sha256` is the identity of the prefix's token ids (RULES, "Prompt identity, in
    bytes"), `cached_tokens` what the server took from its cache (None: it does not tell), `top`
    the token ids with their natural log-probabilities, the likeliest first.
    """

    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT

    prompt: str
    prefix_tokens: int
    prefix_sha256: str
    cached_tokens: int | None
    top: Vector


@dataclass(frozen=True)
class Probe:
    """One run over all positions of its prompts, with everything that a comparison must know.

    `run` names the run and was its cache salt, never used twice; `band` is the seal of the band
    that a candidate is going to be judged by: who names it cannot have come before it.
    """

    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT

    schema: Literal["dsv41-probe-1"]
    run: str
    role: Literal["control", "candidate"]
    band: str | None
    engine: str
    version: str
    model: str
    top_n: int
    conditions: Conditions
    started_utc: str
    notes: tuple[str, ...]
    prompts: tuple[ProbedPrompt, ...]
    positions: tuple[Position, ...]

    @property
    def sha256(self) -> str:
        """The seal of the record: the name by which bands speak of it."""
        return seal_of(asdict(self))

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The hashes of all prefixes, in order: what was asked."""
        return tuple(position.prefix_sha256 for position in self.positions)

    @property
    def subset(self) -> str:
        """The subsets it covers, as `short,32k`."""
        return ",".join(dict.fromkeys(prompt.subset for prompt in self.prompts))

    @property
    def cached_share(self) -> float | None:
        """The share of prompt tokens that came from the cache, 0 to 1; None: not all told."""
        cached = [position.cached_tokens for position in self.positions]
        told = [tokens for tokens in cached if tokens is not None]
        if len(told) != len(cached):
            return None
        return sum(told) / sum(position.prefix_tokens for position in self.positions)

    def check(self) -> None:
        """Hold the record against itself: what a gate may rely on.

        Raises:
            MeasurementRefused: kinds `probe-positions` (a position twice, of no prompt, or
                without a prompt's), and those of `checked_vector`.
        """
        names = {prompt.name for prompt in self.prompts}
        if not self.positions or len(names) != len(self.prompts):
            raise MeasurementRefused("probe-positions", "no positions, or one prompt twice")
        if {position.prompt for position in self.positions} != names:
            raise MeasurementRefused("probe-positions", "positions and prompts do not agree")
        if len(set(self.prefixes)) != len(self.positions):
            raise MeasurementRefused("probe-positions", "one position stands there twice")
        for position in self.positions:
            try:
                vector = checked_vector(position.top, top_n=self.top_n)
            except MeasurementRefused as error:
                where = f"{position.prompt}, {position.prefix_tokens} tokens"
                raise MeasurementRefused(error.kind, f"{where}: {error}") from None
            if vector != position.top:
                raise MeasurementRefused(
                    "probe-positions", f"{position.prompt}: a list is not in order"
                )


@dataclass(frozen=True)
class ProbeProgress:
    """How far a run is."""

    done: int
    total: int
    prompt: str
    elapsed_s: float


def save_probe(path: Path, probe: Probe) -> str:
    """Write `probe` to a new file and return its seal.

    Raises:
        UsageError: the path lies in a git work tree, or the file exists.
    """
    return write_sealed(outside_git(path), asdict(probe))


def load_probe(path: Path) -> Probe:
    """Read a probe's file.

    Raises:
        UsageError: it is none.
        MeasurementRefused: kind `probe-edited`, or those of `Probe.check`.
    """
    probe, _ = read_sealed(path, "probe", SCHEMA, Probe)
    try:
        probe.check()
    except MeasurementRefused as error:
        raise MeasurementRefused(error.kind, f"{path}: {error}") from None
    return probe


def run_probe(
    endpoint: Endpoint,
    prompts: Sequence[ProbePrompt],
    *,
    deadline_s: float,
    role: Literal["control", "candidate"] = "control",
    band: str | None = None,
    prefixes: Sequence[str] | None = None,
    conditions: Conditions | None = None,
    top_n: int = TOP_N,
    positions: int = POSITIONS,
    salt: str = "probe",
    progress: Callable[[ProbeProgress], None] | None = None,
    stop: threading.Event | None = None,
    context: ssl.SSLContext | None = None,
) -> Probe:
    """Ask a server for the `top_n` likeliest tokens at the last `positions` of every prompt.

    Nothing is retried and nothing left out: a position without a trustworthy answer refuses the
    probe, with the prompt's name and the reason.

    Args:
        endpoint: the server.
        prompts: see `probe_prompts`.
        deadline_s: everything is over by then.
        role: production (`control`), or what is to be judged (`candidate`).
        band: the seal of the band that the candidate will be judged by.
        prefixes: the hashes of the positions it was registered over; where the server's tokenizer
            makes others of the prompts, nothing is asked.
        conditions: None for one salt a run, alone, nobody else served.
        top_n: entries of a list.
        positions: positions of a prompt.
        salt: the beginning of the run's name and cache salt.
        progress: called after each position, from one thread at a time.
        stop: ends the run within a fraction of a second once it is set.
        context: TLS settings; None for the system's.

    Raises:
        UsageError: no prompts, one twice, or a prompt with too few tokens.
        MeasurementFailed: a request did not deliver; kinds `connection`, `status`, `stopped`,
            `deadline`.
        MeasurementRefused: kinds of `AskedServer`, `foreign-request`, `no-counters`,
            `other-prompt`, `other-prompts`, `tokenize`.
    """
    if not prompts or len({prompt.name for prompt in prompts}) != len(prompts):
        raise UsageError("a probe needs prompts, each once")
    under = conditions or Conditions()
    deadline_ns = time.monotonic_ns() + int(deadline_s * 1e9)
    started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    with (
        ended_by(stop, deadline_ns),
        control_client(endpoint, stop=stop, deadline_ns=deadline_ns, context=context) as client,
    ):
        asked = AskedServer(endpoint, client)
        run = _Run(
            asked=asked,
            endpoint=endpoint,
            name=f"{salt}-{secrets.token_hex(8)}",
            under=under,
            top_n=top_n,
            total=len(prompts) * positions,
            progress=progress,
            stop=stop,
            deadline_ns=deadline_ns,
        )
        pieces = [run.pieces(prompt, positions, client) for prompt in prompts]
        if prefixes is not None:
            _refuse_others(pieces, prefixes)
        before = None
        if under.others == "none":
            before = run.rest(client, "before the first position", lambda _: None)
        if under.concurrency == 1:
            answers = [run.ask_prompt(piece, client) for piece in pieces]
        else:
            answers = run.ask_beside(pieces, context)
        in_band = [told for prompt in answers for _, told, _ in prompt]
        asked.prove_same(client)
        if before is not None:
            run.prove_alone(client, before, in_band)
        notes = []
        if not all(echoed for prompt in answers for _, _, echoed in prompt):
            notes.append("prompt-echo-unproved")
            _refuse_twins([position for prompt in answers for position, _, _ in prompt])
        if any(told.cached_tokens is None for told in in_band):
            notes.append("cache-unproved")
        return Probe(
            schema="dsv41-probe-1",
            run=run.name,
            role=role,
            band=band,
            engine=asked.engine.name,
            version=asked.version,
            model=asked.model,
            top_n=top_n,
            conditions=under,
            started_utc=started,
            notes=tuple(notes),
            prompts=tuple(piece.prompt for piece in pieces),
            positions=tuple(position for prompt in answers for position, _, _ in prompt),
        )


def _refuse_others(pieces: Sequence[_Pieces], prefixes: Sequence[str]) -> None:
    own = [
        (piece.prompt.name, length, piece.sha256(length))
        for piece in pieces
        for length in piece.lengths
    ]
    if len(own) != len(prefixes):
        raise MeasurementRefused(
            "other-prompts", f"{len(own)} positions; the band was registered over {len(prefixes)}"
        )
    for (name, length, sha256), theirs in zip(own, prefixes, strict=True):
        if sha256 != theirs:
            raise MeasurementRefused(
                "other-prompts",
                f"the band was registered over other positions: they differ at {name}, "
                f"{length} tokens",
            )


def _refuse_twins(positions: Sequence[Position]) -> None:
    """Where no echo proves it, the same answer to two prefixes, to the last digit, is a mix-up."""
    seen: dict[Vector, Position] = {}
    for position in positions:
        other = seen.setdefault(position.top, position)
        if other is not position:
            raise MeasurementRefused(
                "other-prompt",
                f"{other.prompt} ({other.prefix_tokens} tokens) and {position.prompt} "
                f"({position.prefix_tokens} tokens) have the same answer to the last digit",
            )


@dataclass(frozen=True)
class _Pieces:
    """A prompt's token ids, and how long its prefixes are."""

    prompt: ProbedPrompt
    ids: tuple[int, ...]
    lengths: tuple[int, ...]

    def sha256(self, length: int) -> str:
        """The identity of the first `length` tokens."""
        return text_sha256(dump_json(list(self.ids[:length])))


_Asked = tuple[Position, InBand, bool]


class _Run:
    """One run: what stays the same from position to position."""

    def __init__(
        self,
        *,
        asked: AskedServer,
        endpoint: Endpoint,
        name: str,
        under: Conditions,
        top_n: int,
        total: int,
        progress: Callable[[ProbeProgress], None] | None,
        stop: threading.Event | None,
        deadline_ns: int,
    ) -> None:
        self._deadline_ns = deadline_ns
        self.asked = asked
        self.engine = asked.engine
        self.endpoint = endpoint
        self.name = name
        self._under = under
        self._top_n = top_n
        self._total = total
        self._progress = progress
        self._stop = stop
        self._began = time.monotonic()
        self._count = itertools.count(1)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._first: BaseException | None = None

    def pieces(self, prompt: ProbePrompt, positions: int, client: httpx.Client) -> _Pieces:
        """Split a prompt as the server does."""
        ids = self.engine.tokenize(self.endpoint.url, self.asked.model, prompt.text, client=client)
        if len(ids) <= positions:
            raise UsageError(f"prompt {prompt.name}: {len(ids)} tokens; {positions + 1} needed")
        return _Pieces(
            ProbedPrompt(prompt.name, prompt.subset, text_sha256(prompt.text), len(ids)),
            tuple(ids),
            tuple(range(len(ids) - positions, len(ids))),
        )

    def ask_prompt(self, piece: _Pieces, client: httpx.Client) -> list[_Asked]:
        """Ask for every position of one prompt, one after the other."""
        out = []
        for index, length in enumerate(piece.lengths):
            if self._over.is_set():
                raise MeasurementFailed("stopped", "another prompt ended the probe")
            out.append(self._ask(piece, index, length, client))
        return out

    def _ask(self, piece: _Pieces, index: int, length: int, client: httpx.Client) -> _Asked:
        cold = self._under.cache == "cold"
        cache = "cold" if cold else "warm" if index else "fill"
        salt = f"{self.name}-{secrets.token_hex(4)}" if cold else self.name
        where = f"{piece.prompt.name}, {length} tokens"
        try:
            found = self.asked.next_token(
                piece.ids[:length],
                self._top_n,
                cache=cache,
                salt=salt,
                # A long prompt's prefill may take its time; the deadline ends it.
                timeout=max(0.1, (self._deadline_ns - time.monotonic_ns()) / 1e9),
                client=client,
            )
        except MeasurementRefused as error:
            raise MeasurementRefused(error.kind, f"{where}: {error}") from None
        except MeasurementFailed as error:
            raise MeasurementFailed(error.kind, f"{where}: {error}") from None
        sha = piece.sha256(length)
        if self._progress is not None:
            with self._lock:
                elapsed = time.monotonic() - self._began
                self._progress(
                    ProbeProgress(next(self._count), self._total, piece.prompt.name, elapsed)
                )
        position = Position(piece.prompt.name, length, sha, found.in_band.cached_tokens, found.top)
        return position, found.in_band, found.echoed

    def ask_beside(
        self, pieces: Sequence[_Pieces], context: ssl.SSLContext | None
    ) -> list[list[_Asked]]:
        """Ask for several prompts at a time, each with a connection of its own."""
        own = threading.local()
        with contextlib.ExitStack() as clients, ThreadPoolExecutor(self._under.concurrency) as pool:

            def ask(piece: _Pieces) -> list[_Asked]:
                try:
                    if not hasattr(own, "client"):
                        client = control_client(
                            self.endpoint,
                            stop=self._stop,
                            deadline_ns=self._deadline_ns,
                            context=context,
                        )
                        with self._lock:
                            own.client = clients.enter_context(client)
                    return self.ask_prompt(piece, own.client)
                except BaseException as error:
                    with self._lock:
                        self._first = self._first or error
                    self._over.set()
                    raise

            futures = [pool.submit(ask, piece) for piece in pieces]
            try:
                return [future.result() for future in futures]
            except BaseException:
                self._over.set()
                for future in futures:
                    future.cancel()
                if self._first is not None:
                    # What ended the run is said, not that it ended the others.
                    raise self._first from None
                raise

    def rest(
        self, client: httpx.Client, when: str, owed: Callable[[Snapshot], str | None]
    ) -> Snapshot:
        """Return the counters of a server that has come to rest."""
        return at_rest(self.engine, self.endpoint, client, self._stop, _SETTLE_S, when, owed)

    def prove_alone(self, client: httpx.Client, before: Snapshot, done: Sequence[InBand]) -> None:
        """Refuse where the counters moved by more, or other, than the probe's own requests."""

        def owed(now: Snapshot) -> str | None:
            self.engine.same_server(before, now)
            return self.engine.settled(before, now, done)

        after = self.rest(client, "after the last position", owed)
        server = self.engine.account(before, after, done)
        if self._under.cache == "cold" and server.cached_tokens:
            raise MeasurementRefused(
                "warm-cache", f"{server.cached_tokens} prompt tokens came from a cache: not cold"
            )
