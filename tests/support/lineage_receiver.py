"""A receiver of OpenLineage that accepts only what is valid; it can fail, hang and recover."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker
from referencing import Registry, Resource
from servers import QuietHandler, in_threads

import anabranch.lineage
from anabranch.dev.services.processes import HOST

PATH = "/api/v1/lineage"
_SPEC = Path(__file__).parent / "openlineage"
_EVENT = "https://openlineage.io/spec/2-0-2/OpenLineage.json"
_OURS = Path(anabranch.lineage.__file__).parent / "AnabranchHourRunFacet.json"
# See openlineage/README.md for the reason.
_REPLACEMENTS = {
    "https://openlineage.io/spec/facets/1-0-1/DataQualityMetricsDatasetFacet.json": (
        "https://openlineage.io/spec/facets/1-0-0/DataQualityMetricsDatasetFacet.json"
    )
}


def _schemas() -> dict[str, Any]:
    files = [_SPEC / "OpenLineage.json", *sorted((_SPEC / "facets").glob("*.json")), _OURS]
    schemas = [json.loads(file.read_text("utf-8")) for file in files]
    return {schema["$id"]: schema for schema in schemas}


_BY_ID = _schemas()
_REGISTRY: Any = Registry().with_resources(
    (id, Resource.from_contents(schema)) for id, schema in _BY_ID.items()
)


def problems(event: dict[str, Any]) -> list[str]:
    """Return violations of the schemas of an event and its facets, and unknown facets' keys."""
    found = _unlike(event["schemaURL"], event, "event")
    found += _unlike(_EVENT, event, "event")
    places = [("run", event["run"].get("facets", {})), ("job", event["job"].get("facets", {}))]
    for side in ("inputs", "outputs"):
        for i, dataset in enumerate(event.get(side, [])):
            for key in ("facets", "inputFacets", "outputFacets"):
                places.append((f"{side}[{i}].{key}", dataset.get(key, {})))
    for place, facets in places:
        for key, facet in facets.items():
            id = _known_id(facet["_schemaURL"])
            if key not in _BY_ID.get(id, {}).get("properties", {}):
                found.append(f"{place}.{key}: {facet['_schemaURL']} knows no such key")
            found += _unlike(facet["_schemaURL"], facet, f"{place}.{key}")
    return found


def _known_id(url: str) -> str:
    id = url.partition("#")[0]
    return _REPLACEMENTS.get(id, id)


def _unlike(url: str, value: Any, place: str) -> list[str]:
    id, pointer = _known_id(url), url.partition("#")[2]
    if id not in _BY_ID:
        return [f"{place}: {url} is none of the official schemas"]
    schema = {"$ref": f"{id}#{pointer}" if pointer else id}
    validator = Draft202012Validator(schema, registry=_REGISTRY, format_checker=FormatChecker())
    return [f"{place}: {e.json_path}: {e.message}" for e in validator.iter_errors(value)]


class LineageReceiver:
    """The received events, and the response: `status`, or none while the receiver hangs. Unless it
    is strict, it also accepts events of other producers with unknown facets."""

    def __init__(self, is_strict: bool = True) -> None:
        self._is_strict, self.url, self.asked, self.status = is_strict, "", 0, 201
        self.events, self.headers = list[dict[str, Any]](), list[dict[str, str]]()
        self.problems = list[str]()
        self.go_on = threading.Event()
        self.go_on.set()

    def hang(self) -> None:
        self.go_on.clear()

    def recover(self) -> None:
        self.status = 201
        self.go_on.set()

    def runs(self) -> dict[str, list[str]]:
        """Return the event types of each run, in order."""
        runs: dict[str, list[str]] = {}
        for event in self.events:
            runs.setdefault(event["run"]["runId"], []).append(event["eventType"])
        return runs

    def ended(self) -> list[dict[str, Any]]:
        """Return the events that end a run."""
        return [event for event in self.events if event["eventType"] != "START"]

    def take(self, path: str, headers: dict[str, str], body: bytes) -> int:
        self.asked += 1
        self.go_on.wait(60)
        if self.status >= 300:
            return self.status
        if path != PATH:
            return 404
        event = json.loads(body)
        unlike = problems(event) if self._is_strict else []
        self.problems += unlike
        if unlike:
            return 422
        self.events.append(event)
        self.headers.append(headers)
        return self.status


@contextmanager
def running_receiver(is_strict: bool = True) -> Iterator[LineageReceiver]:
    """Run a receiver within a `with`."""
    receiver = LineageReceiver(is_strict)

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = self.body()
            try:
                self.send_response(receiver.take(self.path, dict(self.headers.items()), body))
                self.end_headers()
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client has closed the connection

    with in_threads(ThreadingHTTPServer((HOST, 0), Handler)) as port:
        receiver.url = f"http://{HOST}:{port}"
        try:
            yield receiver
        finally:
            receiver.recover()
