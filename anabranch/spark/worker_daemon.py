"""The process from which Spark forks its Python workers (`spark.python.daemon.module`).

It imports the workers' modules once, so that a worker starts in milliseconds and shares memory with
the others. It also removes Spark's archives and jars from Python's path. A worker would read their
directories before every task, which takes longer (130 ms and 25 ms) than the records of a
micro-batch.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys

from anabranch.common import process

MODULES = (
    "speed_layer.group_staging",
    "anabranch.decode.avro",
    "anabranch.decode.json",
    "anabranch.decode.protobuf",
)
"""The modules that workers run. Their packages are above this one."""


def forget_archives() -> None:
    """Remove Spark's archives from Python's path, unless only they contain PySpark."""
    archives, before = [path for path in sys.path if _is_sparks(path)], list(sys.path)
    sys.path[:] = [path for path in sys.path if path not in archives]
    if importlib.util.find_spec("pyspark") is None:
        sys.path[:] = before
        return
    for path in list(sys.path_importer_cache):
        if any(path == archive or path.startswith(f"{archive}/") for archive in archives):
            del sys.path_importer_cache[path]


def _is_sparks(path: str) -> bool:
    return path.endswith(".jar") or (
        path.endswith(".zip") and ("pyspark" in path or "py4j" in path)
    )


if __name__ == "__main__":
    forget_archives()
    process.import_pandas_late()
    with process.importing():
        import pyspark.daemon

        for module in MODULES:
            importlib.import_module(module)
    # A worker collects garbage after every task. Scanning these objects, none of them garbage,
    # takes longer than the task, and scanning nested values a tenth of their decoding.
    gc.freeze()
    gc.set_threshold(*process.COLLECT_AFTER)
    pyspark.daemon.manager()  # type: ignore[no-untyped-call]
