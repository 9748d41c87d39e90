"""A stream of a thousand records on services of its own, for what a job costs before its first
record."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from world import World, past_hour, spread

from anabranch.dev.services import running

HOUR = past_hour(1)


@contextmanager
def thousand_records() -> Iterator[tuple[World, Path]]:
    """The stream, applied and not read yet, and a folder that is gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-thousand-") as name,
        running(Path(name) / "services") as servers,
    ):
        os.environ |= {
            "AWS_ACCESS_KEY_ID": servers.access_key,
            "AWS_SECRET_ACCESS_KEY": servers.secret_key,
        }
        keys = {"access_key": "${AWS_ACCESS_KEY_ID}", "secret_key": "${AWS_SECRET_ACCESS_KEY}"}
        settings = {
            "kafka": {"bootstrap_servers": servers.bootstrap_servers},
            "catalog": {
                "name": "lake",
                "uri": f"sqlite:///{name}/catalog.db",
                "warehouse": "s3://thousand/warehouse",
            },
            "s3": {"endpoint": servers.s3_endpoint, **keys},
        }
        one = World(Path(name) / "conf", settings, None)  # type: ignore[arg-type]
        one.topic()
        one.send(spread(HOUR, 1000, "e"))
        one.apply()
        yield one, Path(name)


def run_java(one: World, options: str) -> None:
    """Have the jobs of the stream run on this machine, with these options of Java's."""
    one.set_environment(
        spark={
            "master": "local[2]",
            "conf": {"spark.driver.memory": "1g", "spark.driver.extraJavaOptions": options},
        }
    )
