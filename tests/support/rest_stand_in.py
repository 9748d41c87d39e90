"""An Iceberg REST catalog in this process, for loads of tables and commits.

PyIceberg's SQL catalog stores the tables. A commit succeeds if its requirements hold; unlike a
client of the SQL catalog, it does not compare the version of the whole table. The server of Iceberg
is in `rest_catalog.py`.
"""

import json
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest, Table
from pyiceberg.table.update import RemoveSnapshotsUpdate, TableUpdate
from servers import in_threads
from werkzeug.serving import WSGIRequestHandler, make_server

from anabranch.dev.services.processes import HOST


@dataclass
class Rest:
    """A running server. The next `hold` commits are answered with 504 and delayed until `release`.
    `config`: sent to clients that load a table, such as keys for its files."""

    tables: SqlCatalog
    port: int = 0
    hold: int = 0
    held: list[tuple[str, bytes]] = field(default_factory=list)
    landed: int = 0
    refused: int = 0
    config: dict[str, str] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def release(self) -> None:
        """Process the delayed commits; `landed` and `refused` count their results."""
        with self._lock:
            waiting, self.held = self.held, []
            for name, body in waiting:
                status, _ = self._commit(name, body)
                self.landed += status == 200
                self.refused += status == 409

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        path = environ["PATH_INFO"].strip("/").split("/")
        with self._lock:
            status, answer = self._answer(environ["REQUEST_METHOD"], path, body)
        start_response(f"{status} said", [("Content-Type", "application/json")])
        return [answer if isinstance(answer, bytes) else json.dumps(answer).encode()]

    def _answer(self, method: str, path: list[str], body: bytes) -> tuple[int, Any]:
        match method, path[1:]:
            case "GET", ["config"]:
                return 200, {"defaults": {}, "overrides": {}}
            case "POST", ["namespaces"]:
                levels = json.loads(body)["namespace"]
                self.tables.create_namespace_if_not_exists(".".join(levels))
                return 200, {"namespace": levels, "properties": {}}
            case "POST", ["namespaces", namespace, "tables"]:
                request = json.loads(body)
                made = self.tables.create_table(
                    f"{namespace}.{request['name']}",
                    Schema.model_validate(request["schema"]),
                    partition_spec=PartitionSpec.model_validate(request["partition-spec"]),
                    properties=request.get("properties") or {},
                )
                return 200, self._loaded(made)
            case "GET", ["namespaces", namespace, "tables", name]:
                try:
                    return 200, self._loaded(self.tables.load_table(f"{namespace}.{name}"))
                except NoSuchTableError as error:
                    return 404, _error(404, "NoSuchTableException", error)
            case "POST", ["namespaces", namespace, "tables", name]:
                if self.hold > 0:
                    self.hold -= 1
                    self.held.append((f"{namespace}.{name}", body))
                    return 504, _error(504, "GatewayTimeout", "its client has timed out")
                return self._commit(f"{namespace}.{name}", body)
        return 404, _error(404, "NotFoundException", f"{method} {'/'.join(path)}")

    def _loaded(self, table: Table) -> dict[str, Any]:
        metadata = json.loads(table.metadata.model_dump_json(by_alias=True, exclude_none=True))
        at = {"metadata-location": table.metadata_location}
        return at | {"metadata": metadata, "config": self.config}

    def _commit(self, name: str, body: bytes) -> tuple[int, Any]:
        request = CommitTableRequest.model_validate_json(body)
        table = self.tables.load_table(name)
        updates = [_lenient(table, update) for update in request.updates]
        try:
            done = self.tables.commit_table(table, request.requirements, updates)
        except CommitFailedException as error:
            return 409, _error(409, "CommitFailedException", error)
        except ValueError as error:
            return 400, _error(400, "BadRequestException", error)
        return 200, done.model_dump_json(by_alias=True, exclude_none=True).encode()


def _lenient(table: Table, update: TableUpdate) -> TableUpdate:
    """Leave out snapshots to remove that no longer exist, as Iceberg's own implementation does."""
    if not isinstance(update, RemoveSnapshotsUpdate):
        return update
    there = [id for id in update.snapshot_ids if table.metadata.snapshot_by_id(id) is not None]
    return RemoveSnapshotsUpdate(snapshot_ids=there)  # type: ignore[call-arg]


def _error(code: int, kind: str, error: object) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": kind, "code": code}}


class _Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        pass


@contextmanager
def running_rest(folder: Path) -> Iterator[Rest]:
    """Run a new, empty catalog on a folder within a `with`, in threads of this process."""
    uri, warehouse = f"sqlite:///{folder}/rest.db", f"file://{folder}/warehouse"
    rest = Rest(SqlCatalog("rest", uri=uri, warehouse=warehouse))
    server = make_server(HOST, 0, rest, threaded=True, request_handler=_Quiet)
    try:
        with in_threads(server) as rest.port:
            yield rest
    finally:
        rest.tables.engine.dispose()
