"""The streams that a command or a process works with: by name, by group, or all of the configuration folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from anabranch.common.errors import ConfigurationError
from anabranch.config.loading import UNREADABLE, group_in_file, load_stream, resolve_folder, stream_names
from anabranch.config.stream import Stream

Selected = Mapping[str, Stream | ConfigurationError]
"""By name: the stream, or the error of its file."""


def select_streams(
    folder: str | Path | None = None, names: Collection[str] = (), group: str | None = None, every: bool = False
) -> Selected:
    """The streams that are named, those with `group: GROUP`, or every stream; names keep their order.

    A file that is wrong is in the result with its error, and changes nothing for other streams. One whose group cannot
    be read belongs to every group. Raises ConfigurationError for a name without a file, a group or a folder without
    streams, and for anything but one of the three ways to select.
    """
    if [bool(names), group is not None, every].count(True) != 1:
        raise ConfigurationError("streams: expected names, or --group NAME, or --all; give one of them")
    known = stream_names(folder)
    if names:
        chosen = tuple(dict.fromkeys(names))
        if missing := next((name for name in chosen if name not in known), None):
            load_stream(missing, folder)  # raises, and names the streams that there are
    elif not known:
        raise ConfigurationError(
            f"{resolve_folder(folder)}/streams: expected a stream's file, found none; `anabranch init` writes examples"
        )
    else:
        chosen = known
    selected = {name: _load(name, folder) for name in chosen}
    return selected if group is None else _members(selected, group, folder)


def loaded(selected: Selected) -> list[Stream]:
    """The streams whose files are right."""
    return [found for found in selected.values() if isinstance(found, Stream)]


def broken(selected: Selected) -> dict[str, ConfigurationError]:
    """By stream: the error of its file."""
    return {name: found for name, found in selected.items() if isinstance(found, ConfigurationError)}


def _load(name: str, folder: str | Path | None) -> Stream | ConfigurationError:
    try:
        return load_stream(name, folder)
    except ConfigurationError as error:
        return error


def _members(selected: Selected, group: str, folder: str | Path | None) -> Selected:
    groups = {name: group_in_file(name, folder) for name in broken(selected)}
    groups |= {stream.name: stream.group for stream in loaded(selected)}
    members = {name: found for name, found in selected.items() if groups[name] in (group, UNREADABLE)}
    if not any(groups[name] == group for name in members):
        known = ", ".join(sorted({str(found) for found in groups.values() if found not in (None, UNREADABLE)}))
        raise ConfigurationError(
            f"group {group!r}: expected a stream's file with `group: {group}` in {resolve_folder(folder)}/streams, "
            f"found none (known groups: {known or 'none'})"
        )
    return members
