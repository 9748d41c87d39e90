"""Lineage of real hours, to a receiver that takes only what OpenLineage's schemas allow."""

from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner
from expectations import entry
from lineage_receiver import LineageReceiver, running_receiver
from world import World, past_hour, spread

from anabranch.cli.jobs import batch
from anabranch.lineage.events import table_name


@pytest.fixture
def receiver() -> Iterator[LineageReceiver]:
    with running_receiver() as one:
        yield one


@pytest.mark.full
def test_rebuilt_hours_are_sent_with_their_balance_and_refused_ones_as_failed(
    world: Callable[..., World], receiver: LineageReceiver
) -> None:
    one = world()
    one.set_environment(lineage={"url": receiver.url})
    one.topic()
    good, bad = past_hour(2), past_hour(1)
    one.send(spread(good, 20, "good"))
    one.send([*spread(bad, 9, "bad"), (0, spread(bad, 1, "x")[0][1], b"{")])
    one.apply()
    one.expect(
        entry("expect_column_values_to_match_regex", column="event_id", regex="^good"),
        {
            "type": "expect_column_values_to_not_be_null",
            "kwargs": {"column": "amount"},
            "severity": "warning",
        },
    )

    assert [(r.hour, r.decision) for r in one.batch()] == [(good, "accepted"), (bad, "refused")]

    assert receiver.problems == []
    assert list(receiver.runs().values()) == [["START", "COMPLETE"], ["START", "FAIL"]]
    complete, fail = receiver.ended()
    facts = complete["run"]["facets"]["anabranch_hour"]
    cut = one.state.accepted[good].cut
    assert facts["topicId"] == cut.topic_id
    assert facts["offsetRanges"] == {str(p): list(r) for p, r in cut.ranges.items()}
    assert facts["balance"] == {
        "offsets": 20, "good": 20, "dead": 0, "duplicate": 0, "gap": 0, "gaps": {},
    }  # fmt: skip
    table = one.lake.load(one.job.stream.table)
    [output] = complete["outputs"]
    assert (output["namespace"], output["name"]) == table_name(table.location())
    files = [t.file for t in table.scan(row_filter=f"ingest_hour = '{good}'").plan_files()]
    statistics = output["outputFacets"]["outputStatistics"]
    assert (statistics["rowCount"], statistics["fileCount"]) == (20, len(files))
    assert statistics["size"] == sum(file.file_size_in_bytes for file in files)
    assert int(output["facets"]["version"]["datasetVersion"]) in {
        s.snapshot_id for s in table.snapshots()
    }
    assert complete["run"]["facets"]["processing_engine"]["version"] == one.spark.version
    start = next(e for e in receiver.events if e["run"]["runId"] == complete["run"]["runId"])
    assert start["eventTime"] < complete["eventTime"]
    assert (
        "quality: expect_column_values_to_match_regex(event_id)"
        in fail["run"]["facets"]["errorMessage"]["message"]
    )
    assert fail["run"]["facets"]["anabranch_hour"]["balance"]["dead"] == 1

    # An unreachable receiver fails no hour, and gets its events later.
    receiver.status = 503
    assert [r.decision for r in one.batch(good, restate=True)] == ["accepted"]
    assert len(receiver.runs()) == 2
    receiver.recover()
    done = CliRunner().invoke(batch, [one.name, "--lineage-only", "--conf", str(one.folder)])
    assert done.exit_code == 0, done.output
    assert [line.split()[1:4] for line in done.output.splitlines()] == [
        [good, "revision", "1"], [bad, "revision", "1"], [good, "revision", "2"],
    ]  # fmt: skip
    # Two runs were sent again, and are the same; the restatement is a run of its own.
    assert list(receiver.runs().values()) == [
        ["START", "COMPLETE"] * 2,
        ["START", "FAIL"] * 2,
        ["START", "COMPLETE"],
    ]
    assert receiver.problems == []
