"""Bulk requests to a search engine: what an answer says of each document. Pure."""

from dataclasses import replace
from typing import Any

import pytest

from anabranch import config
from anabranch.common.errors import Transient
from serving_layer.egress import hour
from serving_layer.egress.search import Index, document, read_answer

DOCUMENTS = [document(hour.Identity("t"), (0, o, {"n": o} if o else None), 7) for o in range(5)]


def test_a_document_is_sent_by_another_version() -> None:
    row, nothing = (replace(DOCUMENTS[n], version=9) for n in (1, 0))
    expected = b'{"index":{"_id":"t:0:1","version":9,"version_type":"external_gte"}}\n{"n":1}\n'
    assert row.lines == expected
    wanted = b'{"delete":{"_id":"t:0:0","version":9,"version_type":"external_gte"}}\n'
    assert nothing.lines == wanted


def item(status: int, kind: str = "index", **error: Any) -> dict[str, Any]:
    return {kind: {"status": status} | ({"error": error} if error else {})}


def test_each_document_of_an_answer_has_its_own_fate() -> None:
    items = [
        item(404, "delete"),
        item(200),
        item(409, type="version_conflict_engine_exception"),
        item(429, type="rejected", reason="full"),
        item(400, type="mapper_parsing_exception", reason="no number"),
    ]
    found = read_answer(DOCUMENTS, {"errors": True, "items": items})
    assert [d.offset for d in found.overtaken] == [2]
    assert [d.offset for d in found.again] == [3]
    expected = [(4, "400 mapper_parsing_exception: no number")]
    assert [(d.offset, why) for d, why in found.refused] == expected
    blocked = [item(403, type="cluster_block_exception")] * 5
    assert len(read_answer(DOCUMENTS, {"items": blocked}).again) == 5
    with pytest.raises(ValueError, match="expected an item for each of 5 documents"):
        read_answer(DOCUMENTS, {"items": items[:4]})


def test_a_document_of_a_shard_without_an_answer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    # After a restore, its deletion would be left out, and a later reading's document would stay.
    index = Index(config.SearchCluster(url="http://search:9200"), "events")
    missing = {"_id": "t:0:2", "found": False}
    docs: list[dict[str, Any]] = [{"_id": "t:0:1", "_version": 9, "found": True}, missing]
    monkeypatch.setattr(index, "_ask", lambda *_: {"docs": docs})
    assert index.versions(DOCUMENTS[:3]) == {"t:0:1": 9}
    docs.append({"_id": "t:0:3", "error": {"type": "no_shard_available_action_exception"}})
    with pytest.raises(Transient, match="no_shard_available"):
        index.versions(DOCUMENTS[:3])
