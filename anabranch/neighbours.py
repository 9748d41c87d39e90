"""What a neighbour's error means: it may pass, or somebody has to act first.

Kafka, S3 and the catalog are reached through clients of two languages, and what Spark's JVM throws arrives as text. So
the meaning is read from the words that the services themselves use; whatever has none of them may pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from anabranch.errors import AnabranchError, ConfigurationError, Transient

_LONGEST = 300  # characters of an error that a message repeats
# What Spark puts around a cause: which query it was, a number of its own; a name that a client says twice; and a cause
# that names its Java class itself.
_WRAPPED = re.compile(r"^\[STREAM_FAILED\] Query \[.*?\] terminated with exception: ")
_SQLSTATE = re.compile(r"\.? SQLSTATE: \w+$")
_TWICE = re.compile(r"\b(\w+): \1: ")
_JAVA = re.compile(r"^[a-z]\w*(\.\w+)+(: |$)")

# By what they concern: the words of S3's error codes (as botocore and the AWS SDKs for Java and C++ spell them), of
# Kafka's and PostgreSQL's. S3 answers a HEAD without a body, so wrong keys and missing rights look alike there.
_DENIED = {
    # Before S3: AWS says both alike, but for what it was that may not be done.
    "the keys of the standard AWS chain, and what they may do in Glue (docs/deploy.md)": (
        "perform: glue:", "UnrecognizedClientException",
    ),
    "catalog.properties: token or credential, and what they may do": (
        "UnauthorizedError", "ForbiddenError", "OAuthError", "NotAuthorizedException", "ForbiddenException",
    ),
    "s3.access_key and s3.secret_key, and what the bucket's policy allows them": (
        "AccessDenied", "ACCESS_DENIED", "Access Denied", "InvalidAccessKeyId", "INVALID_ACCESS_KEY_ID",
        "SignatureDoesNotMatch", "SIGNATURE_DOES_NOT_MATCH", "INVALID_SIGNATURE", "error occurred (403)",
        "Status Code: 403", "HTTP status 403", "HTTP response code: 403",
    ),
    "kafka.security: user, password and certificates": (
        "SaslAuthentication", "SslAuthentication", "CERTIFICATE_VERIFY_FAILED", "UnsupportedSaslMechanism",
        "ALERT_BAD_CERTIFICATE", "ALERT_CERTIFICATE_REQUIRED", "ALERT_UNKNOWN_CA", "ALERT_HANDSHAKE_FAILURE",
    ),
    "the user's rights with kafka-acls: it needs READ and DESCRIBE of the topic, READ of the group": (
        "TopicAuthorization", "GroupAuthorization", "ClusterAuthorization",
    ),
    "catalog.uri: user, password and database, and what the user may do": (
        "password authentication failed", "no pg_hba.conf entry", "permission denied for", "FATAL:  role",
        "FATAL: role", "FATAL:  database", "FATAL: database",
    ),
    "catalog.warehouse: `anabranch apply` makes the bucket": ("NoSuchBucket", "NO_SUCH_BUCKET"),
}  # fmt: skip

# S3 refuses a signature of another time as it refuses a wrong one.
_SKEWED = ("RequestTimeTooSkewed", "REQUEST_TIME_TOO_SKEWED")

# What only the way to a neighbour, or Spark's own machinery, can throw: never the rows that are read.
_AWAY = (
    "S3Exception", "SdkClientException", "SdkServiceException", "AwsServiceException", "software.amazon.awssdk",
    "java.net.", "java.io.IOException", "java.io.EOFException", "RuntimeIOException", "UncheckedIOException",
    "UncheckedSQLException", "java.sql.SQL", "org.sqlite.SQLite", "PSQLException", "org.apache.kafka.common.errors",
    "ServiceFailureException", "NotFoundException: Location does not exist", "Py4JNetworkError", "ExecutorLost",
    "FetchFailed", "Checkpoint block", "CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND", "SparkContext was shut down",
    "was cancelled", "OutOfMemoryError", "AWS Error",
)  # fmt: skip


def explain(doing: str, error: BaseException) -> AnabranchError:
    """The error of ours for what a client threw while `doing`; one of ours stays itself. Pure.

    ConfigurationError when keys, rights or a bucket are what is wrong, else Transient.
    """
    if isinstance(error, AnabranchError):
        return error
    return explain_text(doing, _full_text(error), said_by(error))


def explain_text(doing: str, text: str, said: str | None = None) -> AnabranchError:
    """The same for an error that is only text. `said` is the part of it for the message."""
    found = f"{doing}: expected an answer, found {said or telling_line(text)}"
    if any(word in text for word in _SKEWED):
        return Transient(f"{found}; set this machine's clock (NTP)")
    for subject, words in _DENIED.items():
        if any(word in text for word in words):
            return ConfigurationError(f"{found}; check {subject}, then start it again")
    return Transient(f"{found}; this may pass, try again")


def is_denied(text: str) -> bool:
    """Whether an error's text speaks of keys, passwords or rights that are wrong. Pure."""
    return any(word in text for words in _DENIED.values() for word in words)


def is_away(text: str) -> bool:
    """Whether an error's text, traces included, speaks of the way to a neighbour and not of the rows. Pure."""
    return any(word in text for word in _AWAY)


@contextmanager
def asked(doing: str) -> Iterator[None]:
    """Turn what reading the lake's files throws when the object store is away into an error of ours."""
    try:
        yield
    except OSError as error:
        raise explain(doing, error) from error


def said_by(error: BaseException) -> str:
    """An error in one line, with its type unless that is in the line."""
    line = telling_line(str(error))
    name = type(error).__name__
    return line if name in line or _JAVA.match(line) else f"{name}: {line}"


def telling_line(text: str) -> str:
    """The line of an error's text that tells: the innermost cause of a JVM's stack trace, else the first."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no message"]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    if not causes and lines[0].startswith("An error occurred while calling") and len(lines) > 1:
        causes = [lines[1].removeprefix(": ")]
    line = _TWICE.sub(r"\1: ", _SQLSTATE.sub("", _WRAPPED.sub("", causes[-1] if causes else lines[0])))
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "…"


def _full_text(error: BaseException) -> str:
    """All that an error and its causes say."""
    texts: list[str] = []
    link: BaseException | None = error
    while link is not None and len(texts) < 10:
        texts.append(f"{type(link).__name__}: {link}")
        link = link.__cause__
    return "\n".join(texts)
