"""`--watch`: its output and its end."""

import sys
from datetime import timedelta

import pytest

from anabranch.cli.report import Report, repeat
from anabranch.common.errors import ConfigurationError, Transient

OFTEN = timedelta(0)


class Service:
    """Gives one answer after the other."""

    def __init__(self, *answers: str | BaseException) -> None:
        self.left = list(answers)

    def __call__(self) -> Report[str]:
        answer = self.left.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return Report(answer, [answer])


@pytest.fixture(autouse=True)
def as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.cli.report.output_format", lambda: "text")


def test_it_shows_each_answer_until_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    repeat(OFTEN, Service("a", Transient("Kafka is down"), "b", KeyboardInterrupt(), "never"))
    said = capsys.readouterr()
    assert (said.out, said.err) == ("a\nb\n", "Kafka is down\n")


def test_on_a_terminal_each_takes_the_place_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    repeat(OFTEN, Service("a", "b", KeyboardInterrupt()))
    said = capsys.readouterr()
    assert said.out == "\x1b[2J\x1b[1;1Ha\n\x1b[2J\x1b[1;1Hb\n"
    assert said.err.count("again every 0.1 s; Ctrl-C ends") == 2


def test_a_permanent_error_ends_the_reading() -> None:
    with pytest.raises(ConfigurationError, match="no such stream"):
        repeat(OFTEN, Service("a", ConfigurationError("no such stream")))
