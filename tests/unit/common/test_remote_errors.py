"""Classification of errors of other services, by real texts as their clients write them."""

import errno
import importlib
import os
from pathlib import Path

import pytest
import yaml
from lakes import new_environment
from pydantic import ValidationError
from pyiceberg.catalog.rest import ConfigResponse

from anabranch.common import errors
from anabranch.common.remote_errors import (
    Meaning,
    cause_line,
    classify_text,
    classify_unexpected,
    explain,
    explain_text,
    is_away,
    lake_errors,
    one_line,
)
from anabranch.iceberg.lake import Lake

_FILE = Path(__file__).with_name("remote_errors.yaml")
_CASES = [
    (case["kind"], case["says"], text)
    for case in yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    for text in case["texts"]
]
_EXIT_CODES = {"ConfigurationError": 2, "Unexpected": 70, "Transient": 75, "Unexplained": 75}


@pytest.mark.parametrize(("kind", "says", "text"), _CASES)
def test_the_text_of_an_error_has_its_meaning(kind: str, says: str, text: str) -> None:
    for failure in (
        explain_text("load table t", text),
        explain("load table t", RuntimeError(text)),
    ):
        assert (type(failure).__name__, failure.exit_code) == (kind, _EXIT_CODES[kind])
        assert str(failure).startswith("load table t: ")
        assert says.replace("{text}", text) in str(failure)


def test_a_catalogs_error_names_the_key_to_check(tmp_path: Path) -> None:
    """A proxy's page to sign in, with status 200."""
    with pytest.raises(ValidationError) as raised:
        ConfigResponse.model_validate_json("<!DOCTYPE html><title>Sign in</title>")
    failure = explain("open catalog lake (rest)", raised.value)
    assert isinstance(failure, errors.Unexplained)
    assert "input_value='<!DOCTYPE html>" in str(failure)
    assert "check that catalog.uri is the address of an Iceberg REST catalog" in str(failure)
    (tmp_path / "catalog.db").write_bytes(b"no database" * 100)
    lake = Lake(new_environment(tmp_path))
    with pytest.raises(errors.Unexplained, match=r"file is not a database; check catalog\.uri: "):
        lake.exists("games.events")


def test_the_cause_of_an_error_and_a_cut_connection_count_too() -> None:
    error = RuntimeError("could not load")
    error.__cause__ = OSError("An error occurred (403) when calling the HeadBucket operation")
    assert isinstance(explain("load table t", error), errors.ConfigurationError)
    error.__cause__ = ConnectionResetError("no")
    assert isinstance(explain("load table t", error), errors.Transient)
    expected = "read the manifests of t: OSError: gone"
    with pytest.raises(errors.Transient, match=expected), lake_errors("read the manifests of t"):
        raise OSError("gone")
    cut = _of("sqlalchemy.exc", "DatabaseError", "COMMIT", {}, Exception("PGRES_TUPLES_OK"))
    assert type(explain("load table t", cut)) is errors.Unexplained
    cut.connection_invalidated = True  # type: ignore[attr-defined]
    assert type(explain("load table t", cut)) is errors.Transient


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_path_that_this_user_may_not_write_is_not_tried_again(number: int) -> None:
    error = explain("write the answer", OSError(number, os.strerror(number), "/root/x.csv"))
    assert type(error) is errors.ConfigurationError
    assert "/root/x.csv" in str(error) and "choose another path, or let user" in str(error)


def test_the_reported_line_is_the_innermost_cause_without_sparks_wrapping() -> None:
    trace = (
        "An error occurred while calling o63.append.\n"
        ": org.apache.spark.SparkException: Job aborted\n\tat org.apache.Some.thing(Some.java:1)\n"
        "Caused by: java.io.UncheckedIOException: Failed\n\t... 1 more\n"
        "Caused by: java.net.ConnectException: Connection refused\n\tat java.base/x\n"
    )
    assert cause_line(trace) == "java.net.ConnectException: Connection refused"
    first = "org.apache.spark.SparkException: Job aborted"
    assert cause_line(trace.partition("Caused by")[0]) == first
    assert cause_line("") == "no message"
    twice = "KafkaConnectionError: KafkaConnectionError: socket disconnected"
    assert cause_line(twice) == "KafkaConnectionError: socket disconnected"
    # A cause that is only a class of Java's is enough.
    of_class = f"{trace.partition('Caused by')[0]}Caused by: java.io.EOFException\n"
    assert one_line(RuntimeError(of_class)) == "java.io.EOFException"
    cause = (
        "org.apache.kafka.common.errors.TimeoutException: Timed out waiting for a node "
        "assignment. Call: listNodes"
    )
    query = "[STREAM_FAILED] Query [id = d726a90c, runId = f5f503da] terminated with exception: "
    error = explain("publish", RuntimeError(f"{query}{cause} SQLSTATE: XXKST"))
    assert str(error) == f"publish: {cause} (transient, try again)"


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
        ("OSError: [Errno 28] Error writing bytes to file. Detail: No space left on device", errors.Transient),
        ("OSError: When uploading object with key 'k' in bucket 'b': AWS Error SLOW_DOWN during PutObject", errors.Transient),
        ("OSError: When uploading object: AWS Error ACCESS_DENIED during PutObject operation", errors.ConfigurationError),
        ("PermissionError: [Errno 13] Failed to open local file '/lake/x'", errors.Unexplained),
        ("AssertionError: a fault of ours", errors.Unexplained),
    ],
)  # fmt: skip
def test_the_error_of_a_python_worker_is_reported(
    error: str, kind: type[errors.AnabranchError]
) -> None:
    wrapped = f"Job aborted: {_WORKERS}\nCaused by: java.lang.Other: Of no use\n\tat x"
    for text in (_WORKERS, wrapped):
        failure = explain("publish a micro-batch", RuntimeError(text.format(error=error)))
        assert type(failure) is kind
        assert error in str(failure) and "stack trace" not in str(failure)
        assert "Of no use" not in str(failure)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Errors that rows cause.
        ('The column "nope" does not exist', False),
        ("[UNRESOLVED_COLUMN.WITH_SUGGESTION] A column with name `nope` cannot be resolved", False),
        (
            "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times, most "
            "recent failure: org.apache.spark.SparkNumberFormatException: [CAST_INVALID_INPUT] The value 'x'", False,
        ),
        # Errors of a job that is stopped.
        (
            "org.apache.spark.SparkException: [SPARK_JOB_CANCELLED] Job 7 cancelled as part of cancellation of all jobs "
            "SQLSTATE: XXKDA", True,
        ),
        ("java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.", True),
    ],
)  # fmt: skip
def test_errors_of_rows_are_not_those_of_a_service_or_a_stop(text: str, expected: bool) -> None:
    assert is_away(text) is expected
    if expected:
        assert isinstance(explain_text("evaluate the suite s", text), errors.Transient)


def _of(module: str, name: str, *arguments: object) -> Exception:
    """A real error of a library, as its client raises it."""
    kind: type[Exception] = getattr(importlib.import_module(module), name)
    return kind(*arguments)


def _of_glue(status: int) -> tuple[object, ...]:
    error, metadata = {"Code": "SomethingOfGlues", "Message": "x"}, {"HTTPStatusCode": status}
    return {"Error": error, "ResponseMetadata": metadata}, "GetTable"


@pytest.mark.parametrize(
    ("module", "name", "arguments", "kind"),
    [
        ("kafka.errors", "KafkaTimeoutError", ("x",), errors.Transient),
        ("kafka.errors", "NotLeaderForPartitionError", ("x",), errors.Transient),
        ("kafka.errors", "UnknownTopicOrPartitionError", ("x",), errors.Transient),
        ("kafka.errors", "UnsupportedVersionError", ("x",), errors.Unexplained),
        ("kafka.errors", "InvalidTopicError", ("x",), errors.Unexplained),
        ("sqlalchemy.exc", "OperationalError", ("SELECT 1", {}, Exception("database is locked")), errors.Transient),
        ("sqlalchemy.exc", "TimeoutError", ("QueuePool limit",), errors.Transient),
        ("sqlalchemy.exc", "ArgumentError", ("x",), errors.Unexplained),
        ("pyiceberg.exceptions", "ServiceUnavailableError", ("x",), errors.Transient),
        ("pyiceberg.exceptions", "CommitStateUnknownException", ("x",), errors.Transient),
        ("pyiceberg.exceptions", "BadRequestError", ("x",), errors.Unexplained),
        ("requests.exceptions", "ConnectionError", ("x",), errors.Transient),
        ("urllib3.exceptions", "ProtocolError", ("x",), errors.Transient),
        ("http.client", "IncompleteRead", (b"",), errors.Transient),
        *(("botocore.exceptions", "ClientError", _of_glue(n), errors.Transient) for n in (500, 503, 429)),
        ("botocore.exceptions", "ClientError", _of_glue(400), errors.Unexplained),
        ("builtins", "ConnectionResetError", (104, "reset"), errors.Transient),
        ("builtins", "OSError", (28, "No space left on device"), errors.Transient),
        ("builtins", "ValueError", ("year 58692 is out of range",), errors.Unexplained),
        ("builtins", "KeyError", ("speed",), errors.Unexplained),
        ("builtins", "FileNotFoundError", (2, "No such file", "/tmp/anabranch-checkpoint-0"), errors.Unexplained),
        ("builtins", "PermissionError", (13, "Permission denied"), errors.Unexplained),
        ("builtins", "MemoryError", (), errors.Unexplained),
        # Errors of the program are not retried.
        ("builtins", "OverflowError", ("date value out of range",), errors.Unexpected),
        ("builtins", "TypeError", ("no",), errors.Unexpected),
        ("builtins", "AttributeError", ("no",), errors.Unexpected),
        ("builtins", "RecursionError", ("deep",), errors.Unexpected),
    ],
)  # fmt: skip
def test_an_error_has_a_type(
    module: str, name: str, arguments: tuple[object, ...], kind: type[errors.AnabranchError]
) -> None:
    error = _of(module, name, *arguments)
    failure = explain("ask", error)
    # A command tries once, so its next run may succeed; what ends a program is permanent.
    assert (type(failure), failure.exit_code) == (kind, _EXIT_CODES[kind.__name__])
    if kind is errors.Unexplained:
        assert "a few times only" in str(failure)
        assert classify_unexpected("run the job", error).exit_code == 70


def test_a_cause_within_a_text_decides_unless_a_table_changed() -> None:
    no = "java.net.ConnectException: no\n"
    text = f"org.apache.spark.sql.AnalysisException: [UNRESOLVED_ROUTINE] no\nCaused by: {no}"
    assert classify_text(text) is Meaning.PASSES
    frames = "\tat java.net.Socket.connect(Socket.java:1)\n\t... 8 more\n"
    text = f"java.lang.IllegalStateException: no\n{frames}"
    assert classify_text(text) is Meaning.UNKNOWN
    found = classify_text(f"{text}Caused by: java.net.ConnectException: Connection refused\n")
    assert found is Meaning.PASSES
    # The hazard: an hour was refused by the quality gate since an ALTER TABLE ran beside it.
    text = (
        "pyspark.errors.exceptions.captured.AnalysisException: "
        "[INCOMPATIBLE_TABLE_CHANGE_AFTER_ANALYSIS.COLUMNS_MISMATCH] Detected incompatible changes "
        "to table `lake`.`games`.`events` after DataFrame/Dataset has been resolved and analyzed"
    )
    assert is_away(text)
    assert isinstance(explain_text("evaluate the suite s", text), errors.Unexplained)
    other = text.replace("INCOMPATIBLE_TABLE_CHANGE_AFTER_ANALYSIS", "UNRESOLVED_COLUMN")
    assert not is_away(other)
