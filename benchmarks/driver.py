"""Memory of the speed layer over time: `make bench WHAT=driver MICRO_BATCHES=20000`.

One process reads a topic ten records at a time, without pauses between micro-batches. Prints the
resident memory of the Python driver, of Java and of the workers at 20 points, and the seconds per
micro-batch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from runs import anabranch, configure, end_by_signals
from shapes import SHAPES, fill

from anabranch.dev.services import running

KINDS = ("driver", "java", "workers")
_RECORDS = 10  # of a micro-batch
_EVERY = 5.0
_SHAPE = SHAPES["json_440"]


@dataclass(frozen=True)
class Sample:
    """Resident memory in MB after a number of published micro-batches."""

    micro_batches: int
    at: float
    driver: float
    java: float
    workers: float


def kind_of(process: psutil.Process) -> str:
    """Return one of KINDS: the Python driver, Java or a Python worker."""
    if process.name() == "java":
        return "java"
    return (
        "driver"
        if any(argument.endswith("job.py") for argument in process.cmdline())
        else "workers"
    )


def sample(job: psutil.Process, micro_batches: int) -> Sample:
    """Take a sample of a job and its descendants. The job's process is spark-submit's Java; the
    Python driver is its child."""
    memory = dict.fromkeys(KINDS, 0.0)
    for process in (job, *job.children(recursive=True)):
        memory[kind_of(process)] += process.memory_info().rss / 2**20
    return Sample(micro_batches, time.time(), **memory)


def watch(
    command: list[str], environment: dict[str, str], folder: Path, step: int
) -> Iterator[Sample]:
    """Run the speed layer to its end, and yield a sample about every `step` micro-batches. Raises
    RuntimeError if it fails."""
    with (folder / "log").open("ab") as log, (folder / "log").open() as lines:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT, cwd=folder
        )
        try:
            done, due = 0, step
            while process.poll() is None:
                time.sleep(_EVERY)
                done += lines.read().count("offsets as")
                if done >= due:
                    with suppress(psutil.Error):  # a process has ended in the meantime
                        yield sample(psutil.Process(process.pid), done)
                        due = done + step
        finally:
            process.kill()
            process.wait(30)
    if process.returncode != 0:
        raise RuntimeError(
            f"the speed layer ended with {process.returncode}: "
            f"{(folder / 'log').read_text()[-3000:]}"
        )


def main() -> None:
    end_by_signals()
    parser = argparse.ArgumentParser(description="Whether the speed layer's memory stays level.")
    parser.add_argument("--micro-batches", type=int, default=20_000)
    parser.add_argument(
        "--s3", action="store_true", help="the table on the S3 server, not in a folder"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(
        prefix="anabranch-driver-", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        with running(folder / "services") as services:
            fill(services.bootstrap_servers, _SHAPE, options.micro_batches * _RECORDS)
            environment = configure(
                folder, _SHAPE, services, options.s3, {"max_offsets_per_trigger": _RECORDS}
            )
            environment |= {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_DIRS": name, "TMPDIR": name}
            apply = anabranch("apply", "bench")
            subprocess.run(apply, env=os.environ | environment, check=True)
            before = Sample(0, time.time(), 0, 0, 0)
            command = anabranch("speed", "bench", "--available-now", "--output", "json")
            print(
                "micro-batches, driver MB, Java MB, workers MB, seconds a micro-batch", flush=True
            )
            for now in watch(command, environment, folder, max(1, options.micro_batches // 20)):
                seconds = (now.at - before.at) / (now.micro_batches - before.micro_batches)
                memory = f"{now.driver:7,.0f} {now.java:7,.0f} {now.workers:7,.0f}"
                print(f"{now.micro_batches:7,} {memory} {seconds:7.3f}", flush=True)
                before = now


if __name__ == "__main__":
    main()
