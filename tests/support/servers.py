"""Servers as child processes of a test."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(
    command: Sequence[str],
    log: Path,
    answers: Callable[[], bool],
    seconds: float = 60,
    environment: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server in the folder of its log, wait until it answers, and stop it at the end of the
    `with`.

    `answers` is called until it returns True; an OSError, such as a client's connection error,
    counts as False. `environment` is added to this process's.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=log.parent,
            env=os.environ | (environment or {}),
        )  # fmt: skip
    try:
        deadline = time.monotonic() + seconds
        while not _answers(answers):
            text = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            assert process.poll() is None, (
                f"expected {command[0]} to run, found that it ended:\n{text}"
            )
            assert time.monotonic() < deadline, (
                f"expected an answer within {seconds} s; {log.name} ends:\n{text}"
            )
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait(timeout=30)


def _answers(answers: Callable[[], bool]) -> bool:
    try:
        return answers()
    except OSError:
        return False
