"""Print the size of the project: `.venv/bin/python tests/support/project_size.py`."""

import re

import click
import configuration_page
from programs import ROOT, output_of

from anabranch import cli

SOURCE = ("anabranch/", "batch_layer/", "dags/", "serving_layer/", "speed_layer/")


def main() -> None:
    # A link counts once, as the file that it names.
    paths = [name for name in output_of("git", "ls-files").splitlines() if (ROOT / name).is_file()]
    files = [name for name in paths if not (ROOT / name).is_symlink()]
    source = [name for name in files if name.startswith(SOURCE) and name.endswith(".py")]
    tests = [name for name in files if name.startswith("tests/") and name.endswith(".py")]
    pages = [name for name in files if name.endswith(".md")]
    models = configuration_page.FILES.values()
    figures = {
        "lines of source": sum(len(text(name).splitlines()) for name in source),
        "modules": len(source),
        "lines of tests": sum(len(text(name).splitlines()) for name in tests),
        "words of docs": sum(len(text(name).split()) for name in pages),
        "commands": commands(cli.main),
        "configuration keys": sum(1 for one in models for _ in configuration_page.keys(one)),
        "make targets": len(re.findall(r"(?m)^[a-z-]+:.*##? |^[a-z-]+:.*#: ", text("Makefile"))),
    }
    for name, number in figures.items():
        click.echo(f"{name:20} {number:7,}")


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def commands(group: click.Group) -> int:
    """Return the number of commands, those of nested groups included."""
    context = click.Context(group)
    children = [group.get_command(context, name) for name in group.list_commands(context)]
    return sum(commands(one) if isinstance(one, click.Group) else 1 for one in children)


if __name__ == "__main__":
    main()
