"""Great Expectations' Data Docs of what the quality gate said, from the ledger alone: no row is
read again.

The ledger keeps every expectation of a decision about an hour with its kwargs, its verdict, and
what was found where it failed; long lists and texts are cut short there, and so in the pages.
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
"""How many hours have a page when none is named."""


_PAGES = "anabranch-pages.json"
_PAGE = re.compile(r"validations/.+\.html$")

_NO_FILE_NAME = re.compile(r"[^\w .-]|^\.+")

_LAST = "9999-12-31T23"

# Great Expectations puts values, kwargs and names into its pages with and without escaping them, by
# the place. So no character of HTML's own reaches it: each is another one of Unicode's private use
# until the page is written.
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"}
_PRIVATE = {character: chr(0xE000 + place) for place, character in enumerate(_HTML)}
_TO_PRIVATE = str.maketrans(_PRIVATE)
# As JSON within a page writes them, too.
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
    """The ledger's rows that get a page: all of one hour's, or the newest of each of the newest
    hours. Pure."""
    judged = [row for row in history if row.quality is not None and row.quality.evaluated]
    if hour is not None:
        return [row for row in judged if row.hour == hour]
    newest = {row.hour: row for row in judged}
    return [newest[h] for h in sorted(newest)[-NEWEST:]]


def find_pages(lake: Lake, table: str, timeline: Timeline, hour: str | None) -> list[LedgerRow]:
    """The same, from the ledger `table`: back in time from the newest hour, as far as there are
    judged ones to find. Raises Transient."""
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
    `s3://bucket/prefix`; returns where its index is. Deletes pages that earlier calls wrote there
    longer than `keep` ago (None: no page), which a list beside the index names; every other file
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
        # The list first: a page that it does not name would stay for ever.
        place.write(_PAGES, json.dumps(kept | gone, indent=0, sort_keys=True).encode())
        for name in files:
            place.write(name, (made / name).read_bytes())
        place.delete(sorted(gone))
        place.write(_PAGES, json.dumps(kept, indent=0, sort_keys=True).encode())
    return index


def plan_retention(
    listed: Mapping[str, str], written: Sequence[str], now: datetime, keep: timedelta | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Of the pages that earlier calls wrote, by name with their times, and those that are written
    now: those to keep and those to delete. Pure."""
    oldest = (now - keep).isoformat() if keep is not None else ""
    gone = {name: at for name, at in listed.items() if at < oldest and name not in written}
    kept = {name: at for name, at in listed.items() if name not in gone}
    return kept | dict.fromkeys(written, now.isoformat()), gone


def _parse_pages(body: bytes | None) -> dict[str, str]:
    """The list of pages; empty where it is not ours to read. A name that could lie outside the site
    is none."""
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
        try:
            return (self.folder / name).read_bytes()
        except OSError:
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
    """Write the site into an empty folder; whatever a record, a kwarg or a name holds is text there
    and never markup. Raises Terminal unless every row has its page: Great Expectations leaves out
    what it cannot render, and only logs it."""
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
    # The suite's name is a file's name too.
    return replace(
        changed, suite=_NO_FILE_NAME.sub("_", changed.suite) if changed.suite is not None else None
    )


def _private(value: Any) -> Any:
    """The value with no character that HTML knows, however deep."""
    if isinstance(value, str):
        return value.translate(_TO_PRIVATE)
    if isinstance(value, Mapping):
        if condition := value.get("row_condition"):
            # A text that is shown, and not parsed: that is what Spark's parser does.
            text = condition if isinstance(condition, str) else json.dumps(condition)
            value = {**value, "row_condition": text, "condition_parser": "spark"}
        return {_private(key): _private(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_private, value))
    return value


def _page(stream: str, table: str, row: LedgerRow, quality: QualityResult) -> tuple[Any, Any]:
    """A row of the ledger as Great Expectations' own result, and its key."""
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
    """Every expectation of a verdict, with what the ledger keeps of it."""
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
    """The observations, in Great Expectations' result format."""
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
        # Its pages show a list of values, so put the rows' positions there.
        "partial_unexpected_list": [
            f"partition {row['partition']}, offset {row['offset']}"
            for row in entry.get("rows") or ()
        ],
    }
