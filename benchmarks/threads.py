"""CPU of a record by thread, for Spark's file sink and for the speed layer: `make bench
WHAT=threads`.

Measures microseconds of CPU per record between the ends of micro-batches, as the kernel counts them
(`/proc/PID/task/*/stat`, every 0.5 s). Java still compiles during the first ones. Both ways read
the same topic, one after the other. Small micro-batches are measured in windows of `--window`,
since 0.5 s contains several.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path

import psutil
import runs
from shapes import SHAPES, fill

from anabranch.common.output import print_table
from anabranch.dev.services import running

GROUPS = ("executors", "Python", "compiling", "garbage collection", "driver's thread", "the rest")
_TICKS = float(os.sysconf("SC_CLK_TCK"))
_EVERY = 0.5


def group(java: bool, thread: str) -> str:
    """Return the group of a thread by its name."""
    if not java:
        return "Python"
    if thread.startswith(("C1 Comp", "C2 Comp")):
        return "compiling"
    if thread.startswith(("ParGC", "GC Thread", "VM Thread")):
        return "garbage collection"
    if thread.startswith("Executor task"):
        return "executors"
    return "driver's thread" if thread.startswith("stream exec") else "the rest"


class ThreadWatch(runs.Watch):
    """A watch that also samples the threads."""

    def _look(self) -> None:
        self.threads: list[tuple[float, dict[str, float]]] = []
        looking = threading.Thread(target=self._look_at_threads, daemon=True)
        looking.start()
        super()._look()
        looking.join(10)

    def _look_at_threads(self) -> None:
        root, last = psutil.Process(self._process.pid), dict[Path, tuple[str, float]]()
        while self._process.poll() is None:
            try:
                family = [
                    (p.pid, p.name() == "java") for p in (root, *root.children(recursive=True))
                ]
            except psutil.Error:
                return
            for pid, java in family:
                for file in Path(f"/proc/{pid}/task").glob("*/stat"):
                    try:
                        text = file.read_text()
                    except OSError:
                        continue
                    fields = text[text.rindex(")") + 2 :].split()
                    name = text[text.index("(") + 1 : text.rindex(")")]
                    # Kept by file, so that ended threads count.
                    last[file] = group(java, name), (int(fields[11]) + int(fields[12])) / _TICKS
            cpu = {g: sum(seconds for name, seconds in last.values() if name == g) for g in GROUPS}
            self.threads.append((time.time(), cpu))
            time.sleep(_EVERY)

    def threads_at(self, moment: float) -> dict[str, float]:
        return min(self.threads, key=lambda look: abs(look[0] - moment))[1]


def main() -> None:
    runs.end_by_signals()
    parser = argparse.ArgumentParser(description="Whose CPU a record takes, by thread.")
    parser.add_argument("--records", type=int, default=4_000_000)
    parser.add_argument("--shape", choices=list(SHAPES), default="json_440")
    parser.add_argument("--ways", default="file_sink,anabranch")
    parser.add_argument("--micro-batch", type=int, default=250_000, help="its records")
    parser.add_argument("--window", type=int, default=2, help="micro-batches of a line")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-bench-") as name,
        running(Path(name)) as services,
    ):
        fill(services.bootstrap_servers, shape, options.records)
        for way in options.ways.split(","):
            batches, watch = runs.watched(
                way, shape, services, options.micro_batch, Path(name) / way, ThreadWatch
            )
            assert isinstance(watch, ThreadWatch)
            for i in range(0, len(batches) - options.window, options.window):
                before, after = (
                    watch.threads_at(batches[at].ended) for at in (i, i + options.window)
                )
                number = sum(b.records for b in batches[i + 1 : i + 1 + options.window])
                cpu = [(after[g] - before[g]) / number * 1e6 for g in GROUPS]
                rows.append(
                    (
                        way,
                        f"{i + 2} to {i + 1 + options.window}",
                        *(f"{c:.1f}" for c in cpu),
                        f"{sum(cpu):.1f}",
                    )
                )
            rows.append(
                (way, "memory of Java", *("" for _ in GROUPS), f"{watch.jvm_peak_mb:,.0f} MB")
            )
    print("CPU microseconds a record")
    print_table(("way", "micro-batches", *GROUPS, "all"), rows)


if __name__ == "__main__":
    main()
