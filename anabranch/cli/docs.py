"""Commands that give out files of the wheel: documentation, and starter files."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click

from anabranch.cli.report import Report, local_report
from anabranch.common.errors import ConfigurationError
from anabranch.common.version import shipped


@click.command()
@click.argument("page", metavar="[PAGE[#SECTION]]", required=False)
def docs(page: str | None) -> None:
    """Print a page of the documentation, or list the pages.

    \b
    anabranch docs tutorial
    anabranch docs runbooks#anabranchspeedlate

    PAGE is a name such as `formats`, or a path such as `docs/reference/formats.md`. Both can have a
    section: `docs/runbooks.md#anabranchspeedlate`.
    """
    folder = shipped("docs/design.md", "_docs/design.md").parent
    pages = {
        str(file.relative_to(folder).with_suffix("")): file for file in sorted(folder.rglob("*.md"))
    }
    if page is None:
        _list(folder, {name: file for name, file in pages.items() if _is_listed(name)})
        return
    name, _, section = page.partition("#")
    name = name.removeprefix("docs/").removesuffix(".md")
    named = [path for path in pages if path.rpartition("/")[2] == name]
    name = named[0] if name not in pages and len(named) == 1 else name
    if name not in pages:
        known = ", ".join(name for name in pages if _is_listed(name))
        raise ConfigurationError(f"docs: expected one of the pages {known}, found {name!r}")
    text = pages[name].read_text(encoding="utf-8")
    if section and not (text := section_of(text, section)):
        raise ConfigurationError(
            f"docs: expected a section of {name}.md, found none that is named {section!r}"
        )
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        with (console := Console()).pager(styles=True):
            console.print(Markdown(text))
    else:
        click.echo(text, nl=False)


def _is_listed(name: str) -> bool:
    """Return whether the list has this page; decisions are only reached by links."""
    return not name.startswith("decisions/")


def _list(folder: Path, pages: dict[str, Path]) -> None:
    width = max(map(len, pages))
    for name, file in pages.items():
        with file.open(encoding="utf-8") as lines:
            click.echo(f"{name:<{width}}  {next(lines).removeprefix('# ').strip()}")
    click.echo(f"\nanabranch docs PAGE prints one; the files are in {folder}")


def section_of(text: str, name: str) -> str:
    """Return the Markdown section with the anchor `name` and its subsections; else empty. Pure."""
    from rich.markdown import Markdown

    lines, tokens = text.splitlines(keepends=True), Markdown(text).parsed
    begin, rank = None, 0
    for token, content in pairwise(tokens):
        if token.type != "heading_open" or token.map is None:
            continue
        if begin is None and anchor(content.content) == name:
            begin, rank = token.map[0], int(token.tag[1])
        elif begin is not None and int(token.tag[1]) <= rank:
            return "".join(lines[begin : token.map[0]])
    return "".join(lines[begin:]) if begin is not None else ""


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading. Pure."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


# Starter files: configuration, an example stream, the DAG files, a compose file that runs them, and
# files for Kubernetes. Path in the new folder -> path in a checkout, path in the wheel.
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
    """Write the starter files into `folder`, created if missing; return their paths. README.md and
    .gitignore stay. Raises ConfigurationError first if another of the files exists."""
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
    from importlib.metadata import distribution

    origin = json.loads(distribution("anabranch").read_text("direct_url.json") or "{}")
    wheel = Path(unquote(urlsplit(origin.get("url", "")).path))
    return [wheel] if wheel.suffix == ".whl" and wheel.is_file() else []


@click.command()
@click.argument("folder", metavar="[DIR]", default=".")
@local_report
def init(folder: str) -> Report[object]:
    """Write starter files: configuration, DAGs, containers.

    \b
    anabranch init shop

    Writes to DIR, by default the current folder: README.md, conf/, dags/, deploy/, a compose file
    with its Dockerfile. Overwrites nothing.
    """
    from anabranch.cli.render.changes import written_text

    written = write(Path(folder))
    view = {"folder": folder, "files": [str(file) for file in written]}
    return Report(view, written_text(folder, written))
