"""The transport: TLS, IPv6, Unix sockets, proxies, keep-alive, stops, deadlines; as httpx too."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from wire_groups import endpoint, requests, stub

from pytest_dsv41.errors import MeasurementFailed, MeasurementRefused, UsageError
from pytest_dsv41.measure import Endpoint, Progress, greedy_answers, measure_group
from pytest_dsv41.measure.transport import WireTransport
from pytest_dsv41.measure.wire import Call, Exchange, Loop, parse_url
from pytest_dsv41.stub import serve


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_both_address_families_are_measured(host: str) -> None:
    with serve(host=host, round_ms=5.0, realtime=False) as served:
        result = measure_group(endpoint(served), requests(2), deadline_s=10)
        assert {event.source for stream in result.streams for event in stream.events} == {"kernel"}


def test_a_unix_socket_is_measured(tmp_path: Path) -> None:
    with serve(uds=str(tmp_path / "s"), round_ms=5.0, realtime=False) as served:
        result = measure_group(Endpoint(served.url, "vllm"), requests(2), deadline_s=10)
        assert result.server.tokens == 16


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "server.pem"
    file.write_bytes(
        built.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return file


@pytest.fixture
def tls_front(certificate: Path) -> Iterator[str]:
    """A TLS address in front of a stub: a plain relay, one thread a direction."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with stub(round_ms=5.0) as served, socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(
            target=_relay, args=(listener, context, served.server.port), daemon=True
        ).start()
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"


def _relay(listener: socket.socket, context: ssl.SSLContext, port: int) -> None:
    while True:
        try:
            raw, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_carry, args=(raw, context, port), daemon=True).start()


def _carry(raw: socket.socket, context: ssl.SSLContext, port: int) -> None:
    try:
        outside = context.wrap_socket(raw, server_side=True)
    except OSError:
        raw.close()
        return
    inside = socket.create_connection(("127.0.0.1", port))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    back = threading.Thread(target=pump, args=(inside, outside), daemon=True)
    back.start()
    pump(outside, inside)
    back.join()
    inside.close()
    outside.close()


def test_tls_streams_carry_the_kernels_stamps_too(tls_front: str, certificate: Path) -> None:
    context = ssl.create_default_context(cafile=str(certificate))
    result = measure_group(Endpoint(tls_front, "vllm"), requests(2), deadline_s=15, context=context)
    assert result.server.tokens == 16
    assert {event.source for stream in result.streams for event in stream.events} == {"kernel"}


def test_an_unknown_certificate_is_refused(tls_front: str) -> None:
    with pytest.raises(MeasurementRefused, match=r"(?i)certificate"):
        measure_group(Endpoint(tls_front, "vllm"), requests(), deadline_s=15)


def test_a_proxy_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://user:secret@proxy.example:3128")
    with Loop() as loop:
        with pytest.raises(MeasurementRefused, match=r"proxy\.example") as refused:
            loop.connect("http://10.9.8.7:9/v1", time.monotonic_ns() + 10**8)
        assert refused.value.kind == "proxy"
        assert "secret" not in str(refused.value)
    with stub() as served:  # loopback is never asked through one
        assert measure_group(endpoint(served), requests(), deadline_s=10).server.tokens == 8


@pytest.mark.parametrize("no_proxy", ["*", "10.9.8.7", "example.org, 10.9.8.7"])
def test_a_host_named_in_no_proxy_is_direct(monkeypatch: pytest.MonkeyPatch, no_proxy: str) -> None:
    from pytest_dsv41.measure.wire import _refuse_proxy

    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    _refuse_proxy("http", "10.9.8.7")


@pytest.mark.parametrize("url", ["ftp://h/", "h:80", "http://", "http://h:99999", "http://h:x"])
def test_what_is_no_address_is_said(url: str) -> None:
    with pytest.raises(UsageError):
        parse_url(url)


def test_the_stop_event_ends_streams_and_closes_their_sockets() -> None:
    with stub(round_ms=50.0) as served:
        stop = threading.Event()
        timer = threading.Timer(0.4, stop.set)
        timer.start()
        began = time.monotonic()
        with pytest.raises(MeasurementFailed) as failed:
            measure_group(endpoint(served), requests(2, tokens=4000), deadline_s=600, stop=stop)
        assert failed.value.kind == "stopped"
        assert time.monotonic() - began < 60  # 200 s of tokens were left
        timer.join()
        # The server sees both clients leave: its next requests find it idle.
        assert measure_group(endpoint(served), requests(tokens=3), deadline_s=60).server.tokens == 3


def test_a_stop_ends_a_wait_for_counters_too() -> None:
    with stub() as served:
        served.faults("/metrics:slow-headers=60000")
        stop = threading.Event()
        timer = threading.Timer(0.3, stop.set)
        timer.start()
        with pytest.raises(MeasurementFailed) as failed:
            measure_group(endpoint(served), requests(), deadline_s=600, stop=stop)
        assert failed.value.kind == "stopped"
        timer.join()


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_progress_tells_tokens_rounds_and_rate_while_streams_run(engine: str, api: str) -> None:
    seen: list[Progress] = []
    with stub(engine=engine, draft_tokens=3, acceptance=(0.8,), round_ms=30.0) as served:
        sent = requests(2, tokens=80, api=api)
        result = measure_group(endpoint(served), sent, deadline_s=60, progress=seen.append)
    assert seen
    counts = [now.tokens for now in seen]
    rounds = [now.rounds for now in seen]
    assert counts == sorted(counts)
    assert rounds == sorted(rounds)
    assert 0 < counts[-1] <= 160
    # By the events: a finish or usage event of a stream that is at its end may be one too many.
    assert 0 < rounds[-1] <= (result.server.rounds or 0) + 2
    assert rounds[-1] < counts[-1] / 2  # of four drafted tokens most are accepted
    assert all(now.streams == 2 and now.finished < 2 for now in seen)
    assert seen[-1].tok_s == pytest.approx(counts[-1] / seen[-1].elapsed_s)
    assert f"{counts[-1]} tokens, {rounds[-1]} rounds, " in seen[-1].text


def test_nobody_listening_is_refused_with_the_reason() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(MeasurementRefused, match="refused"):
            measure_group(Endpoint(url), requests(), deadline_s=5)
        with pytest.raises(MeasurementFailed, match="refused") as failed:
            greedy_answers(Endpoint(url, model="m"), ["a"], max_tokens=1, deadline_s=5)
        assert failed.value.kind == "connect"


def test_greedy_answers_are_the_same_again_and_may_end_early() -> None:
    with stub(eos_tokens=5) as served:
        first = greedy_answers(endpoint(served), ["one", "two"], max_tokens=20, deadline_s=20)
        again = greedy_answers(endpoint(served), ["one", "two"], max_tokens=20, deadline_s=20)
    assert first == again
    assert [answer.prompt for answer in first] == ["one", "two"]
    assert {answer.finish for answer in first} == {"stop"}
    assert all(0 < answer.tokens < 20 for answer in first)


def test_as_an_httpx_transport_it_does_what_httpx_does() -> None:
    with stub() as served, httpx.Client(transport=WireTransport()) as client:
        assert client.get(f"{served.url}/health").status_code == 200
        models = client.get(f"{served.url}/v1/models").json()
        assert models["data"][0]["id"] == "stub"
        assert client.get(f"{served.url}/nowhere").status_code == 404
        body = {"model": "stub", "prompt": "a", "max_tokens": 3, "stream": True}
        with client.stream("POST", f"{served.url}/v1/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        connections = {line["connection"] for line in served.truth()}
        assert len(connections) == 1  # kept alive over all of them


def test_a_body_left_unread_closes_its_connection() -> None:
    with stub(round_ms=30.0) as served, httpx.Client(transport=WireTransport()) as client:
        body = {"model": "stub", "prompt": "a", "max_tokens": 300, "stream": True}
        with client.stream("POST", f"{served.url}/v1/completions", json=body):
            pass
        assert client.get(f"{served.url}/health").status_code == 200


def test_a_read_timeout_is_httpxs() -> None:
    with stub() as served, httpx.Client(transport=WireTransport(), timeout=0.3) as client:
        served.faults("/version:slow-headers=30000")
        with pytest.raises(httpx.ReadTimeout):
            client.get(f"{served.url}/version")


def test_a_connection_the_server_closed_is_not_used_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = threading.Semaphore(0)

        def answer_twice() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
                closed.release()

        thread = threading.Thread(target=answer_twice)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        with httpx.Client(transport=WireTransport()) as client:
            for _ in range(2):
                assert client.get(url).text == "ok"
                closed.acquire()
        thread.join()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-A", "hush\r\nX-C: d"),
        ("X-A", "hush\0"),
        ("X-A", "hush\u00e9"),
        ("X A", "hush"),
        ("", "hush"),
    ],
)
def test_what_is_no_header_is_refused_and_its_value_not_shown(name: str, value: str) -> None:
    with_it = Endpoint("http://127.0.0.1:1", headers={name: value})
    for wrong in (lambda: Call("http://h/", headers={name: value}).encode(),
                  lambda: measure_group(with_it, requests(), deadline_s=5)):  # fmt: skip
        with pytest.raises(UsageError, match="none of HTTP's") as refused:
            wrong()
        assert "hush" not in str(refused.value)


def test_the_writes_end_and_gap_are_recorded_for_a_long_prompt() -> None:
    with stub(max_model_len=4_000_000, kv_tokens=8_000_000) as served, Loop() as loop:
        deadline = time.monotonic_ns() + 20 * 10**9
        url = f"{served.url}/tokenize"
        body = b'{"prompt":"' + b"word " * 400_000 + b'"}'
        exchange = Exchange(Call(url, "POST", {"Content-Type": "application/json"}, body),
                            loop.connect(url, deadline))  # fmt: skip
        loop.run([exchange], deadline_ns=deadline)
        exchange.connection.close()
        assert exchange.failure is None
        assert exchange.status == 200
        assert exchange.write_start_ns < exchange.write_end_ns <= exchange.reads[0].at_ns
