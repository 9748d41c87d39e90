"""The programs that wrote the files of a table."""

from collections import Counter

from world import World

from anabranch.iceberg import rewriting
from anabranch.iceberg.manifests import files_by_hour

BY_PYARROW, BY_SPARK = "parquet-cpp-arrow", "parquet-mr"


def writers(one: World, of: str = "") -> Counter[str]:
    """The files of `main`, of the rows or of table `of`, counted by the program that wrote them."""
    table = one.lake.load(of) if of else one.state.table
    found: Counter[str] = Counter()
    for by_path in files_by_hour(table, "main").values():
        for data_file in by_path.values():
            with rewriting.opened(table, data_file) as parquet:
                found[parquet.metadata.created_by.split()[0]] += 1
    return found
