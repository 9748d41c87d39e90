"""The front that cuts connections in the midst of what they carry."""

import random
import socket
import socketserver
from collections.abc import Iterator

import pytest
from servers import in_threads
from soak.cutting_proxy import CuttingProxy

from anabranch.dev.services.processes import HOST, free_port

ASKED, ANSWER = b"a" * 100_000, random.Random(1).randbytes(300_000)


class Service(socketserver.BaseRequestHandler):
    """Answers each whole request; `got` says how many bytes of each came."""

    got: list[int]

    def handle(self) -> None:
        while True:
            count = 0
            while count < len(ASKED):
                data = self.request.recv(65_536)
                if not data:
                    if count:
                        self.got.append(count)
                    return
                count += len(data)
            self.got.append(count)
            self.request.sendall(ANSWER)


@pytest.fixture
def service() -> Iterator[socketserver.ThreadingTCPServer]:
    handler = type("Handler", (Service,), {"got": []})
    server = socketserver.ThreadingTCPServer((HOST, 0), handler)
    server.daemon_threads = True
    with in_threads(server):
        yield server


@pytest.fixture
def wire(service: socketserver.ThreadingTCPServer) -> Iterator[CuttingProxy]:
    with CuttingProxy(7).running() as front:
        front.upstream_port = service.server_address[1]
        yield front


def ask(port: int) -> bytes:
    """Return the bytes received of an answer until it is whole or the connection ends."""
    answer = b""
    try:
        with socket.create_connection((HOST, port), timeout=30) as client:
            client.sendall(ASKED)
            while len(answer) < len(ANSWER):
                data = client.recv(65_536)
                if not data:
                    break
                answer += data
    except (ConnectionError, BrokenPipeError):
        pass
    return answer


def test_bytes_are_passed_on_as_they_are(wire: CuttingProxy) -> None:
    assert ask(wire.port) == ask(wire.port) == ANSWER
    assert wire.cuts == 0


def test_connections_end_in_the_midst_of_bodies_and_answers(
    wire: CuttingProxy, service: socketserver.ThreadingTCPServer
) -> None:
    with wire.cutting(0.2):
        answers = [ask(wire.port) for _ in range(60)]
    assert all(ANSWER.startswith(part) for part in answers)
    assert wire.bodies > 0 and wire.answers > 0
    assert wire.cuts == sum(part != ANSWER for part in answers)
    assert any(0 < len(part) < len(ANSWER) for part in answers), "a part of an answer came through"
    got = service.RequestHandlerClass.got  # type: ignore[attr-defined]
    assert any(0 < count < len(ASKED) for count in got), "a part of a body came through"
    assert ask(wire.port) == ANSWER, "it cuts no longer"


def test_an_unreachable_service_closes_connections_and_comes_back(wire: CuttingProxy) -> None:
    port, wire.upstream_port = wire.upstream_port, free_port()
    assert ask(wire.port) == b""
    wire.upstream_port = port
    assert ask(wire.port) == ANSWER


def test_its_end_ends_open_connections(service: socketserver.ThreadingTCPServer) -> None:
    with CuttingProxy(7).running() as front:
        front.upstream_port = service.server_address[1]
        client = socket.create_connection((HOST, front.port), timeout=30)
        client.sendall(ASKED)
        assert client.recv(1) == ANSWER[:1]
    with client:
        while client.recv(65_536):
            pass
