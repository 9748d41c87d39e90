"""Programs of Go modules, built once and cached."""

import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from anabranch.common.temporary import locked
from anabranch.spark.jars import cache_folder

_SECONDS = 1800


@dataclass(frozen=True)
class Tool:
    """One program: `package` of `module` at `version`."""

    name: str
    module: str
    version: str
    package: str
    tags: str = ""


TOXIPROXY = Tool("toxiproxy-server", "github.com/Shopify/toxiproxy/v2", "v2.12.0", "./cmd/server")
COMPOSE = Tool("docker-compose", "github.com/docker/compose/v5", "v5.0.2", "./cmd")
# Without service discovery, which is most of their code.
PROMTOOL = Tool(
    "promtool", "github.com/prometheus/prometheus", "v0.313.5", "./cmd/promtool", "remove_all_sd"
)


def ensure(tool: Tool) -> Path:
    """Return the executable, built if it is missing. Raises RuntimeError without Go, or if the
    build fails.

    Builds in the module's folder, since `go install` refuses modules with `replace` directives.
    """
    folder = cache_folder() / "bin"
    program = folder / f"{tool.name}-{tool.version}"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / f"{tool.name}.lock", _SECONDS, lambda: None):
        if program.exists():
            return program
        module = f"{tool.module}@{tool.version}"
        source = json.loads(_go("mod", "download", "-json", module))["Dir"]
        part = folder / f"{program.name}.{os.getpid()}"
        _go("build", "-C", source, "-tags", tool.tags, "-o", str(part), tool.package)
        part.rename(program)
        return program


def ensure_own(folder: Path) -> Path:
    """Return the executable of a module here, rebuilt after a change. Raises as `ensure` does."""
    digest = hashlib.sha256(
        b"".join(
            file.read_bytes()
            for file in sorted(folder.iterdir())
            if file.suffix in (".go", ".mod", ".sum")
        )
    )
    program = cache_folder() / "bin" / f"{folder.name}-{digest.hexdigest()[:16]}"
    program.parent.mkdir(parents=True, exist_ok=True)
    with locked(program.with_name(f"{folder.name}.lock"), _SECONDS, lambda: None):
        if not program.exists():
            part = program.with_name(f"{program.name}.{os.getpid()}")
            _go("build", "-C", str(folder), "-o", str(part), ".")
            part.rename(program)
    return program


def _go(*arguments: str) -> str:
    local = "/usr/local/go/bin/go"
    go = shutil.which("go") or (local if Path(local).exists() else None)
    if go is None:
        raise RuntimeError(
            f"expected Go on the PATH to run `go {' '.join(arguments)}`, found none; install Go "
            "1.26+"
        )
    own = os.environ | {"GOFLAGS": "-modcacherw -buildvcs=false", "GOWORK": "off"}
    command = [go, *arguments]
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=_SECONDS)
    if done.returncode != 0:
        raise RuntimeError(
            f"expected `go {' '.join(arguments)}` to work, found: "
            f"{done.stderr[-2000:]}{done.stdout[-500:]}"
        )
    return done.stdout
