"""A server that records a calibration: counts the words it is sent and goes away at a threshold."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class CalibServer(ThreadingHTTPServer):
    """One word is one token.

    Args:
        threshold: computed tokens at which it goes away; 0: never.
        answers: whether the request that reaches the threshold is still answered.
        created: its creation time in /metrics; 0: it has no /metrics.
        tokenizer: whether it has /tokenize.
        cached: tokens of each prompt that come from a cache.
        refuses: prompts it answers with 400.
        hangs: never answer a completion.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self,
        threshold: int = 0,
        *,
        answers: bool = False,
        created: float = 1.0,
        tokenizer: bool = True,
        cached: int = 0,
        refuses: str = "",
        hangs: bool = False,
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.threshold = threshold
        self.answers = answers
        self.created = created
        self.tokenizer = tokenizer
        self.cached = cached
        self.refuses = refuses
        self.hangs = hangs
        self.seen: list[str] = []
        self.tokens = 0
        self.gone = threading.Event()
        self.asked = threading.Event()
        self.guard = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CalibServer

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._say({"data": [{"id": "calib", "owned_by": "radiance"}]})
        elif self.path == "/metrics" and self.server.created:
            names = ("requests_processing", "requests_deferred")
            counters = ("tokens_predicted_total", "prompt_tokens_total")
            text = "".join(f"llamacpp:{name} 0\n" for name in (*names, *counters))
            self._say(text, {"process-start-time-unix": str(int(self.server.created))})
        else:
            self._say({"error": "none"}, code=404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        if self.path == "/tokenize":
            if not server.tokenizer:
                return self._say({"error": "none"}, code=404)
            return self._say({"tokens": list(range(len(body["content"].split())))})
        prompt = body["prompt"]
        assert body["max_tokens"] == 1
        assert body["cache_prompt"] is False
        server.asked.set()
        if server.hangs:
            server.gone.wait(60)
        if server.gone.is_set():
            return self._leave()
        if server.refuses and server.refuses in prompt:
            return self._say({"error": {"message": "too long"}}, code=400)
        count = len(prompt.split())
        with server.guard:
            server.seen.append(prompt)
            server.tokens += count - server.cached
            reached = 0 < server.threshold <= server.tokens
        if reached:
            # Before the answer: who has it could send the next prompt into the open socket.
            self._away()
            if not server.answers:
                return self._leave()
        details = {"cached_tokens": server.cached}
        usage = {"prompt_tokens": count, "completion_tokens": 1, "prompt_tokens_details": details}
        last = {"Connection": "close"} if reached else None
        self._say({"choices": [{"text": "x"}], "usage": usage}, last)
        if reached:
            self._leave()
        return None

    def _away(self) -> None:
        self.server.gone.set()
        threading.Thread(target=self.server.shutdown, daemon=True).start()
        self.server.socket.close()

    def _leave(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def _say(self, body: Any, headers: dict[str, str] | None = None, *, code: int = 200) -> None:
        raw = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@contextlib.contextmanager
def calib_server(threshold: int = 0, **more: Any) -> Iterator[CalibServer]:
    server = CalibServer(threshold, **more)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.gone.set()
        server.shutdown()
        thread.join()
        server.server_close()
