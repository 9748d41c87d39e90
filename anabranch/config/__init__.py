"""Configuration: parsed once, validated once, frozen.

`load_environment` reads `conf/anabranch.yaml`, `load_stream` one file of `conf/streams/`. Any mistake is a
`ConfigurationError` that names file, key, what was expected and what was found. `${NAME}` and `${NAME:-default}`
in a value read the process environment here, and nowhere later.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from anabranch.config import strict_yaml
from anabranch.config.columns import Column, parse_columns
from anabranch.config.format_settings import FormatSettings, check_columns, parse_format
from anabranch.errors import ConfigurationError

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_DURATION = re.compile(r"^\s*(\d+)\s*(second|minute|hour|day|week)s?\s*$")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SQL_URI = re.compile(r"^(sqlite:///.|postgresql\+\w+://.)")
_HTTP_URI = re.compile(r"^https?://[^/\s]")
_NO_URI = re.compile(r"^$")

# What is under these keys is never repeated in a message.
_SECRETS = frozenset({"security", "access_key", "secret_key", "password", "properties"})
_USER_IN_URL = re.compile(r"//[^/@\s]+@")

M = TypeVar("M", bound=BaseModel)

RESERVED_COLUMNS = ("kafka_partition", "kafka_offset", "kafka_timestamp", "ingest_hour", "event_date")


def parse_duration(value: object) -> timedelta:
    """`"2 seconds"`, `"30 days"` … -> timedelta. Raises ValueError for anything else."""
    if isinstance(value, timedelta):
        return value
    match = _DURATION.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected a duration such as '2 seconds', '5 minutes' or '30 days'")
    return timedelta(**{match.group(2) + "s": int(match.group(1))})


def parse_retry_for(value: object) -> timedelta | None:
    """`"15 minutes"` … or `"for ever"`, which is None. Raises ValueError for anything else."""
    if value is None or value == "for ever":
        return None
    try:
        return parse_duration(value)
    except ValueError as error:
        raise ValueError(f"{error}, or 'for ever'") from None


def _name(value: object) -> object:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError("expected a name of letters, digits and underscores")
    return value


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _as_spark_says(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _scalar_as_text(value: object) -> object:
    return _as_spark_says(value) if isinstance(value, bool | int | float) else value


def _plain_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("expected a URL such as 'https://registry.example.com:8081'")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("expected a URL without user, query or fragment (registry.user, registry.password)")
    return value.rstrip("/")


def _a_day_or_more(value: timedelta) -> timedelta:
    if value < timedelta(days=1):
        raise ValueError("expected 1 day or more: what is staged may wait so long to be published")
    return value


Duration = Annotated[timedelta, BeforeValidator(parse_duration)]
RetryFor = Annotated[timedelta | None, BeforeValidator(parse_retry_for)]
Name = Annotated[str, BeforeValidator(_name)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=False)


class Kafka(_Frozen):
    """Where the brokers are. `security` holds Kafka's own client properties (`security.protocol`, `sasl.*`)."""

    bootstrap_servers: str = Field(min_length=1)
    security: dict[str, SecretStr] = {}


class Catalog(_Frozen):
    """The Iceberg catalog. `properties` go to both its clients unchanged, so REST or Glue are configuration alone; they
    may hold a token, and `uri` a password."""

    name: Name
    type: Literal["sql", "rest", "glue"] = "sql"
    uri: str = Field(default="", repr=False, validate_default=True)
    warehouse: str = Field(pattern=r"^(s3|file)://")
    properties: dict[str, Annotated[SecretStr, BeforeValidator(_scalar_as_text)]] = {}

    @field_validator("uri")
    @classmethod
    def _of_its_type(cls, value: str, info: ValidationInfo) -> str:
        expected = {
            "sql": (_SQL_URI, "sqlite:///FILE or postgresql+psycopg2://USER:PASSWORD@HOST/DATABASE"),
            "rest": (_HTTP_URI, "the address of the REST catalog, such as https://catalog.example.com/api/catalog"),
            "glue": (_NO_URI, "none for type glue (catalog.properties: glue.endpoint, where it is not AWS)"),
        }.get(info.data.get("type", ""))
        if expected is not None and not expected[0].match(value):
            raise ValueError(f"expected {expected[1]}")
        return value


class S3(_Frozen):
    """The object store. Without keys the standard AWS chain decides; without an endpoint it is AWS itself."""

    endpoint: str | None = None
    region: str = "us-east-1"
    access_key: SecretStr | None = None
    secret_key: SecretStr | None = None


class Spark(_Frozen):
    """Where Spark runs and what it is told, key by key."""

    master: str = "local[*]"
    conf: dict[str, str] = {}

    @model_validator(mode="before")
    @classmethod
    def _text(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("conf"), dict):
            data = data | {"conf": {k: _as_spark_says(v) for k, v in data["conf"].items()}}
        return data


class Registry(_Frozen):
    """The schema registry of formats in Confluent's wire format: its REST API, and who asks, if it wants to know."""

    url: Annotated[str, AfterValidator(_plain_url)]
    user: str | None = Field(default=None, min_length=1)
    password: SecretStr | None = None

    @field_validator("password")
    @classmethod
    def _of_a_user(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if value is not None and info.data.get("user") is None:
            raise ValueError("expected registry.user beside it")
        return value


class Environment(_Frozen):
    """`conf/anabranch.yaml`: everything that differs between a laptop and production."""

    kafka: Kafka
    catalog: Catalog
    s3: S3 = S3()
    spark: Spark = Spark()
    registry: Registry | None = None


class EventTime(_Frozen):
    """The event's own time; `past` and `future` bound it, measured from the record's ingest hour."""

    column: Name
    past: Duration | None = None
    future: Duration | None = None


class Speed(_Frozen):
    """How the speed layer runs. `lost_offsets`: what to do when retention has overtaken the position.

    `retry_for`: how long a transient error is tried again while nothing is published; None is for ever. `roll_up`:
    whether the small files of an hour are put together while it runs.
    """

    trigger: Duration = timedelta(seconds=2)
    max_offsets_per_trigger: int = Field(default=250_000, gt=0)
    lost_offsets: Literal["stop", "continue"] = "stop"
    retry_for: RetryFor = None
    roll_up: bool = True


Gap = Literal["control", "aborted", "compacted", "retention"]


class Batch(_Frozen):
    """How the batch layer decides. `allow_gaps`: the classes of missing offsets that an hour may hold.

    `retry_for`: how long a transient error of one hour is tried again before the job ends; None is for ever.
    """

    grace: Duration = timedelta(minutes=2)
    lookback_hours: int = Field(default=1, ge=0, le=168)
    allow_gaps: tuple[Gap, ...] = ("control", "aborted")
    retry_for: RetryFor = timedelta(minutes=15)


class Files(_Frozen):
    """How an hour's files are written. `target`: the bytes that a file of the batch layer is to have at most."""

    target: Annotated[ByteSize, Field(ge=1_000_000)] = ByteSize(256_000_000)


class Maintain(_Frozen):
    """What `anabranch maintain` clears away. `orphans_after`: files that nothing refers to, older than the longest that
    a writer takes or pauses before it stages them. `speed_hours`: the speed layer's rows of hours that the batch layer
    has served for so long."""

    orphans_after: Annotated[Duration, AfterValidator(_a_day_or_more)] = timedelta(days=3)
    speed_hours: Duration = timedelta(days=1)


def _an_hour(value: object) -> object:
    if not isinstance(value, str) or not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d", value):
        raise ValueError("expected an hour such as 2026-11-21T03")
    return value


class Airflow(_Frozen):
    """What the DAG files read. `start`: the first hour that Airflow catches up; without it, only hours that end from
    now on. `speed_restart`: the command that starts a speed layer that is late, where Airflow owns it; without it, the
    watching DAG fails."""

    owner: str = "anabranch"
    start: Annotated[str, BeforeValidator(_an_hour)] | None = None
    speed_late_after: Duration = timedelta(minutes=10)
    speed_restart: str | None = None


class Stream(_Frozen):
    """One Kafka topic, its schema, its rules and its tables: one file under `conf/streams/`."""

    name: Name
    topic: str = Field(pattern=r"^[A-Za-z0-9._-]{1,249}$")
    table: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*$")
    format: Annotated[FormatSettings, BeforeValidator(parse_format)] = FormatSettings()
    ddl: str = Field(alias="schema")
    columns: tuple[Column, ...]
    key: Annotated[tuple[Name, ...], BeforeValidator(_one_or_many), Field(min_length=1)]
    event_time: EventTime | None = None
    start: Literal["earliest", "latest"] = "earliest"
    speed: Speed = Speed()
    batch: Batch = Batch()
    files: Files = Files()
    maintain: Maintain = Maintain()
    airflow: Airflow = Airflow()
    expectations: Path | None = None

    @property
    def dead_letters_table(self) -> str:
        return f"{self.table}_dead_letters"

    @property
    def hours_table(self) -> str:
        return f"{self.table}_hours"

    @property
    def most_event_dates(self) -> int | None:
        """On how many dates the events of one ingest hour can lie; None when nothing bounds it: where a record has no
        event time, its date is what its producer stamped."""
        bounds = self.event_time
        if bounds is None or bounds.past is None or bounds.future is None:
            return None
        if any(c.nullable for c in self.columns if c.name == bounds.column):
            return None
        return (bounds.past + bounds.future + timedelta(hours=1)) // timedelta(days=1) + 2

    @model_validator(mode="after")
    def _columns_exist(self) -> Stream:
        by_name = {column.name: column for column in self.columns}
        if taken := [name for name in by_name if name.lower() in RESERVED_COLUMNS]:
            raise ValueError(f"schema: expected names other than {', '.join(RESERVED_COLUMNS)}, found {taken[0]}")
        check_columns(self.format, self.columns)
        for name in self.key:
            if name not in by_name:
                raise ValueError(f"key: expected a column of the schema, found {name!r}")
            if "map<" in by_name[name].type:
                # Neither Spark nor DuckDB compares maps.
                raise ValueError(
                    f"key: expected columns that can be compared, found {name} {by_name[name].type.upper()}"
                )
        if self.event_time is not None:
            column = by_name.get(self.event_time.column)
            if column is None or column.type != "timestamp":
                raise ValueError(
                    f"event_time.column: expected a TIMESTAMP column of the schema, found {self.event_time.column!r}"
                )
        return self


def resolve_folder(folder: str | Path | None = None) -> Path:
    """The configuration folder: the argument, else `ANABRANCH_CONF`, else `conf`."""
    return Path(folder or os.environ.get("ANABRANCH_CONF") or "conf")


def load_environment(folder: str | Path | None = None) -> Environment:
    """Read `anabranch.yaml` of the configuration folder. Raises ConfigurationError."""
    path = resolve_folder(folder) / "anabranch.yaml"
    return _validated(path, Environment, _read(path))


def stream_names(folder: str | Path | None = None) -> tuple[str, ...]:
    """The streams that the configuration folder holds, sorted."""
    paths = (resolve_folder(folder) / "streams").glob("*.yaml")
    return tuple(sorted(p.stem for p in paths if not p.stem.endswith(".expectations")))


def load_stream(name: str, folder: str | Path | None = None) -> Stream:
    """Read `streams/<name>.yaml` of the configuration folder. Raises ConfigurationError."""
    folder = resolve_folder(folder)
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"stream: expected a name of letters, digits and underscores, found {name!r}")
    path = folder / "streams" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(stream_names(folder)) or "none"
        raise ConfigurationError(f"stream {name!r}: expected the file {path}, found none (known streams: {known})")
    data = _read(path)
    try:
        columns = parse_columns(data.get("schema"))
    except ValueError as error:
        raise ConfigurationError(f"{path}: schema: {error}") from error
    data = data | {"name": name, "columns": columns}
    if isinstance(data.get("expectations"), str):
        data["expectations"] = path.parent / data["expectations"]
        if not data["expectations"].is_file():
            raise ConfigurationError(f"{path}: expectations: expected the file {data['expectations']}, found none")
    stream = _validated(path, Stream, data)
    if stream.format.needs_registry and load_environment(folder).registry is None:
        raise ConfigurationError(
            f"{folder / 'anabranch.yaml'}: registry: expected the url of a schema registry, which format "
            f"{stream.format.type} of stream {name} needs, found none"
        )
    return stream


def _read(path: Path) -> dict[str, Any]:
    try:
        data = strict_yaml.load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(
            f"{path}: expected a configuration file, found none (choose the folder with --conf)"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path}: expected readable YAML, found: {error}") from error
    if not isinstance(data, dict):
        raise ConfigurationError(f"{path}: expected a mapping of keys, found {type(data).__name__}")
    substituted: dict[str, Any] = _substitute(path, "", data)
    return substituted


def _substitute(path: Path, key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _substitute(path, f"{key}.{k}".lstrip("."), v) for k, v in value.items()}
    if isinstance(value, list):
        return [_substitute(path, f"{key}[{i}]", v) for i, v in enumerate(value)]
    if not isinstance(value, str):
        return value

    def lookup(match: re.Match[str]) -> str:
        name, default = match.groups()
        replacement = os.environ.get(name, default)
        if replacement is None:
            raise ConfigurationError(f"{path}: {key}: expected the environment variable {name}, found it unset")
        return replacement

    return _REFERENCE.sub(lookup, value)


def _validated(path: Path, model: type[M], data: dict[str, Any]) -> M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = ".".join(str(part) for part in problem["loc"])
            message = problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "extra_forbidden":
                message = (
                    f"expected one of {', '.join(sorted(model.model_fields))}" if "." not in key else "unknown key"
                )
            suffix = "" if problem["type"] in ("missing",) or not key else f", found {problem['input']!r}"
            if not _SECRETS.isdisjoint(problem["loc"]):
                suffix = f", found {type(problem['input']).__name__}"
            suffix = _USER_IN_URL.sub("//…@", suffix)
            lines.append(f"{path}: {key + ': ' if key else ''}{message}{suffix}")
        raise ConfigurationError("\n".join(lines)) from None
