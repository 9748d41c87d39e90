"""A token records what a consumer has received, in a few printable characters that stay valid when
snapshots expire."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from anabranch.common.errors import ConfigurationError
from anabranch.protocol.ledger_row import Layer, LedgerRow

PREFIX = "ab1."


@dataclass(frozen=True)
class Content:
    """The content of an hour in `main`: a revision from a layer. `erased`: the digest of its newest
    known erasure; empty if it has none."""

    revision: int
    layer: Layer
    erased: str = ""


@dataclass(frozen=True)
class Cursor:
    """The newest ledger row that was consumed. A row never changes its sequence, and leaves the
    ledger only with its quarter (`keep.ledger`). `digest`: the digest of the decision's id, which
    differs in another ledger."""

    sequence: int
    digest: str

    @staticmethod
    def at(row: LedgerRow) -> Cursor:
        assert row.sequence is not None
        return Cursor(row.sequence, digest_of(row))


def digest_of(row: LedgerRow) -> str:
    """Return the digest of a decision's id in a token."""
    return hashlib.sha256(row.decision_id.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Token:
    """A consumer's position. `cursor`: None before the first row. `first`: earlier hours are not
    wanted. `ahead`: the contents that were delivered before the ledger's rows of their decisions
    were written."""

    stream: str
    first: str = ""
    cursor: Cursor | None = None
    ahead: Mapping[str, Content] = field(default_factory=dict)

    def encode(self) -> str:
        """Return the token as printable text without blanks or quotes, opaque to consumers."""
        data: dict[str, object] = {"s": self.stream}
        if self.first:
            data["f"] = self.first
        if self.cursor is not None:
            data["c"] = [self.cursor.sequence, self.cursor.digest]
        if self.ahead:
            data["a"] = {
                hour: [content.revision, content.layer]
                for hour, content in sorted(self.ahead.items())
            }
        # Separate from "a", whose values earlier versions of the code read as pairs.
        if erased := {
            hour: content.erased for hour, content in sorted(self.ahead.items()) if content.erased
        }:
            data["e"] = erased
        text = json.dumps(data, separators=(",", ":")).encode()
        return PREFIX + base64.urlsafe_b64encode(text).decode().rstrip("=")

    @staticmethod
    def decode(text: str) -> Token:
        """Return the token of a text. Raises ConfigurationError for text that `encode` did not
        write."""
        try:
            packed = text.removeprefix(PREFIX)
            data = json.loads(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)))
            cursor = Cursor(int(data["c"][0]), str(data["c"][1])) if "c" in data else None
            erased = data.get("e", {})
            ahead = {
                str(h): Content(int(revision), layer, str(erased.get(h, "")))
                for h, (revision, layer) in data.get("a", {}).items()
            }
            return Token(str(data["s"]), str(data.get("f", "")), cursor, ahead)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ConfigurationError(
                f"--since: expected a complete token printed by `anabranch changes`, found {text!r}"
            ) from error
