"""docs/tutorial.md, command by command, in a folder of its own with real services."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tutorial_page

from anabranch.dev.services.processes import free_port


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_commands_of_the_tutorial_give_what_it_says(tmp_path: Path) -> None:
    environment = os.environ | {
        "ANABRANCH_KAFKA": f"127.0.0.1:{free_port()}",
        "ANABRANCH_S3": f"http://127.0.0.1:{free_port()}",
        "NO_COLOR": "1",
    }

    def run(command: str, folder: Path) -> str:
        done = subprocess.run(
            command.replace("anabranch", f"{Path(sys.executable).parent}/anabranch", 1),
            shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    lake = tmp_path / "lake"
    run(f"anabranch init {lake}", tmp_path)
    (lake / "conf" / "streams" / "orders.yaml").write_text(tutorial_page.block("yaml"))
    (lake / "orders.jsonl").write_text(tutorial_page.block("json"))
    printed: dict[str, str] = {}
    hour = ""
    try:
        for command in tutorial_page.commands():
            if "HOUR" in command and not hour:
                listed = json.loads(run("anabranch hours game_events --output json", lake))
                hour = next(h["hour"] for h in listed if h["state"] == "accepted")
            printed[command] = run(command.replace("HOUR", hour), lake)
    finally:
        run("anabranch dev down", lake)
    [query] = (text for command, text in printed.items() if " query " in command)
    assert query in tutorial_page.PAGE.read_text(encoding="utf-8")
    assert "total: expected decimal(12,2), found much" in printed["anabranch dead-letters orders"]
    assert "ledger, files and Kafka agree" in printed["anabranch audit game_events --hours HOUR"]
