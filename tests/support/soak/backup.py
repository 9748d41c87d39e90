"""A backup of catalog and bucket, and its restore, as an operator does them."""

import filecmp
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path


class Backup:
    """The newest backup of a folder of objects and a SQLite catalog, restored in place. Taken while
    no job commits, the catalog first, so that the bucket has every file that it names."""

    def __init__(self, catalog: Path, bucket: Path, folder: Path) -> None:
        self._catalog, self._bucket, self._folder = catalog, bucket, folder

    @property
    def is_taken(self) -> bool:
        return (self._folder / "bucket").exists()

    def take(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        copy_catalog(self._catalog, self._folder / "catalog.db")
        # With the extended attributes, in which the S3 server stores the metadata of objects.
        shutil.copytree(self._bucket, self._folder / "bucket")

    def restore(self) -> None:
        """Restore the backup, and delete objects that it does not have. No job may run."""
        saved = self._folder / "bucket"
        for path in sorted(self._bucket.rglob("*"), reverse=True):
            if path.is_file() and not (saved / path.relative_to(self._bucket)).exists():
                path.unlink()
        for path in sorted(saved.rglob("*")):
            there = self._bucket / path.relative_to(saved)
            if path.is_dir():
                there.mkdir(exist_ok=True)
            elif not there.exists() or not filecmp.cmp(path, there, shallow=False):
                shutil.copy2(path, there)
        copy_catalog(self._folder / "catalog.db", self._catalog)


def copy_catalog(source: Path, target: Path) -> None:
    """Copy a catalog by SQLite's backup API: processes with the target open see all of it."""
    with (
        closing(sqlite3.connect(source, timeout=60)) as one,
        closing(sqlite3.connect(target, timeout=60)) as other,
    ):
        one.backup(other)
