"""A family: one file that defines a stream for each topic of the cluster that matches a pattern.

`select_streams` selects the streams for a command or process: by name, by group, or all of the
configuration folder.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from anabranch.common.errors import ConfigurationError
from anabranch.config.base import Frozen
from anabranch.config.loading import (
    as_configuration_errors,
    build_stream,
    family_names,
    load_stream,
    require_services,
    shared_tables,
    stream_names,
    validated,
)
from anabranch.config.plain import (
    NAME,
    UNREADABLE,
    StreamFile,
    group_in_file,
    read_stream_file,
    resolve_folder,
)
from anabranch.config.stream import Stream

_GROUP = re.compile(r"\{([^{}]*)\}")
_TABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*")
# RE2 and Python both accept a POSIX class, but with different meanings.
_POSIX_CLASS = re.compile(r"\[:\^?[a-z]+:\]")
# Prefix of topics that Kafka and its tools create.
_INTERNAL = "__"
# The keys of an egress target that name its destination.
_PLACES = ("root", "topic", "index")
# The stream, topic and table name with which a family's shared keys are checked.
_SAMPLE = "sample"


def _pattern(value: str) -> str:
    import pyarrow as pa
    import pyarrow.compute as pc

    if posix := _POSIX_CLASS.search(value):
        raise ValueError(f"expected a character class such as [a-z], found {posix[0]}")
    try:
        pc.match_substring_regex(pa.array([""]), _anchored(value))
        re.compile(value)
    except (pa.ArrowInvalid, re.error) as error:
        why = str(error).removeprefix("Invalid regular expression: ")
        raise ValueError(
            f"expected a regular expression (RE2: no look-around, no back-references), found: {why}"
        ) from None
    return value


@lru_cache(maxsize=20_000)
def _matches(pattern: str, topic: str) -> bool:
    """Return whether a pattern matches a whole topic. RE2 bounds the time; Python's `re` takes
    hours for some patterns and topics, and blocks all threads meanwhile."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return bool(pc.match_substring_regex(pa.array([topic]), _anchored(pattern))[0].as_py())


def _anchored(pattern: str) -> str:
    return f"^(?:{pattern})$"


MOST_STREAMS = 1_000
"""Maximum number of streams of a family: each new topic creates tables."""


class Topics(Frozen):
    """The family's topics: `pattern` matches the whole name, `exclude` does not. With `create`, a
    speed process creates the tables of new topics; otherwise `anabranch apply` does."""

    pattern: Annotated[str, AfterValidator(_pattern)] = Field(
        min_length=1,
        description=(
            "A regular expression (RE2) that matches whole names of topics: each such topic is a "
            "stream. Topics that begin with `__`, and topics of other streams' files, are "
            "excluded."
        ),
        examples=["app-(.*)"],
    )
    exclude: Annotated[str, AfterValidator(_pattern)] | None = Field(
        default=None,
        description="A regular expression that matches whole names of topics to exclude.",
        examples=[".*-dlq"],
    )
    create: bool = Field(
        default=True,
        description=(
            "Whether a running speed process of a group, or of all streams, creates the tables "
            "of a new topic. With `false`, a new topic waits for `anabranch apply`."
        ),
    )


class FamilyKeys(Frozen):
    """The keys that replace `topic` in a family's file. `table`, `name` and the places of `egress`
    name groups of the pattern: `{1}`, `{NAME}`, or `{0}` for the whole topic."""

    topics: Topics
    table: str = Field(
        description=(
            "The table of each stream. `{1}` is the first group of `topics.pattern`, `{NAME}` a "
            "named one, `{0}` the whole topic; `.` and `-` become `_`."
        ),
        examples=["raw.{1}"],
    )
    name: str | None = Field(
        default=None,
        description=(
            "The name of each stream, with groups as in `table`. Default: the family's name, "
            "`_`, and `table` without its namespace."
        ),
    )


@dataclass(frozen=True)
class Family:
    """A family's file, read and checked: the settings that its streams share. `side_tables` are the
    endings of a stream's other tables, after the name of its table of rows."""

    name: str
    topics: Topics
    table: str
    stream: str
    group: str | None
    side_tables: frozenset[str]
    file: StreamFile = field(repr=False)

    def matches(self, topic: str) -> bool:
        """Return whether the family has a stream for a topic."""
        if topic.startswith(_INTERNAL) or (
            self.topics.exclude and _matches(self.topics.exclude, topic)
        ):
            return False
        return _matches(self.topics.pattern, topic)

    def stream_name(self, topic: str) -> str:
        """Return the stream name of a topic, which may be invalid."""
        return self._fill(self.stream, topic)

    def table_name(self, topic: str) -> str:
        """Return the table name of a topic's stream, which may be invalid."""
        return self._fill(self.table, topic)

    @property
    def namespace(self) -> str:
        """The namespace of all tables of the family."""
        return self.table.partition(".")[0]

    def may_have(self, table: str) -> bool:
        """Return whether the family's template can produce this table name."""
        parts = _GROUP.split(self.table)
        form = "".join(re.escape(text) if i % 2 == 0 else r"\w*" for i, text in enumerate(parts))
        return re.fullmatch(form, table) is not None

    def build(self, topic: str) -> Stream:
        """Build the stream of a matching topic. Raises ConfigurationError."""
        name, table = self.stream_name(topic), self.table_name(topic)
        where = f"{self.file.path}: topic {topic}"
        if not _TABLE.fullmatch(table):
            raise ConfigurationError(
                f"{where}: table: expected namespace.table of letters, digits and underscores, no "
                f"digit first, found {table}; change `table: {self.table}`, or leave the topic "
                "out with `topics: {exclude: ...}`"
            )
        if not NAME.fullmatch(name):
            raise ConfigurationError(
                f"{where}: name: expected letters, digits and underscores, no digit first, found "
                f"{name}; change `name: {self.stream}`, or leave the topic out with `topics: "
                "{exclude: ...}`"
            )
        own = {"name": name, "topic": topic, "table": table, "family": self.name}
        return _build(self.file, own, lambda place: self._fill(place, topic))

    def _fill(self, template: str, topic: str) -> str:
        found = re.fullmatch(self.topics.pattern, topic)
        assert found is not None

        def value(group: re.Match[str]) -> str:
            key = group[1]
            text = found[int(key) if key.isdecimal() else key] or ""
            return re.sub(r"[.-]", "_", text)

        return _GROUP.sub(value, template)


@dataclass(frozen=True)
class FamilyMember:
    """A stream of a family, or the reason that a topic has none. `is_gone`: Kafka no longer has the
    topic. `creates`: a speed process creates the stream's tables."""

    family: str
    group: str | None
    topic: str
    found: Stream | ConfigurationError
    is_gone: bool = False
    creates: bool = False


Members = Mapping[str, FamilyMember]
"""Family members by stream name."""


def load_families(folder: str | Path | None = None) -> dict[str, Family | ConfigurationError]:
    """Load the configuration folder's families, each as a Family or its file's error."""
    found: dict[str, Family | ConfigurationError] = {}
    for name in family_names(folder):
        try:
            found[name] = load_family(name, folder)
        except ConfigurationError as error:
            found[name] = error
    return found


def load_family(name: str, folder: str | Path | None = None) -> Family:
    """Read and check a family's file, with its streams' shared keys. Raises ConfigurationError."""
    folder = resolve_folder(folder)
    with as_configuration_errors(folder / "streams" / f"{name}.yaml"):
        return _load_family(name, folder)


def _load_family(name: str, folder: Path) -> Family:
    path = folder / "streams" / f"{name}.yaml"
    file = read_stream_file(folder, name)
    if "topic" in file.own:
        raise ConfigurationError(f"{path}: topic: expected topic or topics, found both; remove one")
    own = {key: file.values[key] for key in FamilyKeys.model_fields if key in file.values}
    keys = validated(file.source, FamilyKeys, own, file.own)
    stream = keys.name or f"{name}_{keys.table.rpartition('.')[2]}"
    _check_templates(file, keys)
    own = {"name": _SAMPLE, "topic": _SAMPLE, "table": f"{_SAMPLE}.{_SAMPLE}"}
    sample = _build(file, own, lambda place: _GROUP.sub(_SAMPLE, place))
    _check_places(file, keys.topics.pattern)
    require_services(sample, folder)
    sides = frozenset(table.removeprefix(sample.table) for table in sample.tables) - {""}
    return Family(name, keys.topics, keys.table, stream, sample.group, sides, file)


def _check_templates(file: StreamFile, keys: FamilyKeys) -> None:
    for key, template in (("table", keys.table), ("name", keys.name or "{0}")):
        _check_groups(file.path, key, template, keys.topics.pattern)
    if not _TABLE.fullmatch(_GROUP.sub("x", keys.table)) or "{" in keys.table.partition(".")[0]:
        raise ConfigurationError(
            f"{file.path}: table: expected namespace.table with groups only after the point, "
            f"such as raw.{{1}}, found {keys.table!r}"
        )


def _check_places(file: StreamFile, pattern: str) -> None:
    """Check that each stream has its own folders, since folders of an hour have the same name in
    all streams; streams may share a topic or an index. Raises ConfigurationError."""
    for i, target in enumerate(file.values.get("egress") or ()):
        for key in _PLACES:
            if key in target:
                _check_groups(
                    file.source(["egress"]),
                    f"egress[{i}].{key}",
                    target[key],
                    pattern,
                    key == "root",
                )


def _check_groups(path: Path, key: str, template: str, pattern: str, is_own: bool = True) -> None:
    """Check that a template names only groups of the pattern, and at least one if `is_own`. Raises
    ConfigurationError."""
    compiled, used = re.compile(pattern), _GROUP.findall(template)
    known = [*map(str, range(compiled.groups + 1)), *compiled.groupindex]
    if unknown := next((group for group in used if group not in known), None):
        raise ConfigurationError(
            f"{path}: {key}: expected groups of topics.pattern ({', '.join(known)}), found "
            f"{{{unknown}}}"
        )
    if is_own and not used:
        raise ConfigurationError(
            f"{path}: {key}: expected a group of topics.pattern such as {{1}}, so that each topic "
            f"has its own, found {template!r}"
        )


def expand(
    families: Iterable[Family],
    topics: Iterable[str],
    streams: Sequence[Stream] = (),
    known: Mapping[str, str] | None = None,
) -> dict[str, FamilyMember]:
    """Return the streams of families by name: one for each topic that matches, and one for each
    member in `known`. Pure.

    `streams` have files of their own; families leave out their topics. `known` has the topics of
    earlier members by stream name: an earlier member precedes a new topic with the same table, and
    stays when its topic is gone. A member has an error instead of a stream if two families match
    its topic, or if its table or name belongs to another stream. If its name is taken, the member's
    key is the family and the topic, `app: app-x.y`. A family gets no new streams beyond
    MOST_STREAMS: the first topic beyond them has an error, the others are left out.
    """
    families, present, known = list(families), set(topics), known or {}
    counts = Counter[str]()
    taken = {table.casefold(): s.name for s in streams for table in s.tables}
    members: dict[str, FamilyMember] = {s.name: FamilyMember("", None, s.topic, s) for s in streams}
    own = {stream.topic for stream in streams}
    wanted = [(name, topic) for name, topic in known.items() if topic not in own]
    before = {topic for _, topic in wanted}
    for topic in [*dict.fromkeys(topic for _, topic in wanted), *sorted(present - before - own)]:
        matching = [family for family in families if family.matches(topic)]
        chosen = [
            family for family in matching if known.get(family.stream_name(topic)) == topic
        ] or matching
        for family in matching:
            name = family.stream_name(topic)
            if topic not in before and counts[family.name] >= MOST_STREAMS:
                error = ConfigurationError(
                    f"{family.file.path}: topic {topic}: expected at most {MOST_STREAMS} streams "
                    "of a family, found more topics; narrow `topics.pattern`, or divide the family"
                )
                beyond = FamilyMember(family.name, family.group, topic, error)
                members.setdefault(f"{family.name}: more topics", beyond)
                continue
            found = _find_stream(
                family, topic, [f for f in chosen if f is not family], taken, members
            )
            if isinstance(found, Stream):
                taken |= dict.fromkeys(map(str.casefold, found.tables), name)
                counts[family.name] += 1
            place = name if name not in members else f"{family.name}: {topic}"
            is_gone = topic not in present
            members[place] = FamilyMember(
                family.name, family.group, topic, found, is_gone, family.topics.create
            )
    return {name: member for name, member in members.items() if member.family}


def _find_stream(
    family: Family, topic: str, rivals: Sequence[Family], taken: Mapping[str, str], members: Members
) -> Stream | ConfigurationError:
    """Return the stream of a topic, or the reason that there is none."""

    def refused(message: str) -> ConfigurationError:
        return ConfigurationError(f"{family.file.path}: {message}")

    name = family.stream_name(topic)
    if rivals:
        return refused(
            f"topic {topic}: expected one family for each topic, found that {rivals[0].file.path} "
            "matches it too; narrow one `topics.pattern`, or use `topics.exclude`"
        )
    if name in members:
        return refused(
            f"topic {topic}: expected a stream name of its own, found {name}, which topic "
            f"{members[name].topic} has; change `name:`, or leave one topic out with "
            "`topics.exclude`"
        )
    try:
        stream = family.build(topic)
    except ConfigurationError as error:
        return error
    if shared := next((table for table in stream.tables if table.casefold() in taken), None):
        return refused(
            f"topic {topic}: expected tables of its own, found {shared}, which belongs to stream "
            f"{taken[shared.casefold()]}; change `table:`, or leave one topic out with "
            "`topics.exclude`"
        )
    return stream


def _build(file: StreamFile, own: Mapping[str, str], fill: Callable[[str], str]) -> Stream:
    values = {key: value for key, value in file.values.items() if key not in ("topics", "name")}
    if isinstance(targets := values.get("egress"), list):
        values["egress"] = [_with_place(target, fill) for target in targets]
    return build_stream(file, own, values)


def _with_place(target: object, fill: Callable[[str], str]) -> object:
    """Return an egress target with the groups of its place filled in."""
    if not isinstance(target, Mapping):
        return target
    return {
        k: fill(value) if k in _PLACES and isinstance(value, str) else value
        for k, value in target.items()
    }


Selected = Mapping[str, Stream | ConfigurationError]
"""Streams, or the errors of their files, by name."""


def select_streams(
    folder: str | Path | None = None,
    names: Collection[str] = (),
    group: str | None = None,
    every: bool = False,
    members: Callable[[], Members] | None = None,
) -> Selected:
    """Return the named streams, those with `group: GROUP`, or every stream; names keep their order.

    A stream with a table of another stream, by name the earlier one, has an error too.

    `members` returns the streams of families. It is called only if the folder has a family that may
    be selected; without it, families and names that may belong to one are left out. A stream whose
    file is invalid is in the result as an error and does not affect others. A file whose group
    cannot be read belongs to every group. Raises ConfigurationError for a name without a file, for
    a group or folder without streams, and unless exactly one way to select is given.
    """
    if [bool(names), group is not None, every].count(True) != 1:
        raise ConfigurationError(
            "streams: expected names, or --group NAME, or --all; give one of them"
        )
    known, families = stream_names(folder), family_names(folder)
    if names:
        return _named(folder, tuple(dict.fromkeys(names)), known, members, bool(families))
    if not known and not families:
        raise ConfigurationError(
            f"{resolve_folder(folder)}/streams: expected a stream's file, found none; `anabranch "
            "init` writes examples"
        )
    selected = {name: _load(name, folder) for name in known}
    selected |= shared_tables(loaded(selected), folder)
    groups = {name: group_in_file(name, folder) for name in broken(selected)}
    groups |= {stream.name: stream.group for stream in loaded(selected)}
    of_families = {name: group_in_file(name, folder) for name in families}
    if members is not None and (group is None or {group, UNREADABLE} & {*of_families.values()}):
        wrong = {
            name: found
            for name, found in load_families(folder).items()
            if isinstance(found, ConfigurationError)
        }
        selected |= wrong
        groups |= {name: of_families[name] for name in wrong}
        found = members()
        selected |= {name: member.found for name, member in found.items()}
        groups |= {name: member.group for name, member in found.items()}
    if group is None:
        return selected
    if group not in (*groups.values(), *of_families.values()):
        names_of = sorted(
            {str(name) for name in (*groups.values(), *of_families.values())} - {"None", UNREADABLE}
        )
        raise ConfigurationError(
            f"group {group!r}: expected a stream's file with `group: {group}` in "
            f"{resolve_folder(folder)}/streams, found none (known groups: "
            f"{', '.join(names_of) or 'none'})"
        )
    return {name: found for name, found in selected.items() if groups[name] in (group, UNREADABLE)}


def loaded(selected: Selected) -> list[Stream]:
    """Return the streams with valid files."""
    return [found for found in selected.values() if isinstance(found, Stream)]


def broken(selected: Selected) -> dict[str, ConfigurationError]:
    """Return the errors of files by stream."""
    return {
        name: found for name, found in selected.items() if isinstance(found, ConfigurationError)
    }


def _named(
    folder: str | Path | None,
    names: Sequence[str],
    known: Collection[str],
    members: Callable[[], Members] | None,
    has_families: bool,
) -> Selected:
    is_asked = has_families and members is not None and not set(names) <= set(known)
    found = members() if is_asked and members is not None else {}
    selected: dict[str, Stream | ConfigurationError] = {}
    for name in names:
        if name in known:
            selected[name] = _load(name, folder)
        elif name in found:
            selected[name] = found[name].found
        elif is_asked or not has_families:
            load_stream(name, folder)  # raises, and names the streams that there are
    return selected


def _load(name: str, folder: str | Path | None) -> Stream | ConfigurationError:
    try:
        return load_stream(name, folder)
    except ConfigurationError as error:
        return error
