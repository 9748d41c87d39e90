"""The Spark of this environment: the pyspark wheel, and what lets its plain `spark-submit` run our
jobs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from anabranch.common.errors import Terminal

_MARK = "# Added by anabranch:"


def spark_home() -> Path:
    """The pyspark package's folder, which is a whole SPARK_HOME. Raises Terminal if it is not
    installed."""
    spec = importlib.util.find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise Terminal(
            "pyspark: expected it to be installed, found that it is not; run `make setup` in the "
            "checkout, or install the package again"
        )
    return Path(spec.submodule_search_locations[0])


def is_ours(file: Path) -> bool:
    """Whether a file of Spark's configuration is the one that `configure` writes."""
    return file.name == "spark-defaults.conf" and file.read_text(
        encoding="utf-8", errors="replace"
    ).startswith(_MARK)


def configure(jars: Sequence[Path]) -> tuple[Path, ...]:
    """Makes `.venv/bin/spark-submit` find `jars` and this environment's Python; returns the files
    written.

    Without it the wheel's script asks whatever `python3` is on the PATH, which knows pyspark only
    in an activated environment. Both files are of this environment alone, and another call writes
    the same again.
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
        # Replaced, not written in place: an installer may have hard-linked it to a cache that
        # others share.
        part = finder.with_name(finder.name + ".part")
        part.write_text(
            f"{shebang}\n{_MARK} the Python beside this script.\n{ours}\n{rest}", encoding="utf-8"
        )
        part.chmod(finder.stat().st_mode)
        part.replace(finder)
    return (defaults, finder)
