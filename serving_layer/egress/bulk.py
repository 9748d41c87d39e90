"""Bulk requests to a search engine: their contents, and the engine's answer for each document.
Pure. Every document is written with the version of the snapshot of `main` that it was read from
(`external_gte`), so the engine itself keeps documents of later readings:
https://docs.opensearch.org/latest/api-reference/document-apis/bulk/."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from anabranch.common.http import is_transient
from serving_layer.egress.records import Identity, value_of

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

    def at_version(self, version: int) -> Document:
        return replace(self, version=version)


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


def bulks(
    documents: Iterable[Document], at_most: int, size: int = BULK_BYTES
) -> Iterator[list[Document]]:
    """Yield the documents in their order, in lists of at most `at_most` documents and `size` bytes,
    and of at least one document."""
    bulk: list[Document] = []
    bulk_bytes = 0
    for one in documents:
        lines = len(one.lines)
        if bulk and (len(bulk) == at_most or bulk_bytes + lines > size):
            yield bulk
            bulk, bulk_bytes = [], 0
        bulk.append(one)
        bulk_bytes += lines
    if bulk:
        yield bulk


def read_answer(documents: Sequence[Document], answer: Any) -> Answered:
    """Return the engine's result for each document of a request. Raises ValueError for an answer to
    another request."""
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
