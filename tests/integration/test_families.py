"""A family of topics with the real broker and catalog: what is new, what `apply` creates, and a topic that is gone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import yaml
from click.testing import CliRunner
from commands import call
from waiting import wait_for
from world import SCHEMA, World

from anabranch.cli import main
from anabranch.kafka.client import create_topic


def _streams(one: World) -> dict[str, tuple[str, str | None, str]]:
    """By stream: family, topic and state, as `anabranch streams` lists them."""
    done = CliRunner().invoke(main, ["streams", "--all", "--output", "json", "--conf", str(one.folder)])
    assert done.exit_code == 0, done.output
    return {s["stream"]: (s["topic"], s["table"], s["state"]) for s in json.loads(done.stdout) if s["family"] == "fam"}


def test_a_familys_topics_become_streams_and_none_is_dropped(world: Callable[..., World]) -> None:
    one = world()
    family: dict[str, Any] = {
        "topics": {"pattern": f"{one.name}-([a-z.]+)", "exclude": ".*[.]dlq"},
        "table": f"{one.name}_raw.{{1}}",
        "schema": SCHEMA,
        "key": "event_id",
        "group": "small",
    }
    (one.folder / "streams" / "fam.yaml").write_text(yaml.safe_dump(family))
    kafka = one.job.environment.kafka
    for end in ("orders", "user.events", "orders.dlq"):
        create_topic(kafka, f"{one.name}-{end}", 1, {})
    table = f"{one.name}_raw"
    orders, events = f"{one.name}-orders", f"{one.name}-user.events"
    assert _streams(one) == {
        "fam_orders": (orders, f"{table}.orders", "new"),
        "fam_user_events": (events, f"{table}.user_events", "new"),
    }

    printed = call(one, "apply", "--group", "small")
    [first, second, third, *done] = printed.splitlines()
    assert first == "families: 2 new of 2 streams"
    assert second == f"family fam: topic {orders}: stream fam_orders, table {table}.orders"
    assert third.startswith(f"family fam: topic {events}: ")
    assert f"fam_orders: created table {table}.orders" in done
    assert f"fam_user_events: created table {table}.user_events" in done
    assert json.loads(call(one, "status", "fam_orders", "--output", "json"))["topic"] == orders

    admin = one.admin()
    admin.delete_topics([events])
    wait_for(lambda: events not in admin.list_topics(), "the topic is deleted", 30)
    admin.close()
    assert {name: state for name, (_, _, state) in _streams(one).items()} == {
        "fam_orders": "ready",
        "fam_user_events": "gone",
    }
    assert call(one, "apply", "fam_user_events").endswith("fam_user_events: nothing to change\n")
    assert "stream 'fam_other'" in call(one, "status", "fam_other", expect=2)
