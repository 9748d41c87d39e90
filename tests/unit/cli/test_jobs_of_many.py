"""`anabranch batch` of many streams: those that the job is given, and their one exit code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from conf_folders import write_environment, write_stream

from anabranch import cli, common
from anabranch.protocol.ledger_row import HourAccount
from batch_layer.job import StreamOutcome, print_outcomes
from batch_layer.rebuild import Result as HourResult

HOUR = "2026-11-21T03"


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    folder = tmp_path / "conf"
    write_environment(folder, tmp_path, spark={"master": "local[2]"})
    for name, group in (("a", "small"), ("b", "small"), ("c", None)):
        write_stream(folder, name, group=group)
    return folder


Submitted = Callable[..., tuple[list[str], Result]]


@pytest.fixture
def submitted(conf: Path, monkeypatch: pytest.MonkeyPatch) -> Submitted:
    """Runs `anabranch batch`; returns the arguments of the job, and what the command said."""
    given: list[str] = []
    monkeypatch.setattr("anabranch.job.main", lambda run, arguments: given.extend(arguments))

    def run(*arguments: str) -> tuple[list[str], Result]:
        given.clear()
        done = CliRunner().invoke(cli.main, ["batch", *arguments, "--conf", str(conf)])
        return list(given), done

    return run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("c",), ["--stream", "c"]),
        (("a", "c"), ["--stream", "a", "--stream", "c"]),
        (("--group", "small"), ["--group", "small"]),
        (("--all",), ["--all"]),
    ],
)
def test_the_job_is_given_the_selection(
    submitted: Submitted, conf: Path, arguments: tuple[str, ...], expected: list[str]
) -> None:
    given, done = submitted(*arguments)
    assert (done.exit_code, given) == (0, [*expected, "--conf", str(conf), "--output", "text"])
    given, _ = submitted(*arguments, "--master", "local[7]")
    assert given[-2:] == ["--master", "local[7]"]


def test_reports_read_each_stream(submitted: Submitted) -> None:
    restated = ("--hour", HOUR, "--restate", "--why", "a new schema", "--at-once", "4")
    given, _ = submitted("--all", *restated)
    assert given[0] == "--all"
    assert given[-6:] == ["--hour", HOUR, "--restate", "--why=a new schema", "--at-once", "4"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give one of them"),
        (("a", "--all"), "give one of them"),
        (("--group", "large"), "expected a stream's file with `group: large`"),
        (("a", "missing"), "missing"),
        (("a", "b", "--hour", HOUR, "--accept", "--why", "known"), "--accept: expected one stream"),
        (("--group", "small", "--hour", HOUR, "--accept", "--why", "known"), "--accept: expected one stream"),
        (("a", "--hour", HOUR, "--hour", "2026-11-21T04"), f"expected it once, as HOUR or A..B, found {HOUR} 2026"),
    ],
)  # fmt: skip
def test_wrong_work_is_refused(submitted: Submitted, arguments: tuple[str, ...], said: str) -> None:
    given, done = submitted(*arguments)
    assert (given, done.exit_code) == ([], 2) and said in done.output


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], 0), ([0, 0], 0), ([0, 75], 75), ([75, 1, 0], 1), ([75, 1, 2], 2),
        ([70, 2, 1, 75, 0], 70),
    ],
)  # fmt: skip
def test_one_exit_code_names_what_to_look_at_first(codes: list[int], expected: int) -> None:
    assert common.errors.combined_exit_code(codes) == expected


def hour(decision: str, hour: str = HOUR, reason: str | None = None) -> HourResult:
    return HourResult(hour, decision, 1, reason, HourAccount())


OUTCOMES = [
    StreamOutcome("good", (hour("accepted"),)),
    StreamOutcome("refused", (hour("refused", reason="too few rows"),)),
    StreamOutcome("beside", (hour("accepted"), hour("refused", "2026-11-21T01"))),
    StreamOutcome("away", (hour("accepted"),), common.errors.Transient("Kafka did not answer")),
    StreamOutcome("recreated", (), common.errors.PositionError("another topic")),
    StreamOutcome("broken", (), common.errors.ConfigurationError("no such key")),
    StreamOutcome("bug", (), common.errors.Unexpected("a bug")),
    StreamOutcome("idle"),
]


def test_the_output_names_each_hour_error_and_code(
    capsys: pytest.CaptureFixture[str], recorded: Callable[[Any], None]
) -> None:
    print_outcomes(OUTCOMES, {HOUR}, "json", "to rebuild")
    recorded(json.loads(capsys.readouterr().out))
    print_outcomes(OUTCOMES, {HOUR}, "text", "to rebuild")
    recorded(capsys.readouterr().out.splitlines())
