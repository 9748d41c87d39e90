"""Programs of Go modules, built once and cached."""

import json
import os
import shutil
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from maven import cached
from programs import output_of

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
    """Return the executable, built if it is missing. Raises AssertionError without Go, or if the
    build fails.

    Builds in the module's folder, since `go install` refuses modules with `replace` directives.
    """

    def fill(part: Path) -> None:
        source = json.loads(_go("mod", "download", "-json", f"{tool.module}@{tool.version}"))["Dir"]
        _go("build", "-C", source, "-tags", tool.tags, "-o", part, tool.package)

    return cached(f"{tool.name}-{tool.version}", _SECONDS, fill)


def ensure_own(folder: Path) -> Path:
    """Return the executable of a module here, rebuilt after a change. Raises as `ensure` does."""
    files = [f for f in sorted(folder.iterdir()) if f.suffix in (".go", ".mod", ".sum")]
    name = f"{folder.name}-{sha256(b''.join(f.read_bytes() for f in files)).hexdigest()[:16]}"
    return cached(name, _SECONDS, lambda part: _go("build", "-C", folder, "-o", part, "."))


def _go(*arguments: object) -> str:
    local = "/usr/local/go/bin/go"
    go = shutil.which("go") or (local if Path(local).exists() else None)
    assert go is not None, "expected Go on the PATH, found none; install Go 1.26+"
    own = os.environ | {"GOFLAGS": "-modcacherw -buildvcs=false", "GOWORK": "off"}
    return output_of(go, *arguments, env=own, seconds=_SECONDS)
