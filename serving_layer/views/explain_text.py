"""An hour's facts in sentences: what an operator reads at night. Short, with numbers, and the command to run next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from anabranch.output import print_json
from serving_layer.views.history import changed_words
from serving_layer.views.status import unexplained_words

_PARTITIONS = 8  # of a cut that a sentence names


def explain_sentences(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What there is to say of an hour: a subject and a sentence or two of each. Pure."""
    said = [("hour", _headline(facts))]
    if facts["state"] in ("before the first", "not begun"):
        return said
    if facts["state"] in ("open", "ended"):
        return [*said, ("seal", _seal_from(facts)), ("layers", _layers(facts)), *_commands(facts)]
    said += [("sealed", _sealed(facts)), ("layers", _layers(facts))]
    if facts["offsets"] != 0:
        said += [
            (subject, text) for subject, text in (("account", _account(facts)), ("checks", _checks(facts))) if text
        ]
    said += [("refused", _refusal(facts, refusal)) for refusal in facts["refusals"][-1:]]
    said.append(("served", _served(facts)))
    said += [("revision", _revision(decision)) for decision in facts["revisions"]]
    return [*said, *_commands(facts)]


def _headline(facts: Mapping[str, Any]) -> str:
    hour, first = f"{facts['hour']} of {facts['stream']}", facts["first_hour"]
    match facts["state"]:
        case "before the first":
            return f"{hour} is before {first}, where the stream begins; what Kafka received earlier belongs to {first}"
        case "not begun":
            return f"{hour} has not begun; the open hour is {facts['open_hour']}"
        case "open":
            return f"{hour} is open: records of it still come in, and the speed layer serves them"
        case "ended":
            return f"{hour} has ended and is not sealed yet; the speed layer serves it"
        case "accepted":
            return f"{hour} is accepted as revision {facts['revision']}; the {facts['served']} layer serves it"
        case "refused":
            return f"{hour} is refused and goes on being served by the {facts['served']} layer"
    return f"{hour} is sealed and waits for the batch layer; the {facts['served']} layer serves it"


def _seal_from(facts: Mapping[str, Any]) -> str:
    return f"it can be sealed from {_time(facts['can_be_sealed_from'])} on, by any run of the batch layer"


def _sealed(facts: Mapping[str, Any]) -> str:
    at = f"at {_time(facts['sealed_at'])}" if facts["sealed_at"] is not None else "the ledger does not say when"
    reason = f" ({facts['sealed_reason']})" if facts["sealed_reason"] else ""
    if facts["cut"] is None:
        return f"{at}{reason}; neither table nor ledger know its cut any more"
    if facts["offsets"] == 0:
        return f"{at}{reason}, without a record"
    ranges = [f"partition {p} [{s}, {e})" for p, (s, e) in facts["cut"].items() if s < e]
    more = f" and {len(ranges) - _PARTITIONS} more" if len(ranges) > _PARTITIONS else ""
    where = ", ".join(ranges[:_PARTITIONS]) + more
    return f"{at}{reason}: {facts['offsets']} offsets of topic id {facts['topic_id']}: {where}"


def _layers(facts: Mapping[str, Any]) -> str:
    layers = facts["layers"]
    words = [
        f"{branch} {'serves' if branch == 'main' else 'has'} {_rows(layers[branch])}"
        for branch in ("speed", "batch", "main")
    ]
    said = ", ".join(words)
    if layers["uncovered"] is not None:
        said += f"; speed does not account for all of the hour: {layers['uncovered']}"
    return said


def _rows(held: Mapping[str, int]) -> str:
    return f"{_many(held['rows'], 'row')} in {_many(held['files'], 'file')}" if held["files"] else "no rows"


def _account(facts: Mapping[str, Any]) -> str | None:
    counts, stream, hour = facts["counts"], facts["stream"], facts["hour"]
    if counts["good"] is None:
        return None if facts["state"] != "accepted" else "the ledger does not say what was counted"
    said = [f"{counts['good']} became rows"]
    if counts["dead"]:
        said.append(f"{counts['dead']} are dead letters (`anabranch dead-letters {stream} --hours {hour}`)")
    if counts["duplicate"]:
        said.append(f"{counts['duplicate']} were removed as duplicates (`anabranch duplicates {stream} {hour}`)")
    if counts["gap"]:
        classes = ", ".join(f"{n} {name}" for name, n in facts["gaps"].items())
        said.append(f"{counts['gap']} are gaps ({classes})")
    build = "of" if facts["state"] == "accepted" else "in the build that was refused, of"
    offsets = counts["offsets"] if counts["offsets"] is not None else "its"
    return f"{build} {offsets} offsets " + ", ".join(said) + _sources(facts["sources"])


_FROM = {
    "kafka": "Kafka",
    "accepted": "the rows that were accepted",
    "dead_letters": "the dead letters' bytes",
    "speed": "the speed layer",
}


def _sources(sources: Mapping[str, int] | None) -> str:
    """Where the records came from, as far as the ledger says."""
    found = {name: n for name, n in (sources or {}).items() if n}
    if set(found) <= {"kafka"}:
        return "; all read from Kafka" if found else ""
    return "; " + ", ".join(f"{n} read from {_FROM.get(name, name)}" for name, n in found.items())


def _checks(facts: Mapping[str, Any]) -> str | None:
    said, counts = [], facts["counts"]
    terms = [counts[name] for name in ("good", "dead", "duplicate", "gap")]
    if None not in (*terms, counts["offsets"]):
        closes = sum(terms) == counts["offsets"]
        sums = f"{' + '.join(str(n) for n in terms)} = {sum(terms)} of {counts['offsets']} offsets"
        said.append(f"the balance {'closes' if closes else 'does NOT close'} ({sums})")
    if facts["quality"] is not None:
        said.append(_quality(facts["quality"]))
    if facts["diff"] is not None:
        said.append(_diff(facts))
    return "; ".join(said) or None


def _quality(quality: Mapping[str, Any]) -> str:
    """The gate's verdict. Rows of before `evaluated` and `warnings` were told say only whether it passed."""
    evaluated, failed, warnings = quality.get("evaluated"), quality.get("failed") or [], quality.get("warnings") or []
    if evaluated == 0:
        return "the stream has no expectations"
    of = f" ({_many(evaluated, 'expectation')})" if evaluated else ""
    said = f"the quality gate passed{of}" if quality.get("passed") else f"the quality gate failed{of}"
    for kind, entries in (("critical", failed), ("warnings", warnings)):
        if entries:
            said += f", {kind}: {', '.join(str(entry.get('type', entry)) for entry in entries)}"
    return said


def _diff(facts: Mapping[str, Any]) -> str:
    diff = facts["diff"]
    unread = f" ({diff['unread']} of them not read by then)" if diff.get("unread") else ""
    said = (
        f"compared with {facts['speed_rows'] or 0} rows of speed: {diff['missing']} missing{unread}, "
        f"{diff['extra']} extra, {diff['changed']} changed"
    )
    if facts["unexplained"]:
        look = f"`anabranch diff {facts['stream']} {facts['hour']}`"
        return f"{said}; NOTHING EXPLAINS {unexplained_words(facts['unexplained'])}: {look}"
    return said


def _refusal(facts: Mapping[str, Any], refusal: Mapping[str, Any]) -> str:
    times = len(facts["refusals"])
    said = f"at {_time(refusal['at'])}" + (f", for the {times}. time" if times > 1 else "") + f": {refusal['reason']}"
    if facts["state"] == "accepted":
        return f"a restatement (revision {refusal['revision']}) {said}; revision {facts['revision']} stays"
    return said


def _served(facts: Mapping[str, Any]) -> str:
    stream, hour = facts["stream"], facts["hour"]
    since = f" since {_time(facts['served_since'])}" if facts["served_since"] is not None else ""
    said = f"by {facts['served']}{since}"
    if facts["override"] is not None:
        why = facts["override"]["reason"] or "the reason is not in the ledger"
        said += f", by choice: {why}; `anabranch serve-hour {stream} {hour} --layer auto --why TEXT` lifts it"
    elif facts["state"] == "accepted":
        said += ", by the rule: the batch layer has accepted it"
    else:
        said += ", by the rule: the batch layer has not accepted it"
    if not facts["merged"] and not facts["kept"]:
        said += (
            f"; but main does NOT hold the {facts['served']} layer's files: `anabranch merge {stream}` puts it right"
        )
    if facts["kept"]:
        said += "; main keeps rows that this layer does not cover, until it does"
    return said


def _revision(decision: Mapping[str, Any]) -> str:
    said = f"{decision['revision']} at {_time(decision['at'])}"
    if decision["revision"] > 1:
        said += f", {decision['reason']}: {changed_words(decision['changed'])}"
    elif decision["reason"]:
        said += f", {decision['reason']}"
    if decision["tag"] is not None or decision["query"] is None:
        said += f"; can be read: {decision['readable']}"
    if decision["tag"] is not None and decision["query"] is not None:
        said += f": `{decision['query']}`"
    return said


def _commands(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    said = []
    if facts["query"] is not None:
        said.append(("query", f"`{facts['query']}`"))
    if facts["rebuild"] is not None:
        mend = "mend what the refusal says, then " if facts["state"] == "refused" else ""
        kept = f", from what the table keeps of it: {facts['gone']}" if facts["gone"] is not None else ""
        said.append(("rebuild", f"{mend}`{facts['rebuild']}`{kept}"))
    elif facts["gone"] is not None:
        said.append(("rebuild", f"it cannot be rebuilt: {facts['gone']}; what the speed layer has of it stays served"))
    elif facts["state"] == "accepted":
        said.append(("rebuild", "there is nothing to rebuild: it holds no records"))
    if facts["state"] == "accepted":
        said.append(("audit", f"`anabranch audit {facts['stream']} --hours {facts['hour']}`"))
    return said


def _many(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _time(when: datetime) -> str:
    return f"{when:%F %T} UTC"


def print_explanation(facts: Mapping[str, Any], output: str) -> None:
    sentences = explain_sentences(facts)
    if output == "json":
        print_json(dict(facts) | {"sentences": [f"{subject}: {text}" for subject, text in sentences]})
        return
    print(_aligned(sentences))


def _aligned(sentences: Sequence[tuple[str, str]]) -> str:
    width = max(len(subject) for subject, _ in sentences)
    return "\n".join(f"{subject:<{width}}  {text}" for subject, text in sentences)
