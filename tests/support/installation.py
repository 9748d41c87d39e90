"""The wheel as users install it: built from a checkout, in an otherwise empty environment."""

import sys
import zipfile
from functools import partial
from pathlib import Path

from programs import ROOT, output_of

UV = Path(sys.executable).parent / "uv"
run = partial(output_of, seconds=600)


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
    found = (x.removeprefix("Requires-Dist: ").partition(";") for x in lines if "-Dist:" in x)
    wanted = [f"extra == '{name}'" for name in extras.strip("[]").split(",")]
    return [named for named, _, when in found if when.strip() in ("", *wanted)]
