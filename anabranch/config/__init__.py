"""Configuration: parsed once, validated once, frozen.

`load_environment` reads `conf/anabranch.yaml`, `load_stream` one file of `conf/streams/`. Any mistake is a
`ConfigurationError` that names file, key, what was expected and what was found. `${NAME}` and `${NAME:-default}`
in a value read the process environment here, and nowhere later.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
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

from anabranch.common.errors import ConfigurationError
from anabranch.common.redaction import remember
from anabranch.config import strict_yaml
from anabranch.config.columns import RESCUED, Column, parse_columns
from anabranch.config.durations import parse_duration
from anabranch.config.egress import Target, check_targets
from anabranch.config.format_settings import FormatSettings, check_columns, parse_format
from anabranch.config.mistakes import REFERENCE, explain_mistakes, explain_yaml, unknown_key
from anabranch.config.secrets import secrets_of
from anabranch.config.views import (
    PARTIALS,
    Aggregate,
    Partial,
    check_view,
    definition_digest,
    parse_aggregate,
    partials_of,
)

LOG = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SQL_URI = re.compile(r"^(sqlite:///.|postgresql\+\w+://.)")
_HTTP_URI = re.compile(r"^https?://[^/@\s]+(/[^@\s]*)?$")
_NO_URI = re.compile(r"^$")

M = TypeVar("M", bound=BaseModel)

# Parquet has none for BOOLEAN. Of FLOAT and DOUBLE, 0.0 equals -0.0, and a filter tells them apart.
_BLOOM_TYPES = ("string", "int", "bigint", "decimal", "date", "timestamp", "binary")

RESERVED_COLUMNS = ("kafka_partition", "kafka_offset", "kafka_timestamp", "ingest_hour", "event_date")


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


def _each_once(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) < len(value):
        raise ValueError("expected each column once")
    return value


def _as_spark_says(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _scalar_as_text(value: object) -> object:
    return _as_spark_says(value) if isinstance(value, bool | int | float) else value


def _plain_url(value: str) -> str:
    return _web_address(value, "https://registry.example.com:8081", "registry.user, registry.password")


def _web_address(value: str, example: str, secrets: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"expected a URL such as '{example}'")
    if "@" in value or parts.query or parts.fragment:
        raise ValueError(f"expected a URL without user, query or fragment ({secrets})")
    return value.rstrip("/")


def _page_url(value: str) -> str:
    if urlsplit(value).scheme not in ("http", "https"):
        raise ValueError("expected the address of `anabranch serve` as people reach it")
    return value.rstrip("/")


def _a_day_or_more(value: timedelta) -> timedelta:
    if value < timedelta(days=1):
        raise ValueError("expected 1 day or more: what is staged may wait so long to be published")
    return value


Duration = Annotated[timedelta, BeforeValidator(parse_duration)]
RetryFor = Annotated[timedelta | None, BeforeValidator(parse_retry_for)]
Name = Annotated[str, BeforeValidator(_name)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_one_or_many), AfterValidator(_each_once)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def _brokers(value: str) -> str:
    for broker in value.split(","):
        port = broker.strip().rpartition(":")[2]
        if ":" not in broker or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ValueError("expected HOST:PORT of each broker, such as broker-1.example.com:9092")
    return value


class Kafka(_Frozen):
    """Where the brokers are. `security` holds Kafka's own client properties (`security.protocol`, `sasl.*`),
    `client_rack` is the one of that name (KIP-392)."""

    bootstrap_servers: Annotated[str, AfterValidator(_brokers)] = Field(min_length=1)
    client_rack: str = ""
    security: dict[str, SecretStr] = {}


class Catalog(_Frozen):
    """The Iceberg catalog. `properties` go to both its clients unchanged, so REST or Glue are configuration alone; they
    may hold a token, and `uri` a password."""

    name: Name
    type: Literal["sql", "rest", "glue"] = "sql"
    uri: str = Field(default="", repr=False, validate_default=True)
    warehouse: str = Field(pattern=r"^(s3|file)://")
    properties: dict[str, Annotated[SecretStr, BeforeValidator(_scalar_as_text)]] = {}

    @field_validator("warehouse")
    @classmethod
    def _one_place_for_all_clients(cls, value: str) -> str:
        # PyIceberg and Iceberg's S3 client end a location there, and Hadoop does not: files would lie in two folders.
        if found := next((character for character in "?#" if character in value), None):
            raise ValueError(f"expected a location without {found!r}: Iceberg's clients end a location there")
        return value

    @field_validator("uri")
    @classmethod
    def _of_its_type(cls, value: str, info: ValidationInfo) -> str:
        expected = {
            "sql": (_SQL_URI, "sqlite:///FILE or postgresql+psycopg2://USER:PASSWORD@HOST/DATABASE"),
            "rest": (
                _HTTP_URI,
                "the address of the REST catalog without user, such as https://catalog.example.com/api/catalog",
            ),
            "glue": (_NO_URI, "none for type glue (catalog.properties: glue.endpoint, where it is not AWS)"),
        }.get(info.data.get("type", ""))
        if expected is not None and not expected[0].match(value):
            raise ValueError(f"expected {expected[1]}")
        return value


def _s3_endpoint(value: str) -> str:
    if "@" in value:
        raise ValueError("expected an address without user (s3.access_key, s3.secret_key)")
    return value


class S3(_Frozen):
    """The object store. Without keys the standard AWS chain decides; without an endpoint it is AWS itself."""

    endpoint: Annotated[str, AfterValidator(_s3_endpoint)] | None = None
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


def _search_url(value: str) -> str:
    return _web_address(value, "https://search.example.com:9200", "search.user and search.password, or search.api_key")


class Search(_Frozen):
    """Elasticsearch or OpenSearch, for egress: its address, and who asks, by password or by API key. `ca` is a file of
    certificates to trust, in place of the usual ones."""

    url: Annotated[str, AfterValidator(_search_url)]
    user: str | None = Field(default=None, min_length=1)
    password: SecretStr | None = None
    api_key: SecretStr | None = None
    ca: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_way_to_ask(self) -> Search:
        if (self.user is None) != (self.password is None):
            raise ValueError("expected search.user and search.password, or neither")
        if self.user is not None and self.api_key is not None:
            raise ValueError("expected search.user or search.api_key, found both")
        return self


def _hdfs_url(value: str) -> str:
    return _web_address(value, "http://namenode.example.com:9870", "hdfs.user and hdfs.password")


class Hdfs(_Frozen):
    """HDFS, for egress, by WebHDFS: the address of the name node, of HttpFS or of a gateway, above `/webhdfs/v1`; as
    whom files are written, with a password where a gateway asks for one. `ca` as of `search`."""

    url: Annotated[str, AfterValidator(_hdfs_url)]
    user: str = Field(default="anabranch", min_length=1)
    password: SecretStr | None = None
    ca: str | None = Field(default=None, min_length=1)


class Webhook(_Frozen):
    """Where each change of an hour's state is posted, with which headers; the status page that a message links to, and
    within what time a receiver has to answer. The URL itself may be a secret."""

    url: SecretStr
    headers: dict[str, SecretStr] = {}
    page: Annotated[str, AfterValidator(_page_url)] | None = None
    within: Duration = timedelta(seconds=5)

    def __hash__(self) -> int:
        # Streams are hashed, and no dict is.
        return hash((self.url, *self.headers.items(), self.page, self.within))

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: SecretStr) -> SecretStr:
        parts = urlsplit(value.get_secret_value())
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected a URL such as 'https://hooks.example.com/anabranch'")
        return value

    @field_validator("within")
    @classmethod
    def _is_short(cls, value: timedelta) -> timedelta:
        if not timedelta() < value <= timedelta(minutes=1):
            raise ValueError("expected 1 minute at most: a job waits for it")
        return value


def _receiver(value: str) -> str:
    return _web_address(value, "https://lineage.example.com", "lineage.api_key") if value else value


def _a_minute_at_most(value: timedelta) -> timedelta:
    if not timedelta(0) < value <= timedelta(minutes=1):
        raise ValueError(
            "expected 1 minute at most, and more than nothing: an hour's job waits so long for the receiver"
        )
    return value


class Lineage(_Frozen):
    """Where OpenLineage events go; without `url`, nowhere. `endpoint` is the path below it, `namespace` that of our
    jobs, `timeout` the longest that a job waits for the receiver."""

    url: Annotated[str, AfterValidator(_receiver)] = ""
    endpoint: str = Field(default="api/v1/lineage", pattern=r"^[^/\s?#][^\s?#]*$")
    api_key: SecretStr | None = None
    namespace: str = Field(default="anabranch", pattern=r"^\S+$")
    timeout: Annotated[Duration, AfterValidator(_a_minute_at_most)] = timedelta(seconds=5)


class Environment(_Frozen):
    """`conf/anabranch.yaml`: everything that differs between a laptop and production."""

    kafka: Kafka
    catalog: Catalog
    s3: S3 = S3()
    spark: Spark = Spark()
    registry: Registry | None = None
    search: Search | None = None
    hdfs: Hdfs | None = None
    webhook: Webhook | None = None
    lineage: Lineage = Lineage()


class EventTime(_Frozen):
    """The event's own time; `past` and `future` bound it, measured from the record's ingest hour."""

    column: Name
    past: Duration | None = None
    future: Duration | None = None


class PublishWhen(_Frozen):
    """When the speed layer publishes: as soon as `records` offsets wait, and `within` this time of the micro-batch
    before if any wait. While none wait, it publishes nothing."""

    records: int = Field(default=50_000, gt=0)
    within: Duration = timedelta(seconds=30)


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
    publish: PublishWhen | None = None

    @model_validator(mode="after")
    def _check_publish(self) -> Speed:
        if self.publish is not None and self.publish.records > self.max_offsets_per_trigger:
            raise ValueError(
                f"publish.records: expected at most max_offsets_per_trigger ({self.max_offsets_per_trigger}), found "
                f"{self.publish.records}"
            )
        return self


Gap = Literal["control", "aborted", "compacted", "retention"]


class Batch(_Frozen):
    """How the batch layer decides. `allow_gaps`: the classes of offsets that an hour may lack, of which
    neither Kafka nor the table has a record.

    `retry_for`: how long a transient error of one hour is tried again before the job ends; None is for ever.
    """

    grace: Duration = timedelta(minutes=2)
    lookback_hours: int = Field(default=1, ge=0, le=168)
    allow_gaps: tuple[Gap, ...] = ("control", "aborted")
    retry_for: RetryFor = timedelta(minutes=15)


class Files(_Frozen):
    """How an hour's files are written. `target`: the bytes that a file of the batch layer is to have at most.

    Physical design, by columns of the schema: `sort` keeps equal values together, within a file and among an hour's;
    `bloom` gives files Bloom filters; `statistics` says of which the manifests hold bounds (None: as Iceberg does).
    """

    target: Annotated[ByteSize, Field(ge=1_000_000)] = ByteSize(256_000_000)
    sort: Names = ()
    bloom: Names = ()
    statistics: Names | None = None


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


def _aggregates(value: object) -> object:
    if not isinstance(value, dict) or not value:
        raise ValueError("expected names with what each is, such as {events: count, spent: sum(amount)}")
    found = []
    for name, text in value.items():
        try:
            found.append(parse_aggregate(str(_name(name)), text))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return tuple(found)


def _more_than_nothing(value: timedelta) -> timedelta:
    if value <= timedelta(0):
        raise ValueError("expected a window longer than nothing")
    return value


def _more_than_no_time(value: timedelta) -> timedelta:
    if value <= timedelta(0):
        raise ValueError("expected a duration longer than nothing")
    return value


Promised = Annotated[Duration, AfterValidator(_more_than_no_time)]


class Slo(_Frozen):
    """What readers of the stream are promised, and alerts go by; None: no promise. `fresh`: the longest that `main`
    lacks a record that Kafka acknowledged. `complete`: the longest from an hour's end until it and all before it are
    accepted."""

    fresh: Promised | None = None
    complete: Promised | None = None


class View(_Frozen):
    """A windowed aggregate over a stream's rows: one row for each window of event time and each group.

    Windows are aligned to 1970-01-01 00:00 UTC. `late_after`: a record counts as late when its ingest hour began so
    long after its window's end.
    """

    name: Name
    window: Annotated[Duration, AfterValidator(_more_than_nothing)]
    group: Annotated[tuple[Name, ...], BeforeValidator(_one_or_many)] = ()
    aggregates: Annotated[tuple[Aggregate, ...], BeforeValidator(_aggregates)]
    late_after: Duration = timedelta(0)


def _views(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError("expected a mapping of names to views")
    views, known = [], sorted(View.model_fields.keys() - {"name"})
    for name, given in value.items():
        if not isinstance(given, dict):
            raise ValueError(f"{name}: expected {', '.join(known)}, found {type(given).__name__}")
        if unknown := sorted(given.keys() - set(known)):
            raise ValueError(unknown_key(str(unknown[0]), known, f"{name}.{unknown[0]}"))
        try:
            views.append(View.model_validate(given | {"name": name}))
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, (name, *problem["loc"])))
            raise ValueError(f"{key}: {problem['msg'].removeprefix('Value error, ')}") from None
    return tuple(views)


class Stream(_Frozen):
    """One Kafka topic, its schema, its rules and its tables: one file under `conf/streams/`.

    `unknown`: what is done about fields that the schema does not know. The batch layer counts them, unless they are
    ignored; both layers keep them in a column of their own, or refuse the records that have any.
    """

    name: Name
    topic: str = Field(pattern=r"^[A-Za-z0-9._-]{1,249}$")
    table: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*$")
    format: Annotated[FormatSettings, BeforeValidator(parse_format)] = FormatSettings()
    ddl: str = Field(alias="schema")
    columns: tuple[Column, ...]
    key: Annotated[tuple[Name, ...], BeforeValidator(_one_or_many), Field(min_length=1)]
    event_time: EventTime | None = None
    start: Literal["earliest", "latest"] = "earliest"
    unknown: Literal["ignore", "count", "rescue", "refuse"] = "count"
    speed: Speed = Speed()
    batch: Batch = Batch()
    files: Files = Files()
    maintain: Maintain = Maintain()
    airflow: Airflow = Airflow()
    slo: Slo = Slo()
    egress: Annotated[tuple[Target, ...], AfterValidator(check_targets)] = ()
    webhook: Webhook | None = None
    expectations: Path | None = None
    views: Annotated[tuple[View, ...], BeforeValidator(_views)] = ()

    @property
    def dead_letters_table(self) -> str:
        return f"{self.table}_dead_letters"

    @property
    def hours_table(self) -> str:
        return f"{self.table}_hours"

    def view_table(self, view: View) -> str:
        """The name by which a view is read."""
        return f"{self.table}_{view.name}"

    def partials_table(self, view: View) -> str:
        """Where a view's partials are."""
        return f"{self.view_table(view)}{PARTIALS}"

    def partials(self, view: View) -> tuple[Partial, ...]:
        """Of what a view's aggregates are made."""
        return partials_of(view.aggregates, self.columns)

    def definition(self, view: View) -> str:
        """A digest of what a view's partials are of."""
        return definition_digest(view.window, self.window_column, view.group, view.aggregates, self.columns)

    @property
    def window_column(self) -> str:
        """The column whose time windows are of: of a stream with views."""
        assert self.event_time is not None
        return self.event_time.column

    def column_type(self, name: str) -> str:
        """The type of a column of the schema."""
        return next(c.type for c in self.columns if c.name == name)

    @property
    def egress_table(self) -> str:
        return f"{self.table}_egress"

    @property
    def plain_tables(self) -> tuple[str, ...]:
        """The tables that are appended to and have no branch but `main`: the ledger, and what was delivered where."""
        return (self.hours_table, self.egress_table) if self.egress else (self.hours_table,)

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
        if self.unknown in ("rescue", "refuse") and not self.format.names_fields:
            raise ValueError(
                f"unknown: expected count or ignore with format {self.format.type}, whose values name no fields, "
                f"found {self.unknown}"
            )
        check_columns(self.format, self.columns)
        for name in self.key:
            if name not in by_name or by_name[name].rescues:
                raise ValueError(f"key: expected a column of the schema, found {name!r}")
            if "map<" in by_name[name].type:
                # Neither Spark nor DuckDB compares maps.
                raise ValueError(
                    f"key: expected columns that can be compared, found {name} {by_name[name].type.upper()}"
                )
        if taken := [t.name for t in self.egress if t.place == self.topic]:
            raise ValueError(f"egress: expected other topics than the stream's own, found {self.topic!r} of {taken[0]}")
        if self.event_time is not None:
            column = by_name.get(self.event_time.column)
            if column is None or column.type != "timestamp":
                raise ValueError(
                    f"event_time.column: expected a TIMESTAMP column of the schema, found {self.event_time.column!r}"
                )
        self._check_physical_design(by_name)
        return self

    def _check_physical_design(self, by_name: Mapping[str, Column]) -> None:
        for key in ("sort", "bloom", "statistics"):
            for name in getattr(self.files, key) or ():
                column = by_name.get(name)
                if column is None:
                    raise ValueError(f"files.{key}: expected a column of the schema, found {name!r}")
                kind = column.type.partition("(")[0]
                if "<" in kind:
                    raise ValueError(
                        f"files.{key}: expected a column that is no array, map or struct, found {name} {kind.upper()}"
                    )
                if key == "bloom" and kind not in _BLOOM_TYPES:
                    known = ", ".join(t.upper() for t in _BLOOM_TYPES)
                    raise ValueError(f"files.bloom: expected a column of type {known}, found {name} {kind.upper()}")

    @model_validator(mode="after")
    def _views_are_of_columns(self) -> Stream:
        if self.views and self.event_time is None:
            raise ValueError("views: expected event_time beside them, whose column windows are of, found none")
        names = [view.name.lower() for view in self.views]
        if repeated := next((n for n in names if names.count(n) > 1), None):
            raise ValueError(f"views: expected each name once (case does not count), found {repeated!r} twice")
        for view in self.views:
            try:
                check_view(view.name, view.group, view.aggregates, self.columns)
            except ValueError as error:
                raise ValueError(f"views.{view.name}: {error}") from None
        return self


def resolve_folder(folder: str | Path | None = None) -> Path:
    """The configuration folder: the argument, else `ANABRANCH_CONF`, else `conf`."""
    return Path(folder or os.environ.get("ANABRANCH_CONF") or "conf")


def load_environment(folder: str | Path | None = None) -> Environment:
    """Read `anabranch.yaml` of the configuration folder. Raises ConfigurationError."""
    path = resolve_folder(folder) / "anabranch.yaml"
    data, raw = _read(path)
    if "bounded" in data:
        del data["bounded"]
        _warn_of_bounded(path)
    environment = _validated(path, Environment, data, raw)
    remember(secrets_of(environment))
    return environment


@cache
def _warn_of_bounded(path: Path) -> None:
    LOG.warning(
        "%s: bounded: ignored: Anabranch no longer deletes files of other programs; rotate logs with logrotate or "
        "systemd-tmpfiles, set lifecycle rules on S3 prefixes, and remove the key",
        path,
    )


def stream_names(folder: str | Path | None = None) -> tuple[str, ...]:
    """The streams that the configuration folder holds, sorted."""
    paths = (resolve_folder(folder) / "streams").glob("*.yaml")
    return tuple(sorted(p.stem for p in paths if not p.stem.endswith(".expectations")))


def stream_file_stamp(name: str, folder: str | Path | None = None) -> tuple[int, int] | None:
    """What changes with the stream's file: when it was written, and its size; None where there is none."""
    try:
        found = (resolve_folder(folder) / "streams" / f"{name}.yaml").stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size


def require_different_tables(folder: str | Path | None = None) -> None:
    """That no two files of the configuration folder name one table. What else is wrong with a file is not looked at:
    loading it raises. Raises ConfigurationError."""
    streams = resolve_folder(folder) / "streams"
    files: dict[str, Path] = {}
    for name in stream_names(folder):
        path = streams / f"{name}.yaml"
        try:
            table = _read(path)[0].get("table")
        except ConfigurationError:
            continue
        if isinstance(table, str) and (other := files.setdefault(table.casefold(), path)) != path:
            raise ConfigurationError(
                f"{path}: table: expected a table of its own, found {table}, which {other} names too: a table belongs "
                "to one stream; give one of them another name, or delete the file that was renamed"
            )


def load_stream(name: str, folder: str | Path | None = None) -> Stream:
    """Read `streams/<name>.yaml` of the configuration folder. Raises ConfigurationError."""
    folder = resolve_folder(folder)
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"stream: expected a name of letters, digits and underscores, found {name!r}")
    path = folder / "streams" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(stream_names(folder)) or "none"
        raise ConfigurationError(f"stream {name!r}: expected the file {path}, found none (known streams: {known})")
    data, raw = _read(path)
    try:
        # Without a schema its key may be misspelt, which is said with all other mistakes.
        columns = parse_columns(data["schema"]) if "schema" in data else ()
        if data.get("unknown") == "rescue":
            if taken := [c.name for c in columns if c.name.lower() == RESCUED.name]:
                raise ValueError(f"expected names other than {RESCUED.name} with unknown: rescue, found {taken[0]}")
            columns = (*columns, RESCUED)
    except ValueError as error:
        raise ConfigurationError(f"{path}: schema: {error}") from None
    data = data | {"name": name, "columns": columns}
    if isinstance(data.get("expectations"), str):
        data["expectations"] = path.parent / data["expectations"]
        if not data["expectations"].is_file():
            raise ConfigurationError(f"{path}: expectations: expected the file {data['expectations']}, found none")
    stream = _validated(path, Stream, data, raw)
    remember(secrets_of(stream))
    if stream.format.needs_registry and load_environment(folder).registry is None:
        raise ConfigurationError(
            f"{folder / 'anabranch.yaml'}: registry: expected the url of a schema registry, which format "
            f"{stream.format.type} of stream {name} needs, found none"
        )
    return stream


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A file with its variables replaced, and as it is written."""
    try:
        data = strict_yaml.load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(
            f"{path}: expected a configuration file, found none (choose the folder with --conf)"
        ) from None
    except yaml.YAMLError as error:
        # Neither its text nor the error itself goes on: both have lines of the file.
        raise ConfigurationError(f"{path}: expected readable YAML, found: {explain_yaml(error)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: expected readable YAML, found: {error}") from error
    if not isinstance(data, dict):
        raise ConfigurationError(f"{path}: expected a mapping of keys, found {type(data).__name__}")
    return _substitute(path, "", data), data


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

    return REFERENCE.sub(lookup, value)


def _validated(path: Path, model: type[M], data: dict[str, Any], raw: Mapping[str, Any]) -> M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        mistakes = "\n".join(f"{path}: {line}" for line in explain_mistakes(model, raw, error))
        raise ConfigurationError(mistakes) from None
