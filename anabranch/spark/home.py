"""The Spark of this environment: the pyspark wheel, and the configuration with which its plain
`spark-submit` runs our jobs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from anabranch.common.errors import Terminal

_MARK = "# Added by anabranch:"


def spark_home() -> Path:
    """Return the pyspark package's folder, a complete SPARK_HOME. Raises Terminal if pyspark is not
    installed."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise Terminal(
            "pyspark: expected it to be installed, found that it is not; run `make setup` in the "
            "checkout, or install the package again"
        )
    return Path(spec.submodule_search_locations[0])


def configure(jars: Sequence[Path]) -> tuple[Path, ...]:
    """Configure `.venv/bin/spark-submit` to find `jars` and this environment's Python; return the
    files written.

    Without it, the wheel's script uses the first `python3` on the PATH, which has pyspark only in
    an activated environment. Both files belong to this environment alone. Idempotent.
    """
    defaults = spark_home() / "conf" / "spark-defaults.conf"
    defaults.parent.mkdir(exist_ok=True)
    listed = ",".join(str(jar) for jar in jars)
    defaults.write_text(f"{_MARK} 'anabranch jars'.\nspark.jars {listed}\n", encoding="utf-8")
    finder = Path(sys.executable).parent / "find-spark-home"
    if not finder.exists():
        return (defaults,)
    script = finder.read_text(encoding="utf-8")
    if _MARK not in script:
        shebang, _, rest = script.partition("\n")
        ours = (
            'export PYSPARK_PYTHON="${PYSPARK_PYTHON:-$(cd "$(dirname "$0")"; '
            f'pwd)/{Path(sys.executable).name}}}"'
        )
        # Replaced, not written in place: an installer may have hard-linked it to a shared cache.
        part = finder.with_name(finder.name + ".part")
        part.write_text(
            f"{shebang}\n{_MARK} the Python beside this script.\n{ours}\n{rest}", encoding="utf-8"
        )
        part.chmod(finder.stat().st_mode)
        part.replace(finder)
    return (defaults, finder)
