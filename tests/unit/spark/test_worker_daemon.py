"""The process that Python workers fork from drops Spark's archives from its path alone."""

import sys
import zipfile
import zipimport
from pathlib import Path

import pytest

from anabranch.spark.worker_daemon import forget_archives


def test_only_sparks_archives_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spark = tmp_path / "spark" / "python" / "lib"
    spark.mkdir(parents=True)
    (tmp_path / "pyspark").mkdir()
    jar = tmp_path / "spark" / "jars" / "spark-core_2.13-4.1.3.jar"
    jar.parent.mkdir()
    of_spark = (spark / "pyspark.zip", spark / "py4j-0.10.9.9-src.zip", jar)
    for path in (*of_spark, tmp_path / "jobs.zip"):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{path.stem.replace('.', '_').replace('-', '_')}.py", "")
    gone = [*map(str, of_spark)]
    # A user's archive, folders with Spark's names, the folder that the archives lie in.
    kept = [
        "", str(tmp_path / "jobs.zip"), str(tmp_path / "pyspark"), str(spark),
        str(tmp_path / "py4j.zip.d"),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "path", [kept[0], gone[0], *kept[1:3], *gone[1:], *kept[3:]])
    found = {path: zipimport.zipimporter(path) for path in (*gone, kept[1])}
    cached = {
        **found, f"{gone[0]}/pyspark": None, f"{gone[0]}/pyspark/sql": None, str(spark): None,
        kept[2]: None, f"{kept[1]}/package": None,
    }  # fmt: skip
    monkeypatch.setattr(sys, "path_importer_cache", dict(cached))
    forget_archives()
    assert sys.path == kept
    left = {path: one for path, one in cached.items() if not path.startswith(tuple(gone))}
    assert sys.path_importer_cache == left
    assert set(cached) - set(left) == {*gone, f"{gone[0]}/pyspark", f"{gone[0]}/pyspark/sql"}
    # A second time there is nothing to forget.
    forget_archives()
    assert sys.path == kept


def test_an_archive_of_a_like_name_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, beside = f"{tmp_path}/pyspark.zip", f"{tmp_path}/pyspark.zip.unpacked"
    monkeypatch.setattr(sys, "path", [archive, beside])
    cached = {archive: None, beside: None, f"{beside}/a": None}
    monkeypatch.setattr(sys, "path_importer_cache", cached)
    forget_archives()
    assert sys.path == [beside]
    assert set(sys.path_importer_cache) == {beside, f"{beside}/a"}


def test_imported_modules_stay_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    archives = ["/nowhere/pyspark.zip", "/nowhere/py4j-0.10.9.9-src.zip"]
    monkeypatch.setattr(sys, "path", [*sys.path, *archives])
    forget_archives()
    import importlib.util

    for name in ("pyspark", "py4j", "pyarrow", "anabranch.records.staged"):
        assert importlib.util.find_spec(name) is not None, name
