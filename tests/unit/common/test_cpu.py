"""The CPU time of a job's processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from anabranch.common import cpu
from anabranch.common.counters import CPU, TALLY

BUSY = "import time; until = time.process_time() + 0.3\nwhile time.process_time() < until: pass"


def test_cpu_time_has_that_of_children_that_run_and_that_have_ended() -> None:
    before = cpu.cpu_ms()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    assert cpu.cpu_ms() - before >= 300
    with subprocess.Popen([sys.executable, "-c", f"{BUSY}\nprint(flush=True); input()"], text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        assert cpu.cpu_ms() - before >= 600
        child.communicate("\n")


def test_cpu_time_is_counted_once_and_not_at_each_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_counted", 0)
    monkeypatch.setattr(cpu, "_at", float("-inf"))
    before = TALLY.totals()[CPU, ""]
    cpu.count_cpu()
    counted = TALLY.totals()[CPU, ""]
    assert 0 < counted - before <= cpu.cpu_ms()
    subprocess.run([sys.executable, "-c", BUSY], check=True)
    cpu.count_cpu()
    assert TALLY.totals()[CPU, ""] == counted
    monkeypatch.setattr(cpu, "_at", float("-inf"))
    cpu.count_cpu()
    assert TALLY.totals()[CPU, ""] - counted >= 300
