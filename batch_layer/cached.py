"""Records that an hour's passes read again, computed once and cached on the executors' disks.

A thread builds one hour at a time. Other threads may build other streams' hours in the same Spark,
so each releases its own records.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pyspark import StorageLevel
from pyspark.sql import DataFrame

_THREAD_STATE = threading.local()


def cached(
    frame: DataFrame, level: StorageLevel = StorageLevel.DISK_ONLY, *, is_lazy: bool = False
) -> DataFrame:
    """Return the same records, computed now and cached: by default on disk, so that memory does not
    grow with the hour. `is_lazy`: the first action computes and caches the part that it reads.

    Within `released_at_the_end`, the records stay cached until its end.
    """
    checkpoint = frame.localCheckpoint(eager=not is_lazy, storageLevel=level)
    # Spark itself frees them only after a garbage collection of Java.
    records = checkpoint._jdf.queryExecution().analyzed().rdd()
    getattr(_THREAD_STATE, "kept", []).append(lambda: records.unpersist(False))
    return checkpoint


@contextmanager
def released_at_the_end() -> Iterator[None]:
    """Free the records that this thread caches inside."""
    before, _THREAD_STATE.kept = getattr(_THREAD_STATE, "kept", None), []
    try:
        yield
    finally:
        # If the JVM is gone there is nothing to free, and its own error is raised.
        with suppress(Exception):
            for release in _THREAD_STATE.kept:
                release()
        _THREAD_STATE.kept = before if before is not None else []
