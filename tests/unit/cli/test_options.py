"""The proving commands' arguments: a wrong hour is wrong usage, and nothing is opened for it."""

from pathlib import Path

import pytest
from conf_folders import said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["audit", "s", "--hours", "2026-11-21T05..2026-11-21T03"], "expected the earlier hour first"),
        (["audit", "s", "--hours", "2026-11-21T05..x"], "expected a UTC hour such as"),
        (["dead-letters", "s", "--hours", "x"], "expected a UTC hour such as"),
        (["explain", "s", "yesterday"], "expected a UTC hour such as"),
        (["explain", "s"], "expected a UTC hour such as"),
        (["history", "s", "--hour", "x"], "expected a UTC hour such as"),
        # The hours are right, so the next thing that is asked for is the stream's configuration.
        (["audit", "s", "--hours", "2026-11-21T03..2026-11-21T05"], "yaml: expected a configuration file"),
        (["audit", "s", "--hours", "2026-11-21T03"], "anabranch.yaml: expected a configuration file"),
        (["history", "s"], "anabranch.yaml: expected a configuration file"),
    ],
)  # fmt: skip
def test_a_wrong_hour_is_wrong_usage(tmp_path: Path, arguments: list[str], message: str) -> None:
    assert message in said(*arguments, "--conf", str(tmp_path), expect=2)
