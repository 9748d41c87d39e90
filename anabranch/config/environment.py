"""`conf/anabranch.yaml`: the settings that differ between a laptop and production."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from anabranch.config.base import Frozen, Name, web_address

_SQL_URI = re.compile(r"^(sqlite:///.|postgresql\+\w+://.)")
_HTTP_URI = re.compile(r"^https?://[^/@\s]+(/[^@\s]*)?$")
_NO_URI = re.compile(r"^$")


def _spark_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _scalar_as_text(value: object) -> object:
    return _spark_text(value) if isinstance(value, bool | int | float) else value


def _brokers(value: str) -> str:
    for broker in value.split(","):
        port = broker.strip().rpartition(":")[2]
        if ":" not in broker or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ValueError("expected HOST:PORT of each broker, such as broker-1.example.com:9092")
    return value


class Kafka(Frozen):
    """The brokers and their client settings: `security` takes Kafka's client properties
    (`security.protocol`, `sasl.*`), `client_rack` is `client.rack` (KIP-392)."""

    bootstrap_servers: Annotated[str, AfterValidator(_brokers)] = Field(min_length=1)
    client_rack: str = ""
    security: dict[str, SecretStr] = Field(default={})


class Catalog(Frozen):
    """The Iceberg catalog. `properties` are passed unchanged to both clients, so REST or Glue need
    configuration only; they may contain a token, and `uri` a password."""

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
        # PyIceberg and Iceberg's S3 client end a location there, Hadoop does not: files would be in
        # two folders.
        if found := next((character for character in "?#" if character in value), None):
            raise ValueError(
                f"expected a location without {found!r}: Iceberg's clients end a location there"
            )
        return value

    @field_validator("uri")
    @classmethod
    def _matches_type(cls, value: str, info: ValidationInfo) -> str:
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
    """The object store: AWS unless `endpoint` is set, with the standard AWS credential chain unless
    keys are set. `ca` is as in `search`, for Python clients; Java uses its trust store."""

    endpoint: Annotated[str, AfterValidator(_s3_endpoint)] | None = None
    region: str = "us-east-1"
    access_key: SecretStr | None = None
    secret_key: SecretStr | None = None
    ca: str | None = Field(default=None, min_length=1)


class Spark(Frozen):
    """Spark's master and properties."""

    master: str = "local[*]"
    conf: dict[str, Annotated[str, BeforeValidator(_spark_text)]] = Field(default={})


class Registry(Frozen):
    """The schema registry of formats in Confluent's wire format: the URL of its REST API, and
    credentials if it requires them."""

    url: Annotated[
        str, web_address("https://registry.example.com:8081", "registry.user, registry.password")
    ]
    user: str | None = Field(default=None, min_length=1)
    password: SecretStr | None = None

    @field_validator("password")
    @classmethod
    def _needs_user(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if value is not None and info.data.get("user") is None:
            raise ValueError("expected registry.user too")
        return value


class SearchCluster(Frozen):
    """Elasticsearch or OpenSearch, for egress: its URL, with a password or an API key. `ca` is a
    file of trusted certificates that replaces the default ones."""

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


class Lineage(Frozen):
    """The receiver of OpenLineage events; none without `url`. `namespace` is the namespace of
    our jobs."""

    url: Annotated[
        str, web_address("https://lineage.example.com", "lineage.api_key", optional=True)
    ] = ""
    api_key: SecretStr | None = None
    namespace: str = Field(default="anabranch", pattern=r"^\S+$")


class ErasureKeys(Frozen):
    """The secret key that hashes erased values, and former keys, for the erasures made with
    them."""

    key: Annotated[SecretStr, Field(min_length=16)]
    former_keys: tuple[Annotated[SecretStr, Field(min_length=16)], ...] = ()


class Masking(Frozen):
    """The secret that hashes columns (`hash` in `select` of a stream's file)."""

    secret: SecretStr | None = Field(default=None, min_length=16)


class Environment(Frozen):
    """`conf/anabranch.yaml`: the settings that differ between a laptop and production."""

    kafka: Kafka
    catalog: Catalog
    s3: S3 = S3()
    spark: Spark = Spark()
    registry: Registry | None = None
    search: SearchCluster | None = None
    lineage: Lineage = Lineage()
    erasure: ErasureKeys | None = None
    masking: Masking = Masking()

    @property
    def masking_secret(self) -> bytes | None:
        """The secret that hashes columns, None if not configured."""
        return (
            self.masking.secret.get_secret_value().encode()
            if self.masking.secret is not None
            else None
        )
