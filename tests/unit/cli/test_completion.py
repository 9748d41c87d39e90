"""Completion, as a real bash does it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_ASK = """
eval "$(_ANABRANCH_COMPLETE=bash_source anabranch)"
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_anabranch_completion anabranch
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("anabranch stat", "status"),
        ("anabranch status ga", "game_events"),
        ("anabranch maintain --dr", "--dry-run"),
        ("anabranch status --conf nowhere ga", ""),
    ],
)
def test_bash_completes_commands_options_and_streams(words: str, completed: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", _ASK.format(words=words)], cwd=ROOT,
        env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert (done.stdout.strip(), done.stderr) == (completed, "")
