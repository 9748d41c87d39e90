"""Starter files: configuration, an example stream, the DAG files, a compose file that runs them,
and files for Kubernetes."""

from __future__ import annotations

import json
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from anabranch.common.errors import ConfigurationError
from anabranch.common.resources import shipped

# Path in the new folder -> path in a checkout, path in the wheel.
_SHIPPED = {
    "conf/anabranch.yaml": ("conf/anabranch.yaml", "_conf/anabranch.yaml"),
    "conf/streams/game_events.yaml": (
        "conf/streams/game_events.yaml",
        "_conf/streams/game_events.yaml",
    ),
    "conf/streams/game_events.expectations.yaml": (
        "conf/streams/game_events.expectations.yaml",
        "_conf/streams/game_events.expectations.yaml",
    ),
    "docker-compose.yml": ("docker-compose.yml", "_deploy/docker-compose.yml"),
    ".env.example": (".env.example", "_deploy/env.example"),
    ".gitignore": ("anabranch/starter_files/gitignore", "starter_files/gitignore"),
    ".dockerignore": (".dockerignore", "_deploy/dockerignore"),
    "Dockerfile": ("anabranch/starter_files/Dockerfile", "starter_files/Dockerfile"),
    "README.md": ("anabranch/starter_files/README.md", "starter_files/README.md"),
    "wheels/README": ("anabranch/starter_files/wheels", "starter_files/wheels"),
}
# An existing project keeps its own; Anabranch does not need them.
_LEFT_OUT_IF_THERE = ("README.md", ".gitignore")


def write(folder: Path) -> list[Path]:
    """Write the starter files into `folder`, which is created if missing, and return their paths.
    An existing README.md or .gitignore stays. Raises ConfigurationError before writing, if another
    of the files exists."""
    files = {
        folder / place: source
        for place, source in _sources().items()
        if place not in _LEFT_OUT_IF_THERE or not (folder / place).exists()
    }
    if taken := [file for file in files if file.exists()]:
        raise ConfigurationError(
            f"init: expected none of its files in {folder}, found {taken[0]}; choose another folder"
        )
    for file, source in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(source.read_bytes())
    return list(files)


def _sources() -> dict[str, Path]:
    files = {place: shipped(*where) for place, where in _SHIPPED.items()}
    dags = shipped("dags/anabranch_operators.py", "_dags/anabranch_operators.py").parent
    files |= {
        f"dags/{file.name}": file for file in [*sorted(dags.glob("*.py")), dags / ".airflowignore"]
    }
    # Files that the compose file mounts, and files for Kubernetes and S3.
    deploy = shipped("deploy/s3/jobs.json", "_deploy/deploy/s3/jobs.json").parents[1]
    more = [file for file in sorted(deploy.rglob("*")) if file.is_file()]
    files |= {f"deploy/{file.relative_to(deploy)}": file for file in more}
    return files | {f"wheels/{wheel.name}": wheel for wheel in _installed_from()}


def _installed_from() -> list[Path]:
    """Return the wheel file from which this installation was made, if it is still there: the
    image installs it where no index has this version."""
    origin = json.loads(distribution("anabranch").read_text("direct_url.json") or "{}")
    wheel = Path(unquote(urlsplit(origin.get("url", "")).path))
    return [wheel] if wheel.suffix == ".whl" and wheel.is_file() else []
