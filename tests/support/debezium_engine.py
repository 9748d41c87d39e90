"""Debezium's embedded engine in a separate process: `python debezium_engine.py <task.json` sends the
changes of one replication slot to Kafka, and ends after `count` records.

The task: `properties` of the connector, `format` (json or avro), `bootstrap`, `stamp` (milliseconds
since 1970, the timestamp of each record) and `count`. Imports nothing of this project.
"""

import json
import sys
import threading
from typing import Any

import jpype
from kafka import KafkaProducer
from pydbzengine import BasePythonChangeHandler, DebeziumEngine


class Sender(BasePythonChangeHandler):
    def __init__(self, task: dict[str, Any]) -> None:
        self.task, self.sent, self.engine = task, 0, None
        self.producer = KafkaProducer(bootstrap_servers=task["bootstrap"], linger_ms=20)

    def handleJsonBatch(self, records: Any) -> None:
        for record in records:
            key, value = (_bytes(part) for part in (record.key(), record.value()))
            topic = str(record.destination())
            if self.sent < self.task["count"]:
                self.producer.send(topic, value, key, timestamp_ms=self.task["stamp"], partition=0)
                self.sent += 1
        self.producer.flush()
        print(f"{self.sent} records", file=sys.stderr, flush=True)
        if self.sent >= self.task["count"]:
            # Not in the engine's own thread, which it waits for.
            threading.Thread(target=self.engine.close, daemon=True).start()


def _bytes(part: Any) -> bytes | None:
    if part is None:
        return None
    return bytes(part) if isinstance(part, jpype.JArray) else str(part).encode()


def main() -> None:
    task = json.load(sys.stdin)
    handler = Sender(task)
    engine = DebeziumEngine(task["properties"], handler, jvm_opts=["-Xmx512m"])
    if task["format"] == "avro":
        engine._ensure_jvm_started()
        engine.format = jpype.JClass("io.debezium.engine.format.Avro")
    handler.engine = engine.engine
    engine.run()
    assert handler.sent == task["count"], handler.sent


if __name__ == "__main__":
    main()
