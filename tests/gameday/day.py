"""A running demo, all that watches it, and a watch over what each of them says: the page, the
terminal, the alerts."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faketime
import go_tools
import kafka_tools
import yaml
from demo.story import Story, poll
from demo.workspace import ExternalServices, Running, Workspace, open_workspace
from game_day_page import Seen
from servers import serving
from soak.interference import Interference
from toxiproxy import Proxy, Toxiproxy, running_toxiproxy

from anabranch.common.errors import Transient
from anabranch.dev.producers.produce import STREAM
from anabranch.dev.services.processes import HOST, free_port
from anabranch.job import Job

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
FACTOR = 20
LATE = 600 // FACTOR
SECONDS = 240.0
_MACHINE = "machine"
_UNITS = {"s": 1, "m": 60, "h": 3600}


def quickened(text: str, factor: int = FACTOR) -> str:
    """Alert rules whose time runs so many times as fast: `for`, windows, and the age of a
    position."""
    document = yaml.safe_load(text)

    def span(match: re.Match[str]) -> str:
        return f"{max(1, int(match[1]) * _UNITS[match[2]] // factor)}s"

    def window(match: re.Match[str]) -> str:
        return re.sub(r"(\d+)([smh])", span, match[0])

    for rule in (rule for group in document["groups"] for rule in group["rules"]):
        if "for" in rule:
            rule["for"] = re.sub(r"(\d+)([smh])", span, rule["for"])
        rule["expr"] = re.sub(r"\[[\dsmh:]+\]", window, rule["expr"])
        rule["expr"] = rule["expr"].replace("_age_seconds > 600", f"_age_seconds > {600 // factor}")
    return yaml.safe_dump(document)


class Front:
    """S3's port as everything of the workspace knows it: a proxy that can be slow."""

    def __init__(self, toxiproxy: Toxiproxy) -> None:
        self._toxiproxy = toxiproxy
        self.proxy: Proxy | None = None
        self.port = 0

    @property
    def upstream_port(self) -> int:
        return 0

    @upstream_port.setter
    def upstream_port(self, port: int) -> None:
        self.proxy = self._toxiproxy.proxy("s3", port)
        self.port = self.proxy.port


@dataclass
class Day:
    """The processes of the game day and the addresses that are asked about them. `machine` is the
    environment of all our processes, which share one clock. `watch` starts the page
    and Prometheus; the end of the day stops them."""

    story: Story
    space: Workspace
    job: Job
    interference: Interference
    s3: Proxy
    tools: Path
    page_port: int
    prometheus_port: int
    watch: Callable[[], None]
    servers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    clock: dict[str, str] = field(default_factory=dict)
    speed: list[Running] = field(default_factory=list)

    @property
    def machine(self) -> dict[str, str]:
        path = f"{self.tools}{os.pathsep}{os.environ['PATH']}"
        return self.interference.environment(_MACHINE) | {"PATH": path}

    def set_clock(self, seconds: float) -> None:
        self.interference.set_clock(_MACHINE, seconds)
        self.clock = faketime.clock(faketime.ensure(), f"{seconds:+.0f}s") if seconds else {}

    def start_speed(self) -> Running:
        running = self.space.start("speed", STREAM, **self.machine)
        self.speed.append(running)
        return running

    def shell(self, command: str, codes: Sequence[int] = (0,)) -> str:
        """Return the output of a command that an operator types at this machine, in the workspace's
        folder."""
        self.story.say(f"$ {command}", "bold green")
        done = subprocess.run(
            command,
            shell=True,
            cwd=self.space.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode in codes, (
            f"{command}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every process started at this machine."""
        return self.space._environment | self.machine | self.clock

    # The state as the page, the alerts and the doctor report it.

    def words(self) -> dict[str, str]:
        """The stream's state on the page of streams, with all text beside it."""
        with urllib.request.urlopen(f"http://{HOST}:{self.page_port}/", timeout=30) as answer:
            text = answer.read().decode()
        row = text[text.index(f'id="s-{STREAM}"') :]
        cell = row[row.index('<td data-label="State">') : row.index("</td>")]
        lines = [" ".join(re.sub(r"<[^>]+>", "", line).split()) for line in cell.split("<br>")]
        word, *notes = [html.unescape(line) for line in lines if line]
        return {re.sub(r"^\W+\s*", "", word): "\n".join([word, *notes])}

    def alerts(self) -> dict[str, str]:
        """Return the summaries and run-book links of firing alerts, by alert name."""
        url = f"http://{HOST}:{self.prometheus_port}/api/v1/alerts"
        with urllib.request.urlopen(url, timeout=30) as answer:
            firing = [a for a in json.load(answer)["data"]["alerts"] if a["state"] == "firing"]
        return {
            a["labels"][
                "alertname"
            ]: f"{a['annotations']['summary']}\n{a['annotations']['runbook']}"
            for a in firing
        }

    def findings(self) -> dict[str, str]:
        """Return the findings of `anabranch doctor` as it prints them, by check, except those that
        need no action."""
        done = subprocess.run(
            [sys.executable, "-m", "anabranch.cli", "doctor", STREAM, "--output", "json"],
            cwd=self.space.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode in (0, 1), done.stdout + done.stderr
        found = [f for f in json.loads(done.stdout)["findings"] if f["severity"] != "info"]
        return {
            f[
                "check"
            ]: f"{f['severity']} {f['check']}: {f['subject']}\n  expected {f['expected']}\n"
            f"  found    {f['found'][:400]}\n  remedy   {f['remedy']}"
            for f in found
        }

    def is_quiet(self) -> bool:
        """Return whether the page and the alerts report nothing. Alerts of an error budget do not
        count: they look back on purpose."""
        return "in order" in self.words() and all("Budget" in name for name in self.alerts())


Ask = Callable[[], dict[str, str]]


class Watch:
    """Looks at all three places, from `start` on, until each has said what is awaited there."""

    def __init__(
        self,
        day: Day,
        page: str | None = None,
        terminal: str | None = None,
        alert: str | None = None,
        ask_page: Ask | None = None,
        ask_terminal: Ask | None = None,
    ) -> None:
        asks = {
            "page": ask_page or day.words,
            "terminal": ask_terminal or day.findings,
            "alert": day.alerts,
        }
        names = {"page": page, "terminal": terminal, "alert": alert}
        self._awaited = {
            where: (name, asks[where]) for where, name in names.items() if name is not None
        }
        self._over = threading.Event()
        self._seen: dict[str, Seen] = {}
        self._errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self.seen_at = 0.0

    def start(self) -> None:
        """The fault begins now."""
        began = time.monotonic()
        for where, (name, ask) in self._awaited.items():
            thread = threading.Thread(
                target=self._look, args=(began, where, name, ask), daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def await_all(self) -> None:
        """Return once it was seen in each place. Raises Transient when one stays silent."""
        try:
            poll(self._all, f"to see {self._missing()}", SECONDS, self._check)
        except Transient as error:
            raise AssertionError(
                f"expected to see it everywhere, did not see {self._missing()}"
            ) from error
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(150)
        self.seen_at = time.monotonic()

    @property
    def seen(self) -> list[Seen]:
        return [self._seen[where] for where in self._awaited]

    def _look(self, began: float, where: str, name: str, ask: Ask) -> None:
        try:
            while not self._over.is_set():
                answer = ask()
                if name in answer:
                    self._seen[where] = Seen(where, name, time.monotonic() - began, answer[name])
                    return
                self._over.wait(0.5)
        except BaseException as error:
            self._errors.append(error)

    def _missing(self) -> list[str]:
        return [
            f"{name} ({where})"
            for where, (name, _) in self._awaited.items()
            if where not in self._seen
        ]

    def _all(self) -> bool | None:
        return True if self._seen.keys() == self._awaited.keys() else None

    def _check(self) -> None:
        if self._errors:
            raise self._errors[0]


@contextmanager
def _small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """A disk of its own under a folder, which can be filled; only root may."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def running_day(folder: Path) -> Iterator[Day]:
    """Services, workspace, exporter, page and Prometheus; the stream is not applied yet and no job
    runs."""
    story = Story()
    prometheus = go_tools.ensure(go_tools.PROMETHEUS)
    tools = folder / "tools"
    tools.mkdir()
    kafka_tools.write_scripts(tools)
    (tools / "anabranch").write_text(
        f'#!/bin/sh\nexport PYTHONPATH="$PYTHONPATH:{ROOT}"\nexec {sys.executable} -m '
        'anabranch.cli "$@"\n'
    )
    (tools / "anabranch").chmod(0o755)
    with ExitStack() as stack:
        front = Front(stack.enter_context(running_toxiproxy(folder)))
        space = stack.enter_context(open_workspace(story, STREAM, ExternalServices(s3_proxy=front)))  # type: ignore[arg-type]
        space.set_stream(
            STREAM,
            slo={"fresh": "30 seconds", "complete": "90 minutes"},
        )
        stack.enter_context(_small_disk(space.temporary, 900))
        job = space.job(STREAM)
        stack.callback(job.kafka.close)
        assert front.proxy is not None
        interference = Interference(folder / "interference")
        page_port = free_port()
        prometheus_port = free_port(page_port)
        _write_prometheus(folder, page_port)
        ours = [sys.executable, "-m", "anabranch.cli"]
        late = ["--late-after", f"{LATE} seconds"]
        servers = {
            "page": (
                [
                    *ours,
                    "page",
                    "--port",
                    str(page_port),
                    "--refresh",
                    "2 seconds",
                    "--deadline",
                    "15 seconds",
                    *late,
                ],
                f"http://{HOST}:{page_port}/",
            ),
            "prometheus": (
                [
                    str(prometheus),
                    f"--config.file={folder}/prometheus.yml",
                    f"--storage.tsdb.path={folder}/tsdb",
                    f"--web.listen-address={HOST}:{prometheus_port}",
                    "--log.level=warn",
                ],
                f"http://{HOST}:{prometheus_port}/-/ready",
            ),
        }

        def watch() -> None:
            for name, (command, address) in servers.items():
                log, answers = folder / f"{name}.log", _answering(address)
                day.servers[name] = stack.enter_context(
                    serving(command, log, answers, 90, space._environment)
                )

        day = Day(
            story, space, job, interference, front.proxy, tools, page_port, prometheus_port, watch
        )
        yield day


def _answering(address: str) -> Callable[[], bool]:
    def ask() -> bool:
        with urllib.request.urlopen(address, timeout=30) as answer:
            return bool(answer.status == 200)

    return ask


def _write_prometheus(folder: Path, port: int) -> None:
    (folder / "alerts.yml").write_text(quickened(ALERTS.read_text(encoding="utf-8")))
    config: dict[str, Any] = {
        "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {
                "job_name": "anabranch",
                "static_configs": [{"targets": [f"{HOST}:{port}"]}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
