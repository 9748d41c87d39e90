"""Many streams in one speed process: `make bench WHAT=many STREAMS=50 RATE=200 MINUTES=10`.

Each stream has a topic of two partitions and a table of its own on the S3 server; producer, speed layer, Kafka and S3
share this machine. Seconds from a record's acknowledgement by Kafka to the log line of the publish that made it
readable, CPU seconds of the speed process by minute, its memory. At the end each table holds exactly the acknowledged
offsets, or it raises.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import yaml
from freshness import Sent, delays
from peer import BUCKET
from runs import log_events
from shapes import SHAPES, Shape, acknowledged_at

from anabranch import config
from anabranch.common.output import print_table
from anabranch.dev.demo.story import poll
from anabranch.dev.services import Services, running
from anabranch.job import open_job
from anabranch.kafka.client import KafkaAdapter, create_topic
from anabranch.protocol import apply

_PARTITIONS = 2
_START_SECONDS, _DRAIN_SECONDS = 300.0, 180.0


@dataclass(frozen=True)
class Sample:
    """The speed process and what it started, at a moment: CPU seconds so far, resident MB."""

    at: float
    cpu: float
    memory: float


def topic_of(stream: str) -> Shape:
    return replace(SHAPES["json_440"], name=stream)


def configure(folder: Path, services: Services, streams: list[str], within: int) -> dict[str, str]:
    """Write a configuration with a group of streams; returns what a command's environment needs."""
    conf = folder / "conf"
    (conf / "streams").mkdir(parents=True)
    environment = {
        "kafka": {"bootstrap_servers": services.bootstrap_servers},
        "catalog": {
            "name": "lake", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"s3://{BUCKET}/{folder.name}",
        },
        "s3": {
            "endpoint": services.s3_endpoint, "access_key": services.access_key, "secret_key": services.secret_key,
        },
        "spark": {"master": "local[2]", "conf": {"spark.driver.memory": "1500m"}},
    }  # fmt: skip
    (conf / "anabranch.yaml").write_text(yaml.safe_dump(environment))
    for name in streams:
        stream = {
            "group": "small", "topic": name, "table": f"many.{name}", "format": "json",
            "schema": topic_of(name).schema, "key": "event_id",
            "event_time": {"column": "event_time", "past": "30 days", "future": "1 hour"},
            "speed": {"trigger": "1 second", "publish": {"records": 50_000, "within": f"{within} seconds"}},
        }  # fmt: skip
        (conf / "streams" / f"{name}.yaml").write_text(yaml.safe_dump(stream))
    return {"ANABRANCH_CONF": str(conf), "ANABRANCH_LOG": "json"}


def make(conf: str, services: Services, streams: list[str]) -> None:
    """The topics and tables of all streams."""
    for name in streams:
        create_topic(config.Kafka(bootstrap_servers=services.bootstrap_servers), name, _PARTITIONS)
        job = open_job(name, conf)
        with KafkaAdapter(job.environment.kafka) as kafka:
            apply.apply(job.environment, job.stream, job.lake, kafka)


def produce(broker: str, streams: list[str], rate: int, seconds: float, into: Connection) -> None:
    """In a process of its own: send to each topic for so long, then hand over what was acknowledged, by topic."""
    stop = threading.Event()
    threading.Timer(seconds, stop.set).start()
    acks = {name: (array("i"), array("q"), array("d")) for name in streams}
    for topic, partition, offset, at in acknowledged_at(broker, [topic_of(s) for s in streams], rate, stop):
        partitions, offsets, moments = acks[topic]
        partitions.append(partition)
        offsets.append(offset)
        moments.append(at)
    into.send({name: Sent(*(np.array(values) for values in of)) for name, of in acks.items()})


def seen_in(log: str) -> dict[str, dict[int, list[tuple[int, float]]]]:
    """By stream and partition, the published ends with the moments of their log lines."""
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
        memory = 0.0
        try:
            family = [process, *process.children(recursive=True)]
        except psutil.Error:
            return
        for one in family:
            try:
                times = one.cpu_times()
                cpu[one.pid] = times.user + times.system
                # Forked workers share their memory with the daemon.
                memory += one.memory_full_info().pss / 2**20
            except psutil.Error:
                continue
        samples.append(Sample(time.time(), sum(cpu.values()), memory))


def check_rows(conf: str, sent: dict[str, Sent]) -> None:
    """Raise RuntimeError unless each table holds the acknowledged offsets, each once."""
    for name, mine in sent.items():
        job = open_job(name, conf)
        rows = job.lake.load(job.stream.table).scan(selected_fields=("kafka_partition", "kafka_offset")).to_arrow()
        held = sorted(zip(rows["kafka_partition"].to_pylist(), rows["kafka_offset"].to_pylist(), strict=True))
        expected = sorted(zip(mine.partitions.tolist(), mine.offsets.tolist(), strict=True))
        if held != expected:
            raise RuntimeError(f"{name}: expected {len(expected)} offsets, found {len(held)} rows, or other ones")


def measure(services: Services, folder: Path, number: int, rate: int, minutes: float, within: int) -> None:
    streams = [f"app_{i:03}" for i in range(number)]
    environment = os.environ | configure(folder, services, streams, within)
    conf = str(folder / "conf")
    began = time.monotonic()
    make(conf, services, streams)
    print(f"{number} topics and tables: {time.monotonic() - began:.0f} s", flush=True)
    samples: list[Sample] = []
    stop = threading.Event()
    log_file = folder / "speed.log"
    with log_file.open("ab") as log:
        command = [sys.executable, "-m", "anabranch.cli", "speed", "--group", "small", "--output", "json"]
        speed = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        watcher = threading.Thread(target=watch, args=(psutil.Process(speed.pid), samples, stop), daemon=True)
        watcher.start()
        try:
            spawned = multiprocessing.get_context("spawn")
            here, there = spawned.Pipe()
            sender = spawned.Process(
                target=produce, args=(services.bootstrap_servers, streams, rate, minutes * 60, there), daemon=True
            )
            sender.start()
            there.close()
            sent: dict[str, Sent] = here.recv()
            sender.join(60)

            def all_published() -> bool | None:
                seen = seen_in(log_file.read_text())
                return all(covers(seen[name], mine.ends) for name, mine in sent.items()) or None

            poll(all_published, "every acknowledged record to be published", _DRAIN_SECONDS)
        finally:
            speed.terminate()
            code = speed.wait(120)
            stop.set()
            watcher.join(10)
            if os.environ.get("KEEP"):
                Path(os.environ["KEEP"]).write_text(log_file.read_text())
    if code != 0:
        raise RuntimeError(f"expected the speed process to end with 0, found {code}: {log_file.read_text()[-3000:]}")
    check_rows(conf, sent)
    report(sent, seen_in(log_file.read_text()), samples)


def report(sent: dict[str, Sent], seen: dict[str, dict[int, list[tuple[int, float]]]], samples: list[Sample]) -> None:
    each = {name: delays(mine, seen[name]) for name, mine in sent.items()}
    at, waited = (np.concatenate([pair[i] for pair in each.values()]) for i in (0, 1))
    start = at.min()
    minute = ((at - start) // 60).astype(int)
    table = []
    for number in sorted(set(minute.tolist())):
        some = waited[minute == number]
        inside = [s for s in samples if number * 60 <= s.at - start < (number + 1) * 60]
        cpu = inside[-1].cpu - inside[0].cpu if inside else 0.0
        spans = inside[-1].at - inside[0].at if inside else 1.0
        percentiles = (f"{value:.2f}" for value in np.percentile(some, [50, 95, 99, 100]))
        memory = max((s.memory for s in inside), default=0.0)
        table.append((str(number + 1), f"{len(some):,}", *percentiles, f"{cpu / spans:.2f}", f"{memory:,.0f}"))
    print_table(("minute", "records", "p50 s", "p95 s", "p99 s", "most s", "cores", "MB"), table)
    steady = {name: np.percentile(w[(a - start) >= 60], 99) for name, (a, w) in each.items() if (a - start >= 60).any()}
    if steady:
        worst = max(steady, key=lambda name: steady[name])
        print(json.dumps({"worst stream": worst, "its p99 s, behind the first minute": round(steady[worst], 2)}))


def main() -> None:
    parser = argparse.ArgumentParser(description="Many streams in one speed process.")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--rate", type=int, default=200, help="records a second of each stream")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--within", type=int, default=5, help="speed.publish.within, in seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="anabranch-many-") as name:
        folder = Path(name)
        (folder / "run").mkdir()
        with running(folder / "services") as services:
            measure(services, folder / "run", options.streams, options.rate, options.minutes, options.within)


if __name__ == "__main__":
    main()
