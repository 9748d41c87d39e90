"""Print the differences between the layers' rows of an hour, and its duplicates."""

from __future__ import annotations

from anabranch.common.output import plain, print_json, print_table, text
from anabranch.operations.reports.diff import HourDifference, HourDuplicates
from anabranch.operations.reports.status import unexplained_words
from serving_layer.layer_diff.duckdb import Sample

_LONGEST = 100  # maximum characters of a row in a line of text
_WORDS = {
    "changed": "different content",
    "extra": "in speed, not in batch",
    "missing": "in batch, not in speed",
    "unread": "in batch, not read by speed",
    "duplicate": "in speed, removed by batch",
}


def print_difference(view: HourDifference, output: str) -> None:
    if output == "json":
        print_json(view)
        return
    counts = view.diff.as_dict()
    print(
        f"{view.stream}: hour {view.hour}: {view.speed_rows} rows in speed, {view.batch_rows} in "
        "batch"
    )
    print_table(
        ("rows", ""),
        [
            (counts[k] - (counts["unread"] if k == "missing" else 0), f"{k}: {_WORDS[k]}")
            for k in _WORDS
        ],
    )
    if view.uncovered:
        print(f"{view.uncovered}; rows missing for that reason are no fault")
    for sample in view.samples:
        _print_sample(sample)
    if view.when_accepted is not None and view.when_accepted != view.diff:
        print(
            "at acceptance: "
            + ", ".join(f"{n} {k}" for k, n in view.when_accepted.as_dict().items())
        )
    if view.unexplained:
        print(f"nothing explains {unexplained_words(view.unexplained)}")
    else:
        print("all differences are explained")


def _print_sample(sample: Sample) -> None:
    speed, batch = sample.speed, sample.batch
    print(
        f"\n{sample.kind} ({_WORDS[sample.kind]}): partition {sample.partition}, offset "
        f"{sample.offset}"
    )
    if speed is not None and batch is not None:
        print_table(
            ("column", "speed", "batch"),
            [(c, _shown(speed[c]), _shown(batch[c])) for c in sample.columns],
        )
    else:
        row = {
            k: v
            for k, v in (speed or batch or {}).items()
            if v is not None and not k.startswith("kafka_")
        }
        print("  " + ", ".join(f"{k} {_shown(v)}" for k, v in row.items()))


def print_duplicates(view: HourDuplicates, output: str) -> None:
    if output == "json":
        print_json(view)
        return
    if view.duplicates:
        names = list(view.duplicates[0].key)
        print_table(
            ("partition", "offset", *names, "repeats hour", "partition", "offset"),
            [
                (d.partition, d.offset, *map(_shown, d.key.values()), *vars(d.repeats).values())
                for d in view.duplicates
            ],
        )
    counted = "an unknown number of" if view.counted is None else view.counted
    more = f", the first {view.listed} listed (--limit)" if view.listed < view.found else ""
    print(
        f"{view.stream}: hour {view.hour}: {counted} duplicates counted, {view.found} found{more}"
    )
    if view.untold:
        print(view.untold)


def _shown(value: object) -> str:
    line = text(plain(value))
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "…"
