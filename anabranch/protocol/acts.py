"""Acts of operators: who decided something about hours, on which host, when, and why.

Ledger rows that follow from an act contain it. User and host are as the operating system reports
them: a record for colleagues, not a proof of identity.
"""

from __future__ import annotations

import getpass
import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from anabranch.common.errors import ConfigurationError
from anabranch.common.json_values import JsonFields

ActName = Literal[
    "restate",
    "accept",
    "replay",
    "override",
    "adopt",
    "redeliver",
    "hold",
    "release",
    "erase",
    "import",
    "undo",
]


@dataclass(frozen=True, slots=True)
class Act(JsonFields):
    """An act of an operator. `why` is None if the operator gave no reason."""

    name: ActName
    user: str
    host: str
    at: datetime
    why: str | None = None


def act_now(name: ActName, why: str | None = None) -> Act:
    """Return an act of this process's user at the current time (UTC). Raises ConfigurationError for
    a reason that the ledger cannot store: bytes of an argument that are not UTF-8."""
    try:
        (why or "").encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"--why: expected UTF-8 text, found {why!a}; nothing was changed"
        ) from None
    return Act(name, _user(), socket.gethostname(), datetime.now(UTC), why)


def _user() -> str:
    # In a container whose user id has no name, getpass finds it in LOGNAME or USER.
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
