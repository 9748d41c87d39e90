"""The writers' schemas of a stream's records, by schema id, as decoders read them: of the registry
with those to which they refer, and of a descriptor file. The driver asks the registry and passes
them to the workers."""

from __future__ import annotations

import base64
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from anabranch.common.errors import ConfigurationError, Transient
from anabranch.common.remote_errors import full_text
from anabranch.config import Environment, Stream
from anabranch.decode import avro, avro_names, protobuf
from anabranch.decode.avro_names import Incompatible
from anabranch.decode.inputs import DESCRIPTOR, ID_PLACES, UNLISTED, WriterSchema
from anabranch.decode.values import columns_of
from anabranch.kafka.schema_registry import (
    References,
    RegisteredSchema,
    SchemaRegistryClient,
    SubjectVersion,
    open_registry,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


_SECONDS = 60.0
# Files that Confluent's clients import without a reference: Connect writes decimals by them, and
# registries keep tags.
_OF_CONFLUENT = {
    "confluent/type/decimal.proto": (
        'syntax = "proto3"; package confluent.type; '
        "message Decimal { bytes value = 1; uint32 precision = 2; int32 scale = 3; }"
    ),
    "confluent/meta.proto": (
        'syntax = "proto3"; package confluent; import "google/protobuf/descriptor.proto"; '
        "message Meta { string doc = 1; map<string, string> params = 2; repeated string tags = 3; "
        "repeated Rule rules = 4; } "
        "message Rule { string name = 1; string doc = 2; string expr = 3; string sql = 4; }"
        + "".join(
            f" extend google.protobuf.{options} {{ Meta {name}_meta = 1088; }}"
            for options, name in (
                ("FileOptions", "file"),
                ("MessageOptions", "message"),
                ("FieldOptions", "field"),
                ("EnumOptions", "enum"),
                ("EnumValueOptions", "enum_value"),
            )
        )
    ),
}
# Lines of protoc about itself.
_LOG = re.compile(r"WARNING: |[IWEF][0-9]{4} ")
_MAIN = "__schema__.proto"


def whole_schema(schema: RegisteredSchema | SubjectVersion) -> str:
    """Return a schema's text for a decoder: of Protobuf its descriptors, Base64. Raises
    Incompatible for text that is no Protobuf file, ConfigurationError without protoc."""
    if schema.type == "PROTOBUF":
        return compiled(schema.text, schema.references)
    if schema.type == "AVRO" and schema.references:
        return avro_names.with_references(schema.text, (text for _, text in schema.references))
    return schema.text


@lru_cache(maxsize=256)
def compiled(text: str, references: References) -> str:
    """Return the descriptors of a Protobuf file, and of those that it imports by name, Base64. Its
    messages are those of the last file. Raises as `whole_schema`."""
    types = find_spec("google.type")
    if types is None or find_spec("grpc_tools") is None:
        raise ConfigurationError(
            "format protobuf with a schema registry: expected protoc, found none; install it with "
            "`pip install 'anabranch[protobuf]'`"
        )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        for path, content in (*_OF_CONFLUENT.items(), *references, (_MAIN, text)):
            file = (folder / path).resolve()
            # The registry's names must not lead to other files of this machine.
            if not file.is_relative_to(folder):
                raise Incompatible(f"expected an import within a folder, found {path}")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="utf-8")
        target = folder / "descriptors"
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}"]
        command += [f"-I{Path(part).parents[1]}" for part in types.submodule_search_locations or ()]
        command += ["--include_imports", f"--descriptor_set_out={target}", _MAIN]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise Transient(f"protoc: {error} (transient, try again)") from error
        if run.returncode:
            lines = run.stderr.replace(f"{folder}/", "").splitlines()
            why = "; ".join(line for line in lines if not _LOG.match(line))
            raise Incompatible(f"expected a Protobuf file, found one that protoc refuses: {why}")
        return base64.b64encode(target.read_bytes()).decode()


def read_descriptors(stream: Stream) -> str:
    """Return the content of the stream's descriptor file, Base64. Raises ConfigurationError if the
    file cannot be read, or the stream's columns cannot be read from its message."""
    settings = stream.format
    assert settings.descriptor is not None and settings.message is not None
    try:
        text = base64.b64encode(settings.descriptor.read_bytes()).decode()
        protobuf.plan(text, settings.message, columns_of(stream.record_columns))
    except (OSError, Incompatible) as error:
        raise ConfigurationError(
            f"stream {stream.name}: format.descriptor {settings.descriptor}, message "
            f"{settings.message}: {error}; make the file with `protoc --include_imports "
            "--descriptor_set_out`, or correct the columns"
        ) from None
    return text


LOG = logging.getLogger(__name__)

_KINDS = {"avro": "AVRO", "json_schema": "JSON", "protobuf": "PROTOBUF"}
_SCHEMA_ID = (
    "IF(length(value) >= 5 AND substring(value, 1, 1) = X'00', "
    "NULLIF(CAST(conv(hex(substring(value, 2, 4)), 16, 10) AS BIGINT), 0), NULL)"
)


class Schemas:
    """The schemas that records of a stream had so far, each with its text or the error of all its
    records. Without ids for a format that has no registry; with that of the descriptor file of
    plain Protobuf. Raises ConfigurationError for a descriptor file that cannot be used."""

    def __init__(self, stream: Stream, registry: SchemaRegistryClient | None) -> None:
        self._stream, self._registry = stream, registry
        self.known: dict[int, WriterSchema] = {}
        if stream.format.descriptor is not None:
            self.known[DESCRIPTOR] = WriterSchema(read_descriptors(stream))

    def learn(self, ids: Iterable[int]) -> bool:
        """Ask the registry for schemas that are not known yet. Return whether there are any.

        Raises Transient if the registry does not answer, ConfigurationError if it refuses.
        """
        new = sorted(set(ids) - self.known.keys())
        for schema_id in new:
            self.known[schema_id] = self._load(schema_id)
        return bool(new)

    def learn_from(self, records: DataFrame) -> None:
        """Learn the schema ids of records, with a query of its own. Raises as `learn`."""
        if self._registry is not None:
            self.forget_missing()
            found = records.selectExpr(f"{_SCHEMA_ID} AS id").distinct().collect()
            self.learn(row.id for row in found if row.id is not None)

    def forget_missing(self) -> None:
        """Forget ids that the registry did not have: it may have them by now."""
        missing = [
            i for i, one in self.known.items() if one.error and one.error[0] == "unknown_schema"
        ]
        for schema_id in missing:
            del self.known[schema_id]

    def _load(self, schema_id: int) -> WriterSchema:
        assert self._registry is not None
        kind, subject = _KINDS[self._stream.format.type], self._stream.format.subject
        schema = self._registry.schema(schema_id, subject)
        if schema is None:
            why = f"expected it in the schema registry, found none. {ID_PLACES}"
            return WriterSchema(error=("unknown_schema", why))
        if subject is not None and not self._registry.belongs(schema_id, subject):
            why = f"expected a schema of subject {subject}, found another"
            return WriterSchema(error=("wrong_subject", why))
        if schema.type != kind:
            why = f"expected type {kind}, found {schema.type}"
            return WriterSchema(error=("incompatible_schema", why))
        try:
            text = whole_schema(schema)
            if kind == "AVRO":
                avro.plan(text, self._stream.read_columns)
        except Incompatible as incompatible:
            return WriterSchema(error=("incompatible_schema", str(incompatible)))
        return WriterSchema(text)


def open_schemas(environment: Environment, stream: Stream) -> Schemas:
    """Raises ConfigurationError if the format needs a registry and there is none."""
    needs_one = stream.format.needs_registry
    return Schemas(stream, open_registry(environment, stream) if needs_one else None)


def unlisted_ids(error: BaseException) -> list[int]:
    """Return the schema ids that a failed query's decoder lacked; none otherwise. Pure."""
    return [int(number) for number in UNLISTED.findall(full_text(error))]
