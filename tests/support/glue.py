"""Moto's server as AWS Glue, behind a layer that adds a guarantee of Glue which moto 5.2.5 lacks.

Glue refuses UpdateTable with a VersionId that is not the table's version
(https://docs.aws.amazon.com/glue/latest/webapi/API_UpdateTable.html:
ConcurrentModificationException). Iceberg's commits to Glue depend on it. Moto ignores the VersionId
(measured: two updates with the same VersionId both succeeded).
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from servers import in_threads
from werkzeug.serving import make_server

from anabranch.dev.services.processes import HOST

_ACCOUNT, REGION = "123456789012", "us-east-1"  # moto's


@dataclass
class Glue:
    """A running server. `updates`: the received UpdateTable requests, in order.

    `lose`: the number of successful updates whose response becomes an internal error, so that AWS's
    clients retry. `hold`: the number of updates that are delayed until `release`, and answered by
    an internal error; `landed` counts those that succeed then. `expired`: session tokens that are
    refused, as Glue refuses expired ones. `before`: called for each update before its version is
    compared; it may send another update first.
    """

    app: Any
    port: int = 0
    updates: list[dict[str, Any]] = field(default_factory=list)
    refused: int = 0
    lose: int = 0
    hold: int = 0
    held: list[dict[str, Any]] = field(default_factory=list)
    landed: int = 0
    expired: set[str] = field(default_factory=set)
    before: Callable[[], None] = lambda: None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ.get("HTTP_X_AMZ_SECURITY_TOKEN") in self.expired:
            return _error(start_response, 400, "ExpiredTokenException")
        if environ.get("HTTP_X_AMZ_TARGET") != "AWSGlue.UpdateTable":
            return self.app(environ, start_response)  # type: ignore[no-any-return]
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        environ["wsgi.input"] = BytesIO(body)
        request = json.loads(body)
        self.before()
        with self._lock:
            self.updates.append(request)
            if self.hold > 0:
                self.hold -= 1
                self.held.append({**environ, "wsgi.input": body, "asked": request})
                return _error(start_response, 500, "InternalServiceException")
            expected = request.get("VersionId")
            if expected is not None and expected != self._version(request):
                self.refused += 1
                return _error(start_response, 400, "ConcurrentModificationException")
            if self.lose > 0:
                self.lose -= 1
                b"".join(self.app(environ, lambda *_: None))
                return _error(start_response, 500, "InternalServiceException")
            return self.app(environ, start_response)  # type: ignore[no-any-return]

    def release(self) -> None:
        """Process the delayed updates."""
        with self._lock:
            waiting, self.held = self.held, []
            for environ in waiting:
                request = environ.pop("asked")
                if request["VersionId"] == self._version(request):
                    environ["wsgi.input"] = BytesIO(environ["wsgi.input"])
                    b"".join(self.app(environ, lambda *_: None))
                    self.landed += 1
                else:
                    self.refused += 1

    def _version(self, update: dict[str, Any]) -> str:
        from moto.backends import get_backend

        glue, table = get_backend("glue")[_ACCOUNT][REGION], update["TableInput"]["Name"]
        return str(glue.get_table(update["DatabaseName"], table).as_dict()["VersionId"])


def _error(start_response: Any, status: int, code: str) -> Iterable[bytes]:
    body = json.dumps({"__type": code, "message": "as Glue says it"}).encode()
    kind = ("Content-Type", "application/x-amz-json-1.1")
    start_response(f"{status} said", [kind, ("x-amzn-errortype", code)])
    return [body]


@contextmanager
def running_glue() -> Iterator[Glue]:
    """Run a new, empty Glue within a `with`, in threads of this process."""
    from moto.backends import get_backend
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )

    class Quiet(MotoRequestHandler):  # type: ignore[misc]
        def log(self, *_: Any) -> None:
            pass

    get_backend("glue").reset()
    glue = Glue(DomainDispatcherApplication(create_backend_app))
    server = make_server(HOST, 0, glue, threaded=True, request_handler=Quiet)
    with in_threads(server) as glue.port:
        yield glue
