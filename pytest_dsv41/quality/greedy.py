"""Greedy answers of two arms side by side: identical, parted at a near tie, or parted.

At temperature 0 two servers of one model part where two tokens were nearly equally likely and
rounding decided. A registered limit says how near is near: at the first token that differs, the
control's log-probability of its own token minus that of the candidate's token (RULES section 4,
"Near tie"). The check after a restore knows no near tie: there answers are identical or it fails.
"""

from __future__ import annotations

import secrets
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar, Final, Literal

from pytest_dsv41.durable import dump_json
from pytest_dsv41.errors import MeasurementFailed, MeasurementRefused, UsageError
from pytest_dsv41.measure.corpus import text_sha256
from pytest_dsv41.measure.group import Endpoint, control_client, ended_by
from pytest_dsv41.quality.asking import AskedServer
from pytest_dsv41.quality.kl import TOP_N, Vector, checked_vector
from pytest_dsv41.quality.sealed import outside_git, read_sealed, write_sealed

__all__ = [
    "NEAR_TIE_NATS",
    "SCHEMA",
    "Divergence",
    "GreedyProgress",
    "GreedyPrompt",
    "GreedyRecord",
    "GreedyRow",
    "PromptOutcome",
    "ask_prefixes",
    "compare_greedy",
    "load_greedy",
    "record_divergences",
    "run_greedy",
    "save_greedy",
]

SCHEMA: Final = "dsv41-greedy-1"
NEAR_TIE_NATS: Final = 0.501
"""The default limit of a near tie, in nats; another one is a registration."""
_STRICT: Final = {"extra": "forbid", "allow_inf_nan": False}


@dataclass(frozen=True)
class GreedyPrompt:
    """A prompt to be answered: its name and text."""

    name: str
    text: str


@dataclass(frozen=True)
class GreedyRow:
    """One answer: the prompt's and the answer's token ids, and the candidates for each token.

    An entry of `tops` is None where the server tells none for that token.
    """

    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT

    name: str
    prompt_sha256: str
    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: str
    tops: tuple[Vector | None, ...]


@dataclass(frozen=True)
class Divergence:
    """Where a candidate left the control: the common prefix, and the candidate's own candidates.

    `at` counts the answer's tokens from 0. A following control start is asked for the same prefix
    (`greedy_kl.compare_recorded`).
    """

    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT

    name: str
    at: int
    prefix_ids: tuple[int, ...]
    prefix_sha256: str
    top: Vector


@dataclass(frozen=True)
class GreedyRecord:
    """One arm's greedy answers, each asked alone and cold."""

    __pydantic_config__: ClassVar[Mapping[str, object]] = _STRICT

    schema: Literal["dsv41-greedy-1"]
    run: str
    engine: str
    version: str
    model: str
    max_tokens: int
    top_n: int
    started_utc: str
    rows: tuple[GreedyRow, ...]
    divergences: tuple[Divergence, ...]


@dataclass(frozen=True)
class GreedyProgress:
    """How far a run is."""

    done: int
    total: int
    prompt: str
    elapsed_s: float


@dataclass(frozen=True)
class PromptOutcome:
    """One prompt in both arms.

    `at` is the first token that differs, counted from 0; `margin` the control's preference for its
    own token there, in nats. Without a margin (`why` says what is missing) it is no near tie.
    """

    name: str
    outcome: Literal["IDENTICAL", "NEAR TIE", "DIVERGED"]
    at: int | None
    margin: float | None
    why: str


def run_greedy(
    endpoint: Endpoint,
    prompts: Sequence[GreedyPrompt],
    *,
    max_tokens: int,
    deadline_s: float,
    top_n: int = TOP_N,
    salt: str = "greedy",
    progress: Callable[[GreedyProgress], None] | None = None,
    stop: threading.Event | None = None,
    context: ssl.SSLContext | None = None,
) -> GreedyRecord:
    """Ask every prompt at temperature 0, one after the other, each cold.

    Raises:
        UsageError: no prompts, or one name twice.
        MeasurementFailed: a request did not deliver.
        MeasurementRefused: kinds of `Engine.greedy` and `checked_vector`; `warm-cache`,
            `other-server`, `reset`.
    """
    if not prompts or len({prompt.name for prompt in prompts}) != len(prompts):
        raise UsageError("a greedy run needs prompts, each once")
    deadline_ns = time.monotonic_ns() + int(deadline_s * 1e9)
    started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    began = time.monotonic()
    with (
        ended_by(stop, deadline_ns),
        control_client(endpoint, stop=stop, deadline_ns=deadline_ns, context=context) as client,
    ):
        asked = AskedServer(endpoint, client)
        engine, model = asked.engine, asked.model
        run = f"{salt}-{secrets.token_hex(8)}"
        rows = []
        for done, prompt in enumerate(prompts, 1):
            ids = tuple(engine.tokenize(endpoint.url, model, prompt.text, client=client))
            try:
                found = engine.greedy(
                    endpoint.url,
                    model,
                    ids,
                    max_tokens,
                    top_n,
                    cache="cold",
                    salt=f"{run}-{done}",
                    client=client,
                )
                asked.check(found, "cold")
                tops = tuple(
                    None if top is None else checked_vector(top, top_n=top_n) for top in found.tops
                )
            except MeasurementRefused as error:
                raise MeasurementRefused(error.kind, f"{prompt.name}: {error}") from None
            except MeasurementFailed as error:
                raise MeasurementFailed(error.kind, f"{prompt.name}: {error}") from None
            rows.append(
                GreedyRow(
                    prompt.name, text_sha256(prompt.text), ids, found.tokens, found.finish, tops
                )
            )
            if progress is not None:
                elapsed = time.monotonic() - began
                progress(GreedyProgress(done, len(prompts), prompt.name, elapsed))
        asked.prove_same(client)
        return GreedyRecord(
            schema="dsv41-greedy-1",
            run=run,
            engine=engine.name,
            version=asked.version,
            model=model,
            max_tokens=max_tokens,
            top_n=top_n,
            started_utc=started,
            rows=tuple(rows),
            divergences=(),
        )


def compare_greedy(
    control: GreedyRecord, candidate: GreedyRecord, *, near_tie_nats: float = NEAR_TIE_NATS
) -> tuple[PromptOutcome, ...]:
    """Set two arms' answers side by side; `near_tie_nats` is the registered limit.

    Raises:
        UsageError: a limit that is none.
        MeasurementRefused: kind `same-run` (one run against itself); kind `other-prompts`: the
            arms answered other prompts, or split them otherwise; kind `max-tokens`.
    """
    if control.run == candidate.run:
        raise MeasurementRefused("same-run", f"both are the run {control.run}")
    if not 0 <= near_tie_nats < float("inf"):
        raise UsageError(f"near tie {near_tie_nats!r}: valid: 0 and more nats")
    asked = [[(row.name, row.prompt_ids) for row in record.rows] for record in (control, candidate)]
    if asked[0] != asked[1]:
        raise MeasurementRefused("other-prompts", "the two arms answered other prompts")
    if control.max_tokens != candidate.max_tokens:
        raise MeasurementRefused(
            "max-tokens", f"one had {control.max_tokens} tokens, the other {candidate.max_tokens}"
        )
    return tuple(
        _outcome(mine, theirs, near_tie_nats)
        for mine, theirs in zip(control.rows, candidate.rows, strict=True)
    )


def _outcome(control: GreedyRow, candidate: GreedyRow, limit: float) -> PromptOutcome:
    own, theirs = control.tokens, candidate.tokens
    at = next(
        (i for i, pair in enumerate(zip(own, theirs, strict=False)) if len(set(pair)) > 1), -1
    )
    if at < 0:
        if len(own) == len(theirs):
            return PromptOutcome(control.name, "IDENTICAL", None, None, "")
        return PromptOutcome(
            control.name,
            "DIVERGED",
            min(len(own), len(theirs)),
            None,
            f"one ends after {len(own)} tokens ({control.finish}), the other after "
            f"{len(theirs)} ({candidate.finish})",
        )
    top = dict(control.tops[at] or ())
    missing = [
        f"the control tells no probability of {whose} token"
        for whose, token in (("its own", own[at]), ("the candidate's", theirs[at]))
        if token not in top
    ]
    if missing:
        return PromptOutcome(control.name, "DIVERGED", at, None, missing[0])
    margin = top[own[at]] - top[theirs[at]]
    near = margin <= limit
    return PromptOutcome(control.name, "NEAR TIE" if near else "DIVERGED", at, margin, "")


def record_divergences(
    endpoint: Endpoint,
    control: GreedyRecord,
    candidate: GreedyRecord,
    *,
    probe_salt_prefix: str,
    deadline_s: float,
    progress: Callable[[GreedyProgress], None] | None = None,
    stop: threading.Event | None = None,
    context: ssl.SSLContext | None = None,
) -> GreedyRecord:
    """Return `candidate` with its distribution at every divergence, asked of its running server.

    Each prefix (prompt and common answer) is asked under a salt of its own that begins with
    `probe_salt_prefix`.

    Raises:
        MeasurementFailed, MeasurementRefused: as in `run_greedy` and `compare_greedy`.
    """
    found = []
    tokens = {row.name: row for row in candidate.rows}
    for outcome in compare_greedy(control, candidate):
        if outcome.at is None:
            continue
        row = tokens[outcome.name]
        found.append((outcome.name, outcome.at, row.prompt_ids + row.tokens[: outcome.at]))
    tops = ask_prefixes(
        endpoint,
        [(name, prefix) for name, _, prefix in found],
        top_n=candidate.top_n,
        salt_prefix=probe_salt_prefix,
        deadline_s=deadline_s,
        progress=progress,
        stop=stop,
        context=context,
    )
    divergences = tuple(
        Divergence(name, at, prefix, text_sha256(dump_json(list(prefix))), top)
        for (name, at, prefix), top in zip(found, tops, strict=True)
    )
    return GreedyRecord(**{**vars(candidate), "divergences": divergences})


def ask_prefixes(
    endpoint: Endpoint,
    prefixes: Sequence[tuple[str, Sequence[int]]],
    *,
    top_n: int,
    salt_prefix: str,
    deadline_s: float,
    progress: Callable[[GreedyProgress], None] | None = None,
    stop: threading.Event | None = None,
    context: ssl.SSLContext | None = None,
) -> list[Vector]:
    """Ask for the candidates after each (name, prefix), cold, each under a fresh salt.

    Raises:
        MeasurementFailed, MeasurementRefused: as in `AskedServer`, with the prefix's name.
    """
    began = time.monotonic()
    deadline_ns = time.monotonic_ns() + int(deadline_s * 1e9)
    with (
        ended_by(stop, deadline_ns),
        control_client(endpoint, stop=stop, deadline_ns=deadline_ns, context=context) as client,
    ):
        asked = AskedServer(endpoint, client)
        tops = []
        for done, (name, prefix) in enumerate(prefixes, 1):
            salt = f"{salt_prefix}-{secrets.token_hex(8)}"
            where = f"{name}, {len(prefix)} tokens"
            try:
                found = asked.next_token(prefix, top_n, cache="cold", salt=salt, client=client)
            except MeasurementRefused as error:
                raise MeasurementRefused(error.kind, f"{where}: {error}") from None
            except MeasurementFailed as error:
                raise MeasurementFailed(error.kind, f"{where}: {error}") from None
            tops.append(found.top)
            if progress is not None:
                elapsed = time.monotonic() - began
                progress(GreedyProgress(done, len(prefixes), name, elapsed))
        asked.prove_same(client)
        return tops


def save_greedy(path: Path, record: GreedyRecord) -> str:
    """Write `record` to a new file and return its seal.

    Raises:
        UsageError: the path lies in a git work tree, or the file exists.
    """
    return write_sealed(outside_git(path), asdict(record))


def load_greedy(path: Path) -> GreedyRecord:
    """Read a record.

    Raises:
        UsageError: it is none.
        MeasurementRefused: kind `greedy-edited`.
    """
    record, _ = read_sealed(path, "greedy", SCHEMA, GreedyRecord)
    if any(len(row.tops) != len(row.tokens) for row in record.rows):
        raise UsageError(f"{path}: a row has not one list a token")
    return record
