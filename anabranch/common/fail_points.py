"""Fail points: named steps at which a test, or a user who wants proof, ends the process as `kill
-9` would.

`ANABRANCH_FAIL_AT=<step>[:n]` arms one step, at the n-th time that it is reached (default 1). A
comma separates several: steps after a lost answer are reached only if that one is armed too. Unset,
nothing happens. A step of kind `dies` kills this process and, under spark-submit, its JVM, without
handlers or flushes. A step of kind `answer is lost` breaks the connection to the catalog instead,
before or after the commit landed. `ANABRANCH_PAUSE_AT=<step>[:n]` stops both processes (SIGSTOP)
until SIGCONT.
"""

from __future__ import annotations

import logging
import os
import signal
from enum import Enum
from functools import cache

from anabranch.common.errors import ConfigurationError
from anabranch.common.process import is_submitted

LOG = logging.getLogger(__name__)

FAIL_AT = "ANABRANCH_FAIL_AT"
PAUSE_AT = "ANABRANCH_PAUSE_AT"


class Step(Enum):
    """All steps: the name, and what has and has not happened when the step is reached."""

    # Speed job.
    SPEED_RECOVERED = (
        "speed.recovered",
        "pending steps of an earlier publisher are finished, nothing is read yet",
    )
    SPEED_SKIPPED = (
        "speed.skipped",
        "the position has moved behind hours that the batch layer serves",
    )
    SPEED_DECIDED = "speed.decided", "the hours of a micro-batch are decided, nothing is staged"
    SPEED_ROWS_STAGED = "speed.rows-staged", "its rows are staged, its dead letters are not"
    SPEED_STAGED = "speed.staged", "rows and dead letters are staged, nothing is published"
    SPEED_PUBLISHED = "speed.published", "rows and position are published, the dead letters are not"
    SPEED_DEAD_LETTERS = (
        "speed.dead-letters",
        "the dead letters are published, the group's offsets are not committed",
    )
    SPEED_OFFSETS_COMMITTED = (
        "speed.offsets-committed",
        "the group's offsets are committed, Spark's checkpoint is not written",
    )
    ROLLUP_WRITTEN = (
        "rollup.written",
        "an hour's small files are compacted, the new files are not published",
    )
    ROLLUP_PUBLISHED = "rollup.published", "the compacted files replace the small ones"
    # Sealing.
    SEAL_DECIDED = "seal.decided", "the cuts are decided, nothing is published"
    SEAL_PUBLISHED = "seal.published", "the cuts are published, the ledger does not know them"
    SEAL_RECORDED = "seal.recorded", "the ledger knows the cuts"
    # Batch job.
    BATCH_EMPTY_ACCEPTED = (
        "batch.empty-accepted",
        "hours without records are accepted, the ledger does not know it",
    )
    BATCH_DECODED = (
        "batch.decoded",
        "the hour is read and decoded, workers' rows are staged with duplicates",
    )
    BATCH_ROWS_STAGED = "batch.rows-staged", "its rows are staged, its dead letters are not"
    BATCH_STAGED = "batch.staged", "rows and dead letters are staged, nothing is checked"
    BATCH_BALANCED = "batch.balanced", "the balance is counted, the quality gate has not run"
    BATCH_CHECKED = (
        "batch.checked",
        "balance, quality and difference are known, nothing is published",
    )
    BATCH_REFUSED = "batch.refused", "the hour is to be refused, the ledger does not know it"
    BATCH_PUBLISHED = "batch.published", "the hour is published, the ledger does not know it"
    BATCH_DEAD_LETTERS = (
        "batch.dead-letters",
        "its dead letters are published, the ledger does not know it",
    )
    BATCH_RECORDED = "batch.recorded", "the ledger knows the hour too"
    ARCHIVE_STAGED = (
        "archive.staged",
        "an hour's records are staged for the archive, not published",
    )
    ARCHIVE_PUBLISHED = (
        "archive.published",
        "the archive has the hour's records, its rows are not staged",
    )
    # Views, filled after the batch job's work.
    VIEW_COMPUTED = "view.computed", "the partials of some hours are computed, nothing is written"
    VIEW_WRITTEN = "view.written", "their files are written, the view's table does not name them"
    VIEW_FILLED = "view.filled", "the view's table has them, the next hours are not begun"
    # Merger.
    MERGE_PLANNED = "merge.planned", "the swap is decided, nothing is published"
    MERGE_PUBLISHED = "merge.published", "the swap is published"
    # Adoption.
    ADOPT_DECIDED = "adopt.decided", "where the stream goes on is decided, nothing is published"
    ADOPT_PUBLISHED = (
        "adopt.published",
        "the stream goes on in the new log, the ledger does not know the sealed hours",
    )
    # Erasure.
    ERASE_REQUESTED = (
        "erase.requested",
        "the ledger has the hashes of an erasure, no branch records it",
    )
    ERASE_RECORDED = "erase.recorded", "each branch records it, nothing is erased"
    ERASE_WRITTEN = (
        "erase.written",
        "files without the erased rows are written, no commit names them",
    )
    ERASE_DECIDED = "erase.decided", "the files to replace are chosen, nothing is published"
    ERASE_PUBLISHED = (
        "erase.published",
        "some hours' rows have left every branch, the ledger does not know it",
    )
    ERASE_PLACES_DECIDED = (
        "erase.places-decided",
        "dead letters are found, their places are not recorded",
    )
    ERASE_PLACES_PUBLISHED = (
        "erase.places-published",
        "the branches have the places, the ledger does not",
    )
    ERASE_LETTERS_WRITTEN = (
        "erase.letters-written",
        "files without the dead letters are written, no commit names them",
    )
    ERASE_LETTERS_PUBLISHED = "erase.letters-published", "the dead letters have left every branch"
    ERASE_FORMER_FOUND = (
        "erase.former-found",
        "files that former snapshots alone have are found, nothing is recorded",
    )
    ERASE_FORMER_RECORDED = (
        "erase.former-recorded",
        "the ledger has their hours, the erasure is not done",
    )
    ERASE_PARTIALS_CLEARED = "erase.partials-cleared", "views have no partials of erased rows"
    ERASE_ARCHIVE_WRITTEN = (
        "erase.archive-written",
        "files of the archive without the records are written",
    )
    ERASE_ARCHIVE_PUBLISHED = (
        "erase.archive-published",
        "the archive has none of the records, the branches have them",
    )
    ERASE_FOUND_NOTHING = (
        "erase.found-nothing",
        "nothing is left on any branch, none records that it is done",
    )
    # Hold.
    HOLD_PUBLISHED = (
        "hold.published",
        "each branch has the operator's act, perhaps of an earlier run; an expiry of dead letters "
        "may still land",
    )
    HOLD_MOVED = (
        "hold.moved",
        "no expiry that was decided before can land, the ledger does not know it",
    )
    # Import.
    IMPORT_WRITTEN = (
        "import.written",
        "some hours' files are written and read back, no commit names them",
    )
    IMPORT_DECIDED = (
        "import.decided",
        "these hours are compared with the table as it is, nothing is published",
    )
    IMPORT_PUBLISHED = "import.published", "they are accepted, the ledger does not know it"
    IMPORT_RECORDED = "import.recorded", "the ledger knows them, earlier hours are not imported"
    UNDO_DECIDED = (
        "undo.decided",
        "the imported hours to take back are chosen, nothing is published",
    )
    UNDO_PUBLISHED = "undo.published", "they have left every branch, the ledger does not know it"
    # Maintenance.
    EXPIRE_DECIDED = "expire.decided", "the hours that expire are chosen, nothing is published"
    EXPIRE_PUBLISHED = (
        "expire.published",
        "their rows have left every branch, the ledger does not know it",
    )
    EXPIRE_LETTERS_DECIDED = (
        "expire.letters-decided",
        "the hours whose dead letters expire are chosen, nothing is done",
    )
    EXPIRE_LETTERS_PUBLISHED = (
        "expire.letters-published",
        "some hours' dead letters have left every branch",
    )
    EXPIRE_LEDGER_DECIDED = (
        "expire.ledger-decided",
        "the quarters that leave the ledger are chosen, nothing is done",
    )
    EXPIRE_LEDGER_LANDED = (
        "expire.ledger-landed",
        "they have left the ledger, maintenance does not know it",
    )
    EXPIRE_RECORDED = "expire.recorded", "the ledger says that they have expired"
    MAINTAIN_DROPPED = (
        "maintain.dropped",
        "old hours have left the speed branch, their dead letters have not",
    )
    MAINTAIN_EXPIRED = (
        "maintain.expired",
        "snapshots of all tables are expired, no file is looked for",
    )
    MAINTAIN_ENDED = (
        "maintain.ended",
        "tags and snapshots with erased records are gone, their files are not",
    )
    MAINTAIN_LISTED = "maintain.listed", "the orphans are known, none is deleted"
    MAINTAIN_DELETED = "maintain.deleted", "the orphans are deleted"
    MAINTAIN_VERSIONS_DELETED = (
        "maintain.versions-deleted",
        "versions of files with erased records are deleted, the erasure is recorded",
    )
    # Egress.
    EGRESS_BEGUN = "egress.begun", "an hour's folder has no _SUCCESS any more, nothing is written"
    EGRESS_WRITTEN = (
        "egress.written",
        "the hour's files are written, the manifest does not name them",
    )
    EGRESS_NAMED = (
        "egress.named",
        "the manifest names them, the files that they replace are not deleted",
    )
    EGRESS_CLEARED = "egress.cleared", "the replaced files are deleted, _SUCCESS is not written"
    EGRESS_SENT = (
        "egress.sent",
        "a transaction's records are sent, and the position with them; it is not committed",
    )
    EGRESS_COMMITTED = "egress.committed", "the transaction is committed, nothing is recorded"
    EGRESS_INDEXED = (
        "egress.indexed",
        "a bulk of the hour's documents is in the index, the next is not sent",
    )
    EGRESS_DELIVERED = (
        "egress.delivered",
        "the hour is complete at its target, the egress table does not record it",
    )
    EGRESS_RECORDED = "egress.recorded", "the egress table records the hour"
    # Every publish, of any layer.
    COMMIT_PREPARED = (
        "commit.prepared",
        "a publish's manifests are written, the catalog has no request",
    )
    COMMIT_REQUEST_LOST = (
        "commit.request-lost",
        "the connection breaks before the catalog got the publish",
    )
    COMMIT_ANSWER_LOST = (
        "commit.answer-lost",
        "the publish landed, the connection breaks before the answer",
    )
    COMMIT_DOUBTED = "commit.doubted", "an answer was lost, and the publish may still land"
    COMMIT_FENCED = (
        "commit.fenced",
        "a head has moved, so the doubted publish cannot land; its publisher does not know",
    )
    COMMIT_LANDED = "commit.landed", "the publish landed, no later step has begun"
    # Ledger.
    LEDGER_PREPARED = (
        "ledger.prepared",
        "rows are written to storage, the ledger does not have them",
    )
    LEDGER_APPENDED = "ledger.appended", "the ledger has the rows, they were not read back"
    LEDGER_MERGE_PREPARED = (
        "ledger.merge-prepared",
        "files of the ledger are merged in storage, it refers to the old ones",
    )
    LEDGER_MERGED = "ledger.merged", "the ledger refers to the merged files"

    def __init__(self, label: str, meaning: str) -> None:
        self.label = label
        self.meaning = meaning

    @property
    def dies(self) -> bool:
        return self not in (Step.COMMIT_REQUEST_LOST, Step.COMMIT_ANSWER_LOST)


class _Armed:
    """An armed step, and how often it is still to be reached."""

    def __init__(self, step: Step, number: int) -> None:
        self.step, self.left = step, number

    def is_now(self, step: Step) -> bool:
        if step is not self.step:
            return False
        self.left -= 1
        return self.left == 0


@cache
def _armed(variable: str) -> tuple[_Armed, ...]:
    value = os.environ.get(variable)
    return tuple(parse(one, variable) for one in value.split(",")) if value else ()


def parse(value: str, variable: str = FAIL_AT) -> _Armed:
    """Parse `<step>[:n]`. Raises ConfigurationError for an unknown step or a number below 1."""
    label, _, number = value.partition(":")
    step = next((s for s in Step if s.label == label), None)
    if step is None:
        known = ", ".join(s.label for s in Step)
        raise ConfigurationError(f"{variable}: expected one of {known}, found {label}")
    if number and (not number.isdecimal() or int(number) < 1):
        raise ConfigurationError(
            f"{variable}: expected {label}:n with n of at least 1, found {value}"
        )
    return _Armed(step, int(number or 1))


def reach(step: Step) -> None:
    """Report that the process reached a step. If the step is armed, end or pause the process, or
    raise ConnectionError."""
    if any(armed.is_now(step) for armed in _armed(PAUSE_AT)):
        LOG.warning("pause point %s: %s", step.label, step.meaning)
        _signal(signal.SIGSTOP)
        LOG.warning("pause point %s: resumed", step.label)
    if any(armed.is_now(step) for armed in _armed(FAIL_AT)):
        LOG.warning("fail point %s: %s", step.label, step.meaning)
        if not step.dies:
            raise ConnectionError(f"fail point {step.label}")
        _signal(signal.SIGKILL)


def _signal(number: signal.Signals) -> None:
    """Send a signal to this process and, under spark-submit, first to its parent: the JVM would
    notice the death, log it and clean up."""
    if is_submitted():
        os.kill(os.getppid(), number)
    os.kill(os.getpid(), number)
