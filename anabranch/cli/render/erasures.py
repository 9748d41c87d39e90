"""Print erasures: removed records, and remaining copies."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.cli.render import print_result
from anabranch.lifecycle.erasure.rows import Found
from anabranch.lifecycle.erasure.run import Erased
from anabranch.lifecycle.erasure.status import ErasureStatus, status_lines, view


def print_found(stream: str, found: Found, output: str) -> None:
    lines = [
        (
            f"{stream}: would erase {found.rows} rows and {found.dead} dead letters of "
            f"{len(found.hours)} hours, and replace {found.files} files"
        )
    ]
    if found.held:
        lines.append(
            f"{stream}: {len(found.held)} of these hours are kept by operators, {found.held[0]} "
            f"to {found.held[-1]}: refused without --in-spite-of-hold TEXT"
        )
    print_result({"stream": stream, "dry_run": True, "found": found}, lines, output)


def print_erased(stream: str, done: Erased, output: str) -> None:
    removed = done.removed
    rest = f"done on every branch; `anabranch erase {stream} --status` shows the rest"
    lines = [
        (
            f"{stream}: erasure {done.erasure.id}: removed {removed.rows} rows and {removed.dead} "
            f"dead letters of {len(removed.hours)} hours"
        ),
        f"{stream}: {done.left or rest}",
    ]
    if done.was_done:
        lines.append(
            f"{stream}: it is of records before {done.erasure.at:%F %T} UTC; --again erases those "
            "since"
        )
    shown = {"stream": stream, "erasure": done.erasure, "removed": removed, "left": done.left}
    print_result(shown, lines, output)


def print_erasures(stream: str, statuses: Sequence[ErasureStatus], output: str) -> None:
    lines = [line for one in statuses for line in status_lines(one)] or ["no erasure"]
    print_result(
        {"stream": stream, "erasures": view(statuses)},
        [f"{stream}: {line}" for line in lines],
        output,
    )
