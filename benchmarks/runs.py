"""One run of one way to write a topic, with the time, CPU and memory of its micro-batches."""

from __future__ import annotations

import base64
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import psutil
import yaml
from peer import BUCKET, MASTER, spark_master
from protos import descriptors
from shapes import SHAPES, Registered, Shape

from anabranch.config import S3
from anabranch.dev.services import Services
from anabranch.iceberg.s3 import open_store

OURS = ("anabranch", "anabranch_s3")
_PUBLISHED = re.compile(r"published (\d+) offsets as")
_EVERY = 0.1


def end_by_signals() -> None:
    """Make SIGTERM end a benchmark and its services, as Ctrl-C does."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def children_cpu() -> float:
    """Return the CPU seconds of this process's ended children so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@dataclass(frozen=True)
class MicroBatch:
    records: int
    ended: float


@dataclass(frozen=True)
class Sample:
    """The CPU seconds of all processes of a run up to one time."""

    at: float
    cpu: float


@dataclass(frozen=True)
class Run:
    """The results of one run. Rates are of its full micro-batches after the first, in which the JVM
    compiles its code."""

    records: int
    micro_batches: int
    records_per_second: float
    cpu_per_million: float
    cpu_per_micro_batch: float
    seconds_per_micro_batch: float
    jvm_peak_mb: float


class Watch:
    """A thread that samples a process and its descendants until it ends, and the descendants of a
    cluster's workers."""

    workers: ClassVar[list[int]] = []
    """PIDs of the workers of a Spark cluster on this machine; their executors belong to the run."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.samples: list[Sample] = []
        self.jvm_peak_mb = 0.0
        self._process, self._cpu = process, dict[int, float]()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._thread.join(10)

    def _look(self) -> None:
        root = psutil.Process(self._process.pid)
        while self._process.poll() is None:
            try:
                parents = [root, *(psutil.Process(pid) for pid in self.workers)]
                family = [
                    root,
                    *(child for parent in parents for child in parent.children(recursive=True)),
                ]
            except psutil.NoSuchProcess:
                return
            for process in family:
                try:
                    times = process.cpu_times()
                    # Kept by pid, since an ended process no longer has figures.
                    self._cpu[process.pid] = times.user + times.system
                    if process.name() == "java":
                        self.jvm_peak_mb = max(self.jvm_peak_mb, process.memory_info().rss / 2**20)
                except psutil.Error:
                    continue
            self.samples.append(Sample(time.time(), sum(self._cpu.values())))
            time.sleep(_EVERY)

    def cpu_at(self, moment: float) -> float:
        return min(self.samples, key=lambda sample: abs(sample.at - moment)).cpu


def summarized(batches: list[MicroBatch], watch: Watch, limit: int) -> Run:
    full = [b for b in batches[1:] if b.records > limit / 2]
    if not full:
        raise ValueError(
            f"expected at least two full micro-batches of {limit} records, found {batches}"
        )
    first, last, number = batches[0], full[-1], sum(b.records for b in full)
    seconds, cpu = last.ended - first.ended, watch.cpu_at(last.ended) - watch.cpu_at(first.ended)
    return Run(
        records=sum(b.records for b in batches),
        micro_batches=len(batches),
        records_per_second=number / seconds,
        cpu_per_million=cpu / number * 1e6,
        cpu_per_micro_batch=cpu / len(full),
        seconds_per_micro_batch=seconds / len(full),
        jvm_peak_mb=watch.jvm_peak_mb,
    )


def run(way: str, shape: Shape, services: Services, limit: int, expected: int) -> Run:
    """Run one way from the topic's beginning to its end, in a temporary folder. Raises RuntimeError
    if it fails, or has not written the expected number of records."""
    with tempfile.TemporaryDirectory(prefix="anabranch-bench-", ignore_cleanup_errors=True) as name:
        batches, watch = watched(way, shape, services, limit, Path(name))
    if (number := sum(b.records for b in batches)) != expected:
        raise RuntimeError(f"{way}: expected {expected} records, found {number}")
    return summarized(batches, watch, limit)


def watched(
    way: str, shape: Shape, services: Services, limit: int, folder: Path, watch: type[Watch] = Watch
) -> tuple[list[MicroBatch], Watch]:
    """Run one way. Return its micro-batches, and the watch of its processes."""
    folder.mkdir(exist_ok=True)
    return (_ours if way in OURS else _peer)(way, shape, services, limit, folder, watch)


def _peer(
    way: str, shape: Shape, services: Services, limit: int, folder: Path, watch: type[Watch]
) -> tuple[list[MicroBatch], Watch]:
    name, on_s3 = way.removesuffix("_s3"), way.endswith("_s3")
    if shape.proto:
        shape = SHAPES["avro"]
    if on_s3:
        # Anabranch creates its bucket itself.
        keys = {"access_key": services.access_key, "secret_key": services.secret_key}
        open_store(S3.model_validate({"endpoint": services.s3_endpoint, **keys})).ensure_bucket(
            BUCKET
        )
    arguments = [
        name,
        shape.name,
        services.bootstrap_servers,
        str(folder),
        services.s3_endpoint if on_s3 else "",
        shape.schema,
        str(limit),
        shape.avro,
    ]
    log, seen = run_command(
        [sys.executable, str(Path(__file__).with_name("peer.py")), *arguments], {}, folder, watch
    )
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return [MicroBatch(line["records"], line["ended"]) for line in lines if "ended" in line], seen


def _ours(
    way: str, shape: Shape, services: Services, limit: int, folder: Path, watch: type[Watch]
) -> tuple[list[MicroBatch], Watch]:
    environment = configure(
        folder, shape, services, way == "anabranch_s3", {"max_offsets_per_trigger": limit}
    )
    run_quietly(environment, "apply", "bench")
    command = anabranch("speed", "bench", "--available-now", "--output", "json")
    log, seen = run_command(command, environment, folder, watch)
    return list(published(log)), seen


@contextmanager
def on_master(master: str) -> Iterator[None]:
    """Set the Spark master of all measurements within a `with`: `standalone` starts a cluster of
    two workers of one core; an empty text is this machine."""
    if master not in ("", "standalone"):
        os.environ[MASTER] = master
    if master != "standalone":
        yield
        return
    from cluster import running_cluster

    with running_cluster() as cluster:
        os.environ[MASTER] = cluster.master
        Watch.workers = [
            process.pid for name, process in cluster.processes.items() if name != "master"
        ]
        try:
            yield
        finally:
            Watch.workers = []
            del os.environ[MASTER]


def configure(
    folder: Path, shape: Shape, services: Services, on_s3: bool, speed: dict[str, object]
) -> dict[str, str]:
    """Write a configuration with one stream, `bench`, of the shape's topic. Return the environment
    of commands."""
    master, conf_of_spark = spark_master()
    spark = {"master": master, "conf": {"spark.driver.memory": "2g", **conf_of_spark}}
    warehouse = f"s3://{BUCKET}/{folder.name}" if on_s3 else f"file://{folder}/warehouse"
    conf = write_environment(folder, services, warehouse, spark, shape.registered)
    stream = {
        "topic": shape.name, "table": "bench.events", "format": format_of(shape, conf),
        "schema": shape.schema, "key": "event_id",
        "event_time": {"column": "event_time", "past": "30 days", "future": "1 hour"},
        "speed": {"trigger": "1 second", **speed},
        "batch": {"grace": "0 seconds", "lookback_hours": 1},
    }  # fmt: skip
    if shape.select:
        stream["select"] = [*shape.select]
    (conf / "streams" / "bench.yaml").write_text(yaml.safe_dump(stream))
    return {"ANABRANCH_CONF": str(conf), "ANABRANCH_LOG": "json"}


def format_of(shape: Shape, conf: Path) -> object:
    """Return the `format` of a stream's file; write the descriptors that it names."""
    if not shape.proto:
        return "avro" if shape.avro else "csv" if shape.csv else "json"
    (conf / "streams" / "bench.desc").write_bytes(base64.b64decode(descriptors(shape.proto)))
    return {"type": "protobuf", "descriptor": "bench.desc", "message": "shop.Event"}


def write_environment(
    folder: Path,
    services: Services,
    warehouse: str,
    spark: dict[str, Any],
    registered: Registered | None = None,
    catalog: str | None = None,
) -> Path:
    """Write the environment's file, and return the configuration folder. `catalog`: its URI; None
    for a SQLite file."""
    conf = folder / "conf"
    (conf / "streams").mkdir(parents=True)
    environment = {
        "kafka": {"bootstrap_servers": services.bootstrap_servers},
        "catalog": {
            "name": "lake",
            "uri": catalog or f"sqlite:///{folder}/catalog.db",
            "warehouse": warehouse,
        },
        "s3": {
            "endpoint": services.s3_endpoint,
            "access_key": services.access_key,
            "secret_key": services.secret_key,
        },
        "spark": spark,
    }
    if registered is not None:
        environment["registry"] = {"url": registered.url}
    (conf / "anabranch.yaml").write_text(yaml.safe_dump(environment))
    return conf


def edit(file: Path, values: Mapping[str, Any]) -> None:
    """Set keys of a configuration file, also within its sections."""
    file.write_text(yaml.safe_dump(_merged(yaml.safe_load(file.read_text()), values)))


def _merged(data: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return data | {
        key: _merged(data[key], value) if isinstance(value, Mapping) else value
        for key, value in values.items()
    }


def anabranch(*arguments: str) -> list[str]:
    """Return the command line of a command of Anabranch."""
    return [sys.executable, "-m", "anabranch.cli", *arguments]


def run_quietly(environment: dict[str, str], *arguments: str) -> None:
    """Run a command of Anabranch without its output. Raises CalledProcessError if it fails."""
    subprocess.run(
        anabranch(*arguments), env=os.environ | environment, check=True, capture_output=True
    )


def published(log: str) -> Iterator[MicroBatch]:
    """Yield the micro-batches in the speed layer's JSON log."""
    for event in log_events(log):
        if match := _PUBLISHED.search(event["message"]):
            yield MicroBatch(int(match[1]), datetime.fromisoformat(event["at"]).timestamp())


def log_events(log: str) -> Iterator[dict[str, str]]:
    """Yield the lines of a JSON log, without other output between them."""
    for line in log.splitlines():
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "message" in event and "at" in event:
                yield event


def run_command(
    command: list[str], environment: dict[str, str], folder: Path, watch: type[Watch]
) -> tuple[str, Watch]:  # fmt: skip
    """Run a command to its end. Return its output, and the watch of its processes. Raises
    RuntimeError if it fails."""
    local = {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_DIRS": str(folder), "TMPDIR": str(folder)}
    (folder / "log").unlink(missing_ok=True)
    # Opened for appending, since a job opens it again for its own log.
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | local | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        seen = watch(process)
        try:
            code = process.wait(1800)
        finally:
            process.kill()
            seen.stop()
    text = (folder / "log").read_text(errors="replace")
    if code != 0:
        raise RuntimeError(f"{' '.join(command[:4])} ended with {code}: {text[-3000:]}")
    return text, seen


def median(runs: list[Run], name: str) -> float:
    return statistics.median(float(getattr(run, name)) for run in runs)


def spread(runs: list[Run], name: str) -> tuple[float, float]:
    values = [getattr(run, name) for run in runs]
    return min(values), max(values)
