"""docs/tutorial.md for tests: its commands with the output that it shows, and its files."""

import json
import os
import re
from pathlib import Path

from programs import output_of
from servers import free_ports

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"


def commands() -> list[str]:
    """Return the `anabranch` commands of the page, in order."""
    lines = PAGE.read_text("utf-8").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ anabranch ")]


def block(kind: str) -> str:
    """Return the page's first block of a language."""
    text = PAGE.read_text("utf-8")
    found = re.search(rf"^```{kind}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"{PAGE}: expected a block of {kind}, found none"
    return found[1]


def follow(programs: Path, folder: Path) -> None:
    """Run the page's commands in a new lake, with free ports, and assert what they print."""
    kafka, s3 = free_ports(2)
    addresses = {"KAFKA": f"127.0.0.1:{kafka}", "S3": f"http://127.0.0.1:{s3}"}
    own = {f"ANABRANCH_{name}": address for name, address in addresses.items()}
    environment = os.environ | own | {"NO_COLOR": "1"}

    def run(command: str, folder: Path) -> str:
        return output_of(f"{programs}/{command}", shell=True, cwd=folder, env=environment)

    lake = folder / "lake"
    run(f"anabranch init {lake}", folder)
    (lake / "conf" / "streams" / "orders.yaml").write_text(block("yaml"))
    (lake / "orders.jsonl").write_text(block("json"))
    printed: dict[str, str] = {}
    hour = ""
    try:
        for command in commands():
            if "HOUR" in command and not hour:
                listed = json.loads(run("anabranch hours game_events --output json", lake))
                hour = next(h["hour"] for h in listed if h["state"] == "accepted")
            ports = f" --kafka-port {kafka} --s3-port {s3}" * command.endswith("dev up")
            printed[command] = run(command.replace("HOUR", hour) + ports, lake)
    finally:
        run("anabranch dev down", lake)
    [query] = (text for command, text in printed.items() if " query " in command)
    assert query in PAGE.read_text("utf-8")
    assert "total: expected decimal(12,2), found much" in printed["anabranch dead-letters orders"]
    assert "ledger, files and Kafka agree" in printed["anabranch audit game_events --hours HOUR"]
