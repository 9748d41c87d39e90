"""Facts of a Spark job: of its UI's REST API while it runs; afterwards of its event log."""

import json
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from anabranch.dev.services.processes import free_port


class SparkUi:
    """The application of one command. `settings`: must be in its Spark configuration."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        folder.mkdir()

    @property
    def settings(self) -> dict[str, str]:
        ui = {"enabled": "true", "port": str(self._port), "liveUpdate.period": "0"}
        log = {"enabled": "true", "dir": f"file://{self._folder}", "compress": "false"}
        log["rolling.enabled"] = "false"
        own = {f"spark.ui.{key}": value for key, value in ui.items()}
        return own | {f"spark.eventLog.{key}": value for key, value in log.items()}

    def running_tasks(self, host: str) -> int:
        """Return the number of tasks that run on a host now."""
        there = [e for e in self._ask("executors") if e["hostPort"].startswith(f"{host}:")]
        return sum(e["activeTasks"] for e in there if e["id"] != "driver")

    def finished_stages(self) -> int:
        """Return the number of complete stages, without those of the probe of the executors."""
        done = self._ask("stages?status=complete")
        return sum("workers.py" not in stage["name"] for stage in done)

    def tasks(self) -> list[tuple[str, str]]:
        """Return host and end of each ended task, in order: `Success`, `ExecutorLostFailure`."""
        ended = self._events("SparkListenerTaskEnd")
        return [(event["Task Info"]["Host"], event["Task End Reason"]["Reason"]) for event in ended]

    def lost_executors(self) -> list[str]:
        """Return the reason of each removed executor."""
        return [event["Removed Reason"] for event in self._events("SparkListenerExecutorRemoved")]

    def _events(self, kind: str) -> list[dict[str, Any]]:
        logs = [file.read_text("utf-8") for file in sorted(self._folder.iterdir())]
        lines = [line for log in logs for line in log.splitlines()]
        events = (json.loads(line) for line in lines if kind in line)
        return [event for event in events if event["Event"] == kind]

    def _ask(self, what: str) -> list[dict[str, Any]]:
        root = f"http://127.0.0.1:{self._port}/api/v1/applications"
        with suppress(OSError, ValueError):
            for application in _read(root):
                return _read(f"{root}/{application['id']}/{what}")
        return []


def _read(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(url, timeout=5) as answer:
        entries: list[dict[str, Any]] = json.load(answer)
        return entries
