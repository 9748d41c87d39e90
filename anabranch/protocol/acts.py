"""Acts of operators: who decided something about hours, on which host, when, and why.

Ledger rows that follow from an act contain it. User and host are as the operating system reports
them: a record for colleagues, not a proof of identity.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

ActName = Literal[
    "restate",
    "accept",
    "replay",
    "serve-hour",
    "adopt",
    "redeliver",
    "hold",
    "release",
    "erase",
    "import",
]


@dataclass(frozen=True, slots=True)
class Act:
    """An act of an operator. `why` is None if the operator gave no reason."""

    name: ActName
    user: str
    host: str
    at: datetime
    why: str | None = None

    def as_dict(self) -> dict[str, Any]:
        values = {
            "name": self.name,
            "user": self.user,
            "host": self.host,
            "at": self.at.isoformat(),
            "why": self.why,
        }
        return {name: value for name, value in values.items() if value is not None}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Act:
        at = datetime.fromisoformat(data["at"])
        return Act(data["name"], data["user"], data["host"], at, data.get("why"))


def act_now(name: ActName, why: str | None = None) -> Act:
    """Return an act of this process's user at the current time (UTC)."""
    return Act(name, _user(), socket.gethostname(), datetime.now(UTC), why)


def _user() -> str:
    # In a container whose user id has no name, getpass finds it in LOGNAME or USER.
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
