"""Each identity of `kafka.security`, from one block of configuration for Spark and kafka-python, at
one broker that takes them all: exact over the ends of tokens, tickets and keys; mistakes are named.
"""

import copy
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import call, paused_at, run, started
from identities import NAMES, SECONDS, Identities, running_identities
from kafka.admin import ACLOperation, ResourceType
from kafka_tools import write_scripts
from kerberos import REALM, Realm, gssapi_folder, running_kdc
from kerberos import USER as USER_OF_REALM
from pyspark.sql import SparkSession
from secure_broker import ACCESS_KEY, USER, SecureBroker
from waiting import wait_for
from world import World, closed_at_the_end, past_hour, spread

from anabranch.common.errors import ConfigurationError, MissingRight, Transient
from anabranch.common.fail_points import Step
from anabranch.config import Kafka
from anabranch.kafka.batches import PRESENT, Missing
from anabranch.kafka.client import create_topic
from anabranch.kafka.security import kafka_python_settings, token_digest
from anabranch.kafka.source import read_ranges, read_topics
from anabranch.spark.session import explain_spark
from anabranch.spark.settings import kafka_properties

CLIENT = "sasl.oauthbearer.client.credentials.client"
EXPIRING = ("oauth", "oauth-file", "msk", "kerberos")
PATIENT = 400.0  # seconds to wait for a job
DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DENIED = "check the user's rights with kafka-acls"
REFUSED = "check kafka.security: "


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Identities]:
    """All identities, for this process and for commands."""
    with (
        running_identities(tmp_path_factory.mktemp("identities")) as running,
        pytest.MonkeyPatch.context() as patched,
    ):
        for name, value in running.environment.items():
            patched.setenv(name, value)
        patched.syspath_prepend(str(gssapi_folder()))
        yield running


@pytest.fixture
def broker(identities: Identities) -> SecureBroker:
    return identities.broker


Make = Callable[[], World]


@pytest.fixture
def plain_world(
    tmp_path: Path, environment: dict[str, Any], broker: SecureBroker
) -> Iterator[Make]:
    """Makes streams without a session, whose topic and records come from another user."""
    with closed_at_the_end() as made:

        def make() -> World:
            settings = copy.deepcopy(environment) | {"kafka": {"bootstrap_servers": broker.plain}}
            one = World(tmp_path / f"conf{len(made)}", settings, None)  # type: ignore[arg-type]
            made.append(one)
            one.topic()
            one.send(spread(past_hour(1), 20, "e"))
            return one

        yield make


@pytest.mark.parametrize("how", NAMES)
@pytest.mark.timeout(1500)
def test_an_identity_outlives_tokens(plain_world: Make, identities: Identities, how: str) -> None:
    one, hour = plain_world(), past_hour(1)
    identities.broker.allow(one.name, f"anabranch-{one.name}")
    identities.broker.grant(ResourceType.TOPIC, one.name, ACLOperation.WRITE)
    one.set_environment(kafka=identities.broker.security(how))
    one.apply()

    # In the middle of a micro-batch and of an hour, every token, ticket and key expires.
    with (
        paused_at(one, Step.SPEED_DECIDED, "speed", one.name, seconds=PATIENT) as speed,
        paused_at(one, Step.BATCH_DECODED, "batch", one.name, seconds=PATIENT) as batch,
    ):
        if how == "msk":
            identities.keys.renew()
        time.sleep(SECONDS + 2 if how in EXPIRING else 0)
        speed.resume()
        batch.resume()
        # Over the ends of tokens of connections in use.
        ends = time.monotonic() + (SECONDS + 5 if how in EXPIRING else 0)
        while True:
            speed.until(lambda: one.published == len(one.sent), "a publish", PATIENT)
            if time.monotonic() > ends:
                break
            time.sleep(2)
            one.send_now(20, f"at-{len(one.sent)}")
        # Java reads a token's file once for each attempt.
        assert how == "oauth-file" or "kafka.security" not in speed.log, speed.log
        assert batch.wait(PATIENT) == 0, batch.log
        one.send_now(20, "killed")
        speed.kill()
    run(one, "speed", one.name, "--available-now")
    assert one.contents() == one.acknowledged()
    assert one.state.served_by(hour) == "batch"
    call(one, "audit", one.name)
    assert one.contents() == one.acknowledged()
    # The fetch of batches, which answers for offsets that a read lacks.
    fetched = one.kafka.explain_missing(one.name, {0: Missing(0, np.ones(1, np.bool_))})
    assert fetched[0].counts == {PRESENT: 1}
    if how == "oauth":
        clients = {agent.partition("/")[0] for agent in identities.tokens.issued}
        assert {"python-requests", "Java"} <= clients, clients


def use_in_session(
    spark: SparkSession, one: World, identities: Identities, how: str, **changes: str
) -> None:
    """Use an identity, also in the tests' session, which was opened without it."""
    one.spark = spark
    one.set_environment(kafka=identities.broker.security(how, **changes))
    jvm: Any = spark.sparkContext._jvm
    properties = kafka_properties(one.job.environment)
    # In place of an environment variable, which a JVM that runs cannot get.
    properties |= {"aws.sharedCredentialsFile": str(identities.keys.shared)}
    for key, value in properties.items():
        jvm.java.lang.System.setProperty(key, value)


def refuse(one: World, broker: SecureBroker, section: dict[str, Any], *texts: str) -> None:
    """Assert that commands end with exit code 2 and these texts; `apply` asks Kafka only before
    there are tables. The stream has tables then, and the identity."""
    one.set_environment(kafka=section)
    assert_texts(call(one, "apply", one.name, expect=2), texts)
    one.set_environment(kafka={"bootstrap_servers": broker.plain})
    one.apply()
    one.set_environment(kafka=section)
    assert_texts(call(one, "status", one.name, expect=2), texts)


def assert_texts(output: str, texts: tuple[str, ...]) -> None:
    assert all(text in output for text in texts), output


@pytest.mark.parametrize(
    ("how", "wrong", "message"),
    [
        ("scram", {"sasl.password": "wrong"}, "SaslAuthenticationFailed"),
        ("plain", {"sasl.password": "wrong"}, "SaslAuthenticationFailed"),
        ("scram", {"ssl.truststore.location": "OTHER"}, "CERTIFICATE_VERIFY_FAILED"),
        ("mutual", {"ssl.truststore.location": "OTHER"}, "CERTIFICATE_VERIFY_FAILED"),
        ("oauth", {f"{CLIENT}.secret": "wrong"}, "invalid_client"),
        ("msk", {"aws.profile": "none"}, "(none) could not be found"),
        (
            "kerberos",
            {"sasl.kerberos.principal": "other"},
            "get a Kerberos ticket for kafka@localhost",
        ),
    ],
)
def test_a_wrong_identity_or_an_unknown_authority_is_named_and_terminal(
    plain_world: Make, broker: SecureBroker, how: str, wrong: dict[str, str], message: str
) -> None:
    changes = {k: str(broker.other_ca) if v == "OTHER" else v for k, v in wrong.items()}
    one = plain_world()
    refuse(one, broker, broker.security(how, **changes), message, REFUSED)
    for layer in ("speed", "batch"):
        with pytest.raises(ConfigurationError) as raised:
            getattr(one, layer)()
        assert_texts(str(raised.value), (message, REFUSED))


def test_a_missing_right_is_named_and_terminal(plain_world: Make, broker: SecureBroker) -> None:
    one, texts = plain_world(), ("TopicAuthorization", DENIED)
    refuse(one, broker, broker.security("scram"), *texts)
    with started(one, "speed", one.name) as speed, started(one, "batch", one.name) as batch:
        for job in (speed, batch):
            assert job.wait() == 2, job.log
            assert_texts(job.log, texts)


@pytest.mark.parametrize(
    ("how", "wrong", "found"),
    [
        ("scram", {"sasl.password": "wrong"}, "SaslAuthentication"),
        ("oauth", {f"{CLIENT}.secret": "wrong"}, "401"),
        ("msk", {"aws.profile": "none"}, "none"),
        ("msk", {"sasl.mechanism": "AWS_MSK_IAM", "jar": "none"}, "anabranch jars"),
        ("kerberos", {"sasl.kerberos.principal": "other"}, "LoginException"),
    ],
)
def test_java_alone_names_a_wrong_identity_too(
    plain_world: Make,
    identities: Identities,
    spark: SparkSession,
    how: str,
    wrong: dict[str, str],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Executors may differ from the driver, whose Python asks Kafka first."""
    one = plain_world()
    if wrong.pop("jar", None):
        monkeypatch.setattr("anabranch.config.kafka_security.MSK_PACKAGE", "software.amazon.none")
    use_in_session(spark, one, identities, how, **wrong)
    kafka = one.job.environment.kafka
    with pytest.raises(Exception, match=r".") as raised:
        read_ranges(spark, kafka, one.name, {0: (0, 1)}).collect()
    explained = explain_spark(spark, "read", raised.value)
    assert isinstance(explained, ConfigurationError), repr(raised.value)
    said = str(explained)
    assert found in said and re.search(r"kafka\.security|anabranch jars", said), said


def test_a_job_of_many_streams_reads_on_with_the_renewed_token_of_a_file(
    plain_world: Make, identities: Identities, spark: SparkSession
) -> None:
    """Its reads are of one group, whose consumers Spark keeps."""
    one = plain_world()
    identities.broker.allow(one.name, "reader")
    use_in_session(spark, one, identities, "oauth-file")
    kafka = one.job.environment.kafka
    ranges, former = {one.name: {0: (0, 1)}}, token_digest(kafka)

    def is_renewed() -> bool:
        identities.tokens.write_file()
        return token_digest(kafka) != former

    assert read_topics(spark, kafka, ranges, "reader").count() == 1
    wait_for(is_renewed, "another token", 10)
    assert read_topics(spark, kafka, ranges, "reader").count() == 1


def test_tickets_of_a_keytab_are_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(gssapi_folder()))

    def tickets(realm: Realm, **changes: str) -> Any:
        keys = {
            "sasl.mechanism": "GSSAPI",
            "sasl.kerberos.principal": f"{USER_OF_REALM}@{REALM}",
            "sasl.kerberos.keytab": str(realm.keytab),
            "java.security.krb5.conf": str(realm.conf),
        }
        kafka = Kafka.model_validate({"bootstrap_servers": "b:1", "security": keys | changes})
        return kafka_python_settings(kafka)["sasl_oauth_token_provider"]

    with running_kdc(tmp_path / "kdc", 5) as realm:
        for pause in (6, 0):
            assert tickets(realm).context("kafka@localhost")[1]
            time.sleep(pause)
        for service, changes in (
            ("none@localhost", {}),
            ("kafka@localhost", {"sasl.kerberos.principal": "other"}),
        ):
            with pytest.raises(ConfigurationError, match=r"check kafka\.security: sasl\.kerberos"):
                tickets(realm, **changes).context(service)
    # The last ticket may expire between two steps.
    with pytest.raises(Transient, match=r"Cannot contact any KDC|Ticket expired"):
        tickets(realm, **{"sasl.kerberos.principal": USER_OF_REALM}).context("kafka@localhost")


def by_acls(one: World, identities: Identities, folder: Path, role: str, topic: str) -> None:
    """Grant a user a role's rights by deploy/kafka/acls.sh."""
    write_scripts(folder)
    command = [str(DEPLOY / "kafka/acls.sh"), identities.broker.plain, f"User:{USER}", role]
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run([*command, one.name, topic], env=os.environ | path, check=True, timeout=300)


def by_policy(one: World, identities: Identities, folder: Path, role: str, topic: str) -> None:
    """Grant an access key what a policy of deploy/msk allows, as the ACLs that Amazon names for each
    action (https://docs.aws.amazon.com/msk/latest/developerguide/kafka-actions.html)."""
    text = (DEPLOY / f"msk/{role}.json").read_text()
    for name, value in (("TARGET", topic), ("STREAM", one.name), ("TOPIC", topic)):
        text = text.replace(name, value)
    for statement in json.loads(text)["Statement"]:
        kind, _, resource = statement["Resource"].rpartition(":")[2].partition("/CLUSTER/*")
        actions = statement["Action"]
        for action in [actions] if isinstance(actions, str) else actions:
            if (acl := _ACLS[action.removeprefix("kafka-cluster:")]) is not None:
                name = resource.removeprefix("/") or "kafka-cluster"
                assert acl[0].name == kind.upper().replace("-", "_")
                identities.broker.grant(acl[0], name, acl[1], users=(ACCESS_KEY,))


_ACLS = {
    "Connect": None,
    "DescribeTopic": (ResourceType.TOPIC, ACLOperation.DESCRIBE),
    "DescribeTopicDynamicConfiguration": (ResourceType.TOPIC, ACLOperation.DESCRIBE_CONFIGS),
    "ReadData": (ResourceType.TOPIC, ACLOperation.READ),
    "WriteData": (ResourceType.TOPIC, ACLOperation.WRITE),
    "AlterGroup": (ResourceType.GROUP, ACLOperation.READ),
    "DescribeGroup": (ResourceType.GROUP, ACLOperation.DESCRIBE),
    "WriteDataIdempotently": (ResourceType.CLUSTER, ACLOperation.IDEMPOTENT_WRITE),
    "DescribeTransactionalId": (ResourceType.TRANSACTIONAL_ID, ACLOperation.DESCRIBE),
    "AlterTransactionalId": (ResourceType.TRANSACTIONAL_ID, ACLOperation.WRITE),
}


@pytest.mark.parametrize(("grant", "how"), [(by_acls, "scram"), (by_policy, "msk")])
def test_the_rights_of_deploy_are_enough_and_no_more(
    plain_world: Make,
    identities: Identities,
    spark: SparkSession,
    tmp_path: Path,
    grant: Callable[..., None],
    how: str,
) -> None:
    one, target = plain_world(), "accepted"
    topic = f"{one.name}-{target}"
    create_topic(one.job.environment.kafka, topic, 1)
    use_in_session(spark, one, identities, how)
    with pytest.raises(MissingRight):
        one.apply()
    grant(one, identities, tmp_path, "jobs", one.name)
    one.reconfigure(egress=[{"name": target, "topic": topic}])
    one.serve()
    one.kafka.check_commits(f"anabranch-{one.name}")
    one.batch()
    call(one, "audit", one.name)
    assert one.contents() == one.acknowledged()
    with pytest.raises(Exception, match="AuthorizationFailed"):
        one.send_now(1, "denied")
    denied = call(one, "egress", one.name, expect=2)
    assert (DENIED if how == "scram" else "deploy/msk/egress.json") in denied
    grant(one, identities, tmp_path, "egress", topic)
    call(one, "egress", one.name)
