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

from anabranch.config.base import Frozen, Name, one_or_many, web_address
from anabranch.config.kafka_security import Security

_SQL_URI = re.compile(r"^(sqlite:///(?!:memory:).|postgresql\+\w+://.)")
_HTTP_URI = re.compile(r"^https?://[^/@\s]+(/[^@\s]*)?$")
_NO_URI = re.compile(r"^$")


def _scalar_as_text(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _brokers(value: str) -> str:
    for broker in value.split(","):
        port = broker.strip().rpartition(":")[2]
        if ":" not in broker or not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ValueError("expected HOST:PORT of each broker, such as broker-1.example.com:9092")
    return value


class Kafka(Frozen):
    """The brokers and their client settings; `client_rack` is `client.rack` (KIP-392)."""

    bootstrap_servers: Annotated[str, AfterValidator(_brokers)] = Field(
        min_length=1,
        description="The bootstrap servers, in the form of Kafka's `bootstrap.servers`.",
        examples=["broker-1:9092,broker-2:9092"],
    )
    client_rack: str = Field(
        default="",
        description=(
            "The rack or availability zone of the machines that run the jobs, as in "
            "`broker.rack`. If the brokers have a `replica.selector.class`, records are read "
            "from a replica in this rack."
        ),
    )
    security: Security = Field(
        default=None,
        description=(
            "The identity, for both clients of Kafka that Anabranch uses: client properties "
            "[by mechanism](../how-to/deploy/services.md#kafka)."
        ),
        examples=[
            "{sasl.mechanism: SCRAM-SHA-512, sasl.username: jobs, "
            'sasl.password: "${KAFKA_PASSWORD}"}'
        ],
    )


class Catalog(Frozen):
    """The Iceberg catalog. `properties` are passed unchanged to both clients, so REST or Glue need
    configuration only; they may contain a token, and `uri` a password."""

    name: Name = Field(description="The name of the catalog in Spark and PyIceberg.")
    type: Literal["sql", "rest", "glue"] = Field(
        default="sql", description="The type of the Iceberg catalog."
    )
    uri: str = Field(
        default="",
        repr=False,
        validate_default=True,
        description=(
            "The address: `sqlite:///FILE` or `postgresql+psycopg2://…` for sql, a URL for rest, "
            "none for glue."
        ),
    )
    warehouse: str = Field(
        pattern=r"^(s3://[^/]|file:///)", description="The root folder of all tables."
    )
    properties: dict[str, Annotated[SecretStr, BeforeValidator(_scalar_as_text)]] = Field(
        default={},
        description="Properties of the catalog, for Spark and PyIceberg.",
        examples=['{token: "${CATALOG_TOKEN}"}'],
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


class S3(Frozen):
    """The object store: AWS unless `endpoint` is set, with the standard AWS credential chain unless
    keys are set. `ca` is for Python clients; Java uses its trust store."""

    endpoint: (
        Annotated[
            str,
            web_address("https://s3.example.com", "s3.access_key, s3.secret_key", optional=True),
        ]
        | None
    ) = Field(default=None, description="The URL of the S3 server, unless it is Amazon's.")
    region: str = Field(default="us-east-1", description="The bucket's region.")
    access_key: SecretStr | None = Field(
        default=None,
        description=(
            "The access key, with `secret_key`; without both, AWS's default credentials chain is "
            "used."
        ),
    )
    secret_key: SecretStr | None = Field(default=None, description="The secret of `access_key`.")
    ca: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "A file of trusted certificates that replaces the default ones. Java also needs a "
            "[trust store](../how-to/deploy/services.md#s3)."
        ),
    )

    @model_validator(mode="after")
    def _both_keys(self) -> S3:
        # With one of them, Iceberg's clients would take the keys of AWS's default chain.
        if bool(self.access_key) != bool(self.secret_key):
            raise ValueError("expected s3.access_key and s3.secret_key, or neither")
        return self


_MASTER = re.compile(r"(local|local-cluster)(\[.*\])?|yarn|(spark|k8s)://.+")


def check_master(value: str) -> str:
    """Return a master that spark-submit knows. Raises ValueError for anything else."""
    if not _MASTER.fullmatch(value):
        raise ValueError("expected local[*], spark://HOST:PORT, k8s://URL or yarn")
    return value


class Spark(Frozen):
    """Spark's master and properties."""

    master: Annotated[str, AfterValidator(check_master)] = Field(
        default="local[*]",
        description="The Spark master; a command's `--master` overrides it.",
    )
    conf: dict[str, Annotated[str, BeforeValidator(_scalar_as_text)]] = Field(
        default={}, description="Spark properties.", examples=["{spark.driver.memory: 4g}"]
    )


class Registry(Frozen):
    """The schema registry of Confluent's wire format: its URL, and credentials if needed."""

    url: Annotated[
        str,
        web_address(
            "https://registry.example.com:8081", "registry.user, registry.password", several=True
        ),
    ] = Field(
        description=(
            "The URL of the schema registry (Confluent's API) for the formats avro, "
            "json_schema and protobuf; several servers of one registry with commas between them."
        )
    )
    user: str | None = Field(
        default=None,
        min_length=1,
        description="The user name for the registry, if it requires one.",
    )
    password: SecretStr | None = Field(default=None, description="The user's password.")
    token: SecretStr | None = Field(
        default=None, description="A bearer token, instead of user and password."
    )
    certificate: str | None = Field(
        default=None,
        min_length=1,
        description="A PEM file with a client's certificate and its private key.",
    )
    ca: str | None = Field(
        default=None,
        min_length=1,
        description="A file of trusted certificates that replaces the default ones.",
    )

    @field_validator("password", "token")
    @classmethod
    def _belongs_to_user(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        has_user = info.data.get("user") is not None
        if value is not None and info.field_name == "password" and not has_user:
            raise ValueError("expected registry.user too")
        if value is not None and info.field_name == "token" and has_user:
            raise ValueError("expected registry.user or registry.token")
        return value


class SearchCluster(Frozen):
    """Elasticsearch or OpenSearch, for egress: its URL, with a password or an API key."""

    url: Annotated[
        str,
        web_address(
            "https://search.example.com:9200", "search.user and search.password, or search.api_key"
        ),
    ] = Field(description="The URL of Elasticsearch or OpenSearch, for egress to an index.")
    user: str | None = Field(
        default=None,
        min_length=1,
        description="The user name, with `password`; alternatively `api_key`.",
    )
    password: SecretStr | None = Field(default=None, description="The user's password.")
    api_key: SecretStr | None = Field(
        default=None, description="An API key, instead of user and password."
    )

    @model_validator(mode="after")
    def _one_way_to_ask(self) -> SearchCluster:
        if (self.user is None) != (self.password is None):
            raise ValueError("expected search.user and search.password, or neither")
        if self.user is not None and self.api_key is not None:
            raise ValueError("expected search.user or search.api_key, found both")
        return self


class Lineage(Frozen):
    """The receiver of OpenLineage events; none without `url`. `namespace`: that of our jobs."""

    url: Annotated[
        str, web_address("https://lineage.example.com", "lineage.api_key", optional=True)
    ] = Field(
        default="", description="The URL of the receiver of OpenLineage events; empty for none."
    )
    api_key: SecretStr | None = Field(default=None, description="The API key of the receiver.")
    namespace: str = Field(
        default="anabranch", pattern=r"^\S+$", description="The namespace of the jobs."
    )


class ErasureKeys(Frozen):
    """The secret keys that hash erased values: the one for new erasures, then former ones."""

    key: Annotated[
        tuple[Annotated[SecretStr, Field(min_length=16)], ...],
        BeforeValidator(one_or_many),
        Field(min_length=1),
    ] = Field(
        description=(
            "The secret for the hashes of erased values (`anabranch erase`), 16 characters or "
            "more. Of a list, the first is for new erasures; erasures that were requested with "
            "the others need them."
        ),
        examples=["a-secret-of-32-characters-or-more"],
    )


class Masking(Frozen):
    """The secret that hashes columns (`hash` in `select` of a stream's file)."""

    secret: SecretStr | None = Field(
        default=None,
        min_length=16,
        description=(
            "The secret for hashed columns ([select-columns.md](../how-to/select-columns.md)), "
            "16 characters or more; from the environment."
        ),
    )


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
        if self.masking.secret is not None:
            return self.masking.secret.get_secret_value().encode()
        return None
