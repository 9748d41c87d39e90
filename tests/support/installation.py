"""The wheel as users install it: built from a checkout, in an otherwise empty environment."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).parent / "uv"


def run(*command: object, cwd: Path = ROOT, seconds: float = 600) -> str:
    """Run a command to its end, and return its standard output. Raises AssertionError, with the
    output, if it fails."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, (
        f"{command}: expected exit code 0, found {done.returncode}:\n{done.stdout}{done.stderr}"
    )
    return done.stdout


def build_wheel(folder: Path, checkout: Path = ROOT) -> Path:
    """Build the wheel into the folder, and return the file."""
    run(UV, "build", "--wheel", "--out-dir", folder, cwd=checkout)
    [wheel] = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path, extras: str = "", resolution: str = "highest") -> Path:
    """Create an environment with the wheel and its declared dependencies, and return its bin
    folder. `resolution`: `highest` or `lowest-direct` versions of them."""
    python = folder / "bin" / "python"
    run(UV, "venv", "--python", sys.executable, folder)
    # uv takes the lowest versions of what it is given, not of a wheel's dependencies.
    given = _dependencies(wheel, extras) if resolution != "highest" else []
    install = (UV, "pip", "install", "--python", python, "--resolution", resolution)
    run(*install, f"{wheel}{extras}", *given)
    return folder / "bin"


def _dependencies(wheel: Path, extras: str) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    found = (
        line.removeprefix("Requires-Dist: ").partition(";") for line in lines if "-Dist:" in line
    )
    wanted = [f"extra == '{name}'" for name in extras.strip("[]").split(",")]
    return [named for named, _, when in found if when.strip() in ("", *wanted)]
