"""A decision of the ledger as a run of OpenLineage: its id, its times, its account, and its two
events, START and then COMPLETE or FAIL, as classes of OpenLineage's client. Pure.

The id of an accepted revision is derived from the table, the hour and the revision, so a run that
is sent again keeps its id. Each refusal is a separate run, because the same revision may be
accepted later.

Events depend only on the decision and the tables' names, locations and columns. An event sent
again, from any machine, differs only if the tables changed meanwhile. Names of datasets follow
OpenLineage's conventions (https://openlineage.io/docs/spec/naming), as its integrations with Kafka
and Spark do, so their lineage connects to ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from openlineage.client import event_v2, facet_v2
from openlineage.client.event_v2 import InputDataset, OutputDataset, RunEvent, RunState
from openlineage.client.facet_v2 import (
    base_subset_dataset,
    catalog_dataset,
    column_lineage_dataset,
    dataset_type_dataset,
    dataset_version_dataset,
    documentation_job,
    error_message_run,
    input_statistics_input_dataset,
    job_type_job,
    nominal_time_run,
    output_statistics_output_dataset,
    parent_run,
    processing_engine_run,
    schema_dataset,
    storage_dataset,
    symlinks_dataset,
)
from openlineage.client.facet_v2 import data_quality_assertions_dataset as quality_facet
from openlineage.client.uuid import generate_static_uuid
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import NestedField, StructType

from anabranch.common.version import VERSION
from anabranch.config import Catalog, Environment, Kafka, Stream
from anabranch.lineage import parse_run
from anabranch.offsets.hours import end_of, start_of
from anabranch.offsets.position import ranges_to_keys
from anabranch.protocol.ledger_row import Counts, LedgerRow, QualityResult, accounted


def run_id(table_uuid: str, row: LedgerRow) -> str:
    """Return the id of a decision's run."""
    name = f"{table_uuid}.{row.hour}.{row.revision}"
    name = f"{name}.{row.decision_id}" if row.decision == "refused" else name
    return str(generate_static_uuid(start_of(row.hour), name.encode()))


def error_of(row: LedgerRow) -> str | None:
    """Return why an hour was not accepted; None if it was."""
    return (row.reason or "refused") if row.decision == "refused" else None


def hour_facts(row: LedgerRow) -> dict[str, Any]:
    """Return our own facet, described in `AnabranchHourRunFacet.json`."""
    cut, diff = row.cut, row.diff
    facts = {
        "hour": row.hour,
        "decision": row.decision,
        "revision": row.revision,
        "served": row.served,
        "reason": row.reason,
        "topicId": cut.topic_id if cut is not None else None,
        "offsetRanges": ranges_to_keys(cut.ranges) if cut is not None else None,
        "balance": _balance(row),
        "sources": dict(row.sources) if row.sources is not None else None,
        "speedRows": row.speed_rows,
        "difference": diff.as_dict() | {"sample": None} if diff is not None else None,
    }
    return _without_nulls(facts)


def _balance(row: LedgerRow) -> dict[str, Any] | None:
    counts = Counts.of(row)
    # A restored ledger may lack some of them; the facet requires all.
    if None in counts.cells:
        return None
    return counts.as_dict() | {"gaps": dict(row.gaps or {})}


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: _without_nulls(v) if isinstance(v, dict) else list(v) if isinstance(v, tuple) else v
        for k, v in value.items()
        if v is not None
    }


_SEVERITIES = {"critical": "error", "warning": "warn"}


def assertions_of(row: LedgerRow) -> list[quality_facet.Assertion]:
    """Return the checks of an hour: the balance, then the expectations of the quality gate."""
    found = []
    if row.offsets is not None and (total := accounted(row)) is not None:
        is_closed = total == row.offsets
        found.append(
            _assertion("balance", is_closed, "error", expected=str(row.offsets), actual=str(total))
        )
    quality = row.quality or QualityResult(True)
    found += [_entry_assertion(entry, True) for entry in quality.met]
    found += [_entry_assertion(entry, False) for entry in (*quality.failed, *quality.warnings)]
    return found


def _assertion(
    type: str, success: bool, severity: str, **other: str | None
) -> quality_facet.Assertion:
    return quality_facet.Assertion(
        assertion=type, success=success, severity=severity, name=type, params=None, **other
    )


def _entry_assertion(entry: Mapping[str, Any], met: bool) -> quality_facet.Assertion:
    kwargs = dict(entry.get("kwargs") or {})
    column = kwargs.pop("column", None)
    severity = str(entry.get("severity", "critical"))
    return _assertion(
        str(entry["type"]),
        met,
        _SEVERITIES.get(severity, severity),
        column=str(column) if column is not None else None,
        expected=", ".join(f"{k}: {v}" for k, v in kwargs.items()) or None,
        actual=_actual(entry),
        description=entry.get("message"),
    )


def _actual(entry: Mapping[str, Any]) -> str | None:
    count, elements = entry.get("unexpected_count"), entry.get("element_count")
    if count is not None:
        if elements is not None:
            return f"{count} of {elements} rows otherwise"
        return f"{count} rows do not meet it"
    observed = entry.get("observed")
    return str(observed) if observed is not None else None


class Name(NamedTuple):
    """A dataset's identity."""

    namespace: str
    name: str


def topic_name(kafka: Kafka, topic: str) -> Name:
    """Return the topic's name; the first of several bootstrap servers names the cluster. Pure."""
    first = kafka.bootstrap_servers.split(",")[0].strip()
    return Name(f"kafka://{first.partition('://')[2] or first}", topic)


def table_name(location: str) -> Name:
    """Return the table's name: the location of its files, in any catalog. Pure."""
    parts = urlsplit(location)
    if parts.scheme == "file":
        return Name("file", parts.path.rstrip("/"))
    return Name(f"{parts.scheme}://{parts.netloc}", parts.path.strip("/"))


def catalog_name(catalog: Catalog, region: str, table: str) -> Name | None:
    """Return the table's name in its catalog; None if the conventions have none. Pure."""
    if catalog.type == "rest":
        return Name(catalog.uri, table)
    account = catalog.properties.get("glue.id")
    if catalog.type == "glue" and account is not None:
        return Name(
            f"arn:aws:glue:{region}:{account.get_secret_value()}",
            f"table/{table.replace('.', '/')}",
        )
    return None


def catalog_address(catalog: Catalog) -> str | None:
    """Return the catalog's address without user, password and parameters. Pure."""
    if not catalog.uri:
        return None
    scheme, _, rest = catalog.uri.partition("://")
    # The password may contain characters that end the host part of a URL.
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


PRODUCER = f"urn:anabranch:{VERSION}"
# The schema of our own facet is AnabranchHourRunFacet.json in this folder.
_HOUR_FACET = {
    "_producer": PRODUCER,
    "_schemaURL": (
        "urn:anabranch:lineage:1-1-0:AnabranchHourRunFacet.json#/$defs/AnabranchHourRunFacet"
    ),
}

_DESCRIPTION = (
    "Rebuilds an ingest hour of the topic {topic} from its exact offsets, proves that every "
    "offset is accounted for, runs the quality gate, and publishes the rows to {table}, replacing "
    "those of the speed layer."
)
_DEAD_DESCRIPTION = "records of the topic that cannot become rows"

facet_v2.set_producer(PRODUCER)


@dataclass(frozen=True)
class Subject:
    """The stream that events describe: its configuration, and its tables as loaded."""

    environment: Environment
    stream: Stream
    table: Table
    dead_letters: Table

    @property
    def topic(self) -> Name:
        return topic_name(self.environment.kafka, self.stream.topic)

    def schema(self, row: LedgerRow) -> Schema:
        """Return the columns of a decision's snapshot, or of the current schema without it."""
        snapshot = self.table.metadata.snapshot_by_id(row.snapshot_id) if row.snapshot_id else None
        by_id, id = self.table.schemas(), snapshot.schema_id if snapshot is not None else None
        return by_id[id] if id is not None and id in by_id else self.table.schema()

    def events(self, row: LedgerRow) -> tuple[RunEvent, RunEvent]:
        """Return the START event of a run, with inputs and outputs, and its end, with the
        result."""
        ended = RunState.COMPLETE if error_of(row) is None else RunState.FAIL
        began = row.run.began if row.run is not None else row.recorded_at
        facets = _common_facets(row)
        start = _event(self, row, RunState.START, min(began, row.recorded_at), facets)
        start.inputs = [_dataset(InputDataset, self.topic, _topic_facets(self))]
        # Marquez makes another version of the table, without columns, of an event without them.
        columns = {"schema": _columns(self.schema(row))}
        start.outputs = [_dataset(OutputDataset, table_name(self.table.location()), columns)]
        end = _event(self, row, ended, row.recorded_at, facets | _final_facets(row))
        end.inputs = [_input(self, row)]
        end.outputs = _outputs(self, row)
        return start, end


def _event(
    subject: Subject, row: LedgerRow, state: RunState, at: datetime, facets: dict[str, Any]
) -> RunEvent:
    stream = subject.stream
    description = _DESCRIPTION.format(topic=stream.topic, table=stream.table)
    job_facets = {
        "documentation": documentation_job.DocumentationJobFacet(description, "text/plain"),
        "jobType": job_type_job.JobTypeJobFacet("BATCH", "ANABRANCH", "JOB"),
    }
    job = event_v2.Job(subject.environment.lineage.namespace, f"{stream.name}.batch", job_facets)
    run = event_v2.Run(run_id(str(subject.table.metadata.table_uuid), row), facets)
    return RunEvent(eventType=state, eventTime=at.isoformat(), run=run, job=job, producer=PRODUCER)


def _common_facets(row: LedgerRow) -> dict[str, Any]:
    begin, end = start_of(row.hour).isoformat(), end_of(row.hour).isoformat()
    facets: dict[str, Any] = {"nominalTime": nominal_time_run.NominalTimeRunFacet(begin, end)}
    if row.run is not None and row.run.parent is not None:
        facets["parent"] = _parent(row.run.parent, row.run.root)
    if row.run is not None and row.run.spark is not None:
        facets["processing_engine"] = processing_engine_run.ProcessingEngineRunFacet(
            row.run.spark, "spark", VERSION
        )
    return facets


def _parent(parent: str, root: str | None) -> parent_run.ParentRunFacet:
    outermost = None
    if root is not None:
        namespace, job, id = parse_run(root)
        outermost = parent_run.Root(parent_run.RootRun(id), parent_run.RootJob(namespace, job))
    namespace, job, id = parse_run(parent)
    return parent_run.ParentRunFacet(parent_run.Run(id), parent_run.Job(namespace, job), outermost)


def _final_facets(row: LedgerRow) -> dict[str, Any]:
    facets: dict[str, Any] = {"anabranch_hour": _HOUR_FACET | hour_facts(row)}
    if (error := error_of(row)) is not None:
        facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(error, "Python")
    return facets


def _dataset(kind: Any, name: Name, facets: dict[str, Any], **more: Any) -> Any:
    return kind(namespace=name.namespace, name=name.name, facets=facets, **more)


def _topic_facets(subject: Subject) -> dict[str, Any]:
    fields = [
        schema_dataset.SchemaDatasetFacetFields(
            ".".join(column.field), column.type, ordinal_position=i
        )
        for i, column in enumerate(subject.stream.record_columns, 1)
    ]
    return {
        "schema": schema_dataset.SchemaDatasetFacet(fields),
        "datasetType": dataset_type_dataset.DatasetTypeDatasetFacet("TOPIC"),
    }


def _input(subject: Subject, row: LedgerRow) -> InputDataset:
    facets = {}
    if row.offsets is not None and row.gap is not None:
        facets["inputStatistics"] = input_statistics_input_dataset.InputStatisticsInputDatasetFacet(
            row.offsets - row.gap
        )
    dataset: InputDataset = _dataset(
        InputDataset, subject.topic, _topic_facets(subject), inputFacets=facets
    )
    return dataset


def _outputs(subject: Subject, row: LedgerRow) -> list[OutputDataset]:
    name, facets = table_name(subject.table.location()), _table_facets(subject, row)
    if error_of(row) is not None:
        return [_dataset(OutputDataset, name, facets, outputFacets={})]
    files, size = (row.run.files, row.run.bytes) if row.run is not None else (None, None)
    written = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet
    statistics = {
        "outputStatistics": written(row.good, size, files),
        "subset": _only_the_hour(row.hour),
    }
    outputs = [_dataset(OutputDataset, name, facets, outputFacets=statistics)]
    if row.dead:
        documented = facet_v2.documentation_dataset.DocumentationDatasetFacet(_DEAD_DESCRIPTION)
        of_letters = {
            "documentation": documented,
            **_storage_facets(subject, subject.stream.dead_letters_table),
        }
        number = {"outputStatistics": written(row.dead)}
        where = table_name(subject.dead_letters.location())
        outputs.append(_dataset(OutputDataset, where, of_letters, outputFacets=number))
    return outputs


def _only_the_hour(hour: str) -> base_subset_dataset.OutputSubsetOutputDatasetFacet:
    partition = base_subset_dataset.Partition({"ingest_hour": hour})
    return base_subset_dataset.OutputSubsetOutputDatasetFacet(
        base_subset_dataset.PartitionSubsetCondition([partition])
    )


def _table_facets(subject: Subject, row: LedgerRow) -> dict[str, Any]:
    schema = subject.schema(row)
    facets = _storage_facets(subject, subject.stream.table)
    facets["schema"] = _columns(schema)
    facets["columnLineage"] = _column_lineage(subject, schema)
    if row.decision == "accepted" and row.snapshot_id is not None:
        facets["version"] = dataset_version_dataset.DatasetVersionDatasetFacet(str(row.snapshot_id))
    if assertions := assertions_of(row):
        facet = quality_facet.DataQualityAssertionsDatasetFacet(assertions)
        facets["dataQualityAssertions"] = facet
    return facets


def _storage_facets(subject: Subject, table: str) -> dict[str, Any]:
    catalog = subject.environment.catalog
    kind = "jdbc" if catalog.type == "sql" else catalog.type
    facets: dict[str, Any] = {
        "datasetType": dataset_type_dataset.DatasetTypeDatasetFacet("TABLE"),
        "storage": storage_dataset.StorageDatasetFacet("iceberg", "parquet"),
        "catalog": catalog_dataset.CatalogDatasetFacet(
            "iceberg",
            kind,
            catalog.name,
            catalog_address(catalog),
            catalog.warehouse,
            "anabranch",
            None,
        ),
    }
    if (known := catalog_name(catalog, subject.environment.s3.region, table)) is not None:
        link = symlinks_dataset.Identifier(known.namespace, known.name, "TABLE")
        facets["symlinks"] = symlinks_dataset.SymlinksDatasetFacet([link])
    return facets


def _columns(schema: Schema) -> schema_dataset.SchemaDatasetFacet:
    return schema_dataset.SchemaDatasetFacet(_fields(schema.fields))


def _fields(fields: tuple[NestedField, ...]) -> list[schema_dataset.SchemaDatasetFacetFields]:
    return [
        schema_dataset.SchemaDatasetFacetFields(
            field.name,
            str(field.field_type),
            field.doc,
            i,
            _fields(field.field_type.fields) if isinstance(field.field_type, StructType) else [],
        )
        for i, field in enumerate(fields, 1)
    ]


def _column_lineage(
    subject: Subject, schema: Schema
) -> column_lineage_dataset.ColumnLineageDatasetFacet:
    """Return the source fields of each column: the record's field, or those in the file's `select`;
    for the event date the event time."""
    stream = subject.stream
    chosen, plain = stream.select or (), [c.name for c in stream.columns if not c.rescues]
    source_fields = {name: (name,) for name in plain} | {one.name: one.fields for one in chosen}
    kinds = dict.fromkeys(plain, "field") | {one.name: one.kind for one in chosen}
    in_record = {column.name: ".".join(column.field) for column in stream.record_columns}
    if stream.event_time is not None:
        source_fields["event_date"] = (stream.event_time.column,)
    lineage = {}
    for name in (field.name for field in schema.fields if source_fields.get(field.name)):
        kind = "IDENTITY" if kinds.get(name) == "field" else "TRANSFORMATION"
        masks = kinds.get(name) in ("hash", "truncate")
        how = column_lineage_dataset.Transformation("DIRECT", kind, "", masks)
        sources = [
            column_lineage_dataset.InputField(*subject.topic, in_record.get(field, field), [how])
            for field in source_fields[name]
        ]
        lineage[name] = column_lineage_dataset.Fields(sources)
    return column_lineage_dataset.ColumnLineageDatasetFacet(lineage)
