"""The contract of the command line, run as users run it: exit codes, text and JSON."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from commands import call, shown
from expectations import entry
from pages import browser, new_page
from world import World, past_hour, spread

ROOT = Path(__file__).resolve().parents[2]


def _run(one: World, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "anabranch.cli", *arguments, "--conf", str(one.folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == expect, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def test_the_whole_path_by_command_line(world: Callable[..., World]) -> None:
    """Run each layer once as a process. The batch process refuses the first hour and accepts the
    second."""
    one, small, hour = world(partitions=2), past_hour(2), past_hour(1)
    one.send(spread(small, 6, "s") + spread(hour, 30, "e"))
    assert "created table" in call(one, "apply", one.name)
    assert shown(one, "apply", one.name) == [
        {"stream": one.name, "changes": [], "check": None, "error": None}
    ]
    status = shown(one, "status", one.name)
    assert status["lag"]["offsets"] == 36
    assert status["waiting_since"].startswith(small)

    _run(one, "speed", one.name, "--available-now")
    status = shown(one, "status", one.name)
    assert status["lag"]["offsets"] == 0
    assert status["waiting_since"] is None
    assert status["position"] == {"0": 18, "1": 18}
    assert one.contents() == one.acknowledged()

    one.expect(entry("expect_table_row_count_to_be_between", min_value=10))
    assert shown(one, "batch", one.name, "--seal-only")["sealed"] == [small, hour]
    [first, sealed, running] = shown(one, "hours", one.name)
    assert (
        (first["state"], first["served"])
        == (sealed["state"], sealed["served"])
        == ("sealed", "speed")
    )
    assert (running["hour"], running["state"], running["served"]) == (past_hour(0), "open", "speed")
    done = _run(one, "batch", one.name, "--output", "json", expect=1)
    assert "expect_table_row_count_to_be_between" in done.stdout + done.stderr
    built = [(h["hour"], h["state"], h["good"]) for h in json.loads(done.stdout)["hours"]]
    assert built == [(small, "refused", 6), (hour, "accepted", 30)]

    [refused, accepted, _] = shown(one, "hours", one.name)
    assert (refused["state"], refused["served"], refused["quality"]["passed"]) == (
        "refused",
        "speed",
        False,
    )
    assert accepted == {
        "hour": hour,
        "state": "accepted",
        "revision": 1,
        "served": "batch",
        "cut": {"0": [3, 18], "1": [3, 18]},
        "counts": {"offsets": 30, "good": 30, "dead": 0, "duplicate": 0, "gap": 0},
        "dead_share": {"dead": 0, "records": 30},
        "speed_rows": 30,
        "diff": {
            "missing": 0,
            "extra": 0,
            "changed": 0,
            "duplicate": 0,
            "unread": 0,
            "missing_dead": 0,
            "extra_dead": 0,
        },
        "quality": {"passed": True, "failed": []},
        "reason": None,
    }
    assert hour in call(one, "hours", one.name)
    page = new_page(one.job)
    page.readers[one.name].refresh()
    measured = browser(page).get("/metrics").text
    assert f'anabranch_freshness_seconds{{stream="{one.name}"}} 0.0' in measured
    assert f'anabranch_acceptance_seconds{{stream="{one.name}"}}' in measured
    assert f'anabranch_hours_refused{{stream="{one.name}"}} 1.0' in measured
    # The processes that measured these have ended.
    for counted in ("anabranch_readable_after_seconds_count", "anabranch_stage_seconds_count"):
        assert f'{counted}{{layer="speed",stream="{one.name}"}} 1.0' in measured
    assert f'anabranch_stage_seconds_count{{layer="batch",stream="{one.name}"}} 1.0' in measured
    assert (
        f'anabranch_s3_requests_total{{layer="speed",operation="PutObject",stream="{one.name}"}}'
        in measured
    )
    assert f'anabranch_rows{{layer="batch",stream="{one.name}"}} 30.0' in measured
    merged = shown(one, "merge", one.name)
    assert merged == {"stream": one.name, "dry_run": False, "swaps": [], "overrides": {}}
    answer = call(
        one, "query", f"SELECT count(*) AS n FROM {one.job.stream.table}", "--output", "json"
    )
    assert json.loads(answer) == [{"n": 36}]

    # An operator accepts the hour and gives the reason.
    one.batch(small, accept=True, why="few players that night")
    [refused, *_] = shown(one, "hours", one.name)
    assert (refused["state"], refused["served"], refused["quality"]["passed"]) == (
        "accepted",
        "batch",
        False,
    )
    assert refused["reason"].startswith(
        "accepted by choice: few players that night; in spite of: quality: expect_"
    )


def test_apply_of_many_continues_after_an_error(world: Callable[..., World]) -> None:
    one = world(group="small")
    files = one.folder / "streams"
    good = yaml.safe_load((files / f"{one.name}.yaml").read_text())
    second = {**good, "table": f"{one.name}.second"}
    broken = {**good, "table": f"{one.name}.broken", "key": "nothing"}
    (files / "a_broken.yaml").write_text(yaml.safe_dump(broken))
    (files / "z_second.yaml").write_text(yaml.safe_dump(second))
    (files / "elsewhere.yaml").write_text(
        yaml.safe_dump(second | {"group": "large", "table": f"{one.name}.elsewhere"})
    )

    printed = call(one, "apply", "--group", "small", expect=2)
    assert "anabranch: a_broken: " in printed and "a_broken.yaml: key" in printed
    assert f"{one.name}: created table {one.name}.events" in printed
    assert f"z_second: created table {one.name}.second" in printed
    assert "elsewhere" not in printed

    fine, broken = shown(one, "apply", "z_second", "a_broken", expect=2)
    assert fine == {"stream": "z_second", "changes": [], "check": None, "error": None}
    assert (broken["stream"], broken["changes"]) == (
        "a_broken",
        [],
    ) and "a_broken.yaml: key" in broken["error"]
    assert "elsewhere: created table" in call(one, "apply", expect=2)


@pytest.mark.full
def test_without_readable_dead_letters_nothing_is_replayed(world: Callable[..., World]) -> None:
    one = world()
    one.create()
    assert (
        "no hour has dead letters that decode now"
        in _run(one, "dead-letters", one.name, "--replay").stdout
    )


def test_wrong_usage_is_2_and_transient_is_75(world: Callable[..., World]) -> None:
    one = world(partitions=2)
    assert "run `anabranch apply`" in call(one, "status", one.name, expect=1)
    one.apply()
    assert "expected a UTC hour such as" in call(
        one, "batch", one.name, "--hour", "yesterday", expect=2
    )
    assert "known streams" in _run(one, "status", "nobody", expect=2).stderr
    assert "can be sealed from" in call(
        one, "batch", one.name, "--hour", past_hour(0), "--seal-only", expect=75
    )
