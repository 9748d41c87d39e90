"""Print dead letters."""

from __future__ import annotations

from anabranch.common.output import print_json, print_table, text
from anabranch.operations.reports.dead_letters import DeadLetters, Letter

_LINE = 160  # maximum characters of a key or value in a line of text


def print_letters(view: DeadLetters, output: str) -> None:
    if output == "json":
        print_json(view)
        return
    if not view.reasons:
        print(f"{view.stream}: no dead letters{_span_words(view.hours)}")
        return
    print_table(
        ("reason", "dead letters", "first hour", "last hour"),
        [(r.reason, r.count, r.first_hour, r.last_hour) for r in view.reasons],
    )
    for reason in view.reasons:
        for letter in reason.samples:
            _print_letter(reason.reason, letter)
    print(f"\n{view.stream}: {view.dead} dead letters{_span_words(view.hours)}")


def _print_letter(reason: str, letter: Letter) -> None:
    at = f", stamped {text(letter.timestamp)}" if letter.timestamp is not None else ""
    place = f"hour {letter.hour}, partition {letter.partition}, offset {letter.offset}{at}"
    print(f"\n{reason}: {place}: {text(letter.text)}")
    for name, data in (("key", letter.key), ("value", letter.value)):
        line = "null" if data is None else text(data)
        size = (
            f" ({letter.value_bytes} bytes)"
            if name == "value" and letter.value_bytes is not None
            else ""
        )
        print(f"  {name}: {line if len(line) <= _LINE else line[:_LINE] + '…'}{size}")


def _span_words(hours: tuple[str, str] | None) -> str:
    return f" of the hours {hours[0]} to {hours[1]}" if hours else ""
