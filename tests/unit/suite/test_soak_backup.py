"""The soak's backups: catalog and bucket are afterwards as they were, whatever happened to them."""

import sqlite3
from contextlib import closing
from pathlib import Path

from soak.backup import Backup


def rows(catalog: sqlite3.Connection) -> list[tuple[str]]:
    return catalog.execute("SELECT location FROM tables").fetchall()


def contents(bucket: Path) -> dict[str, str]:
    return {str(p.relative_to(bucket)): p.read_text() for p in bucket.rglob("*") if p.is_file()}


def test_catalog_and_bucket_are_as_they_were(tmp_path: Path) -> None:
    bucket = tmp_path / "bucket"
    (bucket / "data").mkdir(parents=True)
    for name in ("kept", "changed", "deleted"):
        (bucket / "data" / name).write_text(name)
    backup = Backup(tmp_path / "catalog.db", bucket, tmp_path / "backup")
    with closing(sqlite3.connect(tmp_path / "catalog.db")) as catalog:
        catalog.execute("CREATE TABLE tables (location TEXT)")
        catalog.execute("INSERT INTO tables VALUES ('first')")
        catalog.commit()
        assert not backup.is_taken
        backup.take()
        before = contents(bucket)
        catalog.execute("UPDATE tables SET location = 'second'")
        catalog.commit()
        (bucket / "data" / "changed").write_text("another")
        (bucket / "data" / "deleted").unlink()
        (bucket / "more").mkdir()
        (bucket / "more" / "new").write_text("new")
        backup.restore()
        # Also for a process that has the catalog open.
        assert rows(catalog) == [("first",)]
    assert contents(bucket) == before
