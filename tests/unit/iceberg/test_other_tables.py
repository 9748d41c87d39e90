"""The log of Spark's file sink: which files count, whole, compacted, cut short or damaged."""

import json

import pytest

from anabranch.common.errors import ConfigurationError, Refused
from anabranch.iceberg.hudi_source import newest_files
from anabranch.iceberg.other_tables import (
    Entry,
    SinkLog,
    is_written_by_spark,
    location_of,
    match,
    read_log,
)

WHERE = "/old/_spark_metadata"


def lines(*names: str, action: str = "add") -> str:
    """A log file as Spark writes it."""
    said = {"isDir": False, "modificationTime": 1, "action": action}
    files = ({"path": f"file:///old/{name}", "size": len(name)} | said for name in names)
    return "\n".join(["v1", *map(json.dumps, files)])


def log_of(files: dict[str, str]) -> SinkLog:
    return read_log(files, files.__getitem__, WHERE)


def names(log: SinkLog) -> list[str]:
    return [entry.path.removeprefix("file:///old/") for entry in log.entries]


def test_files_count_in_the_order_of_their_micro_batches() -> None:
    files = {"10": lines("k"), "2": lines("c")}
    files |= {str(n): lines(f"f{n}") for n in (0, 1, 3, 4, 5, 6, 7, 8, 9)}
    log = log_of(files)
    assert names(log) == ["f0", "f1", "c", "f3", "f4", "f5", "f6", "f7", "f8", "f9", "k"]
    assert log.through == 10
    # A compact file has all before it, and older ones may be gone.
    files = {"8": lines("h"), "9.compact": lines("a", "h", "i"), "10": lines("k"), "11": "v1"}
    assert names(log_of(files)) == ["a", "h", "i", "k"]
    assert names(log_of(files | {"19.compact": lines("a", "z")})) == ["a", "z"]
    # Files of writers that were killed.
    files = {"0": lines("a"), ".1.6f.tmp": "v1\n{", ".0.crc": "x", "1.compact.tmp": "v1"}
    assert names(log_of(files)) == ["a"]
    with pytest.raises(Refused, match="expected log files 0 to 0, found no 0"):
        log_of({".0.crc": "x"})
    assert names(log_of({"0": lines("a", "b"), "1": lines("a", action="delete")})) == ["b"]
    # Paths are decoded once.
    text = "v1\n" + json.dumps({"path": "file:///old/t=a%2520b/x.parquet", "size": 1})
    assert log_of({"0": text}).entries == (Entry("file:///old/t=a%20b/x.parquet", 1),)


@pytest.mark.parametrize(
    "text", ["", "v1\n" + '{"path": "file:///old/b", "si', "v2\n", 'v1\n{"path": 1}']
)
def test_a_last_file_that_is_damaged_is_refused(text: str) -> None:
    """The hazard: a sink that is started again takes its micro-batch as written."""
    for name, before in (("1", 1), ("9.compact", 9)):
        files = {str(n): lines(f"f{n}") for n in range(before)}
        with pytest.raises(Refused, match=f"_spark_metadata/{name}: expected a line v1"):
            log_of(files | {name: text})


def test_a_log_with_a_hole_or_a_damaged_file_is_refused() -> None:
    with pytest.raises(Refused, match="expected log files 0 to 2, found no 1"):
        log_of({"0": lines("a"), "2": lines("c")})
    with pytest.raises(Refused, match="expected log files 9 to 11, found no 10"):
        log_of({"9.compact": lines("a"), "11": lines("c")})
    with pytest.raises(Refused, match="_spark_metadata/0: expected a line v1 and lines of JSON"):
        log_of({"0": "v1\n{", "1": lines("b")})


def test_files_are_found_in_a_folder_that_was_copied() -> None:
    entries = (Entry("file:///old/day=1/part-a.parquet", 3), Entry("s3a://b/old/part-c.parquet", 4))
    sizes = {"day=1/part-a.parquet": 3, "day=2/part-a.parquet": 3, "part-c.parquet": 4}
    log = SinkLog(entries, 1)
    for root in ("old/", "elsewhere/"):
        assert match(log, sizes, root, WHERE) == ["day=1/part-a.parquet", "part-c.parquet"]
    found = r"expected the file s3a://b/old/part-c\.parquet of 4 bytes, .* found none"
    with pytest.raises(Refused, match=found):
        match(log, {"day=1/part-a.parquet": 3}, "old/", WHERE)
    with pytest.raises(Refused, match="found one of 5 bytes"):
        match(log, sizes | {"part-c.parquet": 5}, "old/", WHERE)


def test_the_newest_committed_file_of_each_group_is_a_hudi_tables() -> None:
    timeline = [f".hoodie/{name}" for name in ("20.commit", "30.commit.requested", "30.inflight")]
    files = ["d=1/a_0-1-2_10.parquet", "d=1/a_0-3-4_20.parquet", "d=1/a_0-5-6_30.parquet"]
    files += ["d=2/a_0-1-2_10.parquet", "b_0-1-2_25.parquet", "c_0-1-2_20.parquet", "other.parquet"]
    # Hudi's index of the files, a Hudi table itself.
    timeline += [".hoodie/metadata/files/f-0000-0_0-6-14_00000000000000010.hfile"]
    assert newest_files([*timeline, *files], "t") == [files[5], files[1], files[3]]
    assert newest_files(files, "t") is None
    later = [".hoodie/timeline/20_21.commit", ".hoodie/timeline/25_26.deltacommit"]
    assert newest_files([*later, *files], "t") == [files[4], files[5], files[1], files[3]]


@pytest.mark.parametrize(
    "name", ["d=1/.a_20.log.1_0-3-4", ".hoodie/20.replacecommit", ".hoodie/hoodie.properties"]
)
def test_a_hudi_table_with_other_rows_than_its_newest_files_is_refused(name: str) -> None:
    commits = [] if name.endswith(".properties") else [".hoodie/20.commit"]
    with pytest.raises(Refused, match="write a snapshot of it as Parquet files"):
        newest_files([*commits, name, "d=1/a_0-1-2_20.parquet"], "t")


@pytest.mark.parametrize("place", ["hdfs://name/old", "gs://b/old", "abfss://c@a/old"])
def test_other_storage_is_named(place: str) -> None:
    with pytest.raises(ConfigurationError, match=r"expected a folder on S3 \(s3://\)"):
        location_of(place)


def test_names_that_sparks_writers_give() -> None:
    name = "part-00000-7fb1c1f6-0dd5-4f0c-8f0c-6c0a3c7a7f11-c000.snappy.parquet"
    assert is_written_by_spark(f"d=1/{name}")
    assert not is_written_by_spark("part-1.parquet")
