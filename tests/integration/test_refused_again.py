"""A refused hour is not rebuilt by every run: only once what its refusal rests on has changed, or
when it is named."""

from collections.abc import Callable

import pytest
from expectations import entry
from world import World, past_hour, spread

from anabranch.common.output import plain
from anabranch.operations.reports import status as views


def refusals(one: World) -> int:
    rows = one.job.ledger.history()
    return sum(row.decision == "refused" for row in rows)


def commits(one: World) -> int:
    """How many snapshots the table ever had: whatever is staged makes one."""
    return one.state.table.metadata.last_sequence_number


def at_most(level: int) -> dict[str, object]:
    return entry("expect_column_max_to_be_between", column="level", max_value=level)


@pytest.mark.full
def test_a_refused_hour_is_rebuilt_once_something_changed(world: Callable[..., World]) -> None:
    one, hour = world(partitions=1), past_hour(1)
    one.send(spread(hour, 10, "e", partitions=1))
    one.expect(at_most(3))
    one.apply()
    [first] = one.batch()
    assert (first.decision, refusals(one)) == ("refused", 1)
    # A run of every hour says it again, and neither builds nor writes anything.
    before = commits(one)
    for _ in range(2):
        [again] = one.batch()
        assert (again.hour, again.decision, again.reason) == (hour, "refused", first.reason)
        assert again.account.quality.failed and again.account.good == 10
    assert (commits(one), refusals(one)) == (before, 1)
    assert next(h for h in plain(views.hours(one.job)) if h["hour"] == hour)["state"] == "refused"
    # Named, it is rebuilt at once; the same reason is in the ledger already.
    [named] = one.batch(hour)
    assert (named.decision, named.reason) == ("refused", first.reason)
    assert commits(one) > before
    assert refusals(one) == 1
    # Another suite is another reason, and then none.
    one.expect(at_most(4))
    [other] = one.batch()
    assert (other.decision, refusals(one)) == ("refused", 2)
    one.expect(at_most(9))
    [accepted] = one.batch()
    assert accepted.decision == "accepted"
    assert one.contents() == one.acknowledged()
