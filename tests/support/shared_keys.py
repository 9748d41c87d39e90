"""Temporary keys in AWS's shared file, and their renewal."""

from collections.abc import Callable
from pathlib import Path

import pytest
from soak.interference import replace_file


def shared_keys(
    folder: Path, monkeypatch: pytest.MonkeyPatch, access_key: str, secret_key: str
) -> Callable[[str], None]:
    """Make AWS's clients read a file of keys; return what writes it, with a session token."""
    shared = folder / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)

    def renew(token: str) -> None:
        keys = f"aws_access_key_id={access_key}\naws_secret_access_key={secret_key}\n"
        replace_file(shared, f"[default]\n{keys}aws_session_token={token}\n")

    return renew
