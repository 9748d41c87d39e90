"""Conversion of kafka-python's errors and log lines to Anabranch's errors, which name a remedy."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from kafka import errors

from anabranch import config
from anabranch.common.errors import AnabranchError, CodecMissing, MissingRight
from anabranch.common.remote_errors import explain, is_denied, one_line
from anabranch.config.kafka_security import MskIam
from anabranch.kafka.kafka_python_fixes import IO_THREAD

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
