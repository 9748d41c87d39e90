"""The jars' list: the committed list, and the error for a wrong jar."""

import hashlib
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from anabranch.common.errors import ConfigurationError, Terminal
from anabranch.spark import jars
from anabranch.spark.java import parse_major, require_java

CONF = jars.jvm_folder()


def _folder(root: Path, **content: bytes) -> Path:
    for name, data in content.items():
        conf, _, artifact = name.partition("__")
        (root / conf).mkdir(parents=True, exist_ok=True)
        (root / conf / f"{artifact}.jar").write_bytes(data)
    return root


def _sums(file: Path, **content: bytes) -> Path:
    sums = {name.replace("__", "/"): hashlib.sha256(d).hexdigest() for name, d in content.items()}
    lines = [f"{of_jar}  {name}.jar\n" for name, of_jar in sums.items()]
    file.write_text("# comment\n\n" + "".join(lines))
    return file


def test_every_direct_dependency_of_ivy_xml_has_a_checksum_in_its_conf() -> None:
    listed = jars.read_sums(CONF / "jars.sha256")
    direct = ElementTree.parse(CONF / "ivy.xml").findall("./dependencies/dependency")
    assert direct
    for dependency in direct:
        for conf in dependency.attrib["conf"].replace("->default", "").split(";"):
            assert f"{conf}/{dependency.attrib['name']}-{dependency.attrib['rev']}.jar" in listed


def test_the_jobs_jars_are_those_of_the_installed_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jars.CONFS[0] == jars.JOBS[0] == jars._of_jobs()
    for installed, conf in (("4.0.1", "spark40"), ("4.1.3", "spark")):
        monkeypatch.setattr(jars, "version", lambda _, found=installed: found)
        assert jars._of_jobs() == conf


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"spark__a-1": b"a"}, "s3/b-2.jar is missing"),
        ({"spark__a-1": b"a", "s3__b-2": b"b", "s3__c-3": b"c"}, "s3/c-3.jar is not listed"),
        ({"spark__a-1": b"altered", "s3__b-2": b"b"}, "spark/a-1.jar: expected sha256 ca978112"),
    ],
)
def test_verify_names_the_jar(tmp_path: Path, content: dict[str, bytes], sentence: str) -> None:
    sums = _sums(tmp_path / "sums", **{"spark__a-1": b"a", "s3__b-2": b"b"})
    with pytest.raises(Terminal) as error:
        jars.verify(_folder(tmp_path / "jars", **content), sums)
    assert sentence in str(error.value)
    assert "anabranch jars" in str(error.value)
    difference = "s3/a.jar: expected sha256 1, found 2"
    assert jars.differences({"s3/a.jar": "1"}, {"s3/a.jar": "2"}) == [difference]


ZEROS, TWICE = "0" * 64, r"expected each jar once, found s3/a\.jar again"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("# comment\nabc  spark/a.jar", "line 2"),
        (f"# comment\n{ZEROS} spark/a.jar", "line 2"),
        (f"# comment\n{ZEROS}  other/a.jar", "line 2"),
        (f"{ZEROS}  s3/a.jar\n{'1' * 64}  s3/a.jar", TWICE),
    ],
    ids=["no checksum", "one blank", "another folder", "a jar twice"],
)
def test_a_wrong_line_of_the_list_is_named(tmp_path: Path, lines: str, found: str) -> None:
    (tmp_path / "sums").write_text(f"{lines}\n")
    with pytest.raises(Terminal, match=found):
        jars.read_sums(tmp_path / "sums")


def test_a_user_without_a_home_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANABRANCH_CACHE", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54_321_000)
    with pytest.raises(ConfigurationError, match="set ANABRANCH_CACHE or HOME to a folder"):
        jars.cache_folder()


@pytest.mark.parametrize(
    ("output", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "25" 2025-09-16', 25),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "26-ea" 2026-03-17', 26),
        ("nothing of the kind", None),
    ],
)
def test_java_versions_are_understood(output: str, major: int | None) -> None:
    assert parse_major(output) == major


def test_an_old_or_missing_java_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(found: str) -> None:
        with pytest.raises(Terminal, match=found):
            require_java()

    java = tmp_path / "jdk" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "jdk"))
    refused(r"expected Java 17 or newer, found 11;.*openjdk-17")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    refused(r"JAVA_HOME .*gone: expected .*java, found none")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(r"a java on the PATH, found neither; install a Java")


def test_the_jobs_jars_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ivy.xml").write_text("<ivy-module/>")
    _sums(tmp_path / "jars.sha256", spark__a=b"a", broker__b=b"b")
    monkeypatch.setattr(jars, "jvm_folder", lambda: tmp_path)
    monkeypatch.setattr(jars, "JOBS", ("spark",))
    monkeypatch.setattr(jars, "CONFS", ("spark", "broker", "s3"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path / "cache"))
    folder = _folder(tmp_path / "cache" / "jars" / jars._key(tmp_path), spark__a=b"a")
    assert jars.ensure_jars(confs=jars.JOBS).spark == (folder / "spark" / "a.jar",)
    assert jars.cached() == (folder, [])
    with pytest.raises(Terminal, match="JAVA_HOME"):
        jars.ensure_jars()
    (folder / "spark" / "other.jar").write_bytes(b"x")
    with pytest.raises(Terminal, match="JAVA_HOME"):
        jars.ensure_jars(confs=jars.JOBS)
