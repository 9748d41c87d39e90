"""kafka-python: corrections of 3.0.12, applied when the adapter is imported (delete each when a
release contains it); conversion of its answers to plain values, and of its errors and log lines to
Anabranch's errors, which name a remedy."""

from __future__ import annotations

import base64
import logging
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from kafka import KafkaAdminClient, errors
from kafka.cluster import ClusterMetadata
from kafka.net.compat import KafkaNetClient
from kafka.net.selector import NetworkSelector
from kafka.net.transport import KafkaSSLTransport, KafkaTCPTransport
from kafka.record import default_records, util
from kafka.record.default_records import DefaultRecordBatch

from anabranch import config
from anabranch.common.errors import (
    AnabranchError,
    CodecMissing,
    MissingRight,
    NoTopicIds,
    Transient,
)
from anabranch.common.remote_errors import explain, is_denied, one_line
from anabranch.config.kafka_security import MskIam
from anabranch.offsets.position import Topic

T = TypeVar("T")

IO_THREAD = "kafka-io-"
"""The prefix of the name of a client's IO thread. For clients of `connect` the name ends with the
bootstrap servers."""


def apply() -> None:
    """Correct kafka-python in this process."""
    deliver_data_before_eof(KafkaTCPTransport)
    deliver_data_before_eof(KafkaSSLTransport)
    read_any_header_names()
    raise_failed_descriptions()
    create_no_topics()
    check_batches_in_c()


def connect(kind: Callable[..., T], **settings: Any) -> T:
    """Return a client of kafka-python, such as KafkaConsumer. Raises the errors of its constructor,
    and then leaks no thread and no file descriptor.

    kafka-python leaks the IO thread and the sockets of a client that found no broker, so a process
    that waits for its brokers runs out of file descriptors.
    """
    opened: list[Any] = []

    def build(**configs: Any) -> Any:
        net = NetworkSelector(**configs | {"client_id": ",".join(configs["bootstrap_servers"])})
        opened.append(KafkaNetClient(net=net, **configs))
        return opened[0]

    try:
        return kind(**settings, kafka_client=build)
    except BaseException:
        for client in opened:
            client.close()
        raise


def deliver_data_before_eof(transport: type[Any]) -> None:
    """Make a transport deliver received data before it reports the end of the connection.

    kafka-python drops data that arrives together with the end, such as a broker's reason for
    refusing a password.
    """
    receive = transport._sock_recv

    def receive_all(self: Any) -> Any:
        data, error = receive(self)
        return (data, None) if data else (data, error)

    transport._sock_recv = receive_all


# The bytes of a surrogate, perhaps cut off.
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]?")


def header_name(data: bytes) -> str:
    """Return a header's name as Java's client does: with U+FFFD for bytes that are not UTF-8."""
    # One for a surrogate, as Spark reads it. Python has one for each byte, and the layers, which
    # may read by either, would differ.
    return _SURROGATE.sub("\ufffd".encode(), data).decode("utf-8", "replace")


class _AnyName(bytearray):
    """A slice of a batch that decodes any bytes."""

    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return header_name(bytes(self))


class _AnyNames(bytearray):
    """A decompressed batch whose slices decode any bytes."""

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return _AnyName(found) if isinstance(at, slice) else found


def read_any_header_names() -> None:
    """Read records whose header names are not UTF-8.

    Brokers do not check header names, and several clients write any bytes. kafka-python decodes
    them strictly and reports such a batch as corrupt.
    """
    read_strictly = DefaultRecordBatch._read_msg

    def read(self: Any, *arguments: Any) -> Any:
        try:
            return read_strictly(self, *arguments)
        except UnicodeDecodeError:
            # The position in the batch advances only after a complete record: read this one again.
            self._buffer = _AnyNames(self._buffer)
            return read_strictly(self, *arguments)

    DefaultRecordBatch._read_msg = read


def create_no_topics() -> None:
    """Prevent consumers and producers from creating the topics that they request.

    kafka-python does not pass their setting `allow_auto_create_topics` to its metadata requests.
    """
    ClusterMetadata.DEFAULT_CONFIG["allow_auto_create_topics"] = False


def raise_failed_descriptions() -> None:
    """Raise the brokers' error if they did not describe a configuration.

    kafka-python drops it and returns an empty configuration, so a missing right looks like a topic
    without settings.
    """
    process = KafkaAdminClient._describe_configs_process_responses.__func__

    def process_good(cls: Any, responses: Any, *arguments: Any, **options: Any) -> Any:
        for result in (result for response in responses for result in response.results):
            if result.error_code:
                raise errors.for_code(result.error_code)(result.error_message)
        return process(cls, responses, *arguments, **options)

    KafkaAdminClient._describe_configs_process_responses = classmethod(process_good)


def check_batches_in_c() -> None:
    """Let kafka-python compute the checksums of batches by google-crc32c (2 GB/s). It looks only
    for the package crc32c, whose license is the LGPL, and else computes 2 MB/s in Python, as
    here without google-crc32c."""
    try:
        import google_crc32c
    except ImportError:
        return

    def compute(view: memoryview) -> int:
        return int(google_crc32c.value(bytes(view)))

    default_records.calc_crc32c = util.calc_crc32c = compute


LARGE_FETCH = 4 << 20
"""The most bytes of a partition to fetch at once."""

LONGEST_MS = 10**13
"""The longest time reported, three centuries: Kafka's longest do not fit a timedelta."""

# The topic id of brokers without topic ids.
_NO_TOPIC_ID = uuid.UUID(int=0)


def topic_of(entry: Mapping[str, Any]) -> Topic:
    """Return a topic from kafka-python's description. Raises NoTopicIds."""
    partitions = tuple(sorted(p["partition_index"] for p in entry["partitions"]))
    return Topic(entry["name"], topic_id(entry["name"], entry.get("topic_id")), partitions)


def topic_id(topic: str, raw: Any) -> str:
    """Return Kafka's text of a topic id, 22 characters of base64. Raises NoTopicIds."""
    value = uuid.UUID(str(raw)) if raw else _NO_TOPIC_ID
    if value == _NO_TOPIC_ID:
        raise NoTopicIds(
            f"topic {topic}: expected an id from the brokers (KIP-516), found none; without ids a "
            "recreated topic looks like the one before it, and its first records would be "
            "skipped: run Kafka 2.8 or newer, with an inter.broker.protocol.version of 2.8 or "
            "newer"
        )
    return base64.urlsafe_b64encode(value.bytes).decode().rstrip("=")


def bytes_of(record: Any) -> int:
    return int(record.serialized_key_size) + int(record.serialized_value_size)


def plan_fetch_bytes(now: int, sizes: Sequence[int], count: int) -> int:
    """Return the fetch size in bytes of each partition for `count` records of each, estimated from
    the `sizes` of some: at least `now`, otherwise at most LARGE_FETCH. Pure.

    A response has at least one batch of any size, and other partitions only as far as they fit
    (KIP-74): with a smaller fetch size, each record would take a request.
    """
    needed = 2 * count * sum(sizes) // len(sizes) if sizes else 0
    return max(now, min(needed, LARGE_FETCH))


def retention_of(milliseconds: int) -> timedelta | None:
    return timedelta(milliseconds=min(milliseconds, LONGEST_MS)) if milliseconds >= 0 else None


def config_value(configs: Mapping[str, Any], topic: str, key: str) -> Any:
    """Return a key of kafka-python's description of topics. Raises Transient without it."""
    found = configs.get("topic", {}).get(topic, {})
    if key not in found:
        raise Transient(
            f"describe the configuration of topic {topic}: expected {key}, found none; try again"
        )
    return found[key]["value"]


# The brokers' authorization errors, the resource's option of kafka-acls.sh, and the options that
# grant every operation used on the resource.
RIGHTS = (
    (
        errors.TopicAuthorizationFailedError,
        "--topic",
        "--operation Read --operation Describe --topic TOPIC",
    ),
    (errors.GroupAuthorizationFailedError, "--group", "--operation Read --group GROUP"),
    (
        errors.ClusterAuthorizationFailedError,
        "--cluster",
        "--operation Describe --operation IdempotentWrite --cluster",
    ),
    (
        errors.TransactionalIdAuthorizationFailedError,
        "--transactional-id",
        "--operation Write --operation Describe --transactional-id ID",
    ),
    (
        errors.DelegationTokenAuthorizationFailedError,
        "--delegation-token",
        "--operation Describe --delegation-token ID",
    ),
)
# The causes and remedies of partitions that cannot be read now.
_WAITS = {
    errors.OffsetNotAvailableError: (
        "its leader was elected just now and cannot confirm where its log ends: too few of its "
        "replicas are in sync (min.insync.replicas); start the brokers that are missing"
    ),
    errors.LeaderNotAvailableError: (
        "it has no leader: no replica that has all records is there; start the brokers that have "
        "it, and do not allow an unclean election, which loses records"
    ),
}
# The packages that kafka-python uses for decompression, by codec.
CODEC_PACKAGES = {"snappy": "python-snappy", "lz4": "lz4", "zstd": "zstandard"}
# kafka-python's message for a connection still being opened when the bootstrap timeout ended.
_CUT_OFF = "Connection timed out"


class FailureHandler(logging.Handler):
    """A log handler that keeps kafka-python's failed connections: its errors say only that no
    broker answered. The lines are not logged, since the adapter's error contains them.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._failures: deque[tuple[float, str, Exception]] = deque(maxlen=50)

    def emit(self, record: logging.LogRecord) -> None:
        values = record.args if isinstance(record.args, tuple) else ()
        failure = next((a for a in values if isinstance(a, Exception)), None)
        # A timeout says nothing new; the line logged before it says why no broker answered.
        if failure is not None and not isinstance(failure, errors.KafkaTimeoutError):
            self._failures.append((time.monotonic(), record.threadName or "", failure))

    def since(self, began: float, servers: str) -> Exception | None:
        """Return the most specific failure of clients of these brokers since `began`; None if there
        was none. That is the last about credentials or rights, else the last from a broker or the
        network, else the last of a connection that our own timeout ended."""
        failures = [
            failure
            for at, thread, failure in reversed(self._failures)
            if at >= began and (thread == IO_THREAD + servers or not thread.startswith(IO_THREAD))
        ]
        heard = (f for f in failures if not str(f).endswith(_CUT_OFF))
        return next((f for f in failures if _is_of_identity(f)), None) or next(
            heard, next(iter(failures), None)
        )


def _is_of_identity(failure: Exception) -> bool:
    """Return whether a failure is about credentials or rights."""
    return isinstance(failure, AnabranchError) or is_denied(one_line(failure))


FAILURES = FailureHandler()
# kafka-python prints passwords of SASL/PLAIN at DEBUG, whatever the root logger says.
logging.getLogger("kafka").setLevel(logging.WARNING)
logging.getLogger("kafka").addHandler(FAILURES)
logging.getLogger("kafka").propagate = False


@contextmanager
def explaining(kafka: config.Kafka, doing: str, right: str = "") -> Iterator[None]:
    """Convert KafkaError and OSError to `explained` errors."""
    began = time.monotonic()
    try:
        yield
    except (errors.KafkaError, OSError) as error:
        raise explained(kafka, doing, error, began, right) from error


def explained(
    kafka: config.Kafka, doing: str, error: BaseException, began: float, right: str = ""
) -> AnabranchError:
    """Return Anabranch's error for an error that kafka-python raised while `doing`, which began at
    `began` (`time.monotonic`).

    `right` are the options of kafka-acls.sh that grant the rights it needs.
    """
    if isinstance(error, errors.AuthorizationError):
        kind, usual = next(
            ((kind, usual) for refused, kind, usual in RIGHTS if isinstance(error, refused)),
            ("", ""),
        )
        return missing_right(kafka, doing, one_line(error), right if kind in right else usual)
    if isinstance(error, errors.UnsupportedCodecError):
        return _codec_missing(f"{doing} at {kafka.bootstrap_servers}", error)
    if isinstance(error, errors.UnknownBrokerIdError):
        # The error is the id of the partition's leader: -1 for none, or a broker that just stopped.
        error = errors.LeaderNotAvailableError(f"broker {error}")
    doing = f"{doing} at {kafka.bootstrap_servers}"
    failure = FAILURES.since(began, kafka.bootstrap_servers)
    if isinstance(failure, AnabranchError):
        # Of the source of tokens, keys or tickets (`kafka.security`).
        return type(failure)(f"{doing}: {failure}")
    cause = one_line(failure) if failure is not None else ""
    reason = one_line(error) + (f" ({cause})" if cause and cause not in str(error) else "")
    if (waits := _WAITS.get(type(error))) is not None:
        reason += f": {waits}"
    if "bootstrap" in str(error):
        reason += "; check kafka.bootstrap_servers: `anabranch doctor` examines it"
    return explain(doing, error, reason)


def missing_right(kafka: config.Kafka, doing: str, found: str, right: str) -> MissingRight:
    if isinstance(kafka.security, MskIam):
        return MissingRight(
            f"{doing} at {kafka.bootstrap_servers}: {found}; allow it in the policy of the AWS "
            "keys, as deploy/msk/jobs.json and deploy/msk/egress.json do; then start it again",
            "a policy such as deploy/msk/jobs.json",
        )
    secured = " --command-config client.properties" if kafka.security else ""
    command = (
        f"kafka-acls.sh --bootstrap-server {kafka.bootstrap_servers}{secured} --add "
        "--allow-principal User:NAME"
    )
    command = f"{command} {right}".strip()
    return MissingRight(
        f"{doing} at {kafka.bootstrap_servers}: {found}; check the user's rights with kafka-acls: "
        f"the missing one is granted by `{command}`; then start it again",
        command,
    )


def _codec_missing(doing: str, error: BaseException) -> CodecMissing:
    package = next(
        (package for codec, package in CODEC_PACKAGES.items() if codec in str(error)), None
    )
    remedy = (
        f"run `pip install {package}` in Anabranch's environment"
        if package is not None
        else "upgrade Anabranch and kafka-python"
    )
    return CodecMissing(
        f"{doing}: expected a package for each codec (gzip, {', '.join(CODEC_PACKAGES)}), found: "
        f"{one_line(error)}; {remedy}, then start it again"
    )
