"""Configuration folders of tests."""

from pathlib import Path

import yaml


def write_environment(conf: Path, lake: Path | None = None, **sections: object) -> None:
    """Write the environment of a configuration folder: a lake of local files in `lake`, by default
    in the same folder, a broker that no process runs, and other `sections`."""
    lake = lake or conf
    environment = {
        "kafka": {"bootstrap_servers": "127.0.0.1:1"},
        "catalog": {
            "name": "lake",
            "uri": f"sqlite:///{lake}/catalog.db",
            "warehouse": f"file://{lake}/warehouse",
        },
    }
    (conf / "streams").mkdir(parents=True, exist_ok=True)
    (conf / "anabranch.yaml").write_text(yaml.safe_dump(environment | sections))
