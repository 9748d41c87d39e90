"""Exit codes of commands and jobs: that of an unexpected error is never that of a refusal."""

import errno
import json
import os
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from lakes import new_environment

from anabranch import cli, job
from anabranch.common import errors
from anabranch.spark.submit import submit
from batch_layer.job import exit_code
from batch_layer.rebuild import Result

ROOT = Path(__file__).parents[3]
ENDS = [
    (errors.Refused("no"), 1),
    (errors.PositionError("no"), 1),
    (errors.Terminal("no"), 1),
    (errors.ConfigurationError("no"), 2),
    (OverflowError("date value out of range"), 70),
    (ValueError("year 58692 is out of range"), 70),
    (KeyError("speed"), 70),
    (MemoryError(), 70),
    (errors.Transient("away"), 75),
    (errors.Unexplained("who knows"), 75),
    (errors.NotYet("not yet"), 75),
    (errors.JvmGone("gone"), 75),
    (ConnectionResetError(104, "reset"), 75),
    (OSError("AWS Error ACCESS_DENIED during HeadObject operation"), 2),
    (OSError(errno.EROFS, "Read-only file system", "/ro/x.csv"), 2),
    (OSError(errno.EACCES, "Permission denied", "/root/x.csv"), 2),
    (OSError(errno.ENOTDIR, "Not a directory", "/etc/passwd/x.csv"), 2),
    (OSError(errno.EADDRINUSE, "Address already in use"), 2),
    (RuntimeError("java.io.IOException: /ro/blockmgr (Read-only file system)"), 2),
    (sqlite3.OperationalError("attempt to write a readonly database"), 2),
]
_IDS = [type(error).__name__ for error, _ in ENDS]


@pytest.mark.parametrize(("error", "code"), ENDS, ids=_IDS)
def test_a_job_and_a_command_end_with_the_exit_code_of_an_error(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: Sequence[str]) -> int:
        raise error

    with pytest.raises(SystemExit) as ended:
        job.main(run, [])
    assert ended.value.code == code

    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr("anabranch.job.open_job", broken)
    done = CliRunner().invoke(cli.main, ["status", "s"])
    assert done.exit_code == code, done.output
    assert str(error) in done.output
    # A traceback for an unexpected error, one line for all others.
    assert ("Traceback" in done.output) is (code == 70)


def test_no_java_and_no_file_of_acknowledgements_are_wrong_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazard: spark-submit ends with 1 there, and so would the command that became it."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(errors.ConfigurationError, match="expected JAVA_HOME or a java") as raised:
        submit(new_environment(tmp_path), [])
    assert raised.value.exit_code == 2
    file = tmp_path / "missing" / "acks.jsonl"
    command = ["dev", "produce", "game_events", "--events", "1", "--acks", str(file)]
    result = CliRunner().invoke(cli.main, command)
    assert result.exit_code == 2
    assert "--acks" in result.stderr and f"'{file}': No such file or directory" in result.stderr


def test_a_restatement_beside_an_hour_is_no_verdict_on_it() -> None:
    results = [Result("2026-11-21T01", "refused", 2), Result("2026-11-21T02", "accepted", 1)]
    assert exit_code(results, {"2026-11-21T02"}) == 0
    assert exit_code(results, {"2026-11-21T01"}) == 1 and exit_code(results, None) == 1
    assert exit_code(results[1:], None) == 0


@pytest.mark.parametrize(
    ("library", "begin"),
    [
        ("click", ["-c", "from anabranch.entry import main; main()"]),
        ("kafka", [str(ROOT / "batch_layer" / "job.py")]),
        ("kafka", [str(ROOT / "speed_layer" / "job.py")]),
        ("batch_layer", [str(ROOT / "batch_layer" / "job.py")]),
    ],
)
def test_a_broken_install_is_no_refusal(tmp_path: Path, library: str, begin: list[str]) -> None:
    (tmp_path / f"{library}.py").write_text("import a_library_that_is_not_there\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, *begin], env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 70, done.stderr
    assert "a_library_that_is_not_there" in done.stderr


@pytest.mark.parametrize(
    ("end", "code"), [("return", 0), ("sys.exit(1)", 1), ("raise Transient('later')", 75)]
)
def test_a_command_that_ends_at_once_has_written_all_of_its_output(end: str, code: int) -> None:
    body = f"""
    logging.basicConfig(stream=sys.stderr)
    sys.stdout.write("out" * 100_000)
    sys.stdout.write("end")
    logging.warning("err" * 100_000)
    {end}
"""
    with speaking(body) as done:
        out, err = done.communicate(timeout=120)
    assert (done.returncode, out) == (code, b"out" * 100_000 + b"end")
    assert b"err" * 100_000 in err


@contextmanager
def speaking(body: str, *shell: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with this body in a process of its own, or in one of a shell."""
    program = f"""
import logging, sys
from anabranch import cli
from anabranch.common.errors import Transient
from anabranch.common.output import print_json

@cli.main.command()
def speak():
{body}

cli.run()
"""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        [*shell, sys.executable, "-c", program, "speak"],
        env=buffered | env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        yield process


def test_a_command_without_a_reader_or_without_streams_prints_no_error(tmp_path: Path) -> None:
    with speaking('    print("a row")') as left:
        assert left.stdout is not None and left.stderr is not None
        left.stdout.close()
        assert left.stderr.read() == b"" and left.wait(120) == 1
    # The hazard: the catalog's file gets the number of a stream that a scheduler closed.
    body = f"""
    with open({str(tmp_path / "file")!r}, "w") as file:
        print("a row", flush=True)
        raise SystemExit(file.fileno() <= 2)
"""
    with speaking(body, "sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-') as closed:
        assert closed.wait(120) == 0
    assert (tmp_path / "file").read_text() == ""


def test_output_in_another_encoding_is_escaped_and_json_stays_json() -> None:
    body = r"""
    print("\u2713")
    print_json({"a": "\u2713\U0001f600"})
"""
    with speaking(body, PYTHONIOENCODING="latin-1") as done:
        out, err = done.communicate(timeout=120)
    assert done.returncode == 0, err
    text, _, shown = out.decode("ascii").partition("\n")
    assert text == "\\u2713"
    assert json.loads(shown) == {"a": "\u2713\U0001f600"}


def test_the_command_begins_where_imports_are_looked_after() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"anabranch": "anabranch.entry:main"}
