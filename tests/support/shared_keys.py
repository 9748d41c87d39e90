"""Temporary keys in AWS's shared file, and their renewal."""

from collections.abc import Callable
from pathlib import Path

import pytest


def shared_keys(
    folder: Path, monkeypatch: pytest.MonkeyPatch, access_key: str, secret_key: str
) -> Callable[[str], None]:
    """Make AWS's clients read a file of keys; return what writes it, with a session token."""
    shared = folder / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)

    def renew(token: str) -> None:
        new = folder / "new"
        keys = f"aws_access_key_id={access_key}\naws_secret_access_key={secret_key}\naws_session_token={token}\n"
        new.write_text(f"[default]\n{keys}")
        new.replace(shared)

    return renew
