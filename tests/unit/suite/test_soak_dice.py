"""Random choices of the soak: the changes of a stream's file, and the timestamps of records."""

import random
from pathlib import Path

from soak.evolving import Evolving, columns_of
from soak.strange_stamps import strange_stamp

from anabranch.config import load_stream
from anabranch.config.columns import parse_columns
from anabranch.iceberg.schema_evolution import Columns, plan_evolution
from anabranch.iceberg.table_schemas import rows_columns
from anabranch.protocol.rolled_back import is_ahead

SHIPPED = load_stream("game_events", Path(__file__).parents[3] / "conf")
NOW_MS = 1_790_000_000_000


def columns(schema: str) -> Columns:
    return rows_columns(
        SHIPPED.model_copy(update={"ddl": schema, "columns": parse_columns(schema)})
    )


def test_the_first_version_is_the_file_as_it_ships() -> None:
    evolving = Evolving([columns_of(SHIPPED.ddl)], random.Random(1))
    assert columns(evolving.schema).schema == rows_columns(SHIPPED).schema
    assert not evolving.is_behind


def test_every_step_is_one_that_apply_takes() -> None:
    kinds = set()
    for seed in range(30):
        evolving = Evolving([columns_of(SHIPPED.ddl)], random.Random(seed))
        table = columns(evolving.schema)
        for _ in range(20):
            words = evolving.step()
            kinds.add(
                words.split()[-1] if words.split()[-1] in ("added", "again") else words.split()[1]
            )
            file = columns(evolving.schema)
            if evolving.is_behind:
                assert is_ahead("games.game_events", table.schema, file)
                continue
            changes = plan_evolution("games.game_events", table.schema, file)
            assert bool(changes) is ("again" not in words)
            table = file
    assert kinds == {"added", "widened", "file", "again"}


def test_a_strange_timestamp_is_accepted_by_brokers() -> None:
    dice = random.Random(1)
    stamps = [strange_stamp(NOW_MS, dice) for _ in range(5_000)]
    assert all(-(2**63) <= stamp < 2**63 for stamp in stamps)
    day = 86_400_000
    for low, high in (
        (-(2**63), -(10**12)),
        (-(10**12), 0),
        (0, 10**10),
        (NOW_MS - 3 * day, NOW_MS),
        (NOW_MS + 1, NOW_MS + day),
        (10**15, 10**16),
        (10**18, 2**63),
    ):
        assert any(low <= stamp < high for stamp in stamps), f"none between {low} and {high}"
    assert {2**63 - 1, -(2**63)} <= set(stamps)
