"""Secrets are in no log, no command line, no page of Spark's, and no file of the lake."""

import json
import os
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest
from commands import Command, started
from expectations import entry
from postgres import DATABASE, USER, Postgres, running_postgres
from postgres import PASSWORD as CATALOG_PASSWORD
from secure_broker import PASSWORD as KAFKA_PASSWORD
from secure_broker import running_secure_broker
from world import World, past_hour, spread

from anabranch.dev.services.processes import HOST, free_port

REGISTRY_PASSWORD = "of-the-registry"
CONFIGURED = "of-spark-itself"
_PAGES = (
    "/environment/", "/jobs/", "/stages/", "/executors/", "/SQL/", "/StreamingQuery/",
    "/api/v1/applications/{app}/environment", "/api/v1/applications/{app}/jobs",
    "/api/v1/applications/{app}/sql?details=true&planDescription=true&length=1000",
)  # fmt: skip


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture
def secrets() -> dict[str, bytes]:
    """Return every text that reveals a secret, by name."""
    quoted = KAFKA_PASSWORD.replace("\\", "\\\\").replace('"', '\\"')
    texts = {
        "kafka": KAFKA_PASSWORD,
        "kafka, quoted": quoted,
        "kafka, as JSON": json.dumps(KAFKA_PASSWORD)[1:-1],
        "kafka, in a page": KAFKA_PASSWORD.replace('"', "&quot;"),
        "catalog": CATALOG_PASSWORD,
        "s3": os.environ["AWS_SECRET_ACCESS_KEY"],
        "registry": REGISTRY_PASSWORD,
        "spark.conf": CONFIGURED,
    }
    return {name: value.encode() for name, value in texts.items()}


def assert_none(where: str, content: bytes, secrets: Mapping[str, bytes]) -> None:
    names = [name for name, secret in secrets.items() if secret in content]
    assert not names, f"{where}: expected no secret, found the one of {names}"


def pages(port: int) -> dict[str, bytes]:
    """The pages of a running application's Spark UI, with the plans of its newest queries."""
    address = f"http://{HOST}:{port}"

    def get(path: str) -> bytes:
        with urllib.request.urlopen(address + path, timeout=60) as answer:
            return bytes(answer.read())

    [application] = json.loads(get("/api/v1/applications"))
    texts = {page: get(page.format(app=application["id"])) for page in _PAGES}
    queries = json.loads(next(text for page, text in texts.items() if "/sql?" in page))
    paths = [f"/SQL/execution/?id={query['id']}" for query in queries[-5:]]
    return texts | {path: get(path) for path in paths}


def watched(command: Command, seen: set[str]) -> bool:
    """Remembers how every process of a running command is called; whether it has ended."""
    seen |= command.command_lines()
    return command.code is not None


@pytest.mark.timeout(900)
def test_no_secret_is_shown_logged_or_stored(
    environment: dict[str, Any], postgres: Postgres, tmp_path: Path, secrets: dict[str, bytes]
) -> None:
    events, ui, hour = tmp_path / "events", free_port(), past_hour(1)
    events.mkdir()
    settings = environment | {
        "catalog": environment["catalog"]
        | {
            "uri": f"postgresql+psycopg2://{USER}:{CATALOG_PASSWORD}@{HOST}:{postgres.port}/{DATABASE}"
        },
        "registry": {
            "url": f"http://{HOST}:{free_port(ui)}",
            "user": "anabranch",
            "password": REGISTRY_PASSWORD,
        },
    }
    settings["spark"] = settings["spark"] | {
        "conf": settings["spark"]["conf"] | {
            "spark.ui.enabled": True, "spark.ui.port": ui, "spark.eventLog.enabled": True,
            "spark.eventLog.dir": events.as_uri(), "spark.hadoop.fs.s3a.secret.key": CONFIGURED,
        }
    }  # fmt: skip
    with running_secure_broker(tmp_path / "broker") as broker:
        kafka = {"bootstrap_servers": broker.plain}
        one = World(tmp_path / "conf", settings | {"kafka": kafka}, None)  # type: ignore[arg-type]
        one.topic()
        one.send(spread(hour, 20, "e"))
        broker.allow(one.name, f"anabranch-{one.name}")
        one.set_environment(kafka=broker.security("scram"))
        # An expectation needs Spark, which a small hour does without.
        one.expect(entry("expect_column_values_to_be_between", column="level", min_value=0))
        one.apply()
        lines: set[str] = set()
        with started(one, "speed", one.name, ANABRANCH_LOG="json") as speed:
            speed.until(lambda: watched(speed, lines) or one.published == 20, "all of it")
            # The hazard: the pages show the session's settings, and the plans of its queries.
            shown = pages(ui)
            assert b"spark.sql.catalog.lake.jdbc.password" in shown["/environment/"]
            plans = [text for page, text in shown.items() if "execution" in page]
            assert any(b"kafka" in text.lower() for text in plans)
            assert speed.terminate() == 0
        with started(one, "batch", one.name) as batch:
            batch.until(lambda: watched(batch, lines) or one.state.is_accepted(hour), "the hour")
            assert batch.wait() == 0
        logs = {"speed": speed.log, "batch": batch.log}
        for question in (["status"], ["hours"], ["explain", hour], ["audit"]):
            with started(one, question[0], one.name, *question[1:]) as command:
                assert command.wait() == 0, command.log
                logs[question[0]] = command.log
        postgres.stop()
        with started(one, "status", one.name) as refused:
            assert refused.wait() == 75, refused.log
            logs["an unreachable catalog"] = refused.log
        one.kafka.close()
    assert any("speed_layer/job.py" in line for line in lines)
    assert any("pyspark-shell" in line for line in lines)
    for name, text in (shown | {name: text.encode() for name, text in logs.items()}).items():
        assert_none(name, text, secrets)
    assert_none("ps", "\n".join(lines).encode(), secrets)
    files = [file for file in events.rglob("*") if file.is_file()]
    assert len(files) >= 2, "two jobs wrote event logs"
    for file in files:
        assert_none(str(file), file.read_bytes(), secrets)
    s3 = boto3.client("s3", endpoint_url=environment["s3"]["endpoint"], region_name="us-east-1")
    pages_of = s3.get_paginator("list_objects_v2").paginate
    listed = pages_of(Bucket="tests", Prefix=f"warehouse/{one.name}")
    objects = [entry["Key"] for page in listed for entry in page.get("Contents", [])]
    assert any(key.endswith(".metadata.json") for key in objects)
    assert any(key.endswith(".parquet") for key in objects)
    for key in objects:
        assert_none(key, s3.get_object(Bucket="tests", Key=key)["Body"].read(), secrets)
