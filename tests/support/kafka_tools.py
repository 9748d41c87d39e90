"""Kafka's command-line tools: scripts with the names of those in `bin/` of Kafka's archive."""

from pathlib import Path

from maven import retrieve

from anabranch.common.temporary import locked
from anabranch.spark.jars import cache_folder, ensure_jars
from anabranch.spark.java import require_java

# Its dependencies are among the broker's jars.
_IVY = """<ivy-module version="2.0"><info organisation="tests" module="kafka-tools"/>
<configurations><conf name="default"/></configurations><dependencies>
<dependency org="org.apache.kafka" name="kafka-tools" rev="{version}" conf="default->master" transitive="false"/>
</dependencies></ivy-module>"""
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
    home = cache_folder() / "bin" / f"kafka-tools-{version}"
    jar = home / f"kafka-tools-{version}.jar"
    home.parent.mkdir(parents=True, exist_ok=True)
    with locked(home.parent / "kafka-tools.lock", 900, lambda: None):
        if not jar.exists():
            retrieve(_IVY.format(version=version), home, "[artifact]-[revision].[ext]")
    class_path = ":".join(map(str, (jar, *broker)))
    for name, main in _CLASSES.items():
        java = f"{require_java()} -XX:TieredStopAtLevel=1 -cp {class_path} {main}"
        (folder / name).write_text(f'#!/bin/sh\nexec {java} "$@"\n')
        (folder / name).chmod(0o755)
