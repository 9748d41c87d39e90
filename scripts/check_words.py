"""Find words that the documentation of Kafka, Spark, Iceberg and Airflow would not use, in code and
docs.

`python scripts/check_words.py [PATH...]` checks all packages and pages, or the given paths. A
finding is one line, `FILE:LINE: expected WORDS, found ...`, and exit code 1.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

CHECKED = (
    "anabranch",
    "batch_layer",
    "benchmarks",
    "dags",
    "docs",
    "examples",
    "serving_layer",
    "speed_layer",
    "tests",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
)

EXAMPLES = ROOT / "tests/unit/suite/test_check_words.py"
"""The tests of this check contain the words."""


class Rule(NamedTuple):
    pattern: re.Pattern[str]
    expected: str


def _rule(pattern: str, expected: str) -> Rule:
    return Rule(re.compile(pattern, re.IGNORECASE), expected)


PROSE = (
    _rule(r"\b(un)?told\b|\btells?\b", "report, log, return, distinguish"),
    _rule(
        r"\b(whoever|nobody|somebody)\b",
        "a subject: a process, a publisher, an operator, no process",
    ),
    _rule(r"\banew\b", "again, from the start"),
    _rule(r"\bstands? (in|for|under|above|beside|behind)\b", "is, replaces, contains"),
    _rule(r"\bfound wanting\b", "a check failed"),
    _rule(r"\bof before\b", "earlier, previous"),
    _rule(r"\b(mends?|mended)\b", "fix"),
    _rule(r"\b(is|are|was) away\b", "is down, is unreachable"),
    _rule(
        r"(^|[.:;]\s+)What (is|was|are|were)\b(?![^.]*\?)",
        "a noun: the rows, the offsets, files that ...",
    ),
)
"""For comments, docstrings, messages and pages."""

DOCSTRINGS = (
    _rule(r"\A\s*(that|what|whose|of|by|to|those|such)\b", "the subject or an imperative first"),
)
"""For the first word of a docstring."""

MESSAGES = (_rule(r"(?<!anabranch )(?<!-of-)\b(holds?|held)\b", "contains, has"),)
"""For messages: texts that a program prints, logs or raises."""

IDENTIFIERS = (
    _rule(r"(^|_)(told|untold|tells?)(_|$)", "report, read, returned"),
    _rule(r"(^|_)(whoever|nobody|somebody|anew)(_|$)", "a noun of the field"),
    _rule(r"(^|_)(standing|stands)(_|$)", "valid, current, status"),
)

# Names and fixed terms of libraries.
ALLOWED = re.compile(r"\.tell\(|\b(held_snapshots)\b")
# Keys of JSON output that programs read.
JSON_KEYS = frozenset({"untold"})


class Finding(NamedTuple):
    path: str
    line: int
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: expected {self.expected}, found {self.found!r}"


def _apply(rules: Sequence[Rule], path: str, line: int, text: str) -> Iterator[Finding]:
    """Yield a finding for each match of a rule, with the line of the match."""
    for rule in rules:
        for match in rule.pattern.finditer(text):
            if match.group() in JSON_KEYS:
                continue
            at = line + text.count("\n", 0, match.start())
            yield Finding(path, at, rule.expected, " ".join(match.group().split()))


def check_python(path: str, source: str) -> list[Finding]:
    """Return the findings in a module's comments, docstrings, messages and defined names."""
    found: list[Finding] = []
    tree = ast.parse(source)
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstrings.add(id(statement.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                rules: tuple[Rule, ...] = (*PROSE, *DOCSTRINGS)
            elif " " in node.value:
                rules = (*PROSE, *MESSAGES)
            else:
                rules = ()
            found += _apply(rules, path, node.lineno, node.value)
        for name in _defined(node):
            found += _apply(IDENTIFIERS, path, getattr(node, "lineno", 1), name)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not ALLOWED.search(token.string):
            found += _apply(PROSE, path, token.start[0], token.string.lstrip("# "))
    return sorted(set(found))


def _defined(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name="tell", args=ast.arguments(args=[ast.arg(arg="self")])):
            return  # the method of Python's file interface
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.arg(arg=name):
            yield name


def check_page(path: str, text: str) -> list[Finding]:
    """Return the findings in a Markdown page, outside of code."""
    without_code = re.sub(
        r"```.*?```|`[^`\n]*`", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL
    )
    return sorted(set(_apply(PROSE, path, 1, without_code)))


def check(paths: Sequence[str], root: Path = ROOT) -> list[Finding]:
    """Return the findings in these files and folders below `root`."""
    found: list[Finding] = []
    for given in paths:
        place = root / given
        if not place.exists():
            found.append(Finding(given, 0, "a file or folder", "none"))
        files = (
            [place]
            if place.is_file()
            else sorted(p for p in place.rglob("*") if p.suffix in (".py", ".md"))
        )
        for file in files:
            if file == EXAMPLES:
                continue
            text, name = file.read_text(encoding="utf-8"), str(file.relative_to(root))
            found += check_python(name, text) if file.suffix == ".py" else check_page(name, text)
    return found


def main(arguments: Sequence[str]) -> int:
    found = check(arguments or CHECKED)
    for finding in found:
        print(finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
