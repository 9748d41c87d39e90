"""The compose file as Docker's client reads it: `docker compose config` with a complete .env."""

import base64
import json
import re
import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import go_tools

ROOT = Path(__file__).resolve().parents[2]
NAMES = re.findall(r"^([A-Z_0-9]+)=$", (ROOT / ".env.example").read_text("utf-8"), re.MULTILINE)


def filled() -> dict[str, str]:
    """Return a value for each variable of .env.example, generated as described there."""
    values = {name: secrets.token_hex(24) for name in NAMES}
    key = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()
    return values | {"AIRFLOW_FERNET_KEY": key}


def config(
    values: Mapping[str, str],
    folder: Path,
    file: Path = ROOT / "docker-compose.yml",
    profile: str | None = None,
) -> dict[str, Any]:
    """Return the file with all variables substituted. Raises ValueError with the client's error."""
    env_file = folder / "env"
    env_file.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    command = [str(go_tools.ensure(go_tools.COMPOSE)), "--env-file", str(env_file)]
    command += ["--project-directory", str(file.parent), "--file", str(file)]
    command += ["--profile", profile] if profile else []
    command += ["config", "--format", "json"]
    # Without the caller's environment, which has precedence over the file.
    done = subprocess.run(
        command, env={"HOME": str(folder)}, capture_output=True, text=True, timeout=60
    )
    if done.returncode != 0:
        raise ValueError(done.stderr)
    # The output is a valid compose file, so its dollars are still doubled.
    content: dict[str, Any] = json.loads(done.stdout.replace("$$", "$"))
    return content
