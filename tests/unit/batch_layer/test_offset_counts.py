"""Places that a table has, by partition and offset."""

import pyarrow as pa
import pytest

from batch_layer.offset_counts import OffsetMasks


@pytest.mark.parametrize(
    ("partition", "offsets", "expected"),
    [
        (0, [10, 12], False),
        (0, [10, 11], True),
        (1, [0], True),
        # Outside of the ranges.
        (0, [9, 14], False),
        (7, [11], False),
    ],
)
def test_places_that_were_not_read(partition: int, offsets: list[int], expected: bool) -> None:
    def places(partition: int, offsets: list[int]) -> pa.Table:
        ofs = pa.array(offsets, pa.int64())
        of = pa.array([partition] * len(offsets), pa.int32())
        return pa.table({"kafka_partition": of, "kafka_offset": ofs})

    masks = OffsetMasks.of([places(0, [10, 12, 13])], {0: (10, 14), 1: (0, 1)})
    assert masks.lacks([places(partition, offsets)]) is expected
