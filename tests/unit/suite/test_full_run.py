"""`make test-full` runs every test, in one shard or in several."""

import full_run
from full_run import ROOT, SHARED, WHOLE


def test_each_folder_of_tests_is_run_whole_by_one_shard_or_in_parts_by_all() -> None:
    named = {f"tests/{folder}" for folder in (*WHOLE, *(f for some in SHARED for f in some))}
    files = (ROOT / "tests").glob("**/test_*.py")
    others = [file for file in files if not file.is_relative_to(ROOT / "tests" / "unit")]
    assert {str(file.parent.relative_to(ROOT)) for file in others} | {"tests/unit"} == named
    shards = [list(full_run.plan(number, 3)) for number in (1, 2, 3)]
    for number, shard in enumerate(shards, 1):
        part = ["--splits", "3", "--group", str(number)]
        assert all(one[one.index("--splits") :][:4] == part for one in shard[: len(SHARED)])
    whole = [one[-1] for shard in shards for one in shard[len(SHARED) :]]
    assert sorted(whole) == sorted(f"tests/{folder}" for folder in WHOLE)
    assert sorted(one[-1] for one in list(full_run.plan(1, 1))[len(SHARED) :]) == sorted(whole)
