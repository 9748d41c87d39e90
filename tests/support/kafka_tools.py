"""Kafka's command-line tools: scripts with the names of those in `bin/` of Kafka's archive."""

from pathlib import Path

from maven import cached, retrieve

from anabranch.spark.jars import ensure_jars
from anabranch.spark.java import require_java

# Its dependencies are among the broker's jars.
_JAR = """<dependency org="org.apache.kafka" name="kafka-tools" rev="{version}" conf="default->master" transitive="false"/>"""
_CLASSES = {
    "kafka-acls.sh": "org.apache.kafka.tools.AclCommand",
    "kafka-configs.sh": "kafka.admin.ConfigCommand",
    "kafka-topics.sh": "org.apache.kafka.tools.TopicCommand",
    "kafka-transactions.sh": "org.apache.kafka.tools.TransactionsCommand",
}


def write_scripts(folder: Path) -> None:
    """Write the tools' scripts into a folder. A jar that the broker lacks is downloaded once."""
    broker = ensure_jars().broker
    [version] = [jar.stem.partition("-")[2] for jar in broker if jar.stem.startswith("kafka_2.13-")]

    def fill(part: Path) -> None:
        retrieve(_JAR.format(version=version), part, "[artifact]-[revision].[ext]")

    jar = cached(f"kafka-tools-{version}", 900, fill) / f"kafka-tools-{version}.jar"
    class_path = ":".join(map(str, (jar, *broker)))
    for name, main in _CLASSES.items():
        java = f"{require_java()} -XX:TieredStopAtLevel=1 -cp {class_path} {main}"
        (folder / name).write_text(f'#!/bin/sh\nexec {java} "$@"\n')
        (folder / name).chmod(0o755)
