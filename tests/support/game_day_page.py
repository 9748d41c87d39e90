"""The page tests/gameday/game-day.md: written from the observations of a game day, and read to be
compared with the next one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "gameday" / "game-day.md"


_HEAD = """# Game day

Faults, caused one after the other on the running demo: Kafka, S3, a speed job under live events, batch runs, the
exporter, the status page, and Prometheus with [our alerts](../../deploy/prometheus/alerts.yml). Each until it was
seen, fixed by its [run-book's](../../docs/runbooks.md) command, and gone. `make game-day` does all of it
again, and compares what is seen where, and the commands, with this page; `make game-day WRITE=1` writes the page.
It then causes what the other alerts watch for, and sees each of them fire.

The times are of one run, of {minutes:.0f} minutes on two cores that other work shared. Alerts ran {factor} times as
fast as they ship (`for`, windows, and the ten minutes after which a speed layer is late, which the page and `doctor`
got them too), and the exporter was asked every 16 s: with what ships, an alert comes after its `for`, and up to a
minute for the exporter and Prometheus. The terminal's time is until `anabranch doctor` had ended and said so, run
again and again.
"""
_AUDIT = """After the last one, every record that Kafka acknowledged against what is served: of the topic that was
deleted, then of the recreated one."""


@dataclass(frozen=True)
class Seen:
    """One place in which a fault was seen: its name there, the seconds until then, and the whole
    text."""

    where: str
    name: str
    seconds: float
    says: str


@dataclass(frozen=True)
class Observed:
    """A fault: its cause, where it was seen, the run-book's command, and the seconds until no place
    showed it any more."""

    fault: str
    done: str
    seen: Sequence[Seen]
    command: str
    instead: str
    quiet_after: float

    @property
    def skeleton(self) -> tuple[str, tuple[tuple[str, str], ...], str]:
        """The facts that are the same on each game day."""
        return self.fault, tuple((seen.where, seen.name) for seen in self.seen), self.command


def render(observed: Sequence[Observed], audit: Sequence[str], factor: int, minutes: float) -> str:
    """Return the page."""
    lines = [
        _HEAD.format(minutes=minutes, factor=factor),
        "| fault | page | terminal | alert | run | quiet after |",
        "|---|---|---|---|---|---|",
    ]
    for one in observed:
        by_place = {
            place: [s for s in one.seen if s.where == place]
            for place in ("page", "terminal", "alert")
        }
        cells = [
            ", ".join(f"`{s.name}` {s.seconds:.0f} s" for s in of) or "—"
            for of in by_place.values()
        ]
        run = f"`{one.command}`" if one.command else one.instead
        anchor = one.fault.lower().replace(" ", "-").replace(",", "")
        lines.append(
            f"| [{one.fault}](#{anchor}) | {' | '.join(cells)} | {run} | {one.quiet_after:.0f} s |"
        )
    lines += [
        "",
        _AUDIT,
        "",
        "```text",
    ]
    lines += [*audit, "```", ""]
    for one in observed:
        lines += [f"## {one.fault}", "", f"{one.done}", ""]
        for seen in one.seen:
            lines += [
                f"- {seen.where}, `{seen.name}`, after {seen.seconds:.1f} s:",
                "",
                "  ```text",
            ]
            lines += [f"  {line}" for line in seen.says.splitlines()]
            lines += ["  ```", ""]
        run = f"`{one.command}`" if one.command else "nothing of ours"
        more = f" ({one.instead})" if one.instead else ""
        lines += [f"Run: {run}{more}. All was quiet again {one.quiet_after:.0f} s after that.", ""]
    return "\n".join(lines).rstrip() + "\n"


def skeletons(text: str) -> list[tuple[str, tuple[tuple[str, str], ...], str]]:
    """Read the facts of each fault that are the same on each game day from a page."""
    found = []
    for part in text.split("\n## ")[1:]:
        fault, _, body = part.partition("\n")
        seen = tuple(re.findall(r"^- (\w+), `([^`]+)`, after", body, re.MULTILINE))
        [run] = re.findall(r"^Run: (?:`([^`]+)`|nothing of ours)", body, re.MULTILINE)
        found.append((fault, seen, run))
    return found
