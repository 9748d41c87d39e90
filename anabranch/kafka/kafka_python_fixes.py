"""What kafka-python 3.0.12 gets wrong, corrected when the adapter is imported. Each goes when a
release has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from kafka import KafkaAdminClient, errors
from kafka.cluster import ClusterMetadata
from kafka.net.compat import KafkaNetClient
from kafka.net.selector import NetworkSelector
from kafka.net.transport import KafkaSSLTransport, KafkaTCPTransport
from kafka.record.default_records import DefaultRecordBatch

T = TypeVar("T")

IO_THREAD = "kafka-io-"
"""How the name of a client's IO thread begins; that of a client of `connect` ends with its
bootstrap servers."""


def apply() -> None:
    """Correct kafka-python in this process."""
    deliver_data_before_eof(KafkaTCPTransport)
    deliver_data_before_eof(KafkaSSLTransport)
    read_any_header_names()
    raise_failed_descriptions()
    create_no_topics()


def connect(kind: Callable[..., T], **settings: Any) -> T:
    """A client of kafka-python, such as KafkaConsumer. Raises what its constructor raises, and then
    leaves no thread and no file descriptor.

    kafka-python leaves the IO thread and the sockets of a client that found no broker, so a process
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
    """Have a transport give what was received before it says that the other side hung up.

    kafka-python drops what comes in one piece with the end: a broker's reason for refusing a
    password.
    """
    receive = transport._sock_recv

    def receive_all(self: Any) -> Any:
        data, error = receive(self)
        return (data, None) if data else (data, error)

    transport._sock_recv = receive_all


class _AnyName(bytearray):
    """A slice of a batch that decodes whatever its bytes are, as Java's client does: U+FFFD for
    what is not UTF-8."""

    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        return bytes(self).decode("utf-8", "replace")


class _AnyNames(bytearray):
    """A decompressed batch whose slices decode whatever their bytes are."""

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return _AnyName(found) if isinstance(at, slice) else found


def read_any_header_names() -> None:
    """Read records whose header names are not UTF-8.

    Kafka's brokers do not look at header names, and several clients write any bytes. kafka-python
    decodes them strictly and takes such a batch for corrupt.
    """
    read_strictly = DefaultRecordBatch._read_msg

    def read(self: Any, *arguments: Any) -> Any:
        try:
            return read_strictly(self, *arguments)
        except UnicodeDecodeError:
            # The position in the batch moves only behind a record that was read, so the record is
            # read again.
            self._buffer = _AnyNames(self._buffer)
            return read_strictly(self, *arguments)

    DefaultRecordBatch._read_msg = read


def create_no_topics() -> None:
    """Have no consumer or producer create the topic that it asks for.

    kafka-python does not pass their own setting, `allow_auto_create_topics`, on to what asks.
    """
    ClusterMetadata.DEFAULT_CONFIG["allow_auto_create_topics"] = False


def raise_failed_descriptions() -> None:
    """Raise the brokers' error for a configuration that they did not describe.

    kafka-python drops it and gives an empty configuration, so a missing right looks like a topic
    without settings.
    """
    process = KafkaAdminClient._describe_configs_process_responses.__func__

    def process_good(cls: Any, responses: Any, *arguments: Any, **options: Any) -> Any:
        for result in (result for response in responses for result in response.results):
            if result.error_code:
                raise errors.for_code(result.error_code)(result.error_message)
        return process(cls, responses, *arguments, **options)

    KafkaAdminClient._describe_configs_process_responses = classmethod(process_good)
