"""What a webhook is told of an hour: one message for each decision of the ledger that changed what readers may believe
of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.protocol.ledger_row import Layer, LedgerRow

BALANCE = ("offsets", "good", "dead", "duplicate", "gap")
ADOPTING = "sealed by adopting"


@dataclass(frozen=True)
class Standing:
    """An hour's state: `revision` is the accepted one, 0 for none."""

    state: str
    revision: int
    served: Layer


@dataclass(frozen=True)
class Message:
    """A decision, and its hour's state before and after."""

    event: str
    row: LedgerRow
    before: Standing
    after: Standing

    def as_dict(self, stream: str, table: str, page: str | None) -> dict[str, Any]:
        """As it is posted. `text` is all of it in a sentence, as chat services show it."""
        row = self.row
        balance = {name: value for name in BALANCE if (value := getattr(row, name)) is not None}
        diff, quality = row.diff, row.quality
        link = f"{page}/streams/{stream}/hours/{row.hour}" if page is not None else None
        return {
            "id": row.decision_id,
            "event": self.event,
            "stream": stream,
            "table": table,
            "hour": row.hour,
            "revision": row.revision,
            "from": vars(self.before),
            "to": vars(self.after),
            "recorded_at": row.recorded_at.isoformat(),
            "reason": row.reason,
            "balance": balance,
            "difference": {"missing": diff.missing, "extra": diff.extra, "changed": diff.changed} if diff else None,
            "quality": {"passed": quality.passed, "failed": len(quality.failed)} if quality is not None else None,
            "command": f"anabranch explain {stream} {row.hour}",
            "link": link,
            "text": self._text(stream) + (f" {link}" if link is not None else ""),
        }

    def _text(self, stream: str) -> str:
        told = f"{stream} {self.row.hour} {self.event}"
        told += f" as revision {self.row.revision}" if self.event in ("accepted", "restated") else ""
        told += f", served by {self.after.served}"
        return told + (f": {self.row.reason}" if self.row.reason else "")


_UNKNOWN = Standing("open", 0, "speed")


def messages(rows: Sequence[LedgerRow], since: int) -> Iterator[Message]:
    """The messages of what was recorded with the sequence `since` or later, in the order of the ledger. `rows` are all
    decisions about the hours concerned, in that order."""
    standing: dict[str, Standing] = {}
    for row in rows:
        before = standing.get(row.hour, _UNKNOWN)
        after = standing[row.hour] = _after(before, row)
        event = _event(before, row)
        if event is not None and (row.sequence or 0) >= since:
            yield Message(event, row, before, after)


def _after(before: Standing, row: LedgerRow) -> Standing:
    served = row.served or before.served
    match row.decision:
        case "accepted":
            return Standing("accepted", row.revision, served)
        case "refused" if not before.revision:
            return Standing("refused", 0, served)
        case "sealed" if before is _UNKNOWN:
            return Standing("sealed", 0, served)
    return Standing(before.state, before.revision, served)


def _event(before: Standing, row: LedgerRow) -> str | None:
    """The event's name; None for decisions that are not sent."""
    match row.decision:
        case "accepted":
            return "restated" if before.revision else "accepted"
        case "refused" | "served":
            return row.decision
    return "adopted" if (row.reason or "").startswith(ADOPTING) else None
