"""Kafka over TLS with a password or a certificate, from one block of configuration for Spark and
kafka-python."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from commands import started
from pyspark.sql import SparkSession
from secure_broker import SecureBroker, running_secure_broker
from world import World, closed_at_the_end, past_hour, spread

from anabranch.cli import main

DENIED = "check the user's rights with kafka-acls"
REFUSED = "check kafka.security: user, password and certificates"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureBroker]:
    with running_secure_broker(tmp_path_factory.mktemp("broker")) as server:
        yield server


Make = Callable[[], World]


@pytest.fixture
def plain_world(
    tmp_path: Path, environment: dict[str, Any], spark: SparkSession, broker: SecureBroker
) -> Iterator[Make]:
    """Makes streams whose topic and records come from a user with all rights."""
    with closed_at_the_end() as made:

        def make() -> World:
            settings = copy.deepcopy(environment) | {"kafka": {"bootstrap_servers": broker.plain}}
            one = World(tmp_path / f"conf{len(made)}", settings, spark)
            made.append(one)
            one.topic()
            one.send(spread(past_hour(1), 20, "e"))
            return one

        yield make


@pytest.mark.parametrize("how", ["scram", "plain", "mutual"])
def test_both_jobs_read_a_broker_that_wants_tls_and_a_name(
    plain_world: Make, broker: SecureBroker, how: str
) -> None:
    one = plain_world()
    broker.allow(one.name, f"anabranch-{one.name}")
    one.set_environment(kafka=broker.security(how))
    one.apply()
    one.speed()
    assert one.contents() == one.acknowledged()
    [result] = [r for r in one.batch() if r.account.offsets]
    assert (result.decision, result.account.good) == ("accepted", 20)
    assert one.contents() == one.acknowledged()


def assert_refused_everywhere(
    one: World, broker: SecureBroker, section: dict[str, Any], *texts: str
) -> None:
    """Every command and both jobs end with exit code 2 and say so; `apply` asks Kafka only before
    there are tables."""
    one.set_environment(kafka=section)
    assert_refused(one, ["apply"], texts)
    one.set_environment(kafka={"bootstrap_servers": broker.plain})
    one.apply()
    one.set_environment(kafka=section)
    assert_refused(one, ["status"], texts)
    assert_refused(one, ["batch", "--seal-only"], texts)
    for layer in ("speed", "batch"):
        with started(one, layer, one.name) as job:
            assert job.wait(120) == 2, job.log
        assert all(text in job.log for text in texts), job.log


def assert_refused(one: World, command: list[str], texts: tuple[str, ...]) -> None:
    result = CliRunner().invoke(main, [*command, one.name, "--conf", str(one.folder)])
    assert result.exit_code == 2, result.output
    assert all(text in result.output for text in texts), result.output


@pytest.mark.parametrize(
    ("how", "wrong", "message"),
    [
        ("scram", {"sasl.password": "wrong"}, "SaslAuthenticationFailed"),
        ("plain", {"sasl.password": "wrong"}, "SaslAuthenticationFailed"),
        ("scram", {"ssl.truststore.location": "OTHER"}, "CERTIFICATE_VERIFY_FAILED"),
        ("mutual", {"ssl.truststore.location": "OTHER"}, "CERTIFICATE_VERIFY_FAILED"),
    ],
)
def test_a_wrong_password_or_an_unknown_authority_is_named_and_terminal(
    plain_world: Make, broker: SecureBroker, how: str, wrong: dict[str, str], message: str
) -> None:
    changes = {
        key: str(broker.other_ca) if value == "OTHER" else value for key, value in wrong.items()
    }
    assert_refused_everywhere(
        plain_world(), broker, broker.security(how, **changes), message, REFUSED
    )


def test_a_missing_right_is_named_and_terminal(plain_world: Make, broker: SecureBroker) -> None:
    assert_refused_everywhere(
        plain_world(), broker, broker.security("scram"), "TopicAuthorization", DENIED
    )
