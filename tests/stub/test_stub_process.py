"""The stub as a process: its command line, its one line, its end; and its sockets."""

from __future__ import annotations

import datetime
import json
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from stub_wire import complete, connect, get, post, request_bytes

from pytest_dsv41.errors import SpecError, UsageError
from pytest_dsv41.stub import Profile, load_profile, serve, spawn
from pytest_dsv41.stub.profile import OPTIONS, make_profile

COMMAND = [sys.executable, "-m", "pytest_dsv41", "stub"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=30)


@pytest.fixture
def started() -> Iterator[Any]:
    """Start processes; whatever is left of them is killed."""
    running: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **options: Any) -> tuple[subprocess.Popen[bytes], str]:
        process = subprocess.Popen(
            [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
        )
        running.append(process)
        assert process.stdout is not None
        return process, json.loads(process.stdout.readline())["url"]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_one_json_line_says_where_it_listens(started: Any) -> None:
    process, url = started("--port", "0", "--model", "a b", "--round-ms", "1")
    assert url.startswith("http://127.0.0.1:")
    assert get(url, "/health").status == 200
    assert get(url, "/v1/models").json()["data"][0]["id"] == "a b"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (0, b"", b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_in_the_middle_of_a_stream(started: Any, number: int) -> None:
    process, url = started("--round-ms", "20")
    with connect(url) as sock:
        body = {"prompt": "a", "max_tokens": 100000, "stream": True}
        sock.sendall(request_bytes("POST", "/v1/completions", body))
        while b"data:" not in sock.recv(65536):
            pass
        process.send_signal(number)
        assert process.wait(10) == 0
        # The kernel closes what was open: the client sees an end, not a hang.
        try:
            while sock.recv(65536):
                pass
        except ConnectionResetError:
            pass


def test_it_may_hang_at_sigterm_while_it_streams(started: Any) -> None:
    process, url = started("--round-ms", "5", "--on-term", "hang")
    with connect(url) as sock:
        body = {"prompt": "a", "max_tokens": 100000, "stream": True}
        sock.sendall(request_bytes("POST", "/v1/completions", body))
        while b"data:" not in sock.recv(65536):
            pass
        process.send_signal(signal.SIGTERM)
        port = int(url.rpartition(":")[2])
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
            except ConnectionResetError:
                # Still in the listener's queue when it closed.
                continue
            except ConnectionRefusedError:
                break
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def fill(pipe: int) -> None:
    """Write to `pipe` until it takes no more."""
    os.set_blocking(pipe, False)
    try:
        while True:
            os.write(pipe, b"x" * 65536)
    except BlockingIOError:
        os.set_blocking(pipe, True)


def test_nobody_reading_its_output_does_not_stop_it() -> None:
    read, write = os.pipe()
    fill(write)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([*COMMAND, "--port", str(port)], stdout=write, stderr=write)
    try:
        for _ in range(500):
            try:
                answer = get(f"http://127.0.0.1:{port}", "/health")
                break
            except ConnectionRefusedError:
                assert process.poll() is None
                time.sleep(0.02)
        assert answer.status == 200
    finally:
        process.terminate()
        assert process.wait(10) == 0
        os.close(read)
        os.close(write)


def test_a_start_loads_nothing_heavy() -> None:
    code = (
        "import sys; from pytest_dsv41.stub.server import Server\n"
        "from pytest_dsv41.cli import stub; print(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    loaded = set(done.stdout.split())
    heavy = {"asyncio", "http.server", "email", "pathlib", "dataclasses", "hashlib", "tomllib"}
    heavy |= {"pytest", "httpx", "numpy", "pydantic", "prometheus_client", "subprocess", "logging"}
    assert loaded & heavy == set()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--round-ms", "fast"], ["round_ms", "'fast'", "number, at least 0"]),
        (["--acceptance", "0.5,1.5"], ["acceptance", "from 0 to 1"]),
        (["--engine", "other"], ["engine", "vllm | llamacpp"]),
        (["--draft-tokens", "1.5"], ["draft_tokens", "whole number"]),
        (["--host", "0.0.0.0"], ["host", "loopback"]),
        (["--profile", "/nowhere/x.toml"], ["/nowhere/x.toml", "cannot be read"]),
        (["--fault", "nonsense"], ["unknown fault 'nonsense'", "no-done"]),
        (["--truth", "/nowhere/truth"], ["truth", "/nowhere/truth"]),
        (["--uds", "/nowhere/socket"], ["cannot listen", "/nowhere/socket"]),
    ],
)
def test_wrong_settings_give_one_line_and_code_4(arguments: list[str], words: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 4
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    for word in words:
        assert word in done.stderr


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("--port", str(port))
    assert done.returncode == 4
    assert f"port {port}" in done.stderr


def test_faults_can_be_listed() -> None:
    done = run("--list-faults")
    assert done.returncode == 0
    assert "role-early=ms" in done.stdout


def test_a_profile_file_holds_the_settings_and_flags_stand_over_it(
    tmp_path: Path, started: Any
) -> None:
    file = tmp_path / "stub.toml"
    file.write_text(
        'model = "filed"\nround_ms = 1\nacceptance = [0.9, 0.5]\nfault = ["no-done"]\n'
        "prompt_tokens_details = false\n"
    )
    profile = load_profile(file)
    assert profile.acceptance == (0.9, 0.5)
    assert (profile.accepts(0), profile.accepts(1), profile.accepts(7)) == (0.9, 0.5, 0.5)
    _, url = started("--profile", str(file), "--model", "flagged", "--prompt-tokens-details")
    assert get(url, "/v1/models").json()["data"][0]["id"] == "flagged"
    reply = complete(url)
    assert "[DONE]" not in reply.data
    assert "prompt_tokens_details" in reply.chunk_objects[-1]["usage"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("round_ms = ", ["not valid TOML"]),
        ('round = 1\n[stub]\nspeed = "x"', ["unknown setting 'speed'", "round_ms"]),
        ("seed = true", ["seed", "whole number"]),
        ("per_request_metrics = 1", ["per_request_metrics", "true | false"]),
    ],
)
def test_a_wrong_profile_names_file_key_and_valid_values(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    file = tmp_path / "stub.toml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_profile(file)
    assert "\n" not in str(caught.value)
    for word in ["stub.toml", *words]:
        assert word in str(caught.value)


def test_every_setting_is_an_option_with_a_valid_default() -> None:
    names = {option.name for option in OPTIONS}
    assert names == set(Profile._fields)
    assert make_profile(Profile()._asdict()) == Profile()
    assert all(option.help for option in OPTIONS)


def test_every_setting_reaches_a_spawned_process() -> None:
    with spawn(
        engine="vllm", dev_mode=False, acceptance=(0.5, 0.25), fault=("comment",), round_ms=1
    ) as stub:
        assert get(stub.url, "/server_info").status == 404
        assert b": keep-alive" in complete(stub.url).body
        assert stub.process.poll() is None
    assert stub.process.returncode == 0


def test_a_spawn_that_fails_says_why() -> None:
    with pytest.raises(UsageError, match="unknown fault"), spawn(arguments=["--fault", "nope"]):
        pass


def test_loading_answers_503_first() -> None:
    with serve(loading_ms=60000) as stub:
        assert get(stub.url, "/health").status == 503
    with serve(loading_ms=60000, engine="llamacpp") as stub:
        reply = get(stub.url, "/health")
    assert reply.status == 503
    assert reply.json() == {
        "error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}
    }


def test_unix_socket_and_ipv6(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serve(uds=str(path)) as stub:
        assert stub.url == f"unix:{path}"
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.sendall(request_bytes("GET", "/health"))
            assert sock.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
    assert not path.exists()
    try:
        with serve(host="::1") as stub:
            assert stub.url.startswith("http://[::1]:")
            assert get(stub.url, "/health").status == 200
    except UsageError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")


def test_tls(tmp_path: Path) -> None:
    certificate = self_signed(tmp_path)
    context = ssl.create_default_context(cafile=str(certificate))
    with serve(tls_cert=str(certificate), round_ms=1, prefill_ms=1) as stub:
        assert stub.url.startswith("https://127.0.0.1:")
        port = int(stub.url.rpartition(":")[2])
        for _ in range(2):
            plain = socket.create_connection(("127.0.0.1", port), timeout=20)
            with context.wrap_socket(plain, server_hostname="localhost") as sock:
                body = {"prompt": "a " * 30_000, "max_tokens": 20, "stream": True}
                sock.sendall(
                    request_bytes("POST", "/v1/completions", body, "", {"connection": "close"})
                )
                raw = b"".join(iter(lambda s=sock: s.recv(65536), b""))  # type: ignore[misc]
            assert raw.count(b"data: [DONE]") == 1
    with pytest.raises(UsageError, match="tls_cert"):
        serve(tls_cert=str(tmp_path / "nowhere")).__enter__()


def self_signed(folder: Path) -> Path:
    """Write a key and a certificate for localhost into one file."""
    now = datetime.datetime.now(datetime.UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = folder / "both.pem"
    file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return file


# ---- HTTP ---------------------------------------------------------------------------------


def test_a_connection_serves_request_after_request() -> None:
    with serve(round_ms=1, prefill_ms=1) as stub, connect(stub.url) as sock:
        body = {"prompt": "a", "max_tokens": 3, "stream": True}
        for _ in range(3):
            sock.sendall(request_bytes("POST", "/v1/completions", body))
            raw = b""
            while not raw.endswith(b"0\r\n\r\n"):
                raw += sock.recv(65536)
            assert raw.count(b"data: [DONE]") == 1


def test_requests_come_in_any_pieces() -> None:
    with serve() as stub:
        raw = request_bytes("POST", "/tokenize", {"prompt": "a b c"}, "", {"connection": "close"})
        with connect(stub.url) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in raw:
                sock.sendall(bytes([byte]))
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        assert b'"count":3' in answer
        chunked = (
            b"POST /tokenize HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
            b'connection: close\r\n\r\n8;a=b\r\n{"prompt\r\n9\r\n":"a b c"\r\n1\r\n}\r\n0\r\n\r\n'
        )
        with connect(stub.url) as sock:
            sock.sendall(chunked)
            answer = b"".join(iter(lambda: sock.recv(65536), b""))
        assert b'"count":3' in answer


def test_expect_100_continue_is_answered() -> None:
    with serve() as stub, connect(stub.url) as sock:
        head = request_bytes("POST", "/tokenize", {"prompt": "a"}, "", {"expect": "100-continue"})
        first, _, body = head.partition(b"\r\n\r\n")
        sock.sendall(first + b"\r\n\r\n")
        assert sock.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/3\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\ncontent-length: -5\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\n" + b"x: " + b"y" * 70000,
    ],
)
def test_what_is_no_request_is_refused_and_the_server_lives_on(raw: bytes) -> None:
    with serve() as stub:
        with connect(stub.url) as sock:
            sock.sendall(raw)
            try:
                answer = b"".join(iter(lambda: sock.recv(65536), b""))
            except ConnectionResetError:
                answer = b"HTTP/1.1 400 "  # it closed before it had read everything
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert get(stub.url, "/health").status == 200


def test_a_body_that_is_no_json_object_is_refused() -> None:
    with serve() as stub, connect(stub.url) as sock:
        raw = b"POST /tokenize HTTP/1.1\r\ncontent-length: 5\r\nconnection: close\r\n\r\n{bad}"
        sock.sendall(raw)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert b'"code":400' in answer
    assert b"invalid JSON" in answer


def test_sixty_four_streams_at_once_are_all_whole() -> None:
    with serve(round_ms=2, prefill_ms=1, max_running=64) as stub:
        socks = [connect(stub.url) for _ in range(64)]
        for i, sock in enumerate(socks):
            body = {"prompt": f"p{i}", "max_tokens": 20, "stream": True, "temperature": 0}
            sock.sendall(
                request_bytes("POST", "/v1/completions", body, "", {"connection": "close"})
            )
        for sock in socks:
            with sock:
                raw = b"".join(iter(lambda s=sock: s.recv(65536), b""))  # type: ignore[misc]
            assert raw.count(b"data: [DONE]") == 1
        tokens: dict[int, int] = {}
        for line in stub.truth():
            tokens[line["request"]] = tokens.get(line["request"], 0) + line["tokens"]
    assert sorted(tokens.values()) == [20] * 64


def test_a_long_document_is_tokenised_beside_the_loop() -> None:
    words = "river stone light " * 50_000
    with serve(round_ms=1, prefill_ms=1, prefill_ms_per_token=0) as stub:
        answer = post(stub.url, "/tokenize", {"prompt": words}).json()
        assert answer["count"] == 150_001
        reply = complete(stub.url, prompt=words)
        assert reply.chunk_objects[-1]["usage"]["prompt_tokens"] == 150_001


def test_a_request_that_lies_before_it_is_accepted_arrived_when_it_came(tmp_path: Path) -> None:
    log = tmp_path / "truth.jsonl"
    with spawn(truth=str(log)) as server:
        server.process.send_signal(signal.SIGSTOP)
        with connect(server.url) as sock:
            sock.sendall(request_bytes("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1}))
            sent_ns = time.monotonic_ns()
            # The halt itself: nothing can come, and nothing is waited for.
            assert select.select([sock], [], [], 0.3)[0] == []
            server.process.send_signal(signal.SIGCONT)
            assert sock.recv(65536)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    (arrived,) = [row for row in rows if row["kind"] == "arrived"]
    assert arrived["before_ns"] - sent_ns < 100_000_000 < arrived["after_ns"] - sent_ns
