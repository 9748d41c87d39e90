"""Ten faults, put into the product one at a time. `make test` must catch each; `make
test-mutations` checks that.

    python tests/support/mutations.py               all faults
    python tests/support/mutations.py --only gate   faults with `gate` in their names
    python tests/support/mutations.py --whole       all of `make test`, not only the nearest tests

Each fault is put into a copy of the tree. Its nearest tests run first; if none of them fails, all
of `make test` runs. The model's own mutations are in tests/model/test_mutations.py.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from programs import ROOT, output_of

TESTS = ("tests/unit", "tests/model", "tests/integration")


@dataclass(frozen=True)
class Mutation:
    """In `file`, `right` is replaced by `wrong`. `nearest`: the tests that run first."""

    name: str
    file: str
    right: str
    wrong: str
    nearest: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "the balance closes when offsets are missing",
        "batch_layer/balance.py",
        "if account.offsets != account.total:",
        "if account.offsets < account.total:",
        ("tests/unit/batch_layer/test_balance.py",),
    ),
    Mutation(
        "a commit requires no head",
        "anabranch/iceberg/lake.py",
        "AssertRefSnapshotId(ref=ref, snapshot_id=id) for ref, id in commit.heads.items()",
        "AssertRefSnapshotId(ref=ref, snapshot_id=id) for ref, id in ()",
        ("tests/unit/protocol/test_publish.py",),
    ),
    Mutation(
        "an hour ends one offset late",
        "anabranch/offsets/hours.py",
        "boundary = min(record.offset, stable_end)",
        "boundary = min(record.offset + 1, stable_end)",
        ("tests/unit/offsets/test_hours.py",),
    ),
    Mutation(
        "dead letters that wait are not carried to the next snapshot",
        "anabranch/protocol/publish.py",
        "properties[key] = json.dumps([*waiting, *new], default=str)",
        "properties[key] = json.dumps([*(() if key == DEAD_LETTERS else waiting), *new], "
        "default=str)",
        ("tests/unit/protocol/test_dead_letters.py",),
    ),
    Mutation(
        "the position moves one offset too far",
        "anabranch/offsets/position.py",
        "ends = {p: max(e, position.offsets.get(p, 0)) for p, (_, e) in ranges.items()}",
        "ends = {p: max(e + 1, position.offsets.get(p, 0)) for p, (_, e) in ranges.items()}",
        ("tests/unit/offsets/test_position.py",),
    ),
    Mutation(
        "a staged snapshot that is gone is published",
        "batch_layer/plan.py",
        "if not is_staged(state.table, wap_id, now):",
        "if not is_staged(state.table, wap_id, now) and not wap_id:",
        ("tests/unit/batch_layer/test_batch_plan.py",),
    ),
    Mutation(
        "a snapshot that a tag names expires",
        "anabranch/iceberg/expiry.py",
        "kept = {ref.snapshot_id for name, ref in refs.items() if not name.startswith(STAGED)}",
        "kept = {ref.snapshot_id for name, ref in refs.items() if name in BRANCHES}",
        ("tests/unit/protocol/test_publish.py", "tests/unit/lifecycle/test_maintenance.py"),
    ),
    Mutation(
        "duplicates are looked for in the hour alone",
        "batch_layer/build.py",
        "lookback = self.lookback(hour)",
        "lookback = list[str]()",
        ("tests/integration/test_proof.py",),
    ),
    Mutation(
        "the quality gate's verdict is inverted",
        "batch_layer/quality/gate.py",
        "unmet = {i: e for i, e in bound.items() if raised[i] or not verdicts[i].success}",
        "unmet = {i: e for i, e in bound.items() if raised[i] or verdicts[i].success}",
        ("tests/integration/test_quality.py",),
    ),
    Mutation(
        "a merged hour is taken from the other layer",
        "anabranch/protocol/merge.py",
        "layers = {s.hour: s.layer for s in swaps if s.refused is None and not s.expired}",
        'layers = {s.hour: "speed" if s.layer == "batch" else "batch" for s in swaps if s.refused '
        'is None}',
        ("tests/unit/protocol/test_merge.py", "tests/unit/protocol/test_acts_override.py"),
    ),
)  # fmt: skip


def copied(folder: Path) -> None:
    """Copy the files that git does not ignore, and link the environment."""
    listed = output_of("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")


def failing(folder: Path, *tests: str) -> list[str]:
    """Run tests, and return the failing ones, three at most."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=no", "--maxfail=3"]
    command += ["-p", "no:cacheprovider", "-m", "not full"]
    if tests == TESTS:
        command += ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
        command += ["--max-worker-restart", "0"]
    done = subprocess.run([*command, *tests], cwd=folder, capture_output=True, text=True)
    if done.returncode not in (0, 1, 2):
        found = f"{done.returncode}\n{done.stdout}{done.stderr}"
        raise SystemExit(f"pytest: expected exit code 0 or 1, found {found}")
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)


def caught_by(mutation: Mutation, whole: bool) -> list[str]:
    """Return the tests that catch a fault. Raises SystemExit if its text is not there once."""
    with tempfile.TemporaryDirectory(prefix="anabranch-mutation-") as name:
        folder = Path(name)
        copied(folder)
        file = folder / mutation.file
        text = file.read_text("utf-8")
        if text.count(mutation.right) != 1:
            found = f"found it {text.count(mutation.right)} times"
            raise SystemExit(f"{mutation.file}: expected once {mutation.right!r}, {found}")
        file.write_text(text.replace(mutation.right, mutation.wrong), "utf-8")
        return (failing(folder, *mutation.nearest) if not whole else []) or failing(folder, *TESTS)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args()
    missed = []
    for mutation in MUTATIONS:
        if given.only not in mutation.name:
            continue
        began = time.monotonic()
        tests = caught_by(mutation, given.whole)
        said = f"{', '.join(tests) or 'NOT CAUGHT'} ({time.monotonic() - began:.0f} s)"
        print(f"{mutation.name} ({mutation.file}): {said}", flush=True)
        missed += [] if tests else [mutation.name]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
