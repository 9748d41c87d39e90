"""The command that prints the documentation, which the wheel contains."""

from __future__ import annotations

import re
import sys
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
        click.echo_via_pager(text)
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
    found: list[str] = []
    depth, is_code = 0, False
    for line in text.splitlines(keepends=True):
        is_code ^= line.startswith("```")
        heading = None if is_code else re.match(r"(#+) +(.*)", line)
        if heading is not None and depth and len(heading[1]) <= depth:
            break
        if heading is not None and not depth and anchor(heading[2]) == name:
            depth = len(heading[1])
        if depth:
            found.append(line)
    return "".join(found)


def anchor(heading: str) -> str:
    """Return the anchor that GitHub gives a heading. Pure."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
