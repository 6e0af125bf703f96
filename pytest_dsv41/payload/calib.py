"""Push a corpus through a server that records a calibration, until it has seen enough tokens.

The server sums the activations of what it is sent and ends by itself at its threshold, so its end
is the success of the step, if it comes when enough was sent, and the failure of it before
(FRANK-ARCHON "The payload chain", step 4). Counted is what the server says it computed: prompt
tokens that came from a cache were not seen by it and do not count. A prompt in flight when the
server closed counts with its length by the server's own tokenizer; one never sent does not.

What a server has seen is gone with its process: a resumed push goes on only with the same one.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from pytest_dsv41.durable import parse_json
from pytest_dsv41.engines import Engine, base_url, get_engine, unix_path
from pytest_dsv41.engines.base import read_usage
from pytest_dsv41.errors import (
    MeasurementFailed,
    MeasurementRefused,
    RefusedByWorld,
    SpecError,
    UsageError,
    WindowStopped,
)
from pytest_dsv41.payload.hashing import hash_file, identity
from pytest_dsv41.payload.step import Step, Untrusted
from pytest_dsv41.text import one_line

__all__ = ["KIND", "Corpus", "Pushed", "push", "read_corpus"]

KIND: Final = "calib push"
_LINE_MAX: Final = 64 << 20
_ANSWER_MOST: Final = 16 << 20
_IN_FLIGHT_MOST: Final = 1024
_LOOK_S: Final = 0.5
# A connection a request: one that a server closes for being idle is not the end of the server.
_ALONE: Final = httpx.Limits(max_keepalive_connections=0)
_GRACE_S: Final = 5.0  # for answers that were sent before the server closed
_FIELDS: Final = {"prompt": str, "source": str, "score_from": int}


@dataclass(frozen=True)
class Corpus:
    """A corpus that was read whole and found sound."""

    path: Path
    prompts: int
    sha256: str
    bytes: int
    sources: dict[str, int]
    """Prompts by source."""
    identity: Sequence[int]
    """What changes with the file's content (`hashing.identity`)."""

    def lines(self) -> Iterator[tuple[int, str, str]]:
        """Line number, prompt and source, in order."""
        for number, row in _rows(self.path):
            yield number, str(row["prompt"]), str(row["source"])


@dataclass(frozen=True)
class Pushed:
    """What was pushed. `tokens` is what the server computed, `prompts` those it answered.

    `ended` is `enough` (the server still answers), `closed` (it ended at its threshold) or `before`
    (an earlier push had done it).
    """

    tokens: int
    prompts: int
    ended: str
    sources: dict[str, dict[str, int]]
    """Source to its prompts and tokens."""


@dataclass
class _Sent:
    """One prompt on its way; `size` is its length in tokens, None where the server cannot tell."""

    line: int
    prompt: str
    source: str
    size: int | None


class _Closed(Exception):
    """The server went away. `reached`: it had at least the beginning of the request."""

    def __init__(self, why: str, *, reached: bool) -> None:
        super().__init__(why)
        self.reached = reached


def read_corpus(path: Path) -> Corpus:
    """Read a corpus whole: a JSON object a line with `prompt`, `source`, and maybe `score_from`.

    Raises:
        SpecError: file and line of the first that is none, or an empty corpus.
    """
    digest = hashlib.sha256()
    sources: dict[str, int] = defaultdict(int)
    size = 0
    try:
        before = identity(path)
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
                size += len(chunk)
    except UsageError as error:
        raise SpecError(str(error)) from None
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}") from None
    for _, row in _rows(path):
        sources[str(row["source"])] += 1
    if not sources:
        raise SpecError(f"{path}: holds no prompt")
    return Corpus(path, sum(sources.values()), digest.hexdigest(), size, dict(sources), before)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_LINE_MAX + 1):
            number += 1
            where = f"{path}:{number}"
            if len(line) > _LINE_MAX:
                raise SpecError(f"{where}: longer than {_LINE_MAX} bytes")
            try:
                row = parse_json(line, once=True)
            except ValueError as error:
                what = one_line(str(error), 100) if line.strip() else "an empty line"
                raise SpecError(f"{where}: not JSON: {what}") from None
            if not isinstance(row, dict):
                raise SpecError(f'{where}: valid: {{"prompt": …, "source": …}}')
            for key, kind in _FIELDS.items():
                if key == "score_from" and key not in row:
                    continue
                if key not in row:
                    raise SpecError(f"{where}: {key}: missing")
                value = row[key]
                if type(value) is not kind or (kind is str and not value):
                    wanted = "a text that is not empty" if kind is str else "a whole number"
                    raise SpecError(f"{where}: {key}: {one_line(repr(value), 60)}; valid: {wanted}")
            for key in row:
                if key not in _FIELDS:
                    raise SpecError(
                        f"{where}: unknown key {one_line(repr(key), 60)}; "
                        f"valid: {', '.join(_FIELDS)}"
                    )
            for key in ("prompt", "source"):
                try:
                    row[key].encode()
                except UnicodeEncodeError:
                    raise SpecError(
                        f"{where}: {key}: half a character (a lone surrogate)"
                    ) from None
            yield number, row


def push(
    corpus: Corpus,
    url: str,
    step: Step,
    *,
    until_tokens: int,
    engine: str,
    model: str = "",
    in_flight: int = 1,
    timeout_s: float = 3600.0,
    resume: bool = False,
    again: bool = False,
    same_server: bool = False,
    stop: threading.Event | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Pushed:
    """Send prompts, in the corpus' order, until the server has computed `until_tokens`.

    Each answered prompt is journalled; the receipt is written when enough was pushed.

    Args:
        corpus: what to send.
        url: the server.
        step: the step's folder, held.
        until_tokens: the server's threshold.
        engine: its dialect.
        model: the served name; empty: the first of `/v1/models`.
        in_flight: prompts that are sent at once.
        timeout_s: of one prompt.
        resume: go on after the last answered prompt of an earlier push.
        again: begin anew although there is a receipt.
        same_server: the caller says that the server is the process of the earlier push; needed
            where the server's counters do not tell.
        stop: set to end the push.
        progress: called with a line and the share that is done.

    Raises:
        UsageError: the earlier push was another one.
        RefusedByWorld: an earlier push was done or begun, and neither `resume` nor `again` is set;
            the server is another process than that of the earlier push, or this cannot be seen;
            the earlier push's journal is damaged; the corpus was changed while it was pushed.
        MeasurementFailed: kinds `closed` (before the threshold), `status`, `timeout`, `corpus` (its
            end came before the threshold).
        MeasurementRefused: the server's answers cannot be used.
        WindowStopped: `stop` was set.
    """
    if until_tokens < 1 or timeout_s <= 0:
        raise UsageError("--until-tokens and --timeout: at least 1")
    if not 1 <= in_flight <= _IN_FLIGHT_MOST:
        raise UsageError(f"--in-flight {in_flight}: valid: 1 to {_IN_FLIGHT_MOST:,}")
    dialect = get_engine(engine)
    if not again and not resume:
        _untouched(step)
    if resume:
        done = _done_before(step, corpus, url, until_tokens)
        if done is not None:
            return done
    asked: dict[str, Any] = {
        "corpus_sha256": corpus.sha256,
        "until_tokens": until_tokens,
        "url": url,
        "asked_model": model,
    }
    earlier = _earlier(step, asked) if resume else _Earlier({}, 0, {})
    with _client(url) as asking:
        run = _Run(dialect, url, step, earlier, corpus, until_tokens, timeout_s, progress, asking)
        if run.total >= until_tokens:
            # Everything was done but the receipt; the server may be gone since.
            step.begin({**asked, "server": earlier.server, "resume": True}, keep_journal=True)
            ended = "closed" if run.lost else "enough"
        else:
            run.model = model or dialect.models(url, client=asking)[0]
            server = _process_of(dialect, url, asking)
            if earlier.done:
                _same_process(url, earlier, server, same_server=same_server)
            step.begin({**asked, "server": server, "resume": resume}, keep_journal=resume)
            ended = asyncio.run(run.all(in_flight, stop))
    if identity(corpus.path) != corpus.identity and hash_file(corpus.path) != corpus.sha256:
        raise RefusedByWorld(
            f"{corpus.path}: was changed while it was pushed: the server may have seen either; "
            "there is no receipt"
        )
    sources = run.sources()
    tokens = sum(row["tokens"] for row in sources.values())
    prompts = sum(row["prompts"] for row in sources.values())
    step.finish(
        [{"path": str(corpus.path), "bytes": corpus.bytes, "sha256": corpus.sha256}],
        [],
        url=url,
        until_tokens=until_tokens,
        tokens=tokens,
        in_flight_tokens=run.lost,
        prompts=prompts,
        ended=ended,
        sources=sources,
    )
    return Pushed(tokens, prompts, ended, sources)


@dataclass(frozen=True)
class _Earlier:
    """What an earlier push left: answered prompts, and what was in flight when the server closed.

    `done` is line to source and tokens, `server` what told its process.
    """

    done: dict[int, tuple[str, int]]
    lost: int
    server: dict[str, float]


def _done_before(step: Step, corpus: Corpus, url: str, until_tokens: int) -> Pushed | None:
    """What a whole receipt of the same push says; None without one."""
    try:
        body = step.trusted([corpus.path])
        tokens, lost, prompts = (
            _count(body.get(key)) for key in ("tokens", "in_flight_tokens", "prompts")
        )
        sources = {
            str(source): {key: _count(row.get(key)) for key in ("prompts", "tokens")}
            for source, row in dict(body.get("sources") or {}).items()
        }
    except (Untrusted, ValueError, TypeError, AttributeError):
        return None
    if body.get("url") != url or tokens + lost < until_tokens:
        return None
    return Pushed(tokens, prompts, "before", sources)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _untouched(step: Step) -> None:
    """Refuse to push a corpus a second time unasked: the server would see it twice."""
    if step.receipt.exists():
        raise RefusedByWorld(
            f"{step.receipt}: this step is done; --resume trusts the receipt, --again pushes the "
            "corpus again"
        )
    if any(row.get("event") == "prompt" for row in step.noted()):
        raise RefusedByWorld(
            f"{step.journal}: an earlier push has not come to its end; --resume goes on, --again "
            "begins anew"
        )


def _client(url: str) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=unix_path(url), trust_env=False, limits=_ALONE)
    return httpx.Client(transport=transport, trust_env=False)


def _process_of(dialect: Engine, url: str, client: httpx.Client) -> dict[str, float]:
    """What tells one process of a server from the next; empty where its counters do not say."""
    try:
        return dict(dialect.scrape(url, client=client).created)
    except MeasurementRefused:
        return {}


def _earlier(step: Step, asked: dict[str, Any]) -> _Earlier:
    """Read what earlier pushes of the same have journalled.

    Raises:
        UsageError: an earlier push was another one.
    """
    done: dict[int, tuple[str, int]] = {}
    lost = 0
    server: dict[str, float] = {}
    for row in step.noted():
        if row.get("event") == "begin":
            for key, value in asked.items():
                if row.get(key) != value:
                    raise UsageError(
                        f"{step.folder}: the earlier push had {key} "
                        f"{one_line(str(row.get(key)), 80)!r}, now "
                        f"{one_line(str(value), 80)!r}; --again begins anew"
                    )
        try:
            if row.get("event") == "begin":
                server = server or dict(row.get("server") or {})
            elif row.get("event") == "prompt":
                tokens = _count(row.get("tokens"))
                done[_count(row.get("line"))] = str(row.get("source")), tokens
            elif row.get("event") == "closed":
                lost = _count(row.get("in_flight_tokens"))
        except (ValueError, TypeError) as error:
            raise RefusedByWorld(
                f"{step.journal}: a damaged line ({one_line(str(error), 60)}): what was pushed is "
                "not known; --again begins anew"
            ) from None
    return _Earlier(done, lost, server)


def _same_process(
    url: str, earlier: _Earlier, server: dict[str, float], *, same_server: bool
) -> None:
    tokens = sum(tokens for _, tokens in earlier.done.values())
    if earlier.server != server:
        raise RefusedByWorld(
            f"{url}: another process than the one that was sent the first {tokens:,} tokens, "
            "which are gone with it; --again begins anew"
        )
    if not server and not same_server:
        raise RefusedByWorld(
            f"{url}: its counters do not say whether it is still the process that was sent the "
            f"first {tokens:,} tokens; --same-server if you know that it is, --again begins anew"
        )


class _Run:
    """One push under way."""

    def __init__(
        self,
        dialect: Engine,
        url: str,
        step: Step,
        earlier: _Earlier,
        corpus: Corpus,
        until: int,
        timeout_s: float,
        progress: Callable[[str, float], None] | None,
        asking: httpx.Client,
    ) -> None:
        self._dialect = dialect
        self._url = url
        self._step = step
        self._done = earlier.done
        self._tokens = sum(tokens for _, tokens in earlier.done.values())
        self._corpus = corpus
        self._until = until
        self._timeout = timeout_s
        self._progress = progress
        self._where = f"{base_url(url)}/v1/completions"
        self._tokenizes = True
        self._asking = asking
        self.model = ""
        # A server that closed before its threshold has lost what it had in flight.
        self.lost = earlier.lost if self._tokens + earlier.lost >= until else 0
        """Tokens of the prompts that the server had when it closed."""

    @property
    def total(self) -> int:
        """What the server has computed, as far as can be known."""
        return self._tokens + self.lost

    def sources(self) -> dict[str, dict[str, int]]:
        """Prompts and tokens by source."""
        told: dict[str, dict[str, int]] = {}
        for source, tokens in self._done.values():
            row = told.setdefault(source, {"prompts": 0, "tokens": 0})
            row["prompts"] += 1
            row["tokens"] += tokens
        return dict(sorted(told.items()))

    async def all(self, in_flight: int, stop: threading.Event | None) -> str:
        """Push until it is enough; return `enough` or `closed`."""
        uds = unix_path(self._url)
        lines = self._corpus.lines()
        flying: dict[asyncio.Task[int], _Sent] = {}
        async with httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=uds, trust_env=False, limits=_ALONE),
            timeout=self._timeout,
            trust_env=False,
        ) as client:
            try:
                while self._tokens < self._until:
                    if stop is not None and stop.is_set():
                        raise WindowStopped(f"stopped at {self._told()}")
                    while len(flying) < in_flight and not self._enough(flying.values()):
                        sent = await self._next(lines)
                        if sent is None:
                            break
                        flying[asyncio.create_task(self._send(client, sent))] = sent
                    if not flying:
                        raise MeasurementFailed(
                            "corpus", f"{self._corpus.path}: the corpus ended at {self._told()}"
                        )
                    ready, _ = await asyncio.wait(
                        flying, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in ready:
                        self._book(flying[task], task.result())
                        del flying[task]
                    self._show()
            except _Closed as error:
                return await self._after(error, flying)
            finally:
                for task in flying:
                    task.cancel()
                await asyncio.gather(*flying, return_exceptions=True)
        return "enough"

    def _enough(self, flying: Iterable[_Sent]) -> bool:
        """Whether what is answered and under way makes the threshold already."""
        return self._tokens + sum(sent.size or 0 for sent in flying) >= self._until

    async def _next(self, lines: Iterator[tuple[int, str, str]]) -> _Sent | None:
        for line, prompt, source in lines:
            if line not in self._done:
                return _Sent(line, prompt, source, await asyncio.to_thread(self._size, prompt))
        return None

    def _size(self, prompt: str) -> int | None:
        if self._tokenizes:
            try:
                return len(
                    self._dialect.tokenize(self._url, self.model, prompt, client=self._asking)
                )
            except MeasurementRefused:
                # No tokenizer, or nobody there: the request itself will tell which.
                self._tokenizes = False
        return None

    async def _send(self, client: httpx.AsyncClient, sent: _Sent) -> int:
        """Send one prompt; return the tokens that the server computed of it."""
        body = {
            "model": self.model,
            "prompt": sent.prompt,
            "max_tokens": 1,
            "temperature": 0.0,
            "stream": False,
        }
        body = self._dialect.dress(body, cache="cold", salt=f"{os.getpid()}-{sent.line}")
        where = f"{self._corpus.path}:{sent.line}"
        raw = bytearray()
        try:
            # The client's own timeout is one of a single read: bytes that come now and then would
            # hold the push for ever.
            async with (
                asyncio.timeout(self._timeout),
                client.stream("POST", self._where, json=body) as answer,
            ):
                async for part in answer.aiter_bytes():
                    raw += part
                    if len(raw) > _ANSWER_MOST:
                        raise MeasurementRefused(
                            "bad-answer", f"{where}: the answer has over {_ANSWER_MOST} bytes"
                        )
        except (httpx.TimeoutException, TimeoutError):
            raise MeasurementFailed(
                "timeout", f"{self._corpus.path}:{sent.line}: no answer in {self._timeout:g} s"
            ) from None
        except httpx.ConnectError as error:
            raise _Closed(one_line(str(error), 100), reached=False) from None
        except httpx.HTTPError as error:
            raise _Closed(one_line(str(error) or type(error).__name__, 100), reached=True) from None
        if answer.status_code >= 500:
            raise _Closed(f"it answered {answer.status_code}", reached=True)
        if answer.status_code != 200:
            raise MeasurementFailed(
                "status",
                f"{where}: {self._where} answered {answer.status_code}: "
                f"{one_line(raw[:1000].decode('utf-8', 'replace'), 160)}",
            )
        try:
            usage = read_usage(parse_json(bytes(raw)).get("usage"), where)
        except (ValueError, AttributeError):
            raise MeasurementRefused(
                "bad-answer", f"{where}: the answer is no JSON object"
            ) from None
        if usage.prompt_tokens is None:
            raise MeasurementRefused("bad-answer", f"{where}: the answer does not count its tokens")
        computed = usage.prompt_tokens - (usage.cached_tokens or 0)
        if computed < 0:
            raise MeasurementRefused(
                "bad-answer",
                f"{where}: {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens came from "
                "a cache",
            )
        return computed

    def _book(self, sent: _Sent, tokens: int) -> None:
        self._done[sent.line] = sent.source, tokens
        self._tokens += tokens
        self._step.note("prompt", line=sent.line, source=sent.source, tokens=tokens)

    async def _after(self, error: _Closed, flying: dict[asyncio.Task[int], _Sent]) -> str:
        """Say what the end of the server means: `closed`, or the failure.

        Requests that were answered before it count as answered, those it had as in flight.
        """
        await asyncio.wait(flying, timeout=_GRACE_S)
        for task, sent in flying.items():
            if not task.done():
                self.lost += sent.size or 0
                continue
            try:
                self._book(sent, task.result())
            except _Closed as other:
                self.lost += (sent.size or 0) if other.reached else 0
            except (MeasurementFailed, MeasurementRefused):
                continue
        self._step.note("closed", why=str(error), tokens=self._tokens, in_flight_tokens=self.lost)
        if self.total >= self._until:
            return "closed"
        hint = "" if self._tokenizes else "; without /tokenize a prompt in flight counts nothing"
        raise MeasurementFailed(
            "closed",
            f"{self._url}: the server went away before its threshold, at {self.total:,} of "
            f"{self._until:,} tokens ({error}){hint}",
        )

    def _told(self) -> str:
        return f"{self._tokens:,} of {self._until:,} tokens"

    def _show(self) -> None:
        if self._progress is not None:
            text = f"calib: {self._told()}, {len(self._done)} of {self._corpus.prompts} prompts"
            self._progress(text, min(1.0, self._tokens / self._until))
