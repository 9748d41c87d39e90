"""Many streams in one speed process: `make bench WHAT=many ARGS='--streams 50 --minutes 10'`.

The topics have the `--shapes` of records in turn. `--disturb` uses a catalog in PostgreSQL. After
half the time it recreates one topic, breaks one stream's file and locks one table's row of the
catalog, until the producer ends; it compares the other streams before and after that.

Each stream has a topic of two partitions and a table on the S3 server; producer, speed layer, Kafka
and S3 share this machine. Measures the seconds from a record's acknowledgement by Kafka to the log
line of the publish that made it readable, and CPU seconds and memory of the speed process by
minute. Raises RuntimeError unless each table, except that of a recreated topic, contains exactly
the acknowledged offsets.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import psycopg2
import yaml
from demo.story import poll
from freshness import Sent, by_minute, delays, produce, spawned
from kafka import KafkaAdminClient
from peer import BUCKET
from postgres import DATABASE, PASSWORD, USER, running_postgres
from registry import running_registry
from runs import anabranch, children_cpu, end_by_signals, format_of, log_events, write_environment
from shapes import SHAPES, Registered, Shape

from anabranch import config
from anabranch.common.output import print_table
from anabranch.dev.services import Services, running
from anabranch.job import open_job
from anabranch.kafka.client import KafkaAdapter, create_topic
from anabranch.protocol import apply

COMMANDS = (("status",), ("hours",), ("audit",), ("maintain", "--dry-run"), ("doctor",))
KINDS = ("driver", "java", "workers")
_PARTITIONS = 2
_DRAIN_SECONDS = 180.0


@dataclass(frozen=True)
class Sample:
    """The speed process and its descendants at one time: CPU seconds so far, and memory in MB by
    kind of process."""

    at: float
    cpu: float
    memory: Mapping[str, float]

    @property
    def megabytes(self) -> float:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Plan:
    """The streams, the records per second of each, the seconds of a run, and
    `speed.trigger`."""

    streams: list[str]
    rate: int
    seconds: float
    within: int
    shapes: tuple[Shape, ...]
    disturb: bool = False

    def shape_of(self, stream: str) -> Shape:
        """Return the shape of a stream's records: the streams have them in turn."""
        return replace(self.shapes[self.streams.index(stream) % len(self.shapes)], name=stream)

    @property
    def disturbed(self) -> list[str]:
        """The streams of the recreated topic, the broken file and the locked table."""
        return self.streams[:3] if self.disturb else []

    @property
    def exact(self) -> list[str]:
        """The streams whose tables must have every acknowledged record at the end: all except that
        of the recreated topic."""
        return [name for name in self.streams if name not in self.disturbed[:1]]


def kind_of(process: psutil.Process) -> str:
    """Return one of KINDS: the Python driver, Java or a Python worker."""
    if process.name() == "java":
        return "java"
    is_driver = any(argument.endswith("job.py") for argument in process.cmdline())
    return "driver" if is_driver else "workers"


def configure(
    folder: Path, services: Services, plan: Plan, catalog: str | None = None
) -> dict[str, str]:
    """Write a configuration with a group of streams, and return the environment of commands.
    `catalog`: its URI; None for a SQLite file."""
    spark = {"master": "local[2]", "conf": {"spark.driver.memory": "1500m"}}
    registered = next((shape.registered for shape in plan.shapes if shape.registered), None)
    conf = write_environment(
        folder, services, f"s3://{BUCKET}/{folder.name}", spark, registered, catalog
    )
    for name in plan.streams:
        shape = plan.shape_of(name)
        stream = {
            "group": "small",
            "topic": name,
            "table": f"many.{name}",
            "format": format_of(shape, conf),
            "schema": shape.schema,
            "key": "event_id",
            "event_time": {"column": "event_time", "past": "30 days", "future": "1 hour"},
            "speed": {"trigger": f"{plan.within} seconds"},
        }
        (conf / "streams" / f"{name}.yaml").write_text(yaml.safe_dump(stream))
    return {"ANABRANCH_CONF": str(conf), "ANABRANCH_LOG": "json"}


def create_streams(conf: str, services: Services, streams: list[str]) -> None:
    """Create the topics and tables of all streams."""
    for name in streams:
        create_topic(config.Kafka(bootstrap_servers=services.bootstrap_servers), name, _PARTITIONS)
        job = open_job(name, conf)
        with KafkaAdapter(job.environment.kafka) as kafka:
            apply.apply(job.environment, job.stream, job.lake, kafka)


def produce_shapes(broker: str, plan: Plan, into: Connection) -> None:
    """Send to each topic for `plan.seconds`, then send the acknowledgements by topic to `into`."""
    shapes = [plan.shape_of(name) for name in plan.streams]
    into.send(
        produce(
            broker,
            shapes,
            plan.rate,
            plan.seconds,
            unsure=plan.disturbed[:1],
            linger_ms=50,
            pause=0.01,
        )
    )


def seen_in(log: str) -> dict[str, dict[int, list[tuple[int, float]]]]:
    """Return the published ends with the times of their log lines, by stream and partition."""
    seen: dict[str, dict[int, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for event in log_events(log):
        if "published" in event["message"] and isinstance(event.get("offsets"), dict):
            at = datetime.fromisoformat(event["at"]).timestamp()
            for partition, (_, end) in event["offsets"].items():  # type: ignore[attr-defined]
                seen[event["stream"]][int(partition)].append((end, at))
    return seen


def covers(seen: dict[int, list[tuple[int, float]]], ends: dict[int, int]) -> bool:
    return all(seen.get(p, [(0, 0.0)])[-1][0] >= end for p, end in ends.items())


def watch(process: psutil.Process, samples: list[Sample], stop: threading.Event) -> None:
    cpu: dict[int, float] = {}
    while not stop.wait(1.0):
        memory = dict.fromkeys(KINDS, 0.0)
        try:
            family = [process, *process.children(recursive=True)]
        except psutil.Error:
            return
        for one in family:
            try:
                times = one.cpu_times()
                cpu[one.pid] = times.user + times.system
                # Forked workers share their memory with the daemon.
                memory[kind_of(one)] += one.memory_full_info().pss / 2**20
            except psutil.Error:
                continue
        samples.append(Sample(time.time(), sum(cpu.values()), memory))


def check_rows(conf: str, sent: dict[str, Sent]) -> None:
    """Raise RuntimeError unless each table contains exactly the acknowledged offsets."""
    for name, mine in sent.items():
        job = open_job(name, conf)
        rows = (
            job.lake.load(job.stream.table)
            .scan(selected_fields=("kafka_partition", "kafka_offset"))
            .to_arrow()
        )
        held = sorted(
            zip(rows["kafka_partition"].to_pylist(), rows["kafka_offset"].to_pylist(), strict=True)
        )
        expected = sorted(zip(mine.partitions.tolist(), mine.offsets.tolist(), strict=True))
        if held != expected:
            raise RuntimeError(
                f"{name}: expected {len(expected)} offsets, found {len(held)} rows, or other ones"
            )


@contextmanager
def disturbed(plan: Plan, conf: Path, services: Services, catalog: str) -> Iterator[None]:
    """Recreate a topic; within the `with`, also break a stream's file and lock a table's row of the
    catalog."""
    recreated, broken, locked = plan.disturbed
    kafka = config.Kafka(bootstrap_servers=services.bootstrap_servers)
    with closing(KafkaAdminClient(bootstrap_servers=services.bootstrap_servers)) as admin:
        admin.delete_topics([recreated])
    poll(
        lambda: create_topic(kafka, recreated, _PARTITIONS) or None,
        f"topic {recreated} to be recreated",
        60.0,
    )
    file = conf / "streams" / f"{broken}.yaml"
    whole = file.read_text()
    file.write_text(whole.replace("schema:", "schema: ["))
    try:
        with (
            closing(psycopg2.connect(catalog.replace("+psycopg2", ""))) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(
                "SELECT 1 FROM iceberg_tables WHERE table_name = %s FOR UPDATE", (locked,)
            )
            yield
    finally:
        file.write_text(whole)


def measure(services: Services, folder: Path, plan: Plan, catalog: str | None) -> None:
    environment = os.environ | configure(folder, services, plan, catalog)
    conf = str(folder / "conf")
    began = time.monotonic()
    create_streams(conf, services, plan.streams)
    print(f"{len(plan.streams)} topics and tables: {time.monotonic() - began:.0f} s", flush=True)
    samples: list[Sample] = []
    stop = threading.Event()
    log_file = folder / "speed.log"
    with log_file.open("ab") as log:
        command = anabranch("speed", "--group", "small", "--output", "json")
        speed = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        watcher = threading.Thread(
            target=watch, args=(psutil.Process(speed.pid), samples, stop), daemon=True
        )
        watcher.start()
        try:
            with (
                spawned(produce_shapes, services.bootstrap_servers, plan) as here,
                ExitStack() as stack,
            ):
                if catalog is not None and not here.poll(plan.seconds / 2):
                    stack.enter_context(disturbed(plan, folder / "conf", services, catalog))
                    print(f"disturbed: {', '.join(plan.disturbed)}", flush=True)
                sent: dict[str, Sent] = here.recv()
            sent = {name: sent[name] for name in plan.exact}

            def all_published() -> bool | None:
                seen = seen_in(log_file.read_text())
                return all(covers(seen[name], mine.ends) for name, mine in sent.items()) or None

            poll(all_published, "every acknowledged record to be published", _DRAIN_SECONDS)
        finally:
            speed.terminate()
            code = speed.wait(120)
            stop.set()
            watcher.join(10)
    # With a stream that is set aside, the exit code is not 0.
    if (code == 0) == plan.disturb:
        raise RuntimeError(f"the speed process ended with {code}: {log_file.read_text()[-3000:]}")
    check_rows(conf, sent)
    others = {name: mine for name, mine in sent.items() if name not in plan.disturbed}
    report(others, seen_in(log_file.read_text()), samples, plan)
    time_commands(environment)


def time_commands(environment: dict[str, str]) -> None:
    """Run each command on the group three times, and print the medians of seconds and CPU
    seconds."""
    rows = []
    for command in COMMANDS:
        taken = []
        for _ in range(3):
            began, cpu = time.monotonic(), children_cpu()
            done = subprocess.run(
                anabranch(*command, "--group", "small"),
                env=environment,
                check=False,
                capture_output=True,
                text=True,
                timeout=300,
            )
            taken.append((time.monotonic() - began, children_cpu() - cpu, done.returncode))
        seconds, cpus, codes = zip(*taken, strict=True)
        median = (f"{statistics.median(of):.2f}" for of in (seconds, cpus))
        rows.append((" ".join(command), *median, ", ".join(map(str, sorted(set(codes))))))
    print_table(("command of the group", "s", "CPU s", "exit codes"), rows)


def report(
    sent: dict[str, Sent],
    seen: dict[str, dict[int, list[tuple[int, float]]]],
    samples: list[Sample],
    plan: Plan,
) -> None:
    each = {name: delays(mine, seen[name]) for name, mine in sent.items()}
    at, waited = (np.concatenate([pair[i] for pair in each.values()]) for i in (0, 1))
    start = at.min()
    table = []
    for number, cells in by_minute(at, waited):
        inside = [s for s in samples if number * 60 <= s.at - start < (number + 1) * 60]
        cpu = inside[-1].cpu - inside[0].cpu if inside else 0.0
        spans = inside[-1].at - inside[0].at if inside else 1.0
        largest = max(inside, key=lambda s: s.megabytes, default=Sample(0.0, 0.0, {}))
        memory = (largest.megabytes, *(largest.memory.get(kind, 0.0) for kind in KINDS))
        table.append((*cells, f"{cpu / spans:.2f}", *(f"{m:,.0f}" for m in memory)))
    print_table(
        ("minute", "records", "p50 s", "p95 s", "p99 s", "most s", "cores", "MB", *KINDS), table
    )
    publishes = sum(len({at for ends in of.values() for _, at in ends}) for of in seen.values())
    print(json.dumps({"publishes a second": round(publishes / plan.seconds, 1)}))
    by_shape, worst = defaultdict(list), (0.0, "")
    for name, (a, w) in each.items():
        if len(steady := w[(a - start) >= 60]):
            by_shape[plan.shapes[plan.streams.index(name) % len(plan.shapes)].name].append(steady)
            worst = max(worst, (round(float(np.percentile(steady, 99)), 2), name))
    rows = []
    for shape, some in by_shape.items():
        every = np.concatenate(some)
        percentiles = (f"{np.percentile(every, p):.1f}" for p in (50, 95, 99))
        rows.append((shape, f"{len(some)}", f"{len(every):,}", *percentiles))
    print("after the first minute:")
    print_table(("shape", "streams", "records", "p50 s", "p95 s", "p99 s"), rows)
    print(json.dumps({"worst stream": worst[1], "its p99 s": worst[0]}), flush=True)
    if plan.disturb:
        warm, half = start + min(60.0, plan.seconds / 4), start + plan.seconds / 2
        before, beside = (
            np.percentile(waited[of], 99) for of in ((at >= warm) & (at < half), at >= half)
        )
        print(
            json.dumps(
                {
                    "p99 s before": round(before, 2),
                    "beside": round(beside, 2),
                    "x": round(beside / before, 2),
                }
            )
        )


def main() -> None:
    end_by_signals()
    parser = argparse.ArgumentParser(description="Many streams in one speed process.")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--rate", type=int, default=200, help="records a second of each stream")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--within", type=int, default=5, help="speed.trigger, in seconds")
    parser.add_argument(
        "--shapes", default="json_440", help="of the topics in turn: json_440,avro,csv,protobuf"
    )
    parser.add_argument(
        "--disturb", action="store_true", help="disturb three streams for the second half"
    )
    options = parser.parse_args()
    streams = [f"app_{i:03}" for i in range(options.streams)]
    plan = Plan(
        streams,
        options.rate,
        options.minutes * 60,
        options.within,
        tuple(SHAPES[name] for name in options.shapes.split(",")),
        options.disturb,
    )
    with tempfile.TemporaryDirectory(prefix="anabranch-many-") as name, ExitStack() as stack:
        folder, catalog = Path(name), None
        for part in ("run", "registry"):
            (folder / part).mkdir()
        if avro := next((shape.avro for shape in plan.shapes if shape.avro), None):
            registry = stack.enter_context(running_registry(folder / "registry"))
            known = Registered(registry.url, registry.register("app-value", avro))
            shapes = (replace(one, registered=known) if one.avro else one for one in plan.shapes)
            plan = replace(plan, shapes=tuple(shapes))
        if options.disturb:
            port = stack.enter_context(running_postgres()).port
            catalog = f"postgresql+psycopg2://{USER}:{PASSWORD}@127.0.0.1:{port}/{DATABASE}"
        services = stack.enter_context(running(folder / "services"))
        measure(services, folder / "run", plan, catalog)


if __name__ == "__main__":
    main()
