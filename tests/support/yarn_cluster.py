"""YARN: Hadoop's ResourceManager and one NodeManager from Maven Central, each in a JVM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import hdfs_server
import requests
from servers import serving

from anabranch.dev.services.processes import HOST, free_port
from anabranch.spark.java import require_java

_MANAGER, _NODE = "yarn.resourcemanager", "yarn.nodemanager"
_QUEUES = {
    "root.queues": "default",
    "root.default.capacity": "100",
    "maximum-am-resource-percent": "1",
}


def _site(settings: Mapping[str, str]) -> str:
    properties = [
        f"<property><name>{name}</name><value>{value}</value></property>"
        for name, value in settings.items()
    ]
    return f"<configuration>{''.join(properties)}</configuration>"


@contextmanager
def running_yarn(folder: Path) -> Iterator[Path]:
    """Run YARN within a `with`, and provide the folder of client settings (HADOOP_CONF_DIR). The
    logs of containers are in `folder/logs`."""
    web = f"{HOST}:{free_port()}"
    settings = {
        "hadoop.tmp.dir": f"{folder}/tmp",
        f"{_MANAGER}.hostname": HOST,
        f"{_MANAGER}.webapp.address": web,
        f"{_NODE}.hostname": HOST,
        f"{_NODE}.resource.memory-mb": "8192",
        f"{_NODE}.log-dirs": f"{folder}/logs",
        # Java reserves more addresses than it uses.
        f"{_NODE}.vmem-check-enabled": "false",
        f"{_NODE}.disk-health-checker.enable": "false",
        # Without the checker too, a start takes no disk that is 90 per cent full.
        f"{_NODE}.disk-health-checker.max-disk-utilization-per-disk-percentage": "100",
        "yarn.scheduler.minimum-allocation-mb": "256",
    }
    for name in ("address", "scheduler.address", "resource-tracker.address", "admin.address"):
        settings[f"{_MANAGER}.{name}"] = f"{HOST}:{free_port()}"
    for name in ("address", "localizer.address", "webapp.address"):
        settings[f"{_NODE}.{name}"] = f"{HOST}:{free_port()}"
    conf = folder / "conf"
    conf.mkdir()
    (conf / "yarn-site.xml").write_text(_site(settings))
    capacity = {f"yarn.scheduler.capacity.{name}": value for name, value in _QUEUES.items()}
    (conf / "capacity-scheduler.xml").write_text(_site(capacity))

    def nodes() -> int:
        answer = requests.get(f"http://{web}/ws/v1/cluster/metrics", timeout=30)
        return int(answer.json()["activeNodes"])

    java = require_java().resolve()
    # Its web servers define classes by reflection.
    options = ["-Xmx400m", "-XX:TieredStopAtLevel=1", "--add-opens=java.base/java.lang=ALL-UNNAMED"]
    command = [
        str(java),
        *options,
        "-cp",
        ":".join([str(conf), *map(str, hdfs_server.class_path())]),
    ]
    manager = [*command, "org.apache.hadoop.yarn.server.resourcemanager.ResourceManager"]
    node = [*command, "org.apache.hadoop.yarn.server.nodemanager.NodeManager"]
    # The Java of containers.
    home = {"JAVA_HOME": str(java.parent.parent)}
    with (
        serving(manager, folder / "manager.log", lambda: nodes() == 0, 120),
        serving(node, folder / "node.log", lambda: nodes() == 1, 120, home),
    ):
        yield conf
