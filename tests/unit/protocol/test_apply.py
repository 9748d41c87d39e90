"""A stream's columns and its table's: what apply adds or refuses, and what a job says."""

from pathlib import Path

import pytest
from brokers import Broker
from lakes import new_lake, new_stream, table_of

from anabranch.common.errors import Terminal
from anabranch.iceberg.commits import Commit
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.schema_evolution import evolve
from anabranch.iceberg.table_schemas import rows_columns
from anabranch.protocol import apply
from anabranch.protocol.apply import ROLLED_BACK, require_columns

NESTED = (
    "id STRING NOT NULL, n INT, x STRUCT<at: TIMESTAMP, deep: STRUCT<m: MAP<STRING, "
    "ARRAY<INT>>>>, tags ARRAY<INT>"
)


@pytest.mark.parametrize("ddl", ["id STRING NOT NULL, n INT", NESTED])
def test_a_table_of_apply_belongs_to_the_stream(tmp_path: Path, ddl: str) -> None:
    lake, table = table_of(tmp_path, ddl)
    require_columns(table, new_stream(schema=ddl))
    assert evolve(lake, "games.other", rows_columns(new_stream(schema=ddl))) == []


@pytest.mark.parametrize(
    ("ddl", "message"),
    [
        (f"{NESTED}, colour STRING", "expected column colour string, found none"),
        (NESTED.replace("n INT", "n BIGINT"), "expected column n bigint, found int"),
        (
            NESTED.replace("ARRAY<INT>>>>", "ARRAY<BIGINT>>>>"),
            "expected column x struct<at:timestamp,deep:struct<m:map<",
        ),
        # A job that began before `apply` would write rows without it.
        (NESTED.replace("n INT, ", ""), "expected column n none, found int"),
        # The same error as that of `apply`.
        (
            NESTED.replace("id STRING NOT NULL", "id STRING"),
            "expected column id string, found string NOT NULL",
        ),
    ],
)
def test_a_job_of_other_columns_names_the_remedy(tmp_path: Path, ddl: str, message: str) -> None:
    _, table = table_of(tmp_path, NESTED)
    command = "run `anabranch apply events`, then restart the jobs that were started before it"
    with pytest.raises(
        Terminal, match="put NOT NULL back" if "id STRING," in ddl else command
    ) as error:
        require_columns(table, new_stream(schema=ddl))
    assert message in str(error.value)


def test_two_applies_forget_a_dropped_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as an apply whose answer is lost and that tries again."""
    one = new_lake(tmp_path)
    one.lake.commit(one.table(), Commit("c", {}, (), set_properties={ROLLED_BACK: "{}"}))
    real = apply._change

    def after_another(lake: Lake, name: str, commit: Commit) -> None:
        real(lake, name, commit)
        assert ROLLED_BACK not in lake.load(name).properties, "the other one was not first"
        real(lake, name, commit)

    monkeypatch.setattr(apply, "_change", after_another)
    assert apply.roll_forward(one.lake, one.name)
    assert ROLLED_BACK not in one.table().properties


def test_a_corrected_topic_is_the_tables(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The topic was missing at the first `apply`, and what the jobs read since has its new name."""
    made = new_lake(tmp_path)
    stream = made.stream.model_copy(update={"topic": "orders"})
    found = []
    for broker in (Broker(id="another"), Broker(id="t"), Broker(id="t")):
        found += apply.apply(made.environment, stream, made.lake, broker.adapter)
        assert len(caplog.messages) == 1, "only another topic needs `anabranch adopt`"
    assert found == ["table games.events is of topic orders now, and was of events"]
