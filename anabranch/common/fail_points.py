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
from enum import Enum, unique
from functools import cache

from anabranch.common.errors import ConfigurationError
from anabranch.common.process import is_submitted

LOG = logging.getLogger(__name__)

FAIL_AT = "ANABRANCH_FAIL_AT"
PAUSE_AT = "ANABRANCH_PAUSE_AT"


@unique
class Step(Enum):
    """All steps, with what has and has not happened when the step is reached."""

    # Speed job.
    SPEED_RECOVERED = "pending steps of an earlier publisher are finished, nothing is read yet"
    SPEED_SKIPPED = "the position has moved behind hours that the batch layer serves"
    SPEED_DECIDED = "the hours of a micro-batch are decided, nothing is staged"
    SPEED_ROWS_STAGED = "the micro-batch's rows are staged, its dead letters are not"
    SPEED_STAGED = "rows and dead letters are staged, nothing is published"
    SPEED_PUBLISHED = "rows and position are published, the dead letters are not"
    SPEED_DEAD_LETTERS = "the dead letters are published, the group's offsets are not committed"
    SPEED_OFFSETS_COMMITTED = "the group's offsets are committed, Spark's checkpoint is not written"
    ROLLUP_WRITTEN = "an hour's small files are compacted, the new files are not published"
    ROLLUP_PUBLISHED = "the compacted files replace the small ones"
    # Sealing.
    SEAL_DECIDED = "the cuts are decided, nothing is published"
    SEAL_PUBLISHED = "the cuts are published, the ledger does not know them"
    SEAL_RECORDED = "the ledger knows the cuts"
    # Batch job.
    BATCH_EMPTY_ACCEPTED = "hours without records are accepted, the ledger does not know it"
    BATCH_DECODED = "the hour is read and decoded, workers' rows are staged with duplicates"
    BATCH_ROWS_STAGED = "the hour's rows are staged, its dead letters are not"
    BATCH_STAGED = "rows and dead letters are staged, nothing is checked"
    BATCH_BALANCED = "the balance is counted, the quality gate has not run"
    BATCH_CHECKED = "balance, quality and difference are known, nothing is published"
    BATCH_REFUSED = "the hour is to be refused, the ledger does not know it"
    BATCH_PUBLISHED = "the hour is published, the ledger does not know it"
    BATCH_DEAD_LETTERS = "its dead letters are published, the ledger does not know it"
    BATCH_RECORDED = "the ledger knows the hour too"
    ARCHIVE_STAGED = "an hour's records are staged for the archive, not published"
    ARCHIVE_PUBLISHED = "the archive has the hour's records, its rows are not staged"
    # Views, filled after the batch job's work.
    VIEW_COMPUTED = "the partials of some hours are computed, nothing is written"
    VIEW_WRITTEN = "their files are written, the view's table does not name them"
    VIEW_FILLED = "the view's table has them, the next hours are not begun"
    # Merger.
    MERGE_PLANNED = "the swap is decided, nothing is published"
    MERGE_PUBLISHED = "the swap is published"
    # Adoption.
    ADOPT_DECIDED = "where the stream goes on is decided, nothing is published"
    ADOPT_PUBLISHED = "the stream goes on in the new log, the ledger does not know the sealed hours"
    # Erasure.
    ERASE_REQUESTED = "the ledger has the hashes of an erasure, no branch records it"
    ERASE_RECORDED = "each branch records it, nothing is erased"
    ERASE_WRITTEN = "files without the erased rows are written, no commit names them"
    ERASE_DECIDED = "the files to replace are chosen, nothing is published"
    ERASE_PUBLISHED = "some hours' rows have left every branch, the ledger does not know it"
    ERASE_PLACES_DECIDED = "dead letters are found, their places are not recorded"
    ERASE_PLACES_PUBLISHED = "the branches have the places, the ledger does not"
    ERASE_LETTERS_WRITTEN = "files without the dead letters are written, no commit names them"
    ERASE_LETTERS_PUBLISHED = "the dead letters have left every branch"
    ERASE_FORMER_FOUND = "files that former snapshots alone have are found, nothing is recorded"
    ERASE_FORMER_RECORDED = "the ledger has their hours, the erasure is not done"
    ERASE_PARTIALS_CLEARED = "views have no partials of erased rows"
    ERASE_ARCHIVE_WRITTEN = "files of the archive without the records are written"
    ERASE_ARCHIVE_PUBLISHED = "the archive has none of the records, the branches have them"
    ERASE_FOUND_NOTHING = "nothing is left on any branch, none records that it is done"
    # Hold.
    HOLD_PUBLISHED = (
        "each branch has the operator's act, perhaps of an earlier run; an expiry of dead letters "
        "may still land"
    )
    HOLD_MOVED = "no expiry that was decided before can land, the ledger does not know it"
    # Import.
    IMPORT_WRITTEN = "some hours' files are written and read back, no commit names them"
    IMPORT_DECIDED = "these hours are compared with the table as it is, nothing is published"
    IMPORT_PUBLISHED = "they are accepted, the ledger does not know it"
    IMPORT_RECORDED = "the ledger knows them, earlier hours are not imported"
    UNDO_DECIDED = "the imported hours to take back are chosen, nothing is published"
    UNDO_PUBLISHED = "they have left every branch, the ledger does not know it"
    # Maintenance.
    EXPIRE_DECIDED = "the hours that expire are chosen, nothing is published"
    EXPIRE_PUBLISHED = "their rows have left every branch, the ledger does not know it"
    EXPIRE_LETTERS_DECIDED = "the hours whose dead letters expire are chosen, nothing is done"
    EXPIRE_LETTERS_PUBLISHED = "some hours' dead letters have left every branch"
    EXPIRE_LEDGER_DECIDED = "the quarters that leave the ledger are chosen, nothing is done"
    EXPIRE_LEDGER_LANDED = "they have left the ledger, maintenance does not know it"
    EXPIRE_RECORDED = "the ledger says that they have expired"
    MAINTAIN_DROPPED = "old hours have left the speed branch, their dead letters have not"
    MAINTAIN_EXPIRED = "snapshots of all tables are expired, no file is looked for"
    MAINTAIN_ENDED = "tags and snapshots with erased records are gone, their files are not"
    MAINTAIN_LISTED = "the orphans are known, none is deleted"
    MAINTAIN_DELETED = "the orphans are deleted"
    MAINTAIN_VERSIONS_DELETED = "versions with erased records are deleted, the erasure is recorded"
    # Egress.
    EGRESS_BEGUN = "an hour's folder has no _SUCCESS any more, nothing is written"
    EGRESS_WRITTEN = "the hour's files are written, the manifest does not name them"
    EGRESS_NAMED = "the manifest names them, the files that they replace are not deleted"
    EGRESS_CLEARED = "the replaced files are deleted, _SUCCESS is not written"
    EGRESS_SENT = "a transaction's records and its position are sent; it is not committed"
    EGRESS_COMMITTED = "the transaction is committed, nothing is recorded"
    EGRESS_INDEXED = "a bulk of the hour's documents is in the index, the next is not sent"
    EGRESS_DELIVERED = "the hour is complete at its target, the egress table does not record it"
    EGRESS_RECORDED = "the egress table records the hour"
    # Every publish, of any layer.
    COMMIT_PREPARED = "a publish's manifests are written, the catalog has no request"
    COMMIT_REQUEST_LOST = "the connection breaks before the catalog got the publish"
    COMMIT_ANSWER_LOST = "the publish landed, the connection breaks before the answer"
    COMMIT_DOUBTED = "an answer was lost, and the publish may still land"
    COMMIT_FENCED = "a head has moved, so the doubted publish cannot land; its owner does not know"
    COMMIT_LANDED = "the publish landed, no later step has begun"
    # Ledger.
    LEDGER_PREPARED = "rows are written to storage, the ledger does not have them"
    LEDGER_APPENDED = "the ledger has the rows, they were not read back"
    LEDGER_MERGE_PREPARED = "files of the ledger are merged in storage, it refers to the old ones"
    LEDGER_MERGED = "the ledger refers to the merged files"

    @property
    def label(self) -> str:
        """The step's name in the environment variables, such as `speed.rows-staged`."""
        return self.name.lower().replace("_", ".", 1).replace("_", "-")

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
        LOG.warning("pause point %s: %s", step.label, step.value)
        _signal(signal.SIGSTOP)
        LOG.warning("pause point %s: resumed", step.label)
    if any(armed.is_now(step) for armed in _armed(FAIL_AT)):
        LOG.warning("fail point %s: %s", step.label, step.value)
        if not step.dies:
            raise ConnectionError(f"fail point {step.label}")
        _signal(signal.SIGKILL)


def _signal(number: signal.Signals) -> None:
    """Send a signal to this process and, under spark-submit, first to its parent: the JVM would
    notice the death, log it and clean up."""
    if is_submitted():
        os.kill(os.getppid(), number)
    os.kill(os.getpid(), number)
