"""A dbt-duckdb plugin: a stream's table, or its watermarks, as sources of a dbt project.

A profile names this module among its `plugins`. A source's `config` sets `plugin`, `stream`
(default: the source's name) and `read` (`rows`, the default, or `watermarks`).
docs/how-to/dbt.md has a complete project.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
from dbt.adapters.duckdb.plugins import BasePlugin

from anabranch.common.errors import ConfigurationError
from anabranch.offsets.hours import end_of
from serving_layer.reader import open_table

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from dbt.adapters.duckdb.utils import SourceConfig

    from anabranch.protocol.watermarks import Watermarks

_TIME = pa.timestamp("us", "UTC")
_WATERMARKS = pa.schema(
    {
        "complete_through": pa.string(),
        "complete_until": _TIME,
        "fresh_through": _TIME,
    }  # complete_until: the end of that hour
)


class Plugin(BasePlugin):  # type: ignore[misc]
    """A plugin that loads the table at each use of a source: a read is of one snapshot."""

    def initialize(self, plugin_config: dict[str, Any]) -> None:
        """Configure the plugin. `conf`: the folder (default: ANABRANCH_CONF, else conf)."""
        self._conf = plugin_config.get("conf")

    def load(self, source_config: SourceConfig) -> ds.Dataset | pa.Table:
        """Return `main`'s rows, or watermarks. Raises ConfigurationError, Refused, Transient."""
        table = open_table(source_config.get("stream", source_config.identifier), conf=self._conf)
        match read := source_config.get("read", "rows"):
            case "rows":
                return table.dataset()
            case "watermarks":
                return _as_table(table.watermarks())
        raise ConfigurationError(
            f"source {source_config.table_name()}, read: expected rows or watermarks, found "
            f"{read!r}"
        )

    def default_materialization(self) -> str:
        """Return `view`: nothing is copied, and each statement opens the files that it needs."""
        return "view"


def _as_table(found: Watermarks) -> pa.Table:
    through = found.complete_through
    row = {
        "complete_through": through,
        "complete_until": end_of(through) if through is not None else None,
        "fresh_through": found.fresh_through,
    }
    return pa.Table.from_pylist([row], _WATERMARKS)
