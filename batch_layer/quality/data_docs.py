"""Great Expectations' Data Docs of the quality gate's verdicts, from the ledger alone: no row is
read again.

For each decision about an hour, the ledger has every expectation with its kwargs, its verdict, and
the observations of a failed one. Long lists and texts are shortened there, and so in the pages.
"""

from __future__ import annotations

import json
import mimetypes
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from anabranch import config
from anabranch.common.errors import ConfigurationError, Terminal
from anabranch.common.json_values import from_json
from anabranch.common.temporary import temporary_folder
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.ledger_files import Span
from anabranch.iceberg.s3 import ObjectStore, bucket_and_key
from anabranch.offsets.hours import Timeline, shift
from anabranch.protocol.ledger import Ledger
from anabranch.protocol.ledger_row import LedgerRow, QualityResult
from batch_layer.quality import suite
from batch_layer.quality.suite import Expectation, configuration, context, great_expectations

NEWEST = 48
"""The number of hours with a page if no hour is named."""


_PAGES = "anabranch-pages.json"
_PAGE = re.compile(r"validations/.+\.html$")

_NO_FILE_NAME = re.compile(r"[^\w .-]|^\.+")

_LAST = "9999-12-31T23"

# Great Expectations escapes values, kwargs and names in some places of its pages and not in others.
# So it gets none of HTML's own characters: each is replaced by one of Unicode's private use until
# the page is written.
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"}
_PRIVATE = {character: chr(0xE000 + place) for place, character in enumerate(_HTML)}
_TO_PRIVATE = str.maketrans(_PRIVATE)
# Also in the form in which JSON within a page has them.
_ENTITIES = {
    form: _HTML[c]
    for c, private in _PRIVATE.items()
    for form in (private, f"\\u{ord(private):04x}")
}
_IN_PAGES = re.compile("|".join(map(re.escape, _ENTITIES)))

_NOTHING_RAISED = {
    "raised_exception": False,
    "exception_message": None,
    "exception_traceback": None,
}


def plan_pages(history: Sequence[LedgerRow], hour: str | None) -> list[LedgerRow]:
    """Return the ledger's rows that get a page: all rows of `hour`, or the newest row of each of
    the newest hours. Pure."""
    judged = [row for row in history if row.quality is not None and row.quality.evaluated]
    if hour is not None:
        return [row for row in judged if row.hour == hour]
    newest = {row.hour: row for row in judged}
    return [newest[h] for h in sorted(newest)[-NEWEST:]]


def find_pages(lake: Lake, table: str, timeline: Timeline, hour: str | None) -> list[LedgerRow]:
    """Return the same rows from the ledger `table`: read back from the newest hour until enough
    judged hours are found. Raises Transient."""
    if hour is not None:
        return plan_pages(Ledger(lake, table).history([hour]), hour)
    back = NEWEST
    while True:
        first = shift(timeline.open, -back)
        rows = plan_pages(Ledger(lake, table).history(Span(first, _LAST)), None)
        if len(rows) >= NEWEST or first <= timeline.first:
            return rows
        back *= 4


def publish(
    environment: config.Environment,
    stream: config.Stream,
    rows: Sequence[LedgerRow],
    to: str,
    now: datetime,
    keep: timedelta | None = None,
) -> str:
    """Build a site with a page for each row of the ledger at `to`, a folder or
    `s3://bucket/prefix`. Return the address of its index. Deletes pages that earlier calls wrote
    longer than `keep` ago (None: no page), by a list of pages beside the index; every other file
    stays. Raises ConfigurationError, Terminal, Transient."""
    place: _Folder | _Bucket
    if (on_s3 := bucket_and_key(to)) is not None and on_s3[0]:
        prefix = f"{on_s3[1].strip('/')}/".lstrip("/")
        place, index = (
            _Bucket(ObjectStore(environment.s3), on_s3[0], prefix),
            f"s3://{on_s3[0]}/{prefix}index.html",
        )
    elif "://" not in to:
        place, index = _Folder(Path(to)), str(Path(to) / "index.html")
    else:
        raise ConfigurationError(f"--to: expected a folder or s3://bucket/prefix, found {to!r}")
    with temporary_folder("data-docs") as made:
        build(stream.name, stream.table, rows, made)
        files = sorted(p.relative_to(made).as_posix() for p in made.rglob("*") if p.is_file())
        kept, gone = plan_retention(
            _parse_pages(place.read(_PAGES)), [f for f in files if _PAGE.match(f)], now, keep
        )
        # Write the list first: a page that it does not name would stay for ever.
        place.write(_PAGES, json.dumps(kept | gone, indent=0, sort_keys=True).encode())
        for name in files:
            place.write(name, (made / name).read_bytes())
        place.delete(sorted(gone))
        place.write(_PAGES, json.dumps(kept, indent=0, sort_keys=True).encode())
    return index


def plan_retention(
    listed: Mapping[str, str], written: Sequence[str], now: datetime, keep: timedelta | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the pages to keep and those to delete, by name with their times, among the pages in
    `listed` that earlier calls wrote and the pages written now. Pure."""
    oldest = (now - keep).isoformat() if keep is not None else ""
    gone = {name: at for name, at in listed.items() if at < oldest and name not in written}
    kept = {name: at for name, at in listed.items() if name not in gone}
    return kept | dict.fromkeys(written, now.isoformat()), gone


def _parse_pages(body: bytes | None) -> dict[str, str]:
    """Return the list of pages; empty if the file is not such a list. Ignores names that could lie
    outside the site."""
    try:
        listed = json.loads(body or b"{}")
        return {
            str(name): str(at)
            for name, at in listed.items()
            if _PAGE.match(name) and ".." not in name.split("/")
        }
    except (ValueError, AttributeError, TypeError):
        return {}


@dataclass(frozen=True)
class _Folder:
    """A site in a folder of this machine. Raises Terminal."""

    folder: Path

    def read(self, name: str) -> bytes | None:
        with self._errors("read"):
            try:
                return (self.folder / name).read_bytes()
            except FileNotFoundError:
                return None

    def write(self, name: str, body: bytes) -> None:
        with self._errors("write into"):
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            path = self.folder / name
            if not path.resolve().is_relative_to(self.folder.resolve()):
                continue
            with self._errors("delete old pages of"):
                path.unlink(missing_ok=True)
            for above in path.relative_to(self.folder).parents[:-1]:
                with suppress(OSError):  # not empty
                    (self.folder / above).rmdir()

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Terminal(
                f"--to: expected to {doing} {self.folder}, found {error}; choose another folder"
            ) from error


@dataclass(frozen=True)
class _Bucket:
    """A site below a prefix in S3. Raises ConfigurationError, Transient."""

    store: ObjectStore
    bucket: str
    prefix: str

    def read(self, name: str) -> bytes | None:
        found = self.store.find(self.bucket, self.prefix + name)
        return found[0] if found is not None else None

    def write(self, name: str, body: bytes) -> None:
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        self.store.put(self.bucket, self.prefix + name, body, kind)

    def delete(self, names: Sequence[str]) -> None:
        if names:
            self.store.delete_objects(self.bucket, [self.prefix + name for name in names])


def build(stream: str, table: str, rows: Sequence[LedgerRow], folder: Path) -> None:
    """Write the site into an empty folder. Records, kwargs and names appear as text, never as
    markup. Raises Terminal unless every row has its page: Great Expectations only logs a page that
    it cannot render."""
    site = {
        "class_name": "SiteBuilder",
        "store_backend": {
            "class_name": "TupleFilesystemStoreBackend",
            "base_directory": str(folder.resolve()),
        },
        "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
        "show_how_to_buttons": False,
    }
    docs = context()
    docs.add_data_docs_site(stream, site)
    judged = [(row, _without_html(row.quality)) for row in rows if row.quality is not None]
    for name, quality in {quality.suite or stream: quality for _, quality in judged}.items():
        # Use the newest row's suite; each page links to it. Shortened values may not load again.
        docs.suites.add(
            suite.build(name, dict(enumerate(e for e, _ in _expectations(quality) if _loads(e))))
        )
    for row, quality in judged:
        docs.validation_results_store.set(*_page(stream, table, row, quality))
    docs.build_data_docs()
    for page in folder.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        page.write_text(
            _IN_PAGES.sub(lambda match: _ENTITIES[match.group()], text), encoding="utf-8"
        )
    pages = sum(1 for _ in (folder / "validations").rglob("*.html"))
    if pages != len(rows):
        raise Terminal(
            f"data docs of {stream}: expected {len(rows)} pages, found that {pages} could be "
            f"rendered; the ledger has the rest: `anabranch explain {stream} HOUR`"
        )


def _without_html(quality: QualityResult) -> QualityResult:
    changed = from_json(QualityResult, _private(quality.as_dict()))
    # The suite's name is also a file name.
    return replace(
        changed, suite=_NO_FILE_NAME.sub("_", changed.suite) if changed.suite is not None else None
    )


def _private(value: Any) -> Any:
    """Return the value without HTML's special characters, at any depth."""
    if isinstance(value, str):
        return value.translate(_TO_PRIVATE)
    if isinstance(value, Mapping):
        if condition := value.get("row_condition"):
            # With Spark's parser, the pages show a condition as text and do not parse it.
            text = condition if isinstance(condition, str) else json.dumps(condition)
            value = {**value, "row_condition": text, "condition_parser": "spark"}
        return {_private(key): _private(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_private, value))
    return value


def _page(stream: str, table: str, row: LedgerRow, quality: QualityResult) -> tuple[Any, Any]:
    """Return a row of the ledger as Great Expectations' own result, with its key."""
    gx = great_expectations()
    from great_expectations.core.run_identifier import RunIdentifier
    from great_expectations.data_context.types.resource_identifiers import (
        ExpectationSuiteIdentifier,
        ValidationResultIdentifier,
    )

    name, at = quality.suite or stream, row.recorded_at
    run = RunIdentifier(run_name=f"{row.hour} revision {row.revision} {row.decision}", run_time=at)
    results = list(_results(quality))
    met = sum(result.success for result in results)
    result = gx.core.ExpectationSuiteValidationResult(
        success=quality.passed,
        results=results,
        suite_name=name,
        statistics={
            "evaluated_expectations": len(results),
            "successful_expectations": met,
            "unsuccessful_expectations": len(results) - met,
            "success_percent": 100 * met / len(results) if results else None,
        },
        meta={
            "run_id": run,
            "great_expectations_version": gx.__version__,
            "batch_spec": {"data_asset_name": table},
            "validation_time": at.strftime("%Y%m%dT%H%M%S.%fZ"),
        },
    )
    return ValidationResultIdentifier(ExpectationSuiteIdentifier(name), run, row.hour), result


def _results(quality: QualityResult) -> Iterator[Any]:
    from great_expectations.core import ExpectationValidationResult

    without = {entry["type"]: entry["reason"] for entry in quality.not_applicable or ()}
    for given, entry in _expectations(quality):
        failed = "message" in entry
        info: dict[str, Any] = dict(_NOTHING_RAISED)
        if entry.get("raised"):
            why = entry["raised"]
            info |= {"raised_exception": True, "exception_message": why, "exception_traceback": why}
        yield ExpectationValidationResult(
            success=not failed,
            expectation_config=configuration(given),
            result=_failed_result(entry) if failed else {"observed_value": without.get(given.type)},
            exception_info=info,
            meta={},
        )


def _expectations(quality: QualityResult) -> list[tuple[Expectation, Mapping[str, Any]]]:
    """Return every expectation of a verdict, with the ledger's entry for it."""
    entries = [*quality.failed, *(quality.warnings or ()), *(quality.met or ())]
    return [
        (Expectation(e["type"], e["kwargs"], e.get("severity", "critical")), e) for e in entries
    ]


def _loads(expectation: Expectation) -> bool:
    try:
        configuration(expectation).to_domain_obj()
    except Exception:  # pydantic's, Python's and its own: there is no common base
        return False
    return True


def _failed_result(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the observations in Great Expectations' result format."""
    observed, count, elements = (
        entry["observed"],
        entry["unexpected_count"],
        entry.get("element_count"),
    )
    if count is None or not elements:
        return {"observed_value": observed}
    return {
        "element_count": elements,
        "unexpected_count": count,
        "unexpected_percent": 100 * count / elements,
        # The pages show a list of values, so put the rows' positions there.
        "partial_unexpected_list": [
            f"partition {row['partition']}, offset {row['offset']}"
            for row in entry.get("rows") or ()
        ],
    }
