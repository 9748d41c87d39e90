"""The command that prints the documentation, which the wheel contains."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path

import click


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
    from anabranch.common.errors import ConfigurationError
    from anabranch.common.resources import shipped

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
    """Return the Markdown section with the anchor `name`, and its subsections; empty if there is
    none. Pure."""
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
