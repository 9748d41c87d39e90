"""The contract of the command line, run as users run it: exit codes, text and JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import call, shown
from expectations import entry
from pages import browser, new_page
from world import SAME, Make, World, past_hour, spread

ROOT = Path(__file__).resolve().parents[2]
UNCHANGED = {"changes": [], "check": None, "error": None}


def _run(one: World, *arguments: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "anabranch.cli", *arguments, "--conf", str(one.folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == expect, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def test_the_whole_path_by_command_line(world: Make) -> None:
    """Each layer once as a process. The batch process refuses an hour and accepts the next."""
    one, small, hour = world(partitions=2), past_hour(2), past_hour(1)
    one.send(spread(small, 6, "s") + spread(hour, 30, "e"))
    assert "created table" in call(one, "apply", one.name)
    assert shown(one, "apply", one.name) == [UNCHANGED | {"stream": one.name}]
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
    hours = [(h["hour"], h["state"], h["served"]) for h in shown(one, "hours", one.name)]
    sealed = [(ended, "sealed", "speed") for ended in (small, hour)]
    assert hours == [*sealed, (past_hour(0), "open", "speed")]
    done = _run(one, "batch", one.name, "--output", "json", expect=1)
    assert "expect_table_row_count_to_be_between" in done.stdout + done.stderr
    built = [(h["hour"], h["state"], h["good"]) for h in json.loads(done.stdout)["hours"]]
    assert built == [(small, "refused", 6), (hour, "accepted", 30)]

    [refused, accepted, _] = shown(one, "hours", one.name)
    assert (refused["state"], refused["served"]) == ("refused", "speed")
    assert refused["quality"]["passed"] is False
    assert accepted == {
        "hour": hour, "state": "accepted", "revision": 1, "served": "batch", "reason": None,
        "cut": {"0": [3, 18], "1": [3, 18]},
        "counts": {"offsets": 30, "good": 30, "dead": 0, "duplicate": 0, "gap": 0},
        "dead_share": {"dead": 0, "records": 30}, "speed_rows": 30,
        "diff": SAME | {"duplicate": 0, "unread": 0, "missing_dead": 0, "extra_dead": 0},
        "quality": {"passed": True, "failed": []},
    }  # fmt: skip
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
    counted = f"SELECT count(*) AS n FROM {one.job.stream.table}"
    assert shown(one, "query", counted) == [{"n": 36}]

    # An operator accepts the hour and gives the reason.
    one.batch(small, accept=True, why="few players that night")
    [refused, *_] = shown(one, "hours", one.name)
    assert (refused["state"], refused["served"]) == ("accepted", "batch")
    assert refused["quality"]["passed"] is False
    assert refused["reason"].startswith(
        "accepted by choice: few players that night; in spite of: quality: expect_"
    )


def test_apply_of_many_continues_after_an_error(world: Make) -> None:
    one = world(group="small")
    files = one.folder / "streams"
    good = yaml.safe_load((files / f"{one.name}.yaml").read_text())
    others = {"a_broken": {"key": "nothing"}, "z_second": {}, "elsewhere": {"group": "large"}}
    for name, changes in others.items():
        other = good | {"table": f"{one.name}.{name}"} | changes
        (files / f"{name}.yaml").write_text(yaml.safe_dump(other))

    printed = call(one, "apply", "--group", "small", expect=2)
    assert "anabranch: a_broken: " in printed and "a_broken.yaml: key" in printed
    assert f"{one.name}: created table {one.name}.events" in printed
    assert f"z_second: created table {one.name}.z_second" in printed
    assert "elsewhere" not in printed

    fine, broken = shown(one, "apply", "z_second", "a_broken", expect=2)
    assert fine == UNCHANGED | {"stream": "z_second"}
    assert (broken["stream"], broken["changes"]) == ("a_broken", [])
    assert "a_broken.yaml: key" in broken["error"]
    assert "elsewhere: created table" in call(one, "apply", expect=2)


@pytest.mark.full
def test_without_readable_dead_letters_nothing_is_replayed(world: Make) -> None:
    one = world(create=2)
    said = _run(one, "dead-letters", one.name, "--replay").stdout
    assert "no hour accepted before has dead letters that decode now" in said


def test_wrong_usage_is_2_and_transient_is_75(world: Make) -> None:
    one = world(partitions=2)
    assert "run `anabranch apply`" in call(one, "status", one.name, expect=1)
    one.apply()
    named = ("batch", one.name, "--hour")
    assert "expected a UTC hour such as" in call(one, *named, "yesterday", expect=2)
    assert "known streams" in _run(one, "status", "nobody", expect=2).stderr
    running = call(one, *named, past_hour(0), "--seal-only", expect=75)
    assert "can be sealed from" in running
