"""Classification of errors of other services, on the texts of real errors as their clients write
them."""

import errno
import importlib
import os

import pytest

from anabranch.common.errors import (
    AnabranchError,
    ConfigurationError,
    Refused,
    Transient,
    Unexpected,
    Unexplained,
)
from anabranch.common.remote_errors import (
    Meaning,
    cause_line,
    classify,
    classify_text,
    classify_unexpected,
    explain,
    explain_text,
    is_away,
    lake_errors,
    one_line,
)

DENIED = [
    # botocore, pyarrow (AWS SDK for C++), AWS SDK for Java
    "An error occurred (403) when calling the HeadBucket operation: Forbidden",
    (
        "When reading information for key 'a' in bucket 'b': AWS Error ACCESS_DENIED during "
        "HeadObject operation: No response body."
    ),
    (
        "software.amazon.awssdk.services.s3.model.S3Exception: The AWS Access Key Id you provided "
        "does not exist in our records. (Service: S3, Status Code: 403, Request ID: "
        "4442587FB7D0A2F9)"
    ),
    (
        "org.apache.kafka.common.errors.SaslAuthenticationException: Authentication failed during "
        "authentication"
    ),
    "TopicAuthorizationFailedError",
    (
        '(psycopg2.OperationalError) connection to server at "127.0.0.1", port 1 failed: FATAL:  '
        'password authentication failed for user "lake"'
    ),
    (
        "An error occurred (NoSuchBucket) when calling the GetObject operation: The specified "
        "bucket does not exist"
    ),
]
AWAY = [
    (
        "An error occurred (503) when calling the HeadBucket operation (reached max retries: 1): "
        "Service Unavailable"
    ),
    (
        "KafkaTimeoutError: Unable to bootstrap from ['127.0.0.1:1'] (KafkaConnectionError: "
        "Connection refused)"
    ),
    "(sqlite3.OperationalError) database is locked",
    (
        "org.apache.kafka.common.config.ConfigException: No resolvable bootstrap urls given in "
        "bootstrap.servers"
    ),
    "(psycopg2.errors.AdminShutdown) terminating connection due to administrator command",
]


@pytest.mark.parametrize("text", DENIED)
def test_wrong_keys_and_missing_rights_need_an_operator(text: str) -> None:
    failure = explain("load table t", OSError(text))
    assert isinstance(failure, ConfigurationError)
    assert str(failure).startswith("load table t: ")
    assert "; check " in str(failure)


@pytest.mark.parametrize("text", AWAY)
def test_an_unreachable_service_is_a_transient_error(text: str) -> None:
    failure = explain_text("load table t", text)
    assert type(failure) is Transient
    assert str(failure) == f"load table t: {text} (transient, try again)"


@pytest.mark.parametrize(
    ("text", "check"),
    [
        (
            "UnauthorizedError: NotAuthorizedException: no",
            "check catalog.properties: token or credential",
        ),
        ("OAuthError: invalid_client: bad", "check catalog.properties: token or credential"),
        (
            "org.apache.kafka.common.KafkaException: javax.security.auth.login.LoginException: "
            "The response code 401 and error response {invalid_client} was encountered reading the "
            "token endpoint response; will not attempt further retries",
            "check kafka.security: the keys sasl.oauthbearer.*",
        ),
        (
            "org.apache.kafka.common.errors.SaslAuthenticationException: An error: "
            "(javax.security.sasl.SaslException: Failed to find AWS IAM Credentials)",
            "check kafka.security: aws.profile",
        ),
        (
            "org.apache.kafka.common.KafkaException: javax.security.auth.login.LoginException: "
            "Unable to obtain password from user",
            "check kafka.security: the keys sasl.kerberos.*",
        ),
        (
            "javax.security.auth.login.LoginException: Could not login: the client is being asked "
            "for a password, but the Kafka client code does not currently support obtaining a "
            "password from the user.",
            "check kafka.security: the keys sasl.kerberos.*",
        ),
        (
            "org.apache.kafka.common.config.ConfigException: Invalid value "
            "software.amazon.msk.auth.iam.IAMClientCallbackHandler for configuration "
            "sasl.client.callback.handler.class: Class "
            "software.amazon.msk.auth.iam.IAMClientCallbackHandler could not be found.",
            "`anabranch jars --spark-submit`",
        ),
        (
            "An error occurred (AccessDeniedException) when calling the GetTable operation: User: "
            "arn:aws:iam::1:user/u is not authorized to perform: glue:GetTable on resource: "
            "arn:aws:glue:eu-west-1:1:catalog",
            "check the keys of the standard AWS chain, and what they may do in Glue",
        ),
    ],
)
def test_the_error_names_a_catalog_that_refuses_access(text: str, check: str) -> None:
    failure = explain_text("open catalog lake", text)
    assert isinstance(failure, ConfigurationError)
    assert check in str(failure)


def test_a_signature_refused_for_its_time_is_no_wrong_key() -> None:
    failure = explain_text(
        "ask the time",
        "An error occurred (403) when calling the GetObject operation: RequestTimeTooSkewed",
    )
    assert type(failure) is Transient
    assert str(failure).endswith("; set this machine's clock (NTP)")


@pytest.mark.parametrize(
    ("service", "said"),
    [
        (
            "S3",
            "An error occurred (ExpiredToken) when calling the DeleteObjects operation: The "
            "provided token has expired.",
        ),
        (
            "S3",
            "When uploading object with key 'a' in bucket 'b': AWS Error UNKNOWN (HTTP status "
            "400) during PutObject operation: Unable to parse ExceptionName: ExpiredToken "
            "Message: The provided token has expired.",
        ),
        (
            "S3",
            "software.amazon.awssdk.services.s3.model.S3Exception: The provided token has "
            "expired. (Service: S3, Status Code: 400, Request ID: 4442587FB7D0A2F9)",
        ),
        (
            "Glue",
            "An error occurred (ExpiredTokenException) when calling the GetTable operation: The "
            "security token included in the request is expired",
        ),
        (
            "Glue",
            "software.amazon.awssdk.services.glue.model.GlueException: The security token "
            "included in the request is expired (Service: Glue, Status Code: 400, Request ID: "
            "5d1b)",
        ),
    ],
    ids=["botocore", "pyarrow", "java", "botocore of Glue", "java of Glue"],
)
def test_keys_that_have_expired_may_be_renewed(service: str, said: str) -> None:
    failure = explain("delete 2 objects", RuntimeError(said))
    assert type(failure) is Transient
    assert f"; renew the temporary keys of {service}; " in str(failure)


def test_a_records_words_about_a_token_are_no_expired_keys() -> None:
    trace = (
        "An error occurred.\n: org.apache.Some: cannot cast to INT: 'The provided token has "
        "expired.'\n"
    )
    assert type(explain("decode", RuntimeError(trace))) is Unexplained


@pytest.mark.parametrize(
    "said",
    [
        (
            "SSL validation failed for https://s3.example.com/b [SSL: CERTIFICATE_VERIFY_FAILED] "
            "certificate verify failed"
        ),
        (
            "When reading information for key 'a' in bucket 'b': AWS Error NETWORK_CONNECTION "
            "during HeadObject operation: curlCode: 60, SSL peer certificate or SSH remote key "
            "was not OK"
        ),
        (
            "AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 77, Problem with "
            "the SSL CA cert (path? access rights?); Details: error adding trust anchors from "
            "file: /etc/ca.pem"
        ),
        (
            "software.amazon.awssdk.core.exception.SdkClientException: Unable to execute HTTP "
            "request: PKIX path building failed: unable to find valid certification path to "
            "requested target"
        ),
    ],
    ids=["botocore", "pyarrow", "no file", "java"],
)
def test_a_certificate_of_s3_that_is_not_trusted_needs_an_operator(said: str) -> None:
    failure = explain("read s3://b/a", OSError(said))
    assert type(failure) is ConfigurationError
    assert "; check s3.ca, for Spark the trust store of Java too" in str(failure)


def test_an_error_of_ours_stays_itself() -> None:
    refused = Refused("no")
    assert explain("load table t", refused) is refused


def test_the_cause_of_an_error_counts_too() -> None:
    error = RuntimeError("could not load")
    error.__cause__ = OSError(DENIED[0])
    assert isinstance(explain("load table t", error), ConfigurationError)


@pytest.mark.parametrize(
    "said",
    [
        (
            "java.io.FileNotFoundException: /tmp/spark/blockmgr-1/0c/temp_shuffle_1 (No space "
            "left on device)"
        ),
        "org.apache.hadoop.fs.FSError: java.io.IOException: No space left on device",
        (
            "java.nio.file.FileSystemException: /tmp/checkpoint/offsets/.7.tmp: No space left on "
            "device"
        ),
        "java.io.IOException: Disk quota exceeded",
    ],
)
def test_a_full_disk_is_retried_and_the_message_has_a_remedy(said: str) -> None:
    trace = (
        "An error occurred while calling o63.append.\n: org.apache.Some: Job aborted\nCaused by: "
        f"{said}\n\tat x\n"
    )
    failure = explain("publish a micro-batch", RuntimeError(trace))
    assert type(failure) is Transient
    assert "; make room: `anabranch doctor` names the folder" in str(failure)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_path_that_this_user_may_not_write_is_not_tried_again(number: int) -> None:
    error = explain("write the answer", OSError(number, os.strerror(number), "/root/x.csv"))
    assert type(error) is ConfigurationError
    assert "/root/x.csv" in str(error) and "choose another path, or let user" in str(error)


def test_a_records_words_about_a_disk_are_no_full_disk() -> None:
    trace = "An error occurred.\n: org.apache.Some: cannot cast to INT: 'No space left on device'\n"
    assert type(explain("decode", RuntimeError(trace))) is Unexplained


def test_the_reported_line_is_the_innermost_cause() -> None:
    trace = (
        "An error occurred while calling o63.append.\n"
        ": org.apache.spark.SparkException: Job aborted\n\tat org.apache.Some.thing(Some.java:1)\n"
        "Caused by: java.io.UncheckedIOException: Failed\n\t... 1 more\n"
        "Caused by: java.net.ConnectException: Connection refused\n\tat java.base/x\n"
    )
    assert cause_line(trace) == "java.net.ConnectException: Connection refused"
    assert (
        cause_line(trace.partition("Caused by")[0])
        == "org.apache.spark.SparkException: Job aborted"
    )
    assert cause_line("") == "no message"
    assert cause_line("KafkaConnectionError: KafkaConnectionError: socket disconnected") == (
        "KafkaConnectionError: socket disconnected"
    )


_WORKERS = """
  An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "speed_layer/fast_staging.py", line 153, in run
    yield _tell(files.close(), seen, left)

          ^^^^^^^^^^^^^
  File "pyarrow/io.pxi", line 194, in pyarrow.lib.NativeFile.close
{error}

JVM stacktrace:
org.apache.spark.api.python.PythonException: Traceback (most recent call last)
\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:1)
"""


@pytest.mark.parametrize(
    "error, kind",
    [
        (
            "OSError: [Errno 28] Error writing bytes to file. Detail: No space left on device",
            Transient,
        ),
        (
            "OSError: When uploading object with key 'k' in bucket 'b': AWS Error SLOW_DOWN "
            "during PutObject",
            Transient,
        ),
        (
            "OSError: When uploading object: AWS Error ACCESS_DENIED during PutObject operation",
            ConfigurationError,
        ),
        ("PermissionError: [Errno 13] Failed to open local file '/lake/x'", Unexplained),
        ("AssertionError: a fault of ours", Unexplained),
    ],
)
def test_the_error_of_a_python_worker_is_reported(error: str, kind: type[AnabranchError]) -> None:
    for text in (
        _WORKERS,
        f"Job aborted: {_WORKERS}\nCaused by: java.lang.Other: Of no use\n\tat x",
    ):
        failure = explain("publish a micro-batch", RuntimeError(text.format(error=error)))
        assert type(failure) is kind
        assert error in str(failure) and "stack trace" not in str(failure)
        assert "Of no use" not in str(failure)


def test_a_cause_that_is_only_a_class_of_javas_is_enough() -> None:
    trace = (
        "An error occurred while calling o63.append.\n: org.apache.Some: Job aborted\nCaused by: "
        "java.io.EOFException\n"
    )
    assert one_line(RuntimeError(trace)) == "java.io.EOFException"


def test_sparks_wrapping_of_a_cause_is_left_out() -> None:
    text = (
        "[STREAM_FAILED] Query [id = d726a90c, runId = f5f503da] terminated with exception: "
        "org.apache.kafka.common.errors.TimeoutException: Timed out waiting for a node "
        "assignment. Call: listNodes SQLSTATE: XXKST"
    )
    cause = (
        "org.apache.kafka.common.errors.TimeoutException: Timed out waiting for a node "
        "assignment. Call: listNodes"
    )
    assert str(explain("publish", RuntimeError(text))) == (
        f"publish: {cause} (transient, try again)"
    )


@pytest.mark.parametrize(
    "text",
    [
        'The column "nope" does not exist',
        "[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `nope` cannot be resolved",
        (
            "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage "
            "1.0 failed 1 times, most recent failure: "
            "org.apache.spark.SparkNumberFormatException: [CAST_INVALID_INPUT] The value 'x'"
        ),
    ],
)
def test_errors_that_rows_cause_are_no_service_errors(text: str) -> None:
    assert not is_away(text)


def test_reading_files_raises_errors_of_ours() -> None:
    expected = "read the manifests of t: OSError: gone"
    with pytest.raises(Transient, match=expected), lake_errors("read the manifests of t"):
        raise OSError("gone")


# The errors as Spark 4.1 passes them to the driver's Python.
_OVERFLOW = (
    "org.apache.spark.SparkArithmeticException: [ARITHMETIC_OVERFLOW] long overflow. Use 'try_multiply' to tolerate "
    'overflow and return NULL instead. If necessary set "spark.sql.ansi.enabled" to "false" to bypass this error. '
    "SQLSTATE: 22003"
)
_IN_A_TASK = (
    "[STREAM_FAILED] Query [id = d726a90c, runId = f5f503da] terminated with exception: Job "
    "aborted due to stage failure: Task 0 in stage 1.0 failed 1 times, most recent failure: Lost "
    "task 0.0 in stage 1.0 (TID 1) (host executor driver): java.lang.ArithmeticException: long "
    "overflow\n\tat java.base/java.lang.Math.multiplyExact(Math.java:1004)\n\tat "
    "software.amazon.awssdk.services.s3.DefaultS3Client.getObject(DefaultS3Client.java:1)\n"
)


@pytest.mark.parametrize(
    "text",
    [
        _OVERFLOW,
        _IN_A_TASK,
        f"org.apache.spark.SparkException: Job aborted\nCaused by: {_OVERFLOW}\n\tat x\n",
        (
            "Caused by: org.apache.kafka.common.errors.RecordTooLargeException: There are some "
            "messages at [Partition=Offset]: {t-0=3} whose size is larger than the fetch size "
            "1048576 and hence cannot be returned."
        ),
        (
            "java.lang.StackOverflowError\n\tat "
            "org.apache.spark.sql.catalyst.expressions.Or.x(Or.scala:1)"
        ),
        (
            "org.apache.spark.sql.catalyst.ExtendedAnalysisException: [UNRESOLVED_ROUTINE] Cannot "
            "resolve `from_avro`"
        ),
        (
            "org.apache.spark.sql.catalyst.parser.ParseException: \n[PARSE_SYNTAX_ERROR] Syntax "
            "error at or near 'FROM'"
        ),
    ],
)
def test_errors_that_records_cause_each_time_are_not_retried(text: str) -> None:
    failure = explain("publish a micro-batch", RuntimeError(text))
    assert (type(failure), failure.exit_code) == (Unexpected, 70)
    assert str(failure).startswith("publish a micro-batch: ")


@pytest.mark.parametrize(
    "error",
    [
        OverflowError("date value out of range"),
        TypeError("no"),
        AttributeError("no"),
        RecursionError("deep"),
    ],
)
def test_errors_of_the_program_are_not_retried(error: Exception) -> None:
    assert type(explain("run the job", error)) is Unexpected


@pytest.mark.parametrize(
    "error",
    [
        ValueError("year 58692 is out of range"),
        KeyError("speed"),
        RuntimeError(
            "org.apache.spark.sql.AnalysisException: [UNRESOLVED_COLUMN.WITH_SUGGESTION] A column "
            "with name `nope` cannot be resolved. SQLSTATE: 42703"
        ),
        RuntimeError(
            "org.apache.spark.sql.AnalysisException: "
            "[INCOMPATIBLE_DATA_FOR_TABLE.CANNOT_FIND_DATA] Cannot write incompatible data for "
            "the table `lake`.`games`.`events`: Cannot find data for the output column `level`."
        ),
        RuntimeError(
            "org.apache.spark.sql.AnalysisException: [TABLE_OR_VIEW_NOT_FOUND] The table cannot "
            "be found."
        ),
        RuntimeError(
            "org.apache.spark.sql.AnalysisException: [_LEGACY_ERROR_TEMP_1181] Stream-stream join"
        ),
        RuntimeError(
            "org.apache.spark.SparkException: Job aborted\nCaused by: java.lang.OutOfMemoryError: "
            "Java heap space"
        ),
        FileNotFoundError(
            2, "No such file or directory", "/tmp/anabranch-checkpoint-07ozd8v3/offsets/4"
        ),
        PermissionError(13, "Permission denied"),
        MemoryError(),
    ],
)
def test_an_unexplained_error_is_retried_a_few_times(error: Exception) -> None:
    failure = explain("run stream s", error)
    # A command tries once, so its next run may succeed; an error that reaches the end of the
    # program is permanent.
    assert (type(failure), failure.exit_code) == (Unexplained, 75)
    assert classify_unexpected("run the job", error).exit_code == 70
    assert "a few times only" in str(failure)


def _of(module: str, name: str, *arguments: object) -> Exception:
    """A real error of a library, as its client raises it."""
    kind: type[Exception] = getattr(importlib.import_module(module), name)
    return kind(*arguments)


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [
        ("kafka.errors", "KafkaTimeoutError", ("x",)),
        ("kafka.errors", "NotLeaderForPartitionError", ("x",)),
        ("kafka.errors", "UnknownTopicOrPartitionError", ("x",)),
        ("sqlalchemy.exc", "OperationalError", ("SELECT 1", {}, Exception("database is locked"))),
        ("sqlalchemy.exc", "TimeoutError", ("QueuePool limit",)),
        ("pyiceberg.exceptions", "ServiceUnavailableError", ("x",)),
        ("pyiceberg.exceptions", "CommitStateUnknownException", ("x",)),
        ("requests.exceptions", "ConnectionError", ("x",)),
        ("urllib3.exceptions", "ProtocolError", ("x",)),
        ("http.client", "IncompleteRead", (b"",)),
        ("builtins", "ConnectionResetError", (104, "reset")),
        ("builtins", "OSError", (28, "No space left on device")),
    ],
)
def test_a_clients_error_has_a_type(module: str, name: str, arguments: tuple[object, ...]) -> None:
    assert type(explain("ask", _of(module, name, *arguments))) is Transient


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("kafka.errors", "UnsupportedVersionError"),
        ("kafka.errors", "InvalidTopicError"),
        ("pyiceberg.exceptions", "BadRequestError"),
        ("sqlalchemy.exc", "ArgumentError"),
    ],
)
def test_a_permanent_error_of_a_client_is_not_retried(module: str, name: str) -> None:
    assert type(explain("ask", _of(module, name, "x"))) is Unexplained


@pytest.mark.parametrize(
    ("status", "kind"), [(500, Transient), (503, Transient), (429, Transient), (400, Unexplained)]
)
def test_aws_is_read_by_its_status(status: int, kind: type[Exception]) -> None:
    answer = {
        "Error": {"Code": "SomethingOfGlues", "Message": "x"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    found = type(explain("ask Glue", _of("botocore.exceptions", "ClientError", answer, "GetTable")))
    assert found is kind


def test_a_connection_that_was_cut_may_come_back_whatever_the_driver_calls_it() -> None:
    cut = _of("sqlalchemy.exc", "DatabaseError", "COMMIT", {}, Exception("PGRES_TUPLES_OK"))
    assert type(explain("load table t", cut)) is Unexplained
    cut.connection_invalidated = True  # type: ignore[attr-defined]
    assert type(explain("load table t", cut)) is Transient


def test_an_analysis_that_failed_with_the_catalog_down_is_transient() -> None:
    text = (
        "org.apache.spark.sql.AnalysisException: [UNRESOLVED_ROUTINE] no\nCaused by: "
        "java.net.ConnectException: no\n"
    )
    assert classify_text(text) is Meaning.PASSES


def test_a_frame_of_a_stack_trace_is_no_cause() -> None:
    text = (
        "java.lang.IllegalStateException: no\n\tat java.net.Socket.connect(Socket.java:1)\n\t... "
        "8 more\n"
    )
    assert classify_text(text) is Meaning.UNKNOWN
    found = classify_text(f"{text}Caused by: java.net.ConnectException: Connection refused\n")
    assert found is Meaning.PASSES


def test_the_cause_of_a_python_error_decides() -> None:
    error = RuntimeError("no")
    error.__cause__ = ConnectionResetError("reset")
    assert classify(error) is Meaning.PASSES


def test_a_table_that_changes_while_expectations_read_it_is_no_verdict_on_the_rows() -> None:
    """The hazard: an hour was refused by the quality gate since an ALTER TABLE ran beside it."""
    text = (
        "pyspark.errors.exceptions.captured.AnalysisException: "
        "[INCOMPATIBLE_TABLE_CHANGE_AFTER_ANALYSIS.COLUMNS_MISMATCH] Detected incompatible changes "
        "to table `lake`.`games`.`events` after DataFrame/Dataset has been resolved and analyzed"
    )
    assert is_away(text)
    assert isinstance(explain_text("evaluate the suite s", text), Unexplained)
    assert not is_away(
        text.replace("INCOMPATIBLE_TABLE_CHANGE_AFTER_ANALYSIS", "UNRESOLVED_COLUMN")
    )
