"""The webhook's messages: one for each ledger decision that changed an hour's state for readers.
Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.protocol.counts import Counts
from anabranch.protocol.ledger_row import Layer, LedgerRow

ADOPTING = "sealed by adopting"


@dataclass(frozen=True)
class HourState:
    """The state of an hour; `revision` is the accepted one, 0 for none."""

    state: str
    revision: int
    served: Layer


@dataclass(frozen=True)
class Message:
    """A decision, with the state of its hour before and after."""

    event: str
    row: LedgerRow
    before: HourState
    after: HourState

    def as_dict(self, stream: str, table: str, page: str | None) -> dict[str, Any]:
        """Return the JSON object to post. `text` is a one-sentence summary for chat services."""
        row = self.row
        counts = Counts.of(row).as_dict()
        balance = {name: value for name, value in counts.items() if value is not None}
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
            "difference": {"missing": diff.missing, "extra": diff.extra, "changed": diff.changed}
            if diff
            else None,
            "quality": {"passed": quality.passed, "failed": len(quality.failed)}
            if quality is not None
            else None,
            "command": f"anabranch explain {stream} {row.hour}",
            "link": link,
            "text": self._text(stream) + (f" {link}" if link is not None else ""),
        }

    def _text(self, stream: str) -> str:
        text = f"{stream} {self.row.hour} {self.event}"
        text += (
            f" as revision {self.row.revision}" if self.event in ("accepted", "restated") else ""
        )
        text += f", served by {self.after.served}"
        return text + (f": {self.row.reason}" if self.row.reason else "")


_UNKNOWN = HourState("open", 0, "speed")


def messages(rows: Sequence[LedgerRow], since: int) -> Iterator[Message]:
    """Yield the messages of decisions with sequence `since` or later, in ledger order. `rows` are
    all decisions about the hours concerned, in that order."""
    states: dict[str, HourState] = {}
    for row in rows:
        before = states.get(row.hour, _UNKNOWN)
        after = states[row.hour] = _after(before, row)
        event = _event(before, row)
        if event is not None and (row.sequence or 0) >= since:
            yield Message(event, row, before, after)


def _after(before: HourState, row: LedgerRow) -> HourState:
    served = row.served or before.served
    match row.decision:
        case "accepted":
            return HourState("accepted", row.revision, served)
        case "refused" if not before.revision:
            return HourState("refused", 0, served)
        case "sealed" if before is _UNKNOWN:
            return HourState("sealed", 0, served)
    return HourState(before.state, before.revision, served)


def _event(before: HourState, row: LedgerRow) -> str | None:
    """Return the event's name; None for decisions that are not sent."""
    match row.decision:
        case "accepted":
            return "restated" if before.revision else "accepted"
        case "refused" | "served":
            return row.decision
    return "adopted" if (row.reason or "").startswith(ADOPTING) else None
