"""Executors write to S3 by TLS of a private authority, with temporary keys of a shared file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from authority import Authority, new_authority
from cluster import SparkCluster, running_cluster
from commands import Command, started
from flaky_s3 import FlakyS3, running_flaky_s3
from s3_proxy import running_s3_proxy
from shared_keys import shared_keys
from world import World, past_hour, spread

from anabranch.dev.services import ACCESS_KEY, SECRET_KEY
from anabranch.dev.services.processes import HOST

PATIENT = 400.0  # seconds to wait for a job on a cluster
WRITERS = {"spark": "s3fileio", "workers": "aws-sdk-cpp"}


class Keys:
    """Temporary keys of the driver and of executors, each in a shared file; their server."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, front: FlakyS3) -> None:
        self._front, self._number = front, 1
        self._renew: dict[str, Callable[[str], None]] = {}
        # The last one is the driver's: this process's environment names its file.
        for who in ("executors", "driver"):
            (folder / who).mkdir()
            self._renew[who] = shared_keys(folder / who, monkeypatch, ACCESS_KEY, SECRET_KEY)
            self._renew[who](f"{who}-1")

    def renew(self) -> None:
        """Renew all of them in good time, then revoke the old ones."""
        old, self._number = self._number, self._number + 1
        for who, renew in self._renew.items():
            renew(f"{who}-{self._number}")
        self._front.expired |= {f"{who}-{old}" for who in self._renew}

    def revoke(self, job: Command) -> None:
        """Revoke those of executors, and renew them once the server has refused an executor."""
        old = f"executors-{self._number}"
        self._front.expired.add(old)
        asked = self.requests(old)
        job.until(lambda: self.requests(old) > asked, "an executor to be refused", PATIENT)
        self.renew()

    def requests(self, token: str) -> int:
        return sum(number for (one, _), number in list(self._front.tokens.items()) if one == token)

    def clients(self) -> set[tuple[str, str]]:
        """Which clients have used the present keys: the driver's and the executors'."""
        present = {f"{who}-{self._number}": who for who in self._renew}
        used = list(self._front.tokens)
        return {(present[token], client) for token, client in used if token in present}


def stream(
    folder: Path, environment: dict[str, Any], front: FlakyS3, authority: Authority, executors: Path
) -> World:
    """A stream without keys of S3 in its configuration: each machine has its own."""
    trust, given = authority.trust(folder / "trust.jks"), environment["spark"]["conf"]
    conf = given | {
        "spark.driver.extraJavaOptions": f"{given['spark.driver.extraJavaOptions']} {trust}",
        "spark.executor.extraJavaOptions": trust,
        "spark.executorEnv.AWS_SHARED_CREDENTIALS_FILE": str(executors),
    }
    catalog = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": "s3://lake/warehouse"}
    settings = environment | {
        "catalog": environment["catalog"] | catalog,
        "s3": {"endpoint": f"https://{HOST}:{front.port}", "ca": str(authority.file)},
        "spark": {"master": "local[2]", "conf": conf},
    }
    one = World(folder / "conf", settings, None, speed={"trigger": "1 second", "roll_up": False})  # type: ignore[arg-type]
    one.create()
    return one


def run_speed(one: World, cluster: SparkCluster, keys: Keys) -> None:
    with started(one, "speed", one.name, "--master", cluster.master) as speed:

        def publish(prefix: str) -> None:
            one.send_now(2_000, prefix)
            speed.until(lambda: one.published == len(one.sent), f"records {prefix}", PATIENT)

        publish("first")
        keys.renew()
        publish("renewed")
        assert keys.clients() >= {("driver", "Boto3"), ("executors", "aws-sdk-cpp")}
        one.send_now(2_000, "refused")
        keys.revoke(speed)
        publish("after")
        assert speed.terminate() == 0, speed.log[-4000:]
    assert "executors: Python workers decode records" in speed.log
    assert one.contents() == one.acknowledged()


def run_batch(one: World, cluster: SparkCluster, keys: Keys, hours: list[str], writer: str) -> None:
    # Spark writes the rows of a stream with a sort order.
    one.configure(files={"sort": ["event_id"]} if writer == "spark" else {})
    one.apply()
    of_hours = ("--hour", "..".join(hours), "--master", cluster.master)
    with started(one, "batch", one.name, *of_hours) as batch:
        batch.until(lambda: hours[0] in one.state.accepted, "the first hour", PATIENT)
        keys.revoke(batch)
        assert batch.wait() == 0, batch.log[-4000:]
    assert ("executors", WRITERS[writer]) in keys.clients()
    assert {one.state.served_by(hour) for hour in hours} == {"batch"}
    assert one.contents() == one.acknowledged()


@pytest.mark.timeout(1500)
def test_both_jobs_are_exact_while_the_keys_of_executors_are_renewed_and_revoked(
    environment: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, hours = new_authority(tmp_path), [past_hour(ago) for ago in (5, 4, 3, 2)]
    with (
        running_s3_proxy(tmp_path) as port,
        running_flaky_s3(port, 1, authority.server_context()) as front,
        running_cluster() as cluster,
    ):
        keys = Keys(tmp_path, monkeypatch, front)
        executors = tmp_path / "executors" / "credentials"
        one = stream(tmp_path, environment, front, authority, executors)
        for i, hour in enumerate(hours):
            # The workers' hours are too large for the batch job's own process.
            one.send(spread(hour, 1_000 if i < 2 else 50_002, hour))
        run_speed(one, cluster, keys)
        run_batch(one, cluster, keys, hours[:2], "spark")
        run_batch(one, cluster, keys, hours[2:], "workers")
        one.kafka.close()
