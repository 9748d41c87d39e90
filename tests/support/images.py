"""What stands for the images of others: the same programs, started as their images' documentation says, with the
environment of the compose file. Our own image is built (dockerfile.py)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import go_tools
from container import User
from dockerfile import Built
from postgres import find_server

from anabranch.spark.home import spark_home
from anabranch.spark.jars import Jars, cache_folder, ensure_jars, jvm_folder
from anabranch.spark.java import require_java

KAFKA = "4.2.0"

# KafkaDockerWrapper is what the image itself turns its environment into properties with, and formats the storage.
_KAFKA_RUN = """\
[ $# -eq 0 ] || exec "$@"
set -e
export CLUSTER_ID="${CLUSTER_ID:-AnabranchTestCluster11}"
CP='/opt/kafka/libs/*'
java -cp "$CP" kafka.docker.KafkaDockerWrapper setup -D /etc/kafka/docker -M /mnt/shared/config -F /opt/kafka/config
exec java -Xmx1G -Dlog4j2.configurationFile=file:/etc/kafka/log4j2.xml -cp "$CP" kafka.Kafka \
  /opt/kafka/config/server.properties
"""
_KAFKA_TOOL = "#!/bin/sh\nexec java -cp '/opt/kafka/libs/*:/opt/kafka/tools/*' %s \"$@\"\n"

# The properties that its documentation gives for the variables that the compose file uses; another one ends the start.
_S3_RUN = """\
set -eu
: >/tmp/s3proxy.properties
while read -r variable property; do
  eval "echo \\"$property=\\$$variable\\"" >>/tmp/s3proxy.properties
done <<END
S3PROXY_ENDPOINT s3proxy.endpoint
S3PROXY_AUTHORIZATION s3proxy.authorization
S3PROXY_IDENTITY s3proxy.identity
S3PROXY_CREDENTIAL s3proxy.credential
JCLOUDS_PROVIDER jclouds.provider
JCLOUDS_FILESYSTEM_BASEDIR jclouds.filesystem.basedir
END
exec java -DLOG_LEVEL="$LOG_LEVEL" -cp '/opt/s3proxy/*' org.gaul.s3proxy.Main --properties /tmp/s3proxy.properties
"""

_POSTGRES_RUN = """\
set -eu
export PGDATA=/var/lib/postgresql/data PGHOST=/tmp
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  printf %s "$POSTGRES_PASSWORD" >/tmp/password
  initdb --username "$POSTGRES_USER" --pwfile /tmp/password --auth-local trust --auth-host scram-sha-256
  echo 'host all all all scram-sha-256' >>"$PGDATA/pg_hba.conf"
  pg_ctl --wait --options "-c listen_addresses='' -k /tmp" start
  createdb --username "$POSTGRES_USER" "$POSTGRES_DB"
  for script in /docker-entrypoint-initdb.d/*.sql; do
    psql --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" --file "$script"
  done
  pg_ctl --wait --mode fast stop
fi
exec "$@" -k /tmp -c listen_addresses='*'
"""


@dataclass(frozen=True)
class Image:
    """What an image brings: whom it runs as, what it runs, what lies in it."""

    user: User
    entrypoint: list[str]
    command: list[str] = field(default_factory=list)
    cwd: str = "/"
    environment: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, Path] = field(default_factory=dict)
    readable: Mapping[str, Path] = field(default_factory=dict)
    programs: Mapping[str, Path] = field(default_factory=dict)
    stop_signal: str = "SIGTERM"


def image(name: str, scratch: Path, built: Built) -> Image:
    """What runs for an image of the compose file. Raises KeyError for one that is not known here."""
    repository, _, version = name.partition(":")
    scratch.mkdir(exist_ok=True)
    if repository == "anabranch":
        return Image(built.user, built.entrypoint, built.command, built.cwd, built.environment, built.folders)
    jars = ensure_jars()
    known = {"apache/kafka": _kafka, "andrewgaul/s3proxy": _s3, "postgres": _postgres, "prom/prometheus": _prometheus}
    return known[repository](version, scratch, jars)


def _kafka(version: str, scratch: Path, jars: Jars) -> Image:
    assert version == KAFKA and any(jar.name == f"kafka-server-{version}.jar" for jar in jars.broker)
    for folder in ("bin", "config", "defaults", "tools", "mounted", "data"):
        (scratch / folder).mkdir()
    for file in ("server.properties", "log4j2.yaml", "tools-log4j2.yaml"):
        (scratch / "defaults" / file).write_text("\n")
    shutil.copy(_kafka_tools(), scratch / "tools")
    for name, command in {"broker-api-versions": "BrokerApiVersionsCommand", "topics": "TopicCommand"}.items():
        tool = scratch / "bin" / f"kafka-{name}.sh"
        tool.write_text(_KAFKA_TOOL % f"org.apache.kafka.tools.{command}")
        tool.chmod(0o755)
    folders = {"/opt/kafka/config": scratch / "config", "/var/lib/kafka/data": scratch / "data"}
    readable = {
        "/opt/kafka/bin": scratch / "bin", "/opt/kafka/tools": scratch / "tools",
        "/opt/kafka/libs": jars.broker[0].parent, "/etc/kafka/docker": scratch / "defaults",
        "/mnt/shared/config": scratch / "mounted", "/etc/kafka/log4j2.xml": jvm_folder() / "log4j2-kafka.xml",
    }  # fmt: skip
    return Image(
        User("appuser", 1000, "/home/appuser"), ["bash", "-c", _KAFKA_RUN, "run"], folders=folders, readable=readable
    )


def _s3(version: str, scratch: Path, jars: Jars) -> Image:
    assert any(jar.name == f"s3proxy-{version}.jar" for jar in jars.s3)
    entry = ["tini", "--", "bash", "-c", _S3_RUN]
    return Image(User("root", 0, "/root"), entry, readable={"/opt/s3proxy": jars.s3[0].parent})


def _postgres(version: str, scratch: Path, jars: Jars) -> Image:
    entry = ["bash", "-c", _POSTGRES_RUN, "entrypoint"]
    # PostgreSQL finds its files from where its programs lie.
    path = {"PATH": f"{find_server()}:$PATH"}
    return Image(
        User("postgres", 999, "/var/lib/postgresql"), entry, ["postgres"], environment=path, stop_signal="SIGINT"
    )


def _prometheus(version: str, scratch: Path, jars: Jars) -> Image:
    major, minor, patch = version.removeprefix("v").split(".")
    assert go_tools.PROMETHEUS.version == f"v0.{major}{int(minor):02}.{patch}"
    programs = {tool.name: go_tools.ensure(tool) for tool in (go_tools.PROMETHEUS, go_tools.PROMTOOL)}
    return Image(User("nobody", 65534, "/"), ["prometheus"], cwd="/prometheus", programs=programs)


def _kafka_tools() -> Path:
    """The jar of Kafka's command line tools, which a broker does not need, resolved once into the cache."""
    folder = cache_folder() / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    ivy = sorted((spark_home() / "jars").glob("ivy-*.jar"))[-1]
    command = [str(require_java().executable), "-jar", str(ivy), "-cache", str(cache_folder() / "ivy"), "-notransitive"]
    command += ["-dependency", "org.apache.kafka", "kafka-tools", KAFKA]
    command += ["-types", "jar", "-retrieve", f"{folder}/[artifact]-[revision].[ext]"]
    jar = folder / f"kafka-tools-{KAFKA}.jar"
    if not jar.exists():
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert jar.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    return jar
