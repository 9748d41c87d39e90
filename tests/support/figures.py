"""Tables of a run's durations: `make test RECORD=run.json`, then `python tests/support/figures.py
run.json`."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path


def main(file: Path) -> None:
    """Print minutes and tests by folder, and the twenty slowest tests, as tables of Markdown."""
    tests = json.loads(file.read_text(encoding="utf-8"))
    seconds = {name: sum(test["seconds"].values()) for name, test in tests.items()}
    cpu = {name: sum(test["cpu"].values()) for name, test in tests.items()}
    by_folder: dict[str, list[str]] = defaultdict(list)
    for name in tests:
        by_folder[name.split("/")[1]].append(name)
    print("| folder | tests | minutes of one process | CPU minutes |\n|---|---|---|---|")
    for folder, names in sorted(by_folder.items()):
        took, used = (sum(of[name] for name in names) / 60 for of in (seconds, cpu))
        print(f"| `{folder}` | {len(names):,} | {took:.1f} | {used:.1f} |")
    print("\n| seconds | CPU seconds | test |\n|---|---|---|")
    for name in sorted(tests, key=seconds.__getitem__, reverse=True)[:20]:
        print(f"| {seconds[name]:.1f} | {cpu[name]:.1f} | `{name.removeprefix('tests/')}` |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
