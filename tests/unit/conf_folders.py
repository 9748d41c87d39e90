"""Configuration folders of tests, and the commands that read them."""

from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from anabranch.cli import main


def said(*arguments: str, expect: int = 0, **how: Any) -> str:
    """Run a command to this exit code, and return what it prints."""
    done = CliRunner().invoke(main, arguments, **how)
    assert done.exit_code == expect, f"{arguments}: {done.output}\n{done.exception!r}"
    return str(done.output if expect else done.stdout)


def write_environment(conf: Path, lake: Path | None = None, **sections: object) -> None:
    """Write the environment of a configuration folder: a lake of local files in `lake`, by default
    in the same folder, a broker that no process runs, and other `sections`."""
    lake = lake or conf
    places = {"uri": f"sqlite:///{lake}/catalog.db", "warehouse": f"file://{lake}/warehouse"}
    kafka = {"bootstrap_servers": "127.0.0.1:1"}
    environment = {"kafka": kafka, "catalog": {"name": "lake", **places}}
    (conf / "streams").mkdir(parents=True, exist_ok=True)
    (conf / "anabranch.yaml").write_text(yaml.safe_dump(environment | sections))


def write_stream(conf: Path, name: str, /, **values: object) -> None:
    """Write a stream's file in which `values` are other keys; None leaves one out."""
    keys = {"topic": name, "table": f"games.{name}", "schema": "id STRING NOT NULL", "key": "id"}
    kept = {key: value for key, value in (keys | values).items() if value is not None}
    (conf / "streams" / f"{name}.yaml").write_text(yaml.safe_dump(kept, sort_keys=False))
