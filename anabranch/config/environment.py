"""`conf/anabranch.yaml`: everything that differs between a laptop and production."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from anabranch.config.base import Duration, Frozen, Name, between, web_address

_SQL_URI = re.compile(r"^(sqlite:///.|postgresql\+\w+://.)")
_HTTP_URI = re.compile(r"^https?://[^/@\s]+(/[^@\s]*)?$")
_NO_URI = re.compile(r"^$")


def _as_spark_says(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _scalar_as_text(value: object) -> object:
    return _as_spark_says(value) if isinstance(value, bool | int | float) else value


def _page_url(value: str) -> str:
    if urlsplit(value).scheme not in ("http", "https"):
        raise ValueError("expected the address of `anabranch serve` as people reach it")
    return value.rstrip("/")


def _brokers(value: str) -> str:
    for broker in value.split(","):
        port = broker.strip().rpartition(":")[2]
        if ":" not in broker or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ValueError("expected HOST:PORT of each broker, such as broker-1.example.com:9092")
    return value


class Kafka(Frozen):
    """Where the brokers are. `security` takes Kafka's own client properties (`security.protocol`,
    `sasl.*`), and `client_rack` the one of that name (KIP-392)."""

    bootstrap_servers: Annotated[str, AfterValidator(_brokers)] = Field(min_length=1)
    client_rack: str = ""
    security: dict[str, SecretStr] = Field(default={})


class Catalog(Frozen):
    """The Iceberg catalog. `properties` go to both its clients unchanged, so REST or Glue are
    configuration alone; they may hold a token, and `uri` a password."""

    name: Name
    type: Literal["sql", "rest", "glue"] = "sql"
    uri: str = Field(default="", repr=False, validate_default=True)
    warehouse: str = Field(pattern=r"^(s3|file)://")
    properties: dict[str, Annotated[SecretStr, BeforeValidator(_scalar_as_text)]] = Field(
        default={}
    )

    @field_validator("warehouse")
    @classmethod
    def _one_place_for_all_clients(cls, value: str) -> str:
        # PyIceberg and Iceberg's S3 client end a location there, and Hadoop does not: files would
        # lie in two folders.
        if found := next((character for character in "?#" if character in value), None):
            raise ValueError(
                f"expected a location without {found!r}: Iceberg's clients end a location there"
            )
        return value

    @field_validator("uri")
    @classmethod
    def _of_its_type(cls, value: str, info: ValidationInfo) -> str:
        expected = {
            "sql": (
                _SQL_URI,
                "sqlite:///FILE or postgresql+psycopg2://USER:PASSWORD@HOST/DATABASE",
            ),
            "rest": (
                _HTTP_URI,
                "the address of the REST catalog without user, such as https://catalog.example.com/api/catalog",
            ),
            "glue": (
                _NO_URI,
                "none for type glue (catalog.properties: glue.endpoint, where it is not AWS)",
            ),
        }.get(info.data.get("type", ""))
        if expected is not None and not expected[0].match(value):
            raise ValueError(f"expected {expected[1]}")
        return value


def _s3_endpoint(value: str) -> str:
    if "@" in value:
        raise ValueError("expected an address without user (s3.access_key, s3.secret_key)")
    return value


class S3(Frozen):
    """The object store. Without keys the standard AWS chain decides; without an endpoint it is AWS
    itself. `ca` as of `search`, for Python; Java has a trust store."""

    endpoint: Annotated[str, AfterValidator(_s3_endpoint)] | None = None
    region: str = "us-east-1"
    access_key: SecretStr | None = None
    secret_key: SecretStr | None = None
    ca: str | None = Field(default=None, min_length=1)


class Spark(Frozen):
    """Where Spark runs, and its properties."""

    master: str = "local[*]"
    conf: dict[str, str] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _text(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("conf"), dict):
            data = data | {"conf": {k: _as_spark_says(v) for k, v in data["conf"].items()}}
        return data


class Registry(Frozen):
    """The schema registry of formats in Confluent's wire format: its REST API, and who asks, if it
    wants to know."""

    url: Annotated[
        str, web_address("https://registry.example.com:8081", "registry.user, registry.password")
    ]
    user: str | None = Field(default=None, min_length=1)
    password: SecretStr | None = None

    @field_validator("password")
    @classmethod
    def _of_a_user(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if value is not None and info.data.get("user") is None:
            raise ValueError("expected registry.user beside it")
        return value


class SearchCluster(Frozen):
    """Elasticsearch or OpenSearch, for egress: its address, and who asks, by password or by API
    key. `ca` is a file of certificates to trust, in place of the usual ones."""

    url: Annotated[
        str,
        web_address(
            "https://search.example.com:9200", "search.user and search.password, or search.api_key"
        ),
    ]
    user: str | None = Field(default=None, min_length=1)
    password: SecretStr | None = None
    api_key: SecretStr | None = None
    ca: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_way_to_ask(self) -> SearchCluster:
        if (self.user is None) != (self.password is None):
            raise ValueError("expected search.user and search.password, or neither")
        if self.user is not None and self.api_key is not None:
            raise ValueError("expected search.user or search.api_key, found both")
        return self


class Hdfs(Frozen):
    """HDFS, for egress, by WebHDFS: the address of the name node, of HttpFS or of a gateway, above
    `/webhdfs/v1`; as whom files are written, with a password where a gateway asks for one. `ca` as
    of `search`."""

    url: Annotated[
        str, web_address("http://namenode.example.com:9870", "hdfs.user and hdfs.password")
    ]
    user: str = Field(default="anabranch", min_length=1)
    password: SecretStr | None = None
    ca: str | None = Field(default=None, min_length=1)


class Webhook(Frozen):
    """Where each change of an hour's state is posted, with which headers; the status page that a
    message links to, and within what time a receiver has to answer. The URL itself may be a
    secret."""

    url: SecretStr
    headers: dict[str, SecretStr] = Field(default={})
    page: Annotated[str, AfterValidator(_page_url)] | None = None
    within: Annotated[
        Duration,
        between(
            timedelta.resolution,
            timedelta(minutes=1),
            "expected 1 minute at most: a job waits for it",
        ),
    ] = timedelta(seconds=5)

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


class Lineage(Frozen):
    """Where OpenLineage events go; without `url`, nowhere. `endpoint` is the path below it,
    `namespace` that of our jobs, `timeout` the longest that a job waits for the receiver."""

    url: Annotated[
        str, web_address("https://lineage.example.com", "lineage.api_key", optional=True)
    ] = ""
    endpoint: str = Field(default="api/v1/lineage", pattern=r"^[^/\s?#][^\s?#]*$")
    api_key: SecretStr | None = None
    namespace: str = Field(default="anabranch", pattern=r"^\S+$")
    timeout: Annotated[
        Duration,
        between(
            timedelta.resolution,
            timedelta(minutes=1),
            "expected 1 minute at most, and more than nothing: an hour's job waits so long for "
            "the receiver",
        ),
    ] = timedelta(seconds=5)


class ErasureKeys(Frozen):
    """The secret key by which erased values are hashed, and former ones, for erasures that they
    were used for."""

    key: Annotated[SecretStr, Field(min_length=16)]
    former_keys: tuple[Annotated[SecretStr, Field(min_length=16)], ...] = ()


class Masking(Frozen):
    """The secret of columns that are hashed (`select` of a stream's file)."""

    secret: SecretStr | None = Field(default=None, min_length=16)


class Environment(Frozen):
    """`conf/anabranch.yaml`: everything that differs between a laptop and production."""

    kafka: Kafka
    catalog: Catalog
    s3: S3 = S3()
    spark: Spark = Spark()
    registry: Registry | None = None
    search: SearchCluster | None = None
    hdfs: Hdfs | None = None
    webhook: Webhook | None = None
    lineage: Lineage = Lineage()
    erasure: ErasureKeys | None = None
    masking: Masking = Masking()

    @property
    def masking_secret(self) -> bytes | None:
        """The secret of columns that are hashed, if there is one."""
        return (
            self.masking.secret.get_secret_value().encode()
            if self.masking.secret is not None
            else None
        )
