"""The data files of a Hudi table. Each commit writes a file group again as a new file, and the old
ones stay until Hudi cleans them: only the newest committed one of each group has the table's rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from anabranch.common.errors import Refused

# https://hudi.apache.org/docs/timeline: an instant, and its action, with a state if not completed.
_INSTANT = re.compile(r"\.hoodie/(?:timeline/)?(\d+)(?:_\d+)?\.([\w.]+)")
_COMPLETED = ("commit", "deltacommit")
_REPLACING = ("replacecommit", "clustering")
# The id of a group, a write token, an instant.
_FILE = re.compile(r"(.+)_\d+-\d+-\d+_(\d+)\.\w+")
_LOG = re.compile(r"(?:.*/)?\.[^/]+\.log\.\d[^/]*")


def newest_files(names: Collection[str], location: str) -> list[str] | None:
    """Return the data files of a table's newest version, from all names in its folder; None for
    another folder. Pure. Raises Refused for a table with rows in logs or with replaced groups."""
    if not any(name.startswith(".hoodie/") for name in names):
        return None
    instants = [(m[1], m[2]) for name in names if (m := _INSTANT.fullmatch(name)) is not None]
    # Its index, `.hoodie/metadata`, has files of the same names.
    own = [name for name in names if not name.startswith(".hoodie/")]
    logs = [name for name in own if _LOG.fullmatch(name)]
    replacing = [f"the {action} {at}" for at, action in instants if action in _REPLACING]
    if found := [*logs[:1], *replacing[:1]] or ([] if instants else ["no timeline"]):
        raise Refused(
            f"read {location}: expected a Hudi table whose newest files have its rows, found "
            f"{found[0]}; write a snapshot of it as Parquet files, and name that folder"
        )
    # Instants before the timeline's first are archived. Others that it lacks were rolled back.
    first = min(at for at, _ in instants)
    completed = {at for at, action in instants if action in _COMPLETED}
    newest = dict[str, tuple[str, str]]()
    for name in own:
        file = _FILE.fullmatch(name)
        if file is not None and (file[2] < first or file[2] in completed):
            newest[file[1]] = max((file[2], name), newest.get(file[1], ("", "")))
    return sorted(name for _, name in newest.values())
