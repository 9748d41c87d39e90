"""Bulk requests to a search engine: what they hold, and what its answer says of each document. Pure.

Every document is written with the version of what `main` was read at (`external_gte`), so that the engine itself keeps
what was read later: https://docs.opensearch.org/latest/api-reference/document-apis/bulk/.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving_layer.egress.records import key_of, value_of

BULK_BYTES = 8 * 1024 * 1024
"""A bulk request has no more, unless one document alone has."""


@dataclass(frozen=True)
class Document:
    """What is to be at a record's place: its row, or nothing."""

    partition: int
    offset: int
    lines: bytes = field(repr=False)


@dataclass(frozen=True)
class Answered:
    """Documents by what an answer says of them; those that are in no list are as they should be."""

    again: list[Document]
    overtaken: list[Document]
    refused: list[tuple[Document, str]]
    reason: str = ""


def document(topic_id: str, place: tuple[int, int, Mapping[str, Any] | None], version: int) -> Document:
    """A place of an hour, as it was at a version of `main`."""
    partition, offset, row = place
    action = {"_id": key_of(topic_id, partition, offset).decode(), "version": version, "version_type": "external_gte"}
    line = json.dumps({"delete" if row is None else "index": action}, separators=(",", ":")).encode() + b"\n"
    return Document(partition, offset, line if row is None else line + value_of(row) + b"\n")


def bulks(documents: Iterable[Document], at_most: int, size: int = BULK_BYTES) -> Iterator[list[Document]]:
    """The documents in their order, so many and so many bytes at a time; one at least."""
    bulk: list[Document] = []
    held = 0
    for one in documents:
        if bulk and (len(bulk) == at_most or held + len(one.lines) > size):
            yield bulk
            bulk, held = [], 0
        bulk.append(one)
        held += len(one.lines)
    if bulk:
        yield bulk


def read_answer(documents: Sequence[Document], answer: Any) -> Answered:
    """What the engine says of each document of a request. Raises ValueError for what is no answer to it."""
    items = answer.get("items") if isinstance(answer, dict) else None
    if not isinstance(items, list) or len(items) != len(documents):
        raise ValueError(f"expected an item for each of {len(documents)} documents, found {str(answer)[:200]}")
    found = Answered([], [], [])
    for one, item in zip(documents, items, strict=True):
        kind, said = next(iter(item.items()))
        status, error = said.get("status", 0), said.get("error")
        if error is None and (200 <= status < 300 or (kind == "delete" and status == 404)):
            continue
        reason, type_ = _reason(status, error)
        if status == 409:
            found.overtaken.append(one)
        elif status in (408, 429) or status >= 500 or type_ == "cluster_block_exception":
            found.again.append(one)
            found = Answered(found.again, found.overtaken, found.refused, reason)
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
