"""A Dockerfile followed line by line, without an engine: what its user runs is run, as that user, in the same folders.

What root runs before that (packages, the user, its folders) the machine stands for; the folders are made.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from container import Box, User, ensure_programs

from anabranch.spark.jars import cache_folder

# An engine's build has the proxies and authorities of the machine; so has this one.
_PASSED = ("SSL_CERT_FILE", "PIP_CERT", "PIP_INDEX_URL", "UV_DEFAULT_INDEX", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_UV_CACHE = "/home/anabranch/.cache/uv"
_OWN = ("/opt", "/var/lib", "/home")
UV = Path(sys.executable).parent / "uv"


def caches() -> dict[str, Path]:
    """This machine's caches, in the places of the image's: of uv, which the Dockerfile mounts, and of the jars."""
    uv = subprocess.run([UV, "cache", "dir"], capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    return {_UV_CACHE: Path(uv), "/home/anabranch/.cache/anabranch/ivy": cache_folder() / "ivy"}


@dataclass
class Built:
    """An image: the folders that its lines filled, and what its last lines say."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    @property
    def user(self) -> User:
        return User("anabranch", 10001, "/home/anabranch")

    @property
    def folders(self) -> dict[str, Path]:
        return {own: self.inside(own) for own in _OWN}

    def inside(self, path: str) -> Path:
        """Where a path of the image lies on this machine."""
        return self.folder / path.lstrip("/")


def instructions(file: Path) -> list[tuple[str, str]]:
    """The Dockerfile's lines as (instruction, the rest), continued ones joined."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in joined) if word]


def build(
    context: Path,
    folder: Path,
    arguments: Mapping[str, str] | None = None,
    readable: Mapping[str, Path] | None = None,
) -> Built:
    """Follow the Dockerfile of `context` in `folder`; `arguments` stands for --build-arg, and its lines may read
    `readable` too. Raises AssertionError with the output of a line that fails."""
    ensure_programs()
    built, root, known = Built(folder), True, dict(arguments or {})
    for own in _OWN:
        built.inside(own).mkdir(parents=True)
    built.inside("/home/anabranch").mkdir()
    for word, rest in instructions(context / "Dockerfile"):
        match word:
            case "FROM":
                pass
            case "ARG":
                name, _, value = rest.partition("=")
                known.setdefault(name, *shlex.split(value))
            case "ENV":
                built.environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))
            case "USER":
                assert rest == f"{built.user.uid}:{built.user.uid}", rest
                root = False
            case "WORKDIR":
                built.cwd = rest
                assert built.inside(rest).is_dir(), f"{rest} would be made by the engine, for root"
            case "COPY":
                _copy(rest, context, built)
            case "RUN" if root:
                for made in re.findall(r"mkdir -p ((?:/\S+ ?)+)", rest):
                    for path in made.split():
                        built.inside(path).mkdir(parents=True, exist_ok=True)
            case "RUN":
                _run(rest, built, known, readable or {})
            case "ENTRYPOINT":
                built.entrypoint = json.loads(rest)
            case "CMD":
                built.command = json.loads(rest)
            case _:
                raise AssertionError(f"{word} is not followed here")
    return built


def _copy(rest: str, context: Path, built: Built) -> None:
    *sources, target = [part for part in rest.split() if not part.startswith("--")]
    place = built.inside(os.path.normpath(os.path.join(built.cwd, target)))  # noqa: PTH118 - a path of the image
    ignored = _ignored(context)
    for source in sources:
        if (context / source).is_dir():
            shutil.copytree(context / source, place, ignore=ignored)
        else:
            shutil.copy(context / source, place / source if target.endswith("/") else place)


def _ignored(context: Path) -> Callable[[str, list[str]], list[str]]:
    """Which names of a folder .dockerignore keeps out, as shutil.copytree asks."""
    lines = (context / ".dockerignore").read_text(encoding="utf-8").splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]

    def ignored(folder: str, names: list[str]) -> list[str]:
        place = Path(folder).relative_to(context)
        return [
            name
            for name in names
            for pattern in patterns
            if fnmatch(name if pattern.startswith("**/") else str(place / name), pattern.removeprefix("**/"))
        ]

    return ignored


def _run(rest: str, built: Built, known: Mapping[str, str], readable: Mapping[str, Path]) -> None:
    mounts, kept = {}, caches()
    while rest.startswith("--mount="):
        option, _, rest = rest.partition(" ")
        wanted = dict(pair.split("=") for pair in option.removeprefix("--mount=").split(","))
        assert (wanted["type"], wanted["uid"]) == ("cache", str(built.user.uid)), wanted
        mounts[wanted["target"]] = kept[wanted["target"]]
    # What Ivy downloaded for the image stays in it; what uv did is kept out by the mount.
    del kept[_UV_CACHE]
    passed = {name: value for name in _PASSED if (value := os.environ.get(name) or os.environ.get(name.lower()))}
    environment = passed | dict(known) | built.environment
    box = Box("build", built.user, environment, built.cwd, built.folders | mounts | kept, readable, {"uv": UV})
    line = box.command(built.folder, ["/bin/sh", "-c", rest.strip()])
    done = subprocess.run(line, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"RUN {rest}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
