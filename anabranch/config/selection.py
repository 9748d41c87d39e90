"""Selection of the streams for a command or process: by name, by group, or all of the configuration
folder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from anabranch.common.errors import ConfigurationError
from anabranch.config.family import Members, load_families
from anabranch.config.loading import family_names, load_stream, shared_tables, stream_names
from anabranch.config.plain import UNREADABLE, group_in_file, resolve_folder
from anabranch.config.stream import Stream

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
