"""The interactive shell of `anabranch query`. Statements end with a semicolon; lines are kept as
history."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from anabranch.common.errors import AnabranchError

_REMEMBERED = 1000
# As in the shells of SQLite, DuckDB and PostgreSQL. No SQL begins with a dot or a backslash.
_LEAVE = frozenset({".quit", ".exit", "\\q"})
# As in the shells of MySQL and Spark. Inside a statement they may be names.
_LEAVE_WORDS = frozenset({"exit", "quit"})
_HELP = (
    "End a statement with a semicolon. Ctrl-C discards what is typed; exit or Ctrl-D ends the "
    "shell. SHOW TABLES; lists the tables."
)


def interact(run: Callable[[str], None], history: Path, read: Callable[[str], str] = input) -> None:
    r"""Read statements and run each, until `exit`, `quit`, `\q` or the end of the input. An
    AnabranchError is printed and does not end the shell.

    Keeps the last 1,000 lines in `history`, if Python has readline.
    """
    with _remembering(history):
        _answer(run, read)


def _answer(run: Callable[[str], None], read: Callable[[str], str]) -> None:
    click.echo(_HELP)
    typed: list[str] = []
    while True:
        try:
            line = read("anabranch> " if not typed else "       ..> ")
            word = line.strip() if not typed else None
            only = line.strip().rstrip(";").rstrip().lower()
            if only in _LEAVE or (only in _LEAVE_WORDS and not typed):
                return
            if only in _LEAVE_WORDS:
                click.echo(
                    f"{only}: taken as part of the statement; \\q or Ctrl-D ends the shell",
                    err=True,
                )
            if word == ".help":
                click.echo(_HELP)
            elif word != "":
                typed.append(line)
                if line.rstrip().endswith(";"):
                    statement, typed = "\n".join(typed), []
                    run(statement)
        except AnabranchError as error:
            click.echo(str(error), err=True)
        except KeyboardInterrupt:
            typed = []
            click.echo()
        except EOFError:
            click.echo()
            return


@contextmanager
def _remembering(history: Path) -> Iterator[None]:
    try:
        import readline
    except ImportError:
        yield  # a Python that was built without readline: a shell without history
        return
    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        history.touch(mode=0o600)
        readline.read_history_file(history)
    except OSError as error:
        click.echo(f"query: no history is kept: {error}", err=True)
        yield
        return
    readline.set_history_length(_REMEMBERED)
    try:
        yield
    finally:
        # Not at the interpreter's exit: a command ends its process with os._exit.
        readline.write_history_file(history)
