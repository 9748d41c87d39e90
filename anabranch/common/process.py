"""The start of Anabranch's own processes (commands, jobs, the daemon of Spark's Python workers):
their imports, and signals without the deadlocks of Python's handlers."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from io import TextIOWrapper
from queue import SimpleQueue
from typing import Any

COLLECT_AFTER = (100_000, 50, 50)
"""Thresholds of the garbage collector (`gc.set_threshold`). With Python's own, it would scan the
130,000 objects of the imports, and those of a batch of records, repeatedly."""


class _LazyPandas(MetaPathFinder):
    """Import hook that hides pandas from `pyarrow.dataset`, whose import only checks whether pandas
    is installed.

    This saves each process a second. `to_pandas` imports pandas when it is called
    (https://github.com/apache/arrow/blob/main/python/pyarrow/pandas-shim.pxi).
    """

    def find_spec(self, fullname: str, *_: Any) -> None:
        datasets = sys.modules.get("pyarrow.dataset")
        if fullname == "pandas" and datasets is not None and not hasattr(datasets, "write_dataset"):
            raise ImportError("pandas is imported on first use", name=fullname)


def import_pandas_late() -> None:
    """Install the import hook, in Anabranch's own processes alone, not where it is a library."""
    sys.meta_path.insert(0, _LazyPandas())


def open_streams() -> None:
    """Open the standard streams that this process was started without, as by a scheduler: a file of
    the catalog would get the number of one, and what is printed would be written to it. Characters
    that the output's encoding lacks are escaped."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


class _Late(MetaPathFinder):
    """Import hook by which modules are executed when an attribute of theirs is used first."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, _: object = None
    ) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


@contextmanager
def importing(*late: str) -> Iterator[None]:
    """Collect no garbage within the `with`: imports create 130,000 objects that stay, and the
    collector would scan them. Modules `late` are executed on first use, by one thread at a time."""
    was_enabled, finder = gc.isenabled(), _Late(late)
    sys.meta_path.insert(0, finder)
    gc.disable()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if was_enabled:
            gc.enable()


def run_job(module: str) -> None:
    """Import a job's module, and run its `start`, which ends the process."""
    import_pandas_late()
    with importing():
        start = importlib.import_module(module).start
    start()


def in_own_thread(call: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs `call` in a separate thread and returns at once. Safe to use in a
    signal handler.

    A handler interrupts the main thread anywhere, also where it has a lock that `call` needs, such
    as logging's or an Event's, which `wait` takes for a moment. The handler would then wait for its
    own thread for ever.
    """
    requests: SimpleQueue[None] = SimpleQueue()  # the only queue whose put() is reentrant

    def run() -> None:
        while True:
            requests.get()
            call()

    threading.Thread(target=run, name="signals", daemon=True).start()
    return lambda: requests.put(None)


def is_submitted() -> bool:
    """Return whether spark-submit runs this process: its JVM runs already, and receives signals."""
    return "PYSPARK_GATEWAY_PORT" in os.environ
