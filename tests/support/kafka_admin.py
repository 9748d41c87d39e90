"""Actions of Kafka's operator, by kafka-python's admin client."""

from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any

from kafka import KafkaAdminClient
from kafka.admin import (
    ACL,
    ACLOperation,
    ACLPermissionType,
    ConfigResource,
    ConfigResourceType,
    ResourcePattern,
    ResourceType,
)

Servers = str | Sequence[str]


def admin_of(servers: Servers) -> closing[Any]:
    """Return the client, for a `with`."""
    return closing(KafkaAdminClient(bootstrap_servers=servers))


def set_topic(servers: Servers, topic: str, **settings: str) -> None:
    with admin_of(servers) as admin:
        admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, configs=settings)])


def compact_soon(servers: Servers, *nodes: int) -> None:
    """Make brokers check for logs to compact every 0.5 s instead of every 15 s."""
    soon = {"log.cleaner.backoff.ms": "500"}
    with admin_of(servers) as admin:
        for node in nodes:
            broker = ConfigResource(ConfigResourceType.BROKER, str(node), configs=soon)
            admin.alter_configs([broker])


def grant(
    servers: Servers, users: Iterable[str], kind: ResourceType, name: str, *operations: ACLOperation
) -> None:
    """Grant users these operations."""
    of, allow = ResourcePattern(kind, name), ACLPermissionType.ALLOW
    acls = [ACL(f"User:{user}", "*", o, allow, of) for user in users for o in operations]
    with admin_of(servers) as admin:
        admin.create_acls(acls)


def grant_reading(servers: Servers, users: Iterable[str], topic: str, group: str) -> None:
    """Grant what docs/how-to/deploy/services.md says that a stream needs."""
    users, read = [*users], ACLOperation.READ
    of_topic = (read, ACLOperation.DESCRIBE, ACLOperation.DESCRIBE_CONFIGS)
    grant(servers, users, ResourceType.TOPIC, topic, *of_topic)
    grant(servers, users, ResourceType.GROUP, group, read)
