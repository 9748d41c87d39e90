"""Corrections of kafka-python 3.0.12, applied when the adapter is imported. Delete each when a
release contains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kafka import KafkaAdminClient, errors
from kafka.cluster import ClusterMetadata
from kafka.net.compat import KafkaNetClient
from kafka.net.selector import NetworkSelector
from kafka.net.transport import KafkaSSLTransport, KafkaTCPTransport
from kafka.record import default_records, util
from kafka.record.default_records import DefaultRecordBatch

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


class _AnyName(bytearray):
    """A slice of a batch that decodes any bytes, as Java's client does: U+FFFD replaces invalid
    UTF-8."""

    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return bytes(self).decode("utf-8", "replace")


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
