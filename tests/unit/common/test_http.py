"""Each client of an HTTP service sends the credentials of its configuration, to the configured host
only: neither `.netrc` nor a redirect changes that."""

import base64
import datetime as dt
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from openlineage.client.event_v2 import Job, Run, RunEvent, RunState
from servers import QuietHandler, in_threads

from anabranch import config
from anabranch.common.errors import ConfigurationError
from anabranch.dev.services.processes import HOST
from anabranch.kafka.schema_registry import SchemaRegistryClient
from anabranch.lineage.receiver import Receiver
from serving_layer.egress.search import Index

EVENT = RunEvent(
    eventType=RunState.START,
    eventTime=dt.datetime(2026, 1, 1, tzinfo=dt.UTC).isoformat(),
    run=Run("019aa0b0-0000-7000-8000-000000000000"),
    job=Job("namespace", "job"),
    producer="https://example.com",
)


def ask_registry(url: str, **keys: str) -> None:
    SchemaRegistryClient(config.Registry.model_validate({"url": url, **keys})).schema(1)


def ask_search(url: str, **keys: str) -> None:
    Index(config.SearchCluster.model_validate({"url": url, **keys}), "index").uuid()


def send_lineage(url: str, **keys: str) -> None:
    Receiver(config.Lineage.model_validate({"url": url, **keys})).send([EVENT])


BASIC = "Basic " + base64.b64encode(b"user:secret").decode()
USER = {"user": "user", "password": "secret"}
CLIENTS = [
    pytest.param(ask_registry, {}, None, "registry.url", id="registry"),
    pytest.param(ask_registry, USER, BASIC, "registry.url", id="registry with a user"),
    pytest.param(ask_search, {}, None, "search.url", id="search"),
    pytest.param(ask_search, USER, BASIC, "search.url", id="search with a user"),
    pytest.param(ask_search, {"api_key": "key"}, "ApiKey key", "search.url", id="search with a key"),
    pytest.param(send_lineage, {}, None, "lineage.url", id="lineage"),
    pytest.param(send_lineage, {"api_key": "key"}, "Bearer key", "lineage.url", id="lineage with a key"),
]  # fmt: skip


@contextmanager
def server(status: int, location: str = "") -> Iterator[tuple[str, list[str | None]]]:
    """Yield the URL of a server that gives one answer, and the credentials that it receives."""
    seen: list[str | None] = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.body()
            seen.append(self.headers.get("Authorization"))
            self.answer(status, **({"Location": location} if location else {}))

        do_POST = do_GET

    with in_threads(ThreadingHTTPServer((HOST, 0), Handler)) as port:
        yield f"http://localhost:{port}", seen


@pytest.fixture(autouse=True)
def _netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "netrc"
    file.write_text("default login machine password other\n")
    file.chmod(0o600)
    monkeypatch.setenv("NETRC", str(file))


@pytest.mark.parametrize(("ask", "keys", "expected", "url_key"), CLIENTS)
def test_credentials_come_from_the_configuration_only(
    ask: Callable[..., None], keys: dict[str, str], expected: str | None, url_key: str
) -> None:
    service = url_key.split(".")[0]
    with server(401) as (url, seen), pytest.raises(ConfigurationError, match=rf"{service}\."):
        ask(url, **keys)
    assert seen == [expected]


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize(("ask", "keys", "expected", "url_key"), CLIENTS)
def test_a_redirect_is_not_followed(
    ask: Callable[..., None], keys: dict[str, str], expected: str | None, url_key: str, status: int
) -> None:
    """Else another host gets the credentials, and a POST becomes a GET that counts as sent."""
    with ExitStack() as stack:
        other, seen_there = stack.enter_context(server(200))
        url, seen = stack.enter_context(server(status, f"{other}/x"))
        found = f"found {status}, a redirect to {other}/x; check {url_key}"
        with pytest.raises(ConfigurationError, match=found):
            ask(url, **keys)
    assert (seen, seen_there) == ([expected], [])
