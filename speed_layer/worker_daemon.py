"""The process that Spark's Python workers are forked from, on one machine: `spark.python.daemon.module`.

It imports once what they need, so that a worker is there in milliseconds and shares its memory with the others. And it
leaves out of Python's path the archives that Spark puts there, its own jar among them: a worker reads their directories
again before every task, which takes longer (130 ms and 25) than the records of a micro-batch.
"""

from __future__ import annotations

import gc
import sys


def forget_archives() -> None:
    """Import nothing from archives where the same is installed."""
    archives = [path for path in sys.path if _is_sparks(path)]
    sys.path[:] = [path for path in sys.path if path not in archives]
    for path in list(sys.path_importer_cache):
        if any(path == archive or path.startswith(f"{archive}/") for archive in archives):
            del sys.path_importer_cache[path]


def _is_sparks(path: str) -> bool:
    return path.endswith(".jar") or (path.endswith(".zip") and ("pyspark" in path or "py4j" in path))


if __name__ == "__main__":
    forget_archives()
    import pyspark.daemon

    import speed_layer.fast_staging  # noqa: F401

    # A worker looks for garbage after every task, and this is none: to go through it takes longer than the task.
    gc.freeze()
    pyspark.daemon.manager()  # type: ignore[no-untyped-call]
