"""A broker that does not know a topic, or all its partitions, for a moment: asked again before it
is believed."""

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from kafka import KafkaAdminClient
from waiting import wait_for

from anabranch import config
from anabranch.kafka import client
from anabranch.kafka.client import KafkaAdapter, create_topic, new_producer
from anabranch.offsets.position import Position, Topic, is_contradicted
from anabranch.protocol.state import check_topic

T = TypeVar("T")


@pytest.fixture
def kafka(services: Any) -> config.Kafka:
    return config.Kafka(bootstrap_servers=services.kafka)


@contextmanager
def asked_meanwhile(question: Callable[[], T]) -> Iterator[list[T]]:
    """The answer to a question that is being asked while the body runs."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(question()))
    thread.start()
    yield answers
    thread.join(300)


def first_answer(adapter: KafkaAdapter, topic: str, wanted: Callable[[Topic | None], bool]) -> None:
    """Return once a broker has given the answer that must not be believed at once."""
    wait_for(lambda: wanted(adapter._describe(topic)), "the hazard to happen", 30, 0)


def test_a_topic_unknown_for_a_moment_is_requested_again(kafka: config.Kafka) -> None:
    name = f"t{uuid.uuid4().hex[:12]}"
    with KafkaAdapter(kafka) as one, KafkaAdapter(kafka) as other:
        with asked_meanwhile(lambda: one.describe(name)) as answers:
            first_answer(other, name, lambda topic: topic is None)
            assert not answers, "one answer was believed at once"
            create_topic(kafka, name, 1)
        assert answers[0] is not None and answers[0].partitions == (0,)


def test_partitions_that_brokers_do_not_know_yet_are_no_contradiction(kafka: config.Kafka) -> None:
    name = f"t{uuid.uuid4().hex[:12]}"
    create_topic(kafka, name, 1)
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap_servers)
    with KafkaAdapter(kafka) as one, KafkaAdapter(kafka) as other:
        before = one.describe(name)
        assert before is not None
        position = Position(before.id, {0: 5, 1: 7})
        with asked_meanwhile(lambda: one.describe(name, position)) as answers:
            first_answer(other, name, lambda topic: is_contradicted(topic, position))
            admin.create_partitions({name: 2})
        admin.close()
        assert answers[0] is not None
        assert check_topic(position, answers[0], name) == position


def test_a_log_that_ends_below_the_position_is_requested_again(
    kafka: config.Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazard: a leader that was replaced, and has not noticed, answers with an earlier end."""
    name = f"t{uuid.uuid4().hex[:12]}"
    create_topic(kafka, name, 1)
    with KafkaAdapter(kafka) as one:
        topic = one.describe(name)
        assert topic is not None
        assert one.stable_ends(topic) == {0: 0}
        with asked_meanwhile(lambda: one.stable_ends(topic, {0: 2})) as answers:
            producer = new_producer(kafka)
            for _ in range(2):
                producer.send(name, b"{}", partition=0)
            producer.flush()
            producer.close()
        assert answers == [{0: 2}]
        # An answer that brokers repeat is accepted: the records were lost.
        monkeypatch.setattr(client, "_CONFIRMED_AFTER_S", 1.0)
        assert one.stable_ends(topic, {0: 3}) == {0: 2}


@pytest.mark.usefixtures("single_broker")
def test_a_repeated_answer_of_brokers_is_accepted_within_seconds(kafka: config.Kafka) -> None:
    with KafkaAdapter(kafka) as one:
        assert one.describe(f"t{uuid.uuid4().hex[:12]}") is None
