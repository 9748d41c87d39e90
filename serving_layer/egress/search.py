"""A search engine, Elasticsearch or OpenSearch: an hour as documents of an index, each identified
by its record. Documents and deletions have the version of `main` that they were read from; all
places of an hour without a row are deleted. So sending an hour again changes nothing, and documents
of a later reading by another process stay, whichever request arrives last (`external_gte`:
https://docs.opensearch.org/latest/api-reference/document-apis/bulk/)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from anabranch import config
from anabranch.common import http
from anabranch.common.errors import ConfigurationError, Refused, Transient
from anabranch.common.fail_points import Step, reach
from anabranch.common.http import is_transient
from anabranch.common.retry import attempts, doubling
from anabranch.config.sections import Target
from anabranch.job import Job
from anabranch.protocol import deliveries
from anabranch.protocol.deliveries import Delivery
from anabranch.protocol.publish import new_id
from serving_layer.egress.hour import (
    Hour,
    Identity,
    Restored,
    chunks,
    cut_of,
    is_current,
    places,
    value_of,
)

BULK_DOCUMENTS = 5_000
"""Maximum number of documents of a bulk request."""

BULK_BYTES = 8 * 1024 * 1024
"""Maximum size of a bulk request; a single document may be larger."""


@dataclass(frozen=True)
class Document:
    """The document of a record's place. `value`: its row as JSON, or None to delete the document.
    `version`: the version of the reading."""

    id: str
    partition: int
    offset: int
    version: int
    value: bytes | None = field(repr=False)

    @property
    def lines(self) -> bytes:
        action = {"_id": self.id, "version": self.version, "version_type": "external_gte"}
        kind = "delete" if self.value is None else "index"
        line = json.dumps({kind: action}, separators=(",", ":")).encode() + b"\n"
        return line if self.value is None else line + self.value + b"\n"


@dataclass
class Answered:
    """Documents by their result in an answer; documents in no list were written."""

    again: list[Document]
    overtaken: list[Document]
    refused: list[tuple[Document, str]]
    reason: str = ""


def document(
    identity: Identity, place: tuple[int, int, Mapping[str, Any] | None], version: int
) -> Document:
    """Return the document of a place of an hour, as of a version of `main`."""
    partition, offset, row = place
    value = value_of(row) if row is not None else None
    return Document(identity.key_of(partition, offset).decode(), partition, offset, version, value)


def read_answer(documents: Sequence[Document], answer: Any) -> Answered:
    """Return the engine's result of each document. Raises ValueError for another answer."""
    items = answer.get("items") if isinstance(answer, dict) else None
    if not isinstance(items, list) or len(items) != len(documents):
        raise ValueError(
            f"expected an item for each of {len(documents)} documents, found {str(answer)[:200]}"
        )
    found = Answered([], [], [])
    for one, item in zip(documents, items, strict=True):
        kind, said = next(iter(item.items()))
        status, error = said.get("status", 0), said.get("error")
        if error is None and (200 <= status < 300 or (kind == "delete" and status == 404)):
            continue
        reason, type_ = _reason(status, error)
        if status == 409:
            found.overtaken.append(one)
        elif is_transient(status) or type_ == "cluster_block_exception":
            found.again.append(one)
            found.reason = reason
        else:
            found.refused.append((one, reason))
    return found


def _reason(status: int, error: Any) -> tuple[str, str]:
    if not isinstance(error, dict):
        return f"{status} {error}"[:300], ""
    type_ = str(error.get("type", ""))
    caused = error.get("caused_by")
    because = f" ({caused.get('reason')})" if isinstance(caused, dict) else ""
    return f"{status} {type_}: {error.get('reason')}{because}"[:400], type_


LOG = logging.getLogger(__name__)

_SECONDS = 60.0
_PATIENCE = 120.0  # seconds for retries of a bulk
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0


class _TooLargeError(Exception):
    """A request has more bytes than the engine accepts."""


class OvertakenError(Transient):
    """The index has a document of a later reading."""


class Index:
    """An index, accessed by the engine's REST API. Each call raises Transient when the engine is
    unreachable or not ready, and ConfigurationError when it refuses."""

    def __init__(self, settings: config.SearchCluster, name: str) -> None:
        self.where = f"{settings.url}/{name}"
        credentials: tuple[str, str] | str | None = None
        if settings.user is not None and settings.password is not None:
            credentials = (settings.user, settings.password.get_secret_value())
        if settings.api_key is not None:
            credentials = f"ApiKey {settings.api_key.get_secret_value()}"
        self._session = http.open_session("search.url", credentials)

    def close(self) -> None:
        self._session.close()

    def uuid(self) -> str | None:
        """Return the index's UUID, which changes when the index is recreated; None if the index
        does not exist. Raises ConfigurationError for an alias of several."""
        answer = self._ask("GET", "_settings")
        if answer is None:
            return None
        try:
            (settings,) = answer.values()
            return str(settings["settings"]["index"]["uuid"])
        except (AttributeError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"ask {self.where}: expected one index, or an alias of one, found "
                f"{str(answer)[:200]}"
            ) from error

    def refresh(self) -> None:
        self._ask("POST", "_refresh")

    def send(self, documents: Sequence[Document]) -> None:
        """Write the documents; send those that the engine postpones again. Raises Refused, naming a
        document, if rejected; Transient, also if the index has a later reading."""
        left, reason = list(documents), ""
        for _ in attempts(doubling(_FIRST_PAUSE, _LONGEST_PAUSE), seconds=_PATIENCE):
            try:
                answer = self._ask("POST", "_bulk", b"".join(one.lines for one in left))
            except _TooLargeError as error:
                return self._send_halves(left, str(error))
            except Transient as error:
                LOG.warning("%s; sending %d documents again", error, len(left))
                reason = str(error)
                continue
            try:
                found = read_answer(left, answer)
            except (ValueError, AttributeError, StopIteration) as error:
                raise ConfigurationError(
                    f"send to {self.where}: {error}; check search.url"
                ) from error
            if found.refused:
                one, why = found.refused[0]
                raise self._refused(
                    one,
                    f"{why}; the same for {len(found.refused)} of {len(left)} documents of the "
                    "request",
                )
            if found.overtaken:
                one = found.overtaken[0]
                raise OvertakenError(
                    f"send to {self.where}: expected no later reading of partition "
                    f"{one.partition}, offset {one.offset}, found one: another process delivers; "
                    "run it again. If there is none, the stream's tables were recreated: name "
                    "another index"
                )
            if not found.again:
                return
            left, reason = found.again, found.reason
            LOG.warning(
                "%s: %s; sending %d of %d documents again",
                self.where,
                reason,
                len(left),
                len(documents),
            )
        raise Transient(
            f"send to {self.where}: {reason}, for {_PATIENCE:.0f} s; nothing is lost, run it again"
        )

    def versions(self, documents: Sequence[Document]) -> dict[str, int]:
        """Return the versions of the documents that the index has, by id. Raises Transient if a
        shard does not answer: its documents would count as deleted."""
        body = json.dumps({"ids": [one.id for one in documents]}).encode()
        answer = self._ask("POST", "_mget?_source=false", body, "application/json")
        try:
            if failed := next((d["error"] for d in answer["docs"] if "error" in d), None):
                raise Transient(
                    f"ask {self.where}: expected the versions of {len(documents)} documents, found "
                    f"{str(failed)[:200]}; run it again"
                )
            return {str(d["_id"]): int(d["_version"]) for d in answer["docs"] if d.get("found")}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"ask {self.where}: expected documents with their versions, found "
                f"{str(answer)[:200]}; check search.url"
            ) from error

    def _send_halves(self, documents: list[Document], reason: str) -> None:
        if len(documents) == 1:
            raise self._refused(documents[0], f"{reason}: it exceeds the maximum size of a request")
        half = len(documents) // 2
        self.send(documents[:half])
        self.send(documents[half:])

    def _refused(self, one: Document, reason: str) -> Refused:
        return Refused(
            f"send to {self.where}: expected the document of partition {one.partition}, offset "
            f"{one.offset} to be accepted, found {reason}; the hour counts as not delivered: "
            "change the index's mapping or settings, then run it again"
        )

    def _ask(
        self, method: str, path: str, body: bytes | None = None, kind: str = "application/x-ndjson"
    ) -> Any:
        """Return the answer's JSON; None if the index does not exist."""
        doing = f"ask {self.where}/{path}"
        headers = {"Content-Type": kind} if body is not None else {}
        answer = http.request(
            self._session,
            method,
            f"{self.where}/{path}",
            doing,
            "search.url",
            "REQUESTS_CA_BUNDLE",
            _SECONDS,
            data=body,
            headers=headers,
        )
        status, text = answer.status_code, f"{answer.status_code} {answer.text[:300]}"
        if status == 413:
            raise _TooLargeError(text)
        check = "search.user, search.password or search.api_key, and their privileges"
        http.check_answer(status, text, doing, check)
        if status == 404 and "index_not_found" in answer.text:
            return None
        try:
            if status == 200:
                return answer.json()
        except ValueError:
            pass
        raise ConfigurationError(
            f"{doing}: expected the answer of a search engine, found {text}; check search.url"
        )


@dataclass(frozen=True)
class Search:
    """An open search target. Its place has the index's UUID: a recreated index is another."""

    job: Job
    target: Target
    index: Index
    uuid: str

    @property
    def place(self) -> str:
        return f"{self.index.where} ({self.uuid})"

    def last(self) -> Delivery | None:
        """Return the newest delivery. Raises Transient, Terminal without its table."""
        table = self.job.stream.egress_table
        return deliveries.newest(self.job.lake, table, self.target.name, self.place)

    def deliver(self, hour: Hour, token: str, all_again: bool) -> Delivery:
        """Write the hour's rows to the index, and delete all other documents at its places.
        Idempotent. Raises Restored, unless `all_again` (every hour is being delivered). Raises
        Transient, also when the index was deleted meanwhile, and as `Index.send` does."""
        cut, identity = cut_of(self.job, hour)
        with hour.batches(self.target.name) as batches:
            documents = (
                document(identity, place, hour.sequence) for place in places(batches.rows(), cut)
            )
            latest = hour.sequence
            for bulk, _ in chunks(documents, BULK_DOCUMENTS, BULK_BYTES, lambda d: len(d.lines)):
                latest = self._send(hour, bulk, all_again, latest)
                reach(Step.EGRESS_INDEXED)
        self.index.refresh()
        if (uuid := self.index.uuid()) != self.uuid:
            raise Transient(
                f"deliver hour {hour.name} to {self.index.where}: expected the index {self.uuid}, "
                f"found {uuid or 'none'}: it was deleted meanwhile; create it with its mapping, "
                "then run it again"
            )
        return hour.delivered(self.target.name, self.place, new_id(), 0, token)

    def _send(self, hour: Hour, bulk: Sequence[Document], all_again: bool, latest: int) -> int:
        """Write the documents, and return the `latest` known version of the hour. Later readings
        from before the table was restored to an earlier time are replaced: the document is sent
        with the version that the index has. A later reading wrote its version to all of the hour's
        places, including deleted ones, whose version the index does not return."""
        try:
            if bulk:
                self.index.send(bulk)
            return latest
        except OvertakenError:
            if not is_current(self.job, hour):
                raise
            if not all_again:
                raise Restored from None
            versions = self.index.versions(bulk)
            version = max([latest, *versions.values()])
            # Without deletions of documents that the index lacks: a later reading has deleted them,
            # and the engine may remember their version.
            known = [one for one in bulk if one.id in versions or one.value is not None]
            again = [replace(one, version=version) for one in known]
            LOG.debug("hour %s: replacing later readings of %d documents", hour.name, len(again))
            try:
                if again:
                    self.index.send(again)
            except OvertakenError as deleted:
                raise Transient(
                    f"send to {self.index.where}: expected to write documents that a later "
                    "reading has deleted, found that the engine still remembers the deletion "
                    "(index.gc_deletes): run it again in a minute"
                ) from deleted
            return version


@contextmanager
def open_search(job: Job, target: Target) -> Iterator[Search]:
    """Open a search target until the end of the `with` block. Raises ConfigurationError if the
    index does not exist, Transient."""
    settings = job.environment.search
    if settings is None:
        raise ConfigurationError(
            f"egress.{target.name}: expected `search:` with the url of Elasticsearch or "
            "OpenSearch in anabranch.yaml, found none"
        )
    index = Index(settings, target.place)
    try:
        if (uuid := index.uuid()) is None:
            raise ConfigurationError(
                f"egress.{target.name}: expected the index {index.where}, found none; create it "
                "with its mapping"
            )
        yield Search(job, target, index, uuid)
    finally:
        index.close()
