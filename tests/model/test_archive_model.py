"""The archive's protocol in every interleaving: two writers of an hour, an eraser and kills. A
mutation of a step that the protocol rests on is found."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace

import pytest

RECORDS = frozenset({"good", "personal"})
Files = frozenset[tuple[int, frozenset[str]]]


@dataclass(frozen=True)
class Rules:
    """The protocol; each is true but in a mutation."""

    moves_head: bool = True
    loads_head_first: bool = True
    requires_head: bool = True
    compares_files: bool = True
    searches_new_files: bool = True


@dataclass(frozen=True)
class World:
    """The archive's head and files (a number and records); is the erasure in the branches?"""

    head: int = 0
    files: Files = frozenset()
    is_erased: bool = False
    next_file: int = 0
    kills: int = 1

    def commit(self, files: Files) -> World:
        return replace(self, head=self.head + 1, files=files)

    def with_file(self, files: Files, records: frozenset[str]) -> World:
        """A commit of files with a new one of some records, if it has any."""
        new = {(self.next_file, records)} if records else set()
        return replace(self.commit(files | new), next_file=self.next_file + 1)


@dataclass(frozen=True)
class Writer:
    """A batch job. `by`: the erasure by which it read; `had`: the files as it listed them; `head`,
    `has` and `now`: the head, the files and the erasure by which it decides."""

    at: str = "read"
    by: bool = False
    had: Files = frozenset()
    staged: frozenset[str] = frozenset()
    head: int | None = None
    has: Files = frozenset()
    now: bool | None = None

    def steps(self, world: World, rules: Rules) -> Iterator[tuple[World, Writer]]:
        match self.at:
            case "read":
                yield world, Writer("list", by=world.is_erased)
            case "list":
                wanted = RECORDS - {"personal"} if self.by else RECORDS
                missing = wanted.difference(*(records for _, records in world.files))
                at = "load" if missing else "done"
                yield world, replace(self, at=at, had=world.files, staged=missing)
            case "load":
                yield world, replace(self._load(world, rules.loads_head_first), at="decide")
            case "decide":
                both = self._load(world, not rules.loads_head_first)
                if both.now != self.by or (rules.compares_files and both.has != self.had):
                    yield world, Writer()
                else:
                    yield world, replace(both, at="commit")
            case "commit":
                if rules.requires_head and world.head != self.head:
                    yield world, replace(self, at="load")
                    return
                yield world.with_file(world.files, self.staged), Writer("done")

    def _load(self, world: World, of_archive: bool) -> Writer:
        """The archive, or the erasure, as it is loaded to decide."""
        if of_archive:
            return replace(self, head=world.head, has=world.files)
        return replace(self, now=world.is_erased)


@dataclass(frozen=True)
class Eraser:
    """`anabranch erase`, run again after a kill: it replaces the record's files one by one, then,
    all being `searched`, moves the head. `found`: a file to replace."""

    at: str = "record"
    searched: frozenset[int] = frozenset()
    found: tuple[int, frozenset[str]] | None = None
    head: int = 0

    def steps(self, world: World, rules: Rules) -> Iterator[tuple[World, Eraser]]:
        match self.at:
            case "record":
                yield replace(world, is_erased=True), Eraser("search")
            case "search":
                new = [f for f in world.files if f[0] not in self.searched]
                clean = frozenset(number for number, records in new if "personal" not in records)
                found = min((f for f in new if f[0] not in clean), default=None)
                after = replace(self, searched=self.searched | clean, found=found)
                yield world, replace(after, at="load" if found is None else "rewrite")
            case "rewrite":
                if self.found is None or self.found not in world.files:
                    yield world, replace(self, at="search")
                    return
                kept = self.found[1] - {"personal"}
                searched = self.searched | ({world.next_file} if kept else set())
                rewritten = world.with_file(world.files - {self.found}, kept)
                yield rewritten, replace(self, at="search", searched=searched)
            case "load":
                is_searched = all(number in self.searched for number, _ in world.files)
                if not rules.moves_head:
                    yield world, Eraser("done")
                elif rules.searches_new_files and not is_searched:
                    yield world, replace(self, at="search")
                else:
                    yield world, replace(self, at="move", head=world.head)
            case "move":
                if world.head != self.head:
                    yield world, replace(self, at="load")
                else:
                    yield world.commit(world.files), Eraser("done")


Actor = Writer | Eraser


@dataclass(frozen=True)
class Moment:
    """Everything at one time."""

    world: World = field(default_factory=World)
    actors: tuple[Actor, ...] = (Writer(), Writer(), Eraser())

    def next(self, rules: Rules) -> Iterator[Moment]:
        for i, actor in enumerate(self.actors):
            before, behind = self.actors[:i], self.actors[i + 1 :]
            for world, after in actor.steps(self.world, rules):
                yield Moment(world, (*before, after, *behind))
            if self.world.kills and actor.at != "done" and actor != type(actor)():
                killed = replace(self.world, kills=self.world.kills - 1)
                yield Moment(killed, (*before, type(actor)(), *behind))


def problem(moment: Moment) -> str | None:
    """Return what does not hold."""
    archived = sorted(record for _, records in moment.world.files for record in records)
    if len(archived) != len(set(archived)):
        return f"twice: {archived}"
    if any(actor.at != "done" for actor in moment.actors):
        return None
    if "personal" in archived:
        return "an erased record is archived"
    return None if archived == ["good"] else f"missing: {archived}"


def explore(rules: Rules) -> tuple[int, str | None]:
    """The number of moments, and the first problem."""
    known, waiting = {Moment()}, deque([Moment()])
    while waiting:
        moment = waiting.popleft()
        if found := problem(moment):
            return len(known), found
        for following in moment.next(rules):
            if following not in known:
                known.add(following)
                waiting.append(following)
    return len(known), None


def test_each_record_is_archived_once_and_no_erased_one_stays() -> None:
    moments, found = explore(Rules())
    assert found is None and moments > 1_000


@pytest.mark.parametrize("rule", [rule.name for rule in fields(Rules)])
def test_a_mutation_is_found(rule: str) -> None:
    assert explore(replace(Rules(), **{rule: False}))[1] is not None
