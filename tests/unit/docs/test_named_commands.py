"""Commands that pages, messages and files name: an operator types them as they are printed, and none
is wrong usage. Without a configuration they get no further than their options."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from anabranch.cli import main
from anabranch.offsets.hours import is_hour

ROOT = Path(__file__).resolve().parents[3]
CODE = ("anabranch", "speed_layer", "batch_layer", "serving_layer", "dags")
PAGES = ["README.md", "CHANGELOG.md", "docs/**/*.md", "anabranch/starter_files/README.md"]
# They would start, download or serve something.
NOT_RUN = {"dev", "jars", "pack", "init", "health", "page"}
_SPAN = re.compile(r"`(anabranch [^`]+)`")
# A command without the program, such as `apply --register`, and other programs.
_SHORT = re.compile(r"`([a-z][a-z-]*(?: [^`]+)? --[^`]+)`")
OTHERS = {"airflow", "anabranch", "aws", "docker", "kafka-consumer-groups", "make", "pip", "protoc"}
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_LINE = re.compile(r"^ *(?:\$ )?(anabranch .+)$", re.MULTILINE)
_HOUR = "2026-11-21T03"
_WORDS = {"A..B": f"{_HOUR}..{_HOUR}", "HOURS": _HOUR, "HOUR": _HOUR}


def texts_of(file: Path) -> Iterator[str]:
    """Yield a module's texts. A value in one is a stream if its name says so, else an hour."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    parts = {id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in n.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(map(shown, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from () if id(node) in parts else (node.value,)


def shown(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    is_stream = re.search(r"(name|stream|streams\[0\]|target)\W*$", ast.unparse(part))
    return "orders" if is_stream else _HOUR


def named() -> Iterator[tuple[str, str]]:
    """Yield each command with its file."""
    for file in (file for folder in CODE for file in sorted((ROOT / folder).rglob("*.py"))):
        for text in texts_of(file):
            # Other texts of this form name a session of Spark.
            is_remedy = "operations" in file.parts and re.fullmatch(r"anabranch [a-z].+", text)
            whole = [text] if is_remedy else []
            yield from ((str(file), command) for command in (*_SPAN.findall(text), *whole))
    for file in (file for page in PAGES for file in sorted(ROOT.glob(page))):
        text = file.read_text(encoding="utf-8")
        fenced = [body for kind, body in _FENCE.findall(text) if kind != "text"]
        lines = [line for body in fenced for line in _LINE.findall(body)]
        prose = _FENCE.sub("", text)
        yield from ((str(file), command) for command in (*lines, *_SPAN.findall(prose)))
        # The changelog names what was removed.
        for span in _SHORT.findall(prose) if file.name != "CHANGELOG.md" else ():
            if span.partition(" ")[0] not in OTHERS:
                yield str(file), f"anabranch {span}"


def words_of(command: str) -> list[str]:
    """Return a command's words up to a comment or an operator of the shell."""
    # A log's first value is the stream.
    command = command.replace("%s", "orders", 1).replace("%s", _HOUR)
    for word, value in _WORDS.items():
        command = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", value, command)
    lexer = shlex.shlex(" ".join(command.split()), posix=True, punctuation_chars="|&;>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    words = list(lexer)
    end = next((i for i, word in enumerate(words) if set(word) <= set("|&;>")), len(words))
    return words[1:end]


def fault_of(words: list[str], conf: Path) -> str | None:
    """Return what is wrong with a command line, if anything. A mere mention, such as `anabranch
    batch --restate`, has the options of its command, and is not run."""
    command: click.Command | None = main
    rest = words
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        command, rest = command.commands.get(rest[0]), rest[1:]
    if command is None:
        return "no such command"
    if isinstance(command, click.Group):
        return None
    is_mention = not rest or rest[0].startswith("-")
    try:
        with command.make_context(words[0], [*rest]) as context:
            given = [context.params.get(key) or () for key in ("stream", "streams")]
    except (click.MissingParameter, click.BadOptionUsage) as error:
        return None if is_mention else str(error)
    except click.UsageError as error:
        return str(error)
    names = [name for some in given for name in ([some] if isinstance(some, str) else some)]
    if any(is_hour(str(name)) for name in names):
        return "an hour in the place of a stream"
    if is_mention or words[0] in NOT_RUN:
        return None
    if words[0] == "docs":
        done = CliRunner().invoke(main, words)
        return done.output if done.exit_code and words != ["docs", "PAGE"] else None
    done = CliRunner().invoke(main, [*words, "--conf", str(conf)])
    return done.output if "Usage:" in done.output else None


def test_each_named_command_is_right_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FILE", "values.txt", "players.txt", "orders.jsonl"):
        (tmp_path / name).touch()
    # The usage of a command, and what a shell puts in.
    found = {(c, file) for file, c in named() if not re.search(r"\[[A-Z]|\$\{|…", c)}
    assert len(found) > 300
    faults = {one: fault_of(words_of(one[0]), tmp_path / "none") for one in sorted(found)}
    assert {one: fault for one, fault in faults.items() if fault is not None} == {}
