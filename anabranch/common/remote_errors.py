"""The meaning of errors raised by libraries and services: transient, for an operator, or unknown.

Kafka, S3 and the catalog are reached through clients of two languages, and errors of Spark's JVM
arrive as text. So the meaning is read from the types of Python's errors, the names of Java's, and
the words of the services. A job retries errors that are known to pass until its limit, ends at once
for errors whose type shows that a retry does not help, and retries unexplained errors a few times.
"""

from __future__ import annotations

import errno
import getpass
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from anabranch.common.errors import (
    AnabranchError,
    ConfigurationError,
    Transient,
    Unexpected,
    Unexplained,
)
from anabranch.common.http import is_transient

_LONGEST = 300  # characters of an error that a message repeats
# Text that Spark puts around a cause (the query's id, an SQLSTATE), a name that a client repeats,
# and a cause that begins with its Java class.
_WRAPPED = re.compile(r"^\[STREAM_FAILED\] Query \[.*?\] terminated with exception: ")
_SQLSTATE = re.compile(r"\.? SQLSTATE: \w+$")
_TWICE = re.compile(r"\b(\w+): \1: ")
_JAVA = re.compile(r"^[a-z]\w*(\.\w+)+(: |$)")
# The last line of a Python worker's traceback in an error of Spark.
_WORKER = re.compile(
    r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(\S.*)$", re.MULTILINE
)

# An untrusted certificate of S3, as botocore and the AWS SDKs for C++ and Java report it.
_UNTRUSTED_S3 = (
    "SSL validation failed for",
    "curlCode: 60,",
    "curlCode: 77,",
    "Unable to execute HTTP request: PKIX",
    "Unable to execute HTTP request: (certificate_unknown) PKIX",
)

# By remedy: the words of S3's error codes (as botocore and the AWS SDKs for Java and C++ spell
# them), of Kafka's and PostgreSQL's. S3 answers a HEAD without a body, so it reports wrong keys and
# missing rights alike there.
_DENIED = {
    # Glue before S3: AWS reports both alike, except for the denied action.
    (
        "the keys of the standard AWS chain, and what they may do in Glue "
        "(docs/how-to/deploy/services.md)"
    ): ("perform: glue:", "UnrecognizedClientException"),
    "catalog.properties: token or credential, and what they may do": (
        "UnauthorizedError",
        "ForbiddenError",
        "OAuthError",
        "NotAuthorizedException",
        "ForbiddenException",
    ),
    "s3.ca, for Spark the trust store of Java too (docs/how-to/deploy/services.md)": _UNTRUSTED_S3,
    "s3.access_key and s3.secret_key, and what the bucket's policy allows them": (
        "AccessDenied",
        "ACCESS_DENIED",
        "Access Denied",
        "InvalidAccessKeyId",
        "INVALID_ACCESS_KEY_ID",
        "SignatureDoesNotMatch",
        "SIGNATURE_DOES_NOT_MATCH",
        "INVALID_SIGNATURE",
        "error occurred (403)",
        "Status Code: 403",
        "HTTP status 403",
        "HTTP response code: 403",
    ),
    (
        "the jars of spark.jars: `anabranch jars --spark-submit` links those of every identity of "
        "kafka.security"
    ): ("IAMClientCallbackHandler could not be found",),
    "kafka.security: the keys sasl.oauthbearer.*": (
        "reading the token endpoint response; will not attempt further retries",
    ),
    "kafka.security: aws.profile, aws.role.arn and what these keys of AWS may do": (
        "Failed to find AWS IAM Credentials",
    ),
    "kafka.security: the keys sasl.kerberos.* and java.security.krb5.conf": (
        "Unable to obtain password from user",
        "the client is being asked for a password",
        "Unable to obtain Principal Name",
        "Cannot locate default realm",
        "not found in Kerberos database",
    ),
    "kafka.security: user, password, token, ticket, certificates": (
        "SaslAuthentication",
        "SslAuthentication",
        "CERTIFICATE_VERIFY_FAILED",
        "UnsupportedSaslMechanism",
        "ALERT_BAD_CERTIFICATE",
        "ALERT_CERTIFICATE_REQUIRED",
        "ALERT_UNKNOWN_CA",
        "ALERT_HANDSHAKE_FAILURE",
    ),
    (
        "the user's rights with kafka-acls: it needs READ, DESCRIBE and DESCRIBE_CONFIGS of the "
        "topic"
    ): (
        "TopicAuthorization",
        "GroupAuthorization",
        "ClusterAuthorization",
        "TransactionalIdAuthorization",
        "DelegationTokenAuthorization",
    ),
    "catalog.uri: user, password and database, and the user's permissions": (
        "password authentication failed",
        "no pg_hba.conf entry",
        "permission denied for",
        "FATAL:  role",
        "FATAL: role",
        "FATAL:  database",
        "FATAL: database",
    ),
    "the bucket's name (`anabranch apply` makes that of catalog.warehouse)": (
        "NoSuchBucket",
        "NO_SUCH_BUCKET",
    ),
}

# PyIceberg's errors for an answer that is not a REST catalog's, such as a page to sign in.
_NO_CATALOG = re.compile(
    r"^ValidationError: \d+ validation errors? for \w+Response|unexpected JSON Payload",
    re.MULTILINE,
)

# S3 refuses a signature with a wrong time as it refuses a wrong signature.
_SKEWED = ("RequestTimeTooSkewed", "REQUEST_TIME_TOO_SKEWED")

# Expired temporary keys, by service, as botocore and the AWS SDKs for C++ and Java report them.
_EXPIRED_KEYS = {
    "S3": re.compile(
        r"\(ExpiredToken\)|ExceptionName: ExpiredToken\b|token has expired\. \(Service: S3\b"
        # PyArrow asks for the length first, and the answer to that has no body.
        r"|\(HTTP status 400\) during HeadObject"
    ),
    "Glue": re.compile(r"\(ExpiredTokenException\)|token .* is expired \(Service: Glue\b"),
}

# Searched before FileNotFoundException, with which Java reports a file that a full disk cannot
# open. At the end of a line, where the system says it: not in the words of a record.
_DISK_FULL = re.compile(
    r"(?:No space left on device|Disk quota exceeded|database or disk is full)\)?\s*$", re.MULTILINE
)

# No connection to S3, as the AWS SDK for C++ and botocore report it.
_NO_S3 = ("curlCode: 6,", "curlCode: 7,", "curlCode: 35,", "Could not connect to the endpoint URL")

# Waiting does not help. At the end of a line, as above.
_READ_ONLY = re.compile(
    r"(?:Read-only file system|attempt to write a readonly database)(?:\)|: .*)?\s*$", re.MULTILINE
)
_ADDRESS_TAKEN = frozenset({errno.EADDRINUSE, errno.EADDRNOTAVAIL})
# Errors of a path given to a command, beside those in `_system_remedy`.
_NO_SUCH_PLACE = frozenset(
    {
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EACCES,
        errno.EPERM,
    }
)

# Errors of the network or of Spark's own machinery: never of the rows that are read.
_NETWORK_WORDS = (
    "S3Exception",
    "SdkClientException",
    "SdkServiceException",
    "AwsServiceException",
    "software.amazon.awssdk",
    "java.net.",
    "java.io.IOException",
    "java.io.EOFException",
    "RuntimeIOException",
    "UncheckedIOException",
    "UncheckedSQLException",
    "java.sql.SQL",
    "org.sqlite.SQLite",
    "PSQLException",
    "org.apache.kafka.common.errors",
    "ServiceFailureException",
    "NotFoundException: Location does not exist",
    "Py4JNetworkError",
    "ExecutorLost",
    "FetchFailed",
    "Checkpoint block",
    "CHECKPOINT_RDD_BLOCK_ID_NOT_FOUND",
    "SparkContext was shut down",
    "stopped SparkContext",
    "was cancelled",
    "SPARK_JOB_CANCELLED",
    "OutOfMemoryError",
    "AWS Error",
)


# Names of Java errors that recur for the same records or program.
_JAVA_TERMINAL = (
    "ArithmeticException",
    "DateTimeException",
    "RecordTooLargeException",
    "RecordBatchTooLargeException",
    "MessageSizeTooLarge",
    "RecordListTooLarge",
    "StackOverflowError",
    "No enum constant",
    "NoClassDefFoundError",
    "NoSuchMethodError",
    "NoSuchFieldError",
    "AbstractMethodError",
    "ClassNotFoundException",
    "UnsupportedClassVersionError",
)

# Errors that look like an unreachable service but may be permanent: too little memory, a deleted
# file, a request that the broker does not know, bytes that a disk lost.
_JAVA_DOUBTFUL = (
    "OutOfMemoryError",
    "Location does not exist",
    "FileNotFoundException",
    "NoSuchFileException",
    "NoSuchKeyException",
    "UnsupportedVersionException",
    "InvalidTopicException",
    "CorruptRecordException",
    "SerializationException",
    "UnsupportedForMessageFormatException",
    "InvalidConfigurationException",
    "OffsetOutOfRangeException",
)

# Errors that pass by themselves, beside `_NETWORK_WORDS`, as Java, Spark, Iceberg, SQLAlchemy,
# botocore and kafka-python name them.
_TRANSIENT_WORDS = (
    "TimeoutException",
    "InterruptedException",
    "ClosedByInterruptException",
    "ClosedChannelException",
    "InterruptedIOException",
    "java.nio.file.FileSystemException",
    "RejectedExecutionException",
    "TaskKilled",
    "CommitFailedException",
    "CommitStateUnknownException",
    "ServiceUnavailableException",
    "OperationalError",
    "InterfaceError",
    "AdminShutdown",
    "KafkaTimeoutError",
    "KafkaConnectionError",
    "NodeNotReadyError",
    "Failed to find active controller id",
    "error occurred (5",
    "error occurred (429)",
    "error occurred (408)",
    "Status Code: 5",
    "Status Code: 429",
    "HTTP status 5",
    "InternalError",
    "SlowDown",
    "SLOW_DOWN",
    "Throttl",
    "RequestTimeout",
    "REQUEST_TIMEOUT",
    "RequestLimitExceeded",
    "No resolvable bootstrap urls",
    "ExecutorDead",
    # Of a Python worker, as OSError below; errors of paths have other names.
    "\nOSError: ",
)

# The same in Python, by type. Libraries' errors are given by name, since not every job has every
# library.
_TRANSIENT_TYPES = frozenset(
    {
        "builtins.OSError",
        "kafka.errors.RetriableError",
        "sqlalchemy.exc.OperationalError",
        "sqlalchemy.exc.InterfaceError",
        "sqlalchemy.exc.TimeoutError",
        "botocore.exceptions.HTTPClientError",
        "botocore.exceptions.ConnectionError",
        "botocore.exceptions.EndpointConnectionError",
        "botocore.exceptions.IncompleteReadError",
        "botocore.exceptions.MetadataRetrievalError",
        "urllib3.exceptions.HTTPError",
        "http.client.HTTPException",
        "pyiceberg.exceptions.ServerError",
        "pyiceberg.exceptions.ServiceUnavailableError",
        "pyiceberg.exceptions.TooManyRequestsError",
        "pyiceberg.exceptions.AuthorizationExpiredError",
        "pyiceberg.exceptions.CommitStateUnknownException",
        "pyiceberg.exceptions.CommitFailedException",
        "pyiceberg.exceptions.WaitingForLockException",
    }
)
# Subclasses of OSError about a path, which may not pass.
_DOUBTFUL_TYPES = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
)
_TERMINAL_TYPES = (
    ArithmeticError,
    TypeError,
    AttributeError,
    NameError,
    ImportError,
    NotImplementedError,
    AssertionError,
    SyntaxError,
    RecursionError,
)

# Spark's analysis errors recur, since plans are built from our code and the stream's file. The
# exceptions below are of a table that changed between two reads, or that a catalog did not have for
# a moment: the next attempt reads again, and names a lasting cause.
_ANALYSIS = re.compile(r"(?:AnalysisException|\bParseException):\s+\[(\w+)")
_TABLE_CHANGED = "INCOMPATIBLE_TABLE_CHANGE_AFTER_ANALYSIS"
_CHANGED_MEANWHILE = frozenset(
    {
        "UNRESOLVED_COLUMN",
        "UNRESOLVED_FIELD",
        "UNRESOLVED_USING_COLUMN_FOR_JOIN",
        "COLUMN_NOT_FOUND",
        "FIELD_NOT_FOUND",
        "DATATYPE_MISMATCH",
        "CANNOT_UP_CAST_DATATYPE",
        "INCOMPATIBLE_COLUMN_TYPE",
        "INCOMPATIBLE_DATA_FOR_TABLE",
        _TABLE_CHANGED,
        "INSERT_COLUMN_ARITY_MISMATCH",
        "NUM_COLUMNS_MISMATCH",
        "TABLE_OR_VIEW_NOT_FOUND",
        "SCHEMA_NOT_FOUND",
    }
)

# Services by the words of their clients and of our own messages; the first match is the service of
# the request.
_SERVICES = (
    ("registry", ("schema registry",)),
    ("kafka", ("org.apache.kafka", "kafka.errors")),
    ("s3", ("awssdk", "S3Exception", "botocore", "AWS Error", "s3://")),
    ("catalog", ("sqlalchemy", "sqlite", "psycopg", "PSQLException", "java.sql", "catalog")),
    ("kafka", ("Kafka", "topic ")),
    ("s3", ("S3", "bucket ")),
    ("catalog", ("commit ", "load table ")),
)

SERVICES = (*dict.fromkeys(service for service, _ in _SERVICES), "other")
"""The values that `asked_service` returns."""

# A line of a Java stack trace: it names the code that ran, not the error.
_FRAME = re.compile(r"^\s+(?:at |\.\.\. \d+ more).*$", re.MULTILINE)


class Meaning(Enum):
    """The expected outcome of a retry."""

    PASSES = "it may pass"
    STAYS = "the same again"
    UNKNOWN = "unknown"


def classify_text(text: str) -> Meaning:
    """Return the meaning of an error that is only text, by the names and words in it. Pure."""
    message = _FRAME.sub("", text)
    if any(name in message for name in _JAVA_TERMINAL):
        return Meaning.STAYS
    if _DISK_FULL.search(message):
        return Meaning.PASSES
    if any(name in message for name in _JAVA_DOUBTFUL):
        return Meaning.UNKNOWN
    if any(word in message for word in (*_NETWORK_WORDS, *_TRANSIENT_WORDS)):
        return Meaning.PASSES
    refused = {name for name in _ANALYSIS.findall(message) if not name.startswith("_LEGACY")}
    return Meaning.STAYS if refused - _CHANGED_MEANWHILE else Meaning.UNKNOWN


def classify(error: BaseException) -> Meaning:
    """Return an error's meaning by its type and those of its causes, else by their text. Pure."""
    chain = _chain(error)
    if any(isinstance(link, _DOUBTFUL_TYPES) for link in chain):
        return Meaning.UNKNOWN
    if any(_TRANSIENT_TYPES & _names(link) or _is_transient_answer(link) for link in chain):
        return Meaning.PASSES
    if any(isinstance(link, _TERMINAL_TYPES) for link in chain):
        return Meaning.STAYS
    return classify_text(full_text(error))


def _is_transient_answer(error: BaseException) -> bool:
    """Return whether botocore's HTTP status, or SQLAlchemy's lost connection, is transient."""
    if getattr(error, "connection_invalidated", False):
        return True
    answer = getattr(error, "response", None)
    status = (
        answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if isinstance(answer, dict)
        else 0
    )
    return is_transient(status)


def _names(error: BaseException) -> set[str]:
    return {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}


def explain(doing: str, error: BaseException, reason: str | None = None) -> AnabranchError:
    """Return the AnabranchError for an error raised while `doing`; an AnabranchError is returned
    unchanged. The message has `reason` if given, else the error's own line. Pure.

    ConfigurationError for wrong keys, rights, buckets, paths or ports; Transient for errors known
    to pass; Unexpected for errors that a retry does not fix; Unexplained for all others.
    """
    if isinstance(error, AnabranchError):
        return error
    if (why := _system_remedy(error)) is not None:
        found = reason or one_line(error)
        return ConfigurationError(
            f"{doing}: expected a path or port that this process may use, found {found}; {why}"
        )
    text = f"{full_text(error)}\n{reason or ''}"
    return _explained(doing, text, reason or one_line(error), classify(error))


def _system_remedy(error: BaseException) -> str | None:
    """Return the remedy for a path or address that is unusable for good; None otherwise."""
    for link in _chain(error):
        if not isinstance(link, OSError):
            continue
        if link.errno in _ADDRESS_TAKEN:
            return (
                "another process listens there, or the address is not this machine's: stop it, or "
                "choose another port"
            )
        # A denial by S3 or a catalog has no file name.
        if link.errno == errno.EROFS or (
            link.errno in (errno.EACCES, errno.EPERM) and link.filename is not None
        ):
            return f"choose another path, or let {_user()} write there"
    return None


def _user() -> str:
    """Return the user of this process, by name or id."""
    try:
        return f"user {getpass.getuser()}"
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def classify_unexpected(doing: str, error: BaseException) -> AnabranchError:
    """Explain an error that reached the end of the program: as `explain`, but Unexpected in place
    of Unexplained, and ConfigurationError for a path that cannot be a file."""
    if isinstance(error, OSError) and error.errno in _NO_SUCH_PLACE and error.filename is not None:
        return ConfigurationError(
            f"{doing}: expected a place for a file, found {one_line(error)}; choose another path"
        )
    explained = explain(doing, error)
    return Unexpected(str(explained)) if isinstance(explained, Unexplained) else explained


def explain_text(doing: str, text: str) -> AnabranchError:
    """Return the AnabranchError, as `explain` does, for an error that is only text."""
    return _explained(doing, text, cause_line(text), classify_text(text))


def _explained(doing: str, text: str, reason: str, meaning: Meaning) -> AnabranchError:
    failed = f"{doing}: {reason}"
    if _NO_CATALOG.search(text):
        failed += "; check that catalog.uri is the address of an Iceberg REST catalog"
    if any(word in text for word in _SKEWED):
        return Transient(f"{failed}; set this machine's clock (NTP)")
    for service, said in _EXPIRED_KEYS.items():
        if said.search(text):
            remedy = (
                f"renew the temporary keys of {service}; keys in environment variables need a "
                "restart"
            )
            return Transient(f"{failed}; {remedy} (transient, tried again)")
    if _READ_ONLY.search(text):
        return ConfigurationError(f"{failed}; choose another path, or let {_user()} write there")
    if meaning is Meaning.PASSES and _DISK_FULL.search(text):
        return Transient(
            f"{failed}; make room: `anabranch doctor` names the folder (transient, tried again)"
        )
    for subject, words in _DENIED.items():
        if any(word in text for word in words):
            return ConfigurationError(f"{failed}; check {subject}, then start it again")
    if meaning is Meaning.PASSES:
        if any(word in text for word in _NO_S3):
            failed += "; check s3.endpoint: `anabranch doctor` examines it"
        return Transient(f"{failed} (transient, try again)")
    if meaning is Meaning.STAYS:
        return Unexpected(
            f"{failed}; trying again does not help; no partial data is visible; fix the cause "
            "above, or report it, then start it again"
        )
    return Unexplained(f"{failed} (of unknown cause; try again, a few times only)")


def asked_service(error: BaseException) -> str:
    """Return the service of SERVICES that an error is about; `other` if none. Pure."""
    links = _chain(error)
    text = _FRAME.sub(
        "", "\n".join([full_text(error), *(name for link in links for name in _names(link))])
    )
    return next(
        (service for service, words in _SERVICES if any(word in text for word in words)), "other"
    )


def is_denied(text: str) -> bool:
    """Return whether an error's text is about wrong keys, passwords or rights. Pure."""
    return any(word in text for words in _DENIED.values() for word in words)


def is_untrusted_s3(text: str) -> bool:
    """Return whether an error's text is about an untrusted certificate of S3. Pure."""
    return any(word in text for word in _UNTRUSTED_S3)


def is_away(text: str) -> bool:
    """Return whether an error's text, with stack traces, is about the network, or about a table
    that another program changed meanwhile, and not about the rows. Pure."""
    return _TABLE_CHANGED in text or any(word in text for word in _NETWORK_WORDS)


@contextmanager
def explained_errors(doing: str) -> Iterator[None]:
    """Convert errors of a service's client into errors of ours."""
    try:
        yield
    except AnabranchError:
        raise
    except Exception as error:
        raise explain(doing, error) from error


@contextmanager
def lake_errors(doing: str) -> Iterator[None]:
    """Convert OSErrors of reading the lake's files into errors of ours."""
    try:
        yield
    except OSError as error:
        raise explain(doing, error) from error


def one_line(error: BaseException) -> str:
    """Return an error in one line, with its type unless the line contains it."""
    name = type(error).__name__
    # The first line of Pydantic's error only counts the mistakes.
    said = str(error) if name != "ValidationError" else " ".join(str(error).split())
    line = cause_line(said)
    return line if name in line or _JAVA.match(line) else f"{name}: {line}"


def cause_line(text: str) -> str:
    """Return the line of an error's text with the cause: the error of a Python worker, else the
    innermost cause of a JVM's stack trace, else the first line."""
    lines = [
        line.strip() for line in _WORKER.findall(text)[-1:] or text.splitlines() if line.strip()
    ] or ["no message"]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    if not causes and lines[0].startswith("An error occurred while calling") and len(lines) > 1:
        causes = [lines[1].removeprefix(": ")]
    line = _TWICE.sub(
        r"\1: ", _SQLSTATE.sub("", _WRAPPED.sub("", causes[-1] if causes else lines[0]))
    )
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "…"


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and its causes, outermost first, at most ten."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(chain) < 10:
        chain.append(link)
        link = link.__cause__
    return chain


def full_text(error: BaseException) -> str:
    """Return the messages of an error and its causes, of Spark's with the Java stack trace."""
    return "\n".join(
        f"{type(e).__name__}: {e}\n{getattr(e, '_stackTrace', None) or ''}" for e in _chain(error)
    )
