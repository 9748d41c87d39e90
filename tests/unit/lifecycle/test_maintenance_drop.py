"""`anabranch drop`: nothing of a stream stays, and nothing of another one goes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from lakes import FIRST, StreamLake, new_lake
from run_books import printed

from anabranch.cli import lifecycle, main
from anabranch.common.errors import Refused
from anabranch.iceberg import admin
from anabranch.iceberg.owner import OWNER, Owner
from anabranch.lifecycle.maintenance import drop, tables_of
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.protocol.acts import hold

SECOND = shift(FIRST, 1)


@pytest.fixture
def one(tmp_path: Path) -> StreamLake:
    cut = Cut("t", {0: (0, 10)})
    return new_lake(tmp_path, timeline=Timeline(FIRST, SECOND, {0: 10}, sealed={FIRST: cut}))


def job_of(one: StreamLake) -> Any:
    return SimpleNamespace(environment=one.environment, stream=one.stream, lake=one.lake)


def files(one: StreamLake) -> list[Path]:
    return [path for path in (one.folder / "warehouse").rglob("*") if path.is_file()]


def test_all_tables_and_their_files_go(one: StreamLake) -> None:
    staged = one.stage([(FIRST, 0, 1), (FIRST, 0, 2)])
    one.publish(one.speed(staged, {0: 3}))
    one.stage([(FIRST, 0, 5)])
    other = "games.other"
    admin.create(one.lake, other, one.table().schema(), (), {})
    kept = set(files(one)) & set((one.folder / "warehouse" / "games" / "other").rglob("*"))
    named = tables_of(job_of(one))
    assert named[-1] == one.name and len(named) == 3
    done = drop(job_of(one))
    assert [line.split()[2] for line in done] == named
    assert not any(map(one.lake.exists, named)) and one.lake.exists(other)
    assert set(files(one)) == kept
    assert drop(job_of(one)) == []


def test_a_killed_drop_is_continued(one: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    one.publish(one.speed(one.stage([(FIRST, 0, 1)]), {0: 2}))
    with monkeypatch.context() as killed:

        def die(*_: Any) -> None:
            raise KeyboardInterrupt

        killed.setattr(admin, "forget", die)
        with pytest.raises(KeyboardInterrupt):
            drop(job_of(one))
    assert len(drop(job_of(one))) == 3
    assert files(one) == []


def test_another_streams_table_is_not_dropped(one: StreamLake) -> None:
    def write(_: Any, tx: Any) -> None:
        tx.set_properties({OWNER: Owner("orders", "orders", "cluster").to_json()})

    admin.change_table(one.lake, one.name, "owner", write)
    with pytest.raises(Refused, match="found one of stream orders; nothing was dropped"):
        drop(job_of(one))
    assert len(tables_of(job_of(one))) == 3


def test_held_hours_are_not_dropped(one: StreamLake) -> None:
    publisher = one.publisher
    hold(publisher, FIRST, SECOND, "case 4711", False)
    with pytest.raises(Refused, match=f"found {FIRST} to {SECOND}.*case 4711.*nothing was"):
        drop(job_of(one))
    assert len(tables_of(job_of(one))) == 3
    hold(publisher, FIRST, SECOND, "closed", True)
    assert len(drop(job_of(one))) == 3


def test_the_command_asks_for_the_name(one: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "open_stream", lambda *_: job_of(one))
    command = printed("anabranch drop STREAM", STREAM="events").split()[1:]
    declined = CliRunner().invoke(main, command, input="other\n")
    assert declined.exit_code == 2 and "nothing was dropped" in declined.output
    assert len(tables_of(job_of(one))) == 3
    done = CliRunner().invoke(main, [*command, "--output", "json"], input="events\n")
    assert done.exit_code == 0 and f'"{one.name}"' in done.stdout
    assert tables_of(job_of(one)) == []
    assert CliRunner().invoke(main, [*command, "--yes"]).output == "events: no tables\n"
