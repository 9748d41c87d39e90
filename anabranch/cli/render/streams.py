"""Print the list of streams."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.common.output import print_json, print_table
from anabranch.operations.reports.streams import StreamSummary


def print_streams(views: Sequence[StreamSummary], output: str) -> None:
    """Print the streams: a table, or a list of objects."""
    if output == "json":
        print_json(views)
        return
    rows = [(v.stream, v.family, v.group, v.topic, v.table, v.state, v.error) for v in views]
    print_table(("stream", "family", "group", "topic", "table", "state", "error"), rows)
