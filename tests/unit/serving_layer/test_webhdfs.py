"""The password of WebHDFS goes to the host that the configuration names, and to no other that an
answer names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pydantic import SecretStr

from anabranch.common.errors import ConfigurationError
from anabranch.config import Hdfs
from serving_layer.egress.webhdfs import WebHdfs


@contextmanager
def server(redirect: str | None, seen: list[str | None]) -> Iterator[int]:
    """Answers OPEN with a redirect, or with a file; received passwords are added to `seen`."""

    class Handler(BaseHTTPRequestHandler):
        server: ThreadingHTTPServer

        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            self.send_response(307 if redirect is not None and "op=OPEN" in self.path else 200)
            if redirect is not None:
                self.send_header("Location", redirect.format(port=self.server.server_port))
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            return

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield made.server_address[1]
    finally:
        made.shutdown()
        made.server_close()
        thread.join(10)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_redirect_gets_the_password_on_the_same_host_alone(
    elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nor one that this machine has for any host.
    (tmp_path / "netrc").write_text("default login other password secret\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    first, second = list[str | None](), list[str | None]()
    with ExitStack() as stack:
        other = stack.enter_context(server(None, second))
        to = f"http://127.0.0.1:{other}/x" if elsewhere else "http://127.0.0.1:{port}/x"
        port = stack.enter_context(server(to, first))
        settings = Hdfs(url=f"http://127.0.0.1:{port}", user="u", password=SecretStr("hunter2"))
        hdfs = stack.enter_context(closing(WebHdfs(settings)))
        assert hdfs.read("/a") == b"{}"
    assert first[0] is not None and first[0].startswith("Basic ")
    assert (second == [None]) if elsewhere else (first == [first[0]] * 2 and second == [])


def test_a_redirect_out_of_https_is_refused() -> None:
    hdfs = WebHdfs(
        Hdfs(url="https://namenode.example.com:9871", user="u", password=SecretStr("hunter2"))
    )
    with (
        closing(hdfs),
        pytest.raises(
            ConfigurationError, match="expected a redirect within https, found one to http://"
        ),
    ):
        hdfs._request("GET", "http://datanode.example.com:9864/x", "read hdfs:///a")
