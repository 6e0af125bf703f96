"""What a dialect of server can tell, and the parts every value is built from.

An engine object holds no state and opens no connection of its own but through the
`httpx.Client` it is given (or makes for one call). It answers four questions: is the server up,
which models does it serve, what do its counters say, and what did those counters say about a
group of requests that lies between two snapshots.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import httpx

from pytest_dsv41.address import base_url, check_url, unix_path
from pytest_dsv41.engines.counters import read_samples, refuse_part, refuse_resets
from pytest_dsv41.engines.next_token import (
    Greedy,
    NextToken,
    read_chosen,
    read_ids,
    read_model,
    read_object,
    read_prefixed,
)
from pytest_dsv41.engines.served import Served, whole_above
from pytest_dsv41.errors import MeasurementFailed, MeasurementRefused, UsageError
from pytest_dsv41.text import error_line, one_line

__all__ = [
    "ENGINES",
    "Engine",
    "Health",
    "InBand",
    "Server",
    "Snapshot",
    "base_url",
    "check_url",
    "detect_engine",
    "engine_names",
    "fetch",
    "get_engine",
    "refuse_drafts",
    "unix_path",
]


_BODY_MAX = 64 << 20
"""Of an answer that is no stream: a whole vocabulary's log-probabilities fit."""
_CONNECTED = frozenset(
    f"connection.{step}.complete" for step in ("connect_tcp", "connect_unix_socket", "start_tls")
)
_CODED = frozenset({"content-encoding", "content-length", "transfer-encoding"})
"""Headers that speak of the body as it was sent, not as it is kept."""


class Health(str):
    """`up`, `down` or `unknown`, with the reason beside it in one line."""

    __slots__ = ("reason",)
    reason: str

    def __new__(cls, state: str, reason: str = "") -> Health:
        """Make one of the three states."""
        if state not in ("up", "down", "unknown"):
            raise ValueError(state)
        self = super().__new__(cls, state)
        self.reason = reason
        return self


@dataclass(frozen=True)
class Snapshot:
    """One look at a server's counters.

    `values` is what the dialect understood of it, by its own names; `gone` names families the
    server does not have. The raw text is not kept.
    """

    at_ns: int
    values: Mapping[str, float]
    running: float
    waiting: float
    created: Mapping[str, float] = field(default_factory=dict)
    """Creation times of counters, by sample: a changed one means a restart."""

    def still(self, other: Snapshot) -> bool:
        """Whether nothing moved between two looks and nothing runs."""
        return (
            self.idle
            and other.idle
            and dict(self.values) == dict(other.values)
            and dict(self.created) == dict(other.created)
        )

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return self.running == 0 and self.waiting == 0

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot for a record."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Snapshot:
        """Read it back."""
        return cls(**data)


@dataclass(frozen=True)
class InBand:
    """What one stream itself carried about the server's work: counts, and times in ms."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Server:
    """The server's side of a group of requests. None: the dialect cannot tell.

    Times in ms, everything else a count, summed over the group's requests.
    """

    requests: int
    tokens: int
    decode_ms: float | None = None
    accepted: int | None = None
    drafts: int | None = None
    draft_tokens: int | None = None
    cached_tokens: int | None = None
    prompt_tokens: int | None = None
    steps: int | None = None
    """The engine's own step counter over the same time, prefill steps included."""
    speculates: bool = False
    preemptions: int | None = None
    """None where the server does not count them."""
    accepted_cut: int = 0
    """Drafts that were accepted and then cut off by the token limit; not among `accepted`."""
    notes: tuple[str, ...] = ()
    """What the counters leave unproved, by name."""

    @property
    def rounds(self) -> int | None:
        """Engine steps that yielded an own token after the first (RULES section 0)."""
        if self.accepted is None:
            return None
        return self.tokens - self.accepted - self.requests

    def to_json(self) -> dict[str, Any]:
        """Return the parts for a record."""
        return {**asdict(self), "rounds": self.rounds}


def refuse_drafts(server: Server) -> None:
    """Hold drafts, accepted tokens and rounds against each other (RULES section 0).

    Raises:
        MeasurementRefused: kind `identity`.
    """
    rounds, accepted = server.rounds, server.accepted
    if rounds is None or accepted is None:
        return
    drafted = server.draft_tokens
    if drafted is not None and accepted + server.accepted_cut > drafted:
        raise MeasurementRefused("identity", f"{accepted} accepted of {drafted} drafted tokens")
    if rounds < 0:
        raise MeasurementRefused(
            "identity", f"{accepted} accepted among {server.tokens} tokens: no rounds are left"
        )
    if server.drafts is not None and server.drafts > rounds:
        raise MeasurementRefused(
            "identity", f"{server.drafts} drafts in {rounds} rounds: more than one a round"
        )


class Engine(ABC):
    """One dialect. Subclass it, give it a name, and put an instance into `ENGINES`."""

    name: ClassVar[str]
    gauges: ClassVar[tuple[str, str]] = ("", "")
    """The samples of requests that run, and that wait."""
    counters: ClassVar[tuple[str, ...]] = ()
    """Samples that never fall while one server lives."""
    needed: ClassVar[tuple[str, ...]] = ()
    """Those of them that every server of this dialect has."""
    by_label: ClassVar[Mapping[str, str]] = {}
    """Counters that are also kept apart by a label: sample to label."""
    counters_hint: ClassVar[str] = ""
    """What to do about a server without counters."""
    version_path: ClassVar[str] = "/version"
    version_field: ClassVar[str] = "version"
    next_path: ClassVar[str] = "/v1/completions"
    """Where a prompt of token ids is answered with log-probabilities by token id."""

    @contextlib.contextmanager
    def _client(
        self, client: httpx.Client | None, url: str, timeout: float
    ) -> Iterator[httpx.Client]:
        if client is not None:
            yield client
            return
        # Only https needs the known authorities, and reading them takes longer than asking.
        plain = not base_url(url).lower().startswith("https:")
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if plain else True
        # trust_env off: a proxy must never answer for the server.
        transport = httpx.HTTPTransport(uds=unix_path(url), trust_env=False, verify=verify)
        with httpx.Client(transport=transport, timeout=timeout, trust_env=False) as own:
            yield own

    def health(self, url: str, timeout: float = 2.0, client: httpx.Client | None = None) -> Health:
        """Ask `/health`: `up`, `down` (nobody listens, or it is loading or dead), `unknown`."""
        try:
            with self._client(client, url, timeout) as http:
                answer = fetch(http, f"{base_url(url)}/health", timeout)
        except httpx.TimeoutException:
            return Health("unknown", f"no answer within {timeout:g} s")
        except httpx.ConnectError as error:
            if _refused(error):
                return Health("down", "connection refused")
            return Health("unknown", f"no connection: {error_line(error, 80)}")
        except httpx.HTTPError as error:
            return Health("unknown", f"the connection broke: {error_line(error, 80)}")
        if answer.status_code == 200:
            return Health("up")
        if answer.status_code == 503:
            loading = b"oading" in answer.content[:500]
            return Health("down", "loading" if loading else "the server says 503")
        return Health("unknown", f"/health answered {answer.status_code}")

    def models(
        self, url: str, timeout: float = 5.0, client: httpx.Client | None = None
    ) -> list[str]:
        """Return the served names of `/v1/models`, in the server's order.

        Raises:
            MeasurementRefused: kind `models`, when the answer is none.
        """
        data = self._json(url, "/v1/models", timeout, client, kind="models")
        try:
            names = [row["id"] for row in data["data"]]
        except (KeyError, TypeError):
            names = []
        if not names or not all(isinstance(name, str) and name for name in names):
            raise MeasurementRefused("models", f"{url}/v1/models lists no models")
        for name in names:
            # JSON can write half of a surrogate pair, which no request could carry back.
            if not name.isascii() and name != name.encode(errors="replace").decode():
                raise MeasurementRefused(
                    "models", f"{url}/v1/models: {one_line(name, 80)} is no text"
                )
        return names

    def _json(
        self, url: str, path: str, timeout: float, client: httpx.Client | None, *, kind: str
    ) -> Any:
        answer = self._get(url, path, timeout, client, kind=kind)
        if answer.status_code != 200:
            raise MeasurementRefused(kind, f"{url}{path} answered {answer.status_code}")
        try:
            return answer.json()
        except (ValueError, RecursionError):
            raise MeasurementRefused(kind, f"{url}{path} did not answer JSON") from None

    def _get(
        self, url: str, path: str, timeout: float, client: httpx.Client | None, *, kind: str
    ) -> httpx.Response:
        try:
            with self._client(client, url, timeout) as http:
                return fetch(http, f"{base_url(url)}{path}", timeout)
        except httpx.HTTPError as error:
            why = error_line(error, 120)
            raise MeasurementRefused(kind, f"{url}{path} did not answer: {why}") from None

    def scrape(
        self, url: str, timeout: float = 5.0, client: httpx.Client | None = None
    ) -> Snapshot:
        """Read the server's counters and gauges from `/metrics`.

        Raises:
            MeasurementRefused: kinds `no-counters`, `missing-family`, `bad-counter`.
        """
        answer = self._get(url, "/metrics", timeout, client, kind="no-counters")
        at = time.monotonic_ns()
        if answer.status_code != 200:
            hint = f": {self.counters_hint}" if self.counters_hint else ""
            raise MeasurementRefused(
                "no-counters", f"{url}/metrics answered {answer.status_code}{hint}"
            )
        text = answer.text
        if not text.endswith("\n"):
            raise MeasurementRefused("bad-counter", f"{url}/metrics ends in the middle of a line")
        sums, created = read_samples(text, (*self.gauges, *self.counters), label=self.by_label)
        for name in self.counters:
            refuse_part(name, sums.get(name, 0.0))
        missing = [name for name in (*self.gauges, *self.needed) if name not in sums]
        if missing:
            raise MeasurementRefused("missing-family", f"{url}/metrics has no {', '.join(missing)}")
        running, waiting = (sums.pop(name) for name in self.gauges)
        started = answer.headers.get("process-start-time-unix", "")
        if started.isascii() and started.isdigit() and len(started) < 20:
            created["process-start-time-unix"] = float(started)
        return Snapshot(at, sums, running, waiting, created)

    @abstractmethod
    def dress(self, body: dict[str, Any], *, cache: str, salt: str | None) -> dict[str, Any]:
        """Add the dialect's own fields to a request body and return it.

        `cache` is `cold` or `fill` (no prefix reuse), `warm` (reuse under `salt`) or `any`.
        """

    def same_server(self, before: Snapshot, after: Snapshot) -> None:
        """Refuse where a counter fell or was created anew: another server, or a restarted one.

        Raises:
            MeasurementRefused: kinds `reset`, `missing-family`.
        """
        refuse_resets(
            before.values, after.values, before.created, after.created, counters=self.counters
        )

    @abstractmethod
    def settled(self, before: Snapshot, after: Snapshot, asked: Sequence[InBand]) -> str | None:
        """Say what the counters have not booked yet of `asked`; None when all of it is there."""

    @abstractmethod
    def account(self, before: Snapshot, after: Snapshot, done: Sequence[InBand]) -> Server:
        """Return what the counters say of the requests in `done`, and of nothing else.

        Raises:
            MeasurementRefused: kinds `foreign-request`, `reset`, `missing-family`, `identity`.
        """

    def tokenize(
        self,
        url: str,
        model: str,
        text: str,
        timeout: float = 60.0,
        client: httpx.Client | None = None,
    ) -> list[int]:
        """Return the server's token ids of `text`, special tokens included.

        Raises:
            MeasurementRefused: kind `tokenize`.
        """
        body = self._tokenize_body(model, text)
        where = f"{base_url(url)}/tokenize"
        try:
            with self._client(client, url, timeout) as http:
                answer = fetch(http, where, timeout, body=body)
        except httpx.HTTPError as error:
            why = error_line(error, 100)
            raise MeasurementRefused("tokenize", f"{where}: {why}") from None
        if answer.status_code != 200:
            raise MeasurementRefused("tokenize", f"{where} answered {answer.status_code}")
        try:
            data = read_object(answer.content, where)
            tokens = list(read_ids(data.get("tokens"), where))
        except MeasurementRefused as error:
            raise MeasurementRefused("tokenize", str(error)) from None
        count = data.get("count", len(tokens))
        if count != len(tokens):
            said = one_line(str(count), 40)
            raise MeasurementRefused(
                "tokenize", f"{where} counts {said} tokens and lists {len(tokens)}"
            )
        return tokens

    @abstractmethod
    def _tokenize_body(self, model: str, text: str) -> dict[str, Any]: ...

    def chat_tokens(
        self,
        url: str,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
        timeout: float = 60.0,
        client: httpx.Client | None = None,
    ) -> int:
        """Return how many tokens the server makes of a chat, its template included.

        Raises:
            MeasurementFailed: kinds `connection`, `status`.
            MeasurementRefused: kinds `tokenize`, `bad-answer`.
        """
        body = {
            "model": model,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": True,
            "add_special_tokens": False,
            "chat_template_kwargs": dict(kwargs),
        }
        where = f"{base_url(url)}/tokenize"
        answer = self._post(url, "/tokenize", body, timeout, client)
        count = whole_above(read_object(answer.content, where).get("count"))
        if count is None:
            raise MeasurementRefused("tokenize", f"{where}: no count of a chat's tokens")
        return count

    def served(self, url: str, timeout: float = 10.0, client: httpx.Client | None = None) -> Served:
        """Return the shape that the server says it has; what it does not tell is left out.

        Raises:
            MeasurementRefused: kind `shape`: it contradicts itself, or does not answer.
        """
        data = self._json(url, "/v1/models", timeout, client, kind="shape")
        rows = data.get("data") if isinstance(data, dict) else None
        first = rows[0] if isinstance(rows, list) and rows else None
        window = first.get("max_model_len") if isinstance(first, dict) else None
        return Served.of("/v1/models max_model_len", window=whole_above(window))

    def _told(self, url: str, path: str, timeout: float, client: httpx.Client | None) -> Any:
        """What a GET answers as JSON; None where the server has no such page."""
        try:
            answer = self._get(url, path, timeout, client, kind="shape")
            return answer.json() if answer.status_code == 200 else None
        except (MeasurementRefused, ValueError, RecursionError):
            return None

    def version(self, url: str, timeout: float = 5.0, client: httpx.Client | None = None) -> str:
        """Return what the server calls its version; empty where it does not tell."""
        try:
            answer = self._get(url, self.version_path, timeout, client, kind="version")
            told = answer.json()[self.version_field] if answer.status_code == 200 else ""
        except (MeasurementRefused, ValueError, KeyError, TypeError, RecursionError):
            return ""
        return one_line(str(told), 100)

    def next_token(
        self,
        url: str,
        model: str,
        ids: Sequence[int],
        top_n: int,
        *,
        cache: str,
        salt: str | None,
        timeout: float = 600.0,
        client: httpx.Client | None = None,
    ) -> NextToken:
        """Return the `top_n` (or some more) likeliest tokens after the prompt `ids`.

        The distribution is the model's own, before any sampling setting. `cache` and `salt` as in
        `dress`.

        Raises:
            MeasurementFailed: kinds `connection`, `status`.
            MeasurementRefused: kinds `bad-answer`, `duplicate-id`, `no-logprobs`, `fewer`,
                `other-prompt`.
        """
        body = self.dress(self._next_body(model, ids, top_n), cache=cache, salt=salt)
        where = f"{base_url(url)}{self.next_path}"
        answer = self._post(url, self.next_path, body, timeout, client)
        found = self._next_read(
            read_object(answer.content, where),
            ids,
            where,
            lambda: self._text_of(url, ids, timeout, client),
        )
        _same_length(found.in_band, ids, where)
        _enough(found.top, top_n, where)
        return found

    def greedy(
        self,
        url: str,
        model: str,
        ids: Sequence[int],
        max_tokens: int,
        top_n: int,
        *,
        cache: str,
        salt: str | None,
        timeout: float = 600.0,
        client: httpx.Client | None = None,
    ) -> Greedy:
        """Return the answer to the prompt `ids` at temperature 0, with each token's candidates.

        Raises:
            MeasurementFailed, MeasurementRefused: as in `next_token`.
        """
        body = self.dress(self._greedy_body(model, ids, max_tokens, top_n), cache=cache, salt=salt)
        where = f"{base_url(url)}{self.next_path}"
        answer = self._post(url, self.next_path, body, timeout, client)
        found = self._greedy_read(
            read_object(answer.content, where),
            ids,
            where,
            lambda: self._text_of(url, ids, timeout, client),
        )
        _same_length(found.in_band, ids, where)
        if not 1 <= len(found.tokens) <= max_tokens or len(found.tops) != len(found.tokens):
            raise MeasurementRefused(
                "bad-answer", f"{where}: {len(found.tokens)} tokens, {max_tokens} asked"
            )
        for top in found.tops:
            if top is not None:
                _enough(top, top_n, where)
        return found

    def _post(
        self, url: str, path: str, body: object, timeout: float, client: httpx.Client | None
    ) -> httpx.Response:
        where = f"{base_url(url)}{path}"
        try:
            with self._client(client, url, timeout) as http:
                answer = fetch(http, where, timeout, body=body)
        except httpx.HTTPError as error:
            why = error_line(error, 120)
            raise MeasurementFailed("connection", f"{where} did not answer: {why}") from None
        if answer.status_code != 200:
            said = one_line(answer.text, 200)
            raise MeasurementFailed("status", f"{where} answered {answer.status_code}: {said}")
        return answer

    def _next_body(self, model: str, ids: Sequence[int], top_n: int) -> dict[str, Any]:
        # Temperature 1 and nothing else: a server that lists what is left after its sampling
        # settings then lists the model's own distribution too.
        return {
            "model": model,
            "prompt": list(ids),
            "max_tokens": 1,
            "logprobs": top_n,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": 0,
        }

    def _next_read(
        self,
        data: Mapping[str, Any],
        ids: Sequence[int],
        where: str,
        text_of_prompt: Callable[[], str],  # noqa: ARG002
    ) -> NextToken:
        try:
            (choice,) = data["choices"]
            tops = choice["logprobs"]["top_logprobs"]
            (top,) = tops
        except (KeyError, TypeError, ValueError):
            raise MeasurementRefused(
                "no-logprobs", f"{where}: the answer has no log-probabilities of one token"
            ) from None
        echo = choice.get("prompt_token_ids")
        if echo is not None and echo != list(ids):
            raise MeasurementRefused("other-prompt", f"{where}: the answer is to another prompt")
        return NextToken(
            read_prefixed(top, where),
            read_usage(data.get("usage"), where),
            echo is not None,
            read_model(data),
            read_chosen(choice["logprobs"], where),
        )

    def _greedy_body(
        self, model: str, ids: Sequence[int], max_tokens: int, top_n: int
    ) -> dict[str, Any]:
        body = self._next_body(model, ids, top_n)
        return {**body, "max_tokens": max_tokens, "temperature": 0.0}

    def _greedy_read(
        self,
        data: Mapping[str, Any],
        ids: Sequence[int],
        where: str,
        text_of_prompt: Callable[[], str],  # noqa: ARG002
    ) -> Greedy:
        try:
            (choice,) = data["choices"]
            tops = choice["logprobs"]["top_logprobs"]
            tokens = choice["token_ids"]
        except (KeyError, TypeError, ValueError):
            raise MeasurementRefused(
                "no-logprobs", f"{where}: the answer has no log-probabilities or no token ids"
            ) from None
        echo = choice.get("prompt_token_ids")
        if echo is not None and echo != list(ids):
            raise MeasurementRefused("other-prompt", f"{where}: the answer is to another prompt")
        if not isinstance(tops, list):
            raise MeasurementRefused("no-logprobs", f"{where}: no list of log-probabilities")
        return Greedy(
            read_ids(tokens, where),
            tuple(read_prefixed(top, where) for top in tops),
            str(choice.get("finish_reason")),
            read_usage(data.get("usage"), where),
            echo is not None,
            read_model(data),
        )

    def _text_of(
        self, url: str, ids: Sequence[int], timeout: float, client: httpx.Client | None
    ) -> str:
        answer = self._post(url, "/detokenize", {"tokens": list(ids)}, timeout, client)
        data = read_object(answer.content, f"{base_url(url)}/detokenize")
        return str(data.get("prompt", data.get("content", "")))


def fetch(
    http: httpx.Client, url: str, timeout: float, *, body: object = None, most: int = _BODY_MAX
) -> httpx.Response:
    """GET `url`, or POST `body` to it, whole within `timeout` seconds and `most` bytes.

    httpx's own timeout is one of a single read: a server that sends a byte now and then, in its
    headers or in an endless body, would hold whoever waits for ever.

    Raises:
        httpx.ReadTimeout: the answer was not whole in time.
        httpx.ReadError: it is too long.
        httpx.DecodingError: it is encoded in a way that was not asked for.
    """
    until = time.monotonic_ns() + int(timeout * 1e9)
    late = threading.Event()
    timers: list[threading.Timer] = []

    def cut(connection: socket.socket) -> None:
        late.set()
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def watch(event: str, info: Mapping[str, Any]) -> None:
        if event in _CONNECTED:
            connection = info["return_value"].get_extra_info("socket")
            if connection is not None:
                timers.append(threading.Timer(timeout, cut, (connection,)))
                timers[-1].daemon = True
                timers[-1].start()

    kept = bytearray()
    method, content = ("GET", None) if body is None else ("POST", body)
    # `trace` is httpx's own, `deadline_ns` what `measure.transport` knows.
    extensions = {"trace": watch, "deadline_ns": until}
    try:
        with http.stream(
            method, url, json=content, timeout=timeout, extensions=extensions
        ) as answer:
            _refuse_coding(answer)
            for chunk in answer.iter_bytes():
                kept += chunk
                if late.is_set() or len(kept) > most:
                    break
                if time.monotonic_ns() > until:
                    late.set()
                    break
            headers = [h for h in answer.headers.multi_items() if h[0] not in _CODED]
    except httpx.TransportError:
        if not late.is_set():
            raise
    finally:
        for timer in timers:
            timer.cancel()
    if late.is_set():
        raise httpx.ReadTimeout(f"not whole within {timeout:g} s")
    if len(kept) > most:
        raise httpx.ReadError(f"longer than {most} bytes")
    return httpx.Response(
        answer.status_code, headers=headers, content=bytes(kept), request=answer.request
    )


def _refuse_coding(answer: httpx.Response) -> None:
    """httpx takes a body in a coding that it does not know for the text itself."""
    asked = _words(answer.request.headers.get("accept-encoding", ""))
    strange = _words(answer.headers.get("content-encoding", "")) - asked - {"identity"}
    if strange:
        raise httpx.DecodingError(
            f"the answer is encoded as {one_line(', '.join(sorted(strange)), 60)}, not asked for",
            request=answer.request,
        )


def _words(header: str) -> set[str]:
    return {word.partition(";")[0].strip().lower() for word in header.split(",")} - {""}


def _refused(error: BaseException) -> bool:
    """Whether an error means that nobody listens there."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ConnectionRefusedError) or "refused" in str(seen).lower():
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _same_length(in_band: InBand, ids: Sequence[int], where: str) -> None:
    if in_band.prompt_tokens not in (None, len(ids)):
        raise MeasurementRefused(
            "other-prompt",
            f"{where}: the answer is to a prompt of {in_band.prompt_tokens} tokens, "
            f"{len(ids)} were sent",
        )
    if (in_band.cached_tokens or 0) > len(ids):
        raise MeasurementRefused(
            "bad-answer",
            f"{where}: {in_band.cached_tokens} of {len(ids)} prompt tokens came from a cache",
        )


def _enough(top: Sequence[tuple[int, float]], top_n: int, where: str) -> None:
    if len(top) < top_n:
        raise MeasurementRefused(
            "fewer", f"{where}: {len(top)} tokens with a log-probability, {top_n} asked"
        )


def read_usage(usage: object, where: str) -> InBand:
    """Read the `usage` object of an answer.

    Raises:
        MeasurementRefused: kind `bad-answer` for counts that are no whole numbers.
    """
    table = usage if isinstance(usage, Mapping) else {}
    details = table.get("prompt_tokens_details")

    def count(holder: Mapping[str, Any], name: str) -> int | None:
        value = holder.get(name)
        if value is None or (
            isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
        ):
            return value
        raise MeasurementRefused(
            "bad-answer", f"{where}: {name} is {one_line(repr(value), 40)}, no count"
        )

    return InBand(
        count(table, "prompt_tokens"),
        count(table, "completion_tokens"),
        count(details, "cached_tokens") if isinstance(details, Mapping) else None,
    )


ENGINES: dict[str, Engine] = {}
"""The known dialects by name; add one to make it known."""


def engine_names() -> tuple[str, ...]:
    """The names that `get_engine` knows, sorted."""
    return tuple(sorted(ENGINES))


def get_engine(name: str) -> Engine:
    """Return the dialect called `name`.

    Raises:
        UsageError: no such dialect; the message lists the valid ones.
    """
    try:
        return ENGINES[name]
    except KeyError:
        raise UsageError(
            f"engine {one_line(name, 40)!r}: not known; valid: {', '.join(engine_names())}"
        ) from None


def detect_engine(url: str, timeout: float = 5.0) -> str:
    """Return the name of the dialect that the server at `url` speaks.

    The owner in `/v1/models` says it; where that is no known name, the counters' prefix does.

    Raises:
        MeasurementRefused: kind `engine`: the server does not answer, or speaks none of them.
    """
    any_engine = next(iter(ENGINES.values()))
    data = any_engine._json(url, "/v1/models", timeout, None, kind="engine")
    with contextlib.suppress(KeyError, TypeError, IndexError):
        owner = str(data["data"][0]["owned_by"]).lower()
        if owner in ENGINES:
            return owner
    text = any_engine._get(url, "/metrics", timeout, None, kind="engine").text
    for name in engine_names():
        if f"\n{name}:" in f"\n{text}":
            return name
    raise MeasurementRefused(
        "engine", f"{url}: speaks no known dialect; name one: {', '.join(engine_names())}"
    )
