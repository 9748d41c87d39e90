"""Print an explanation of an hour."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.common.output import plain, print_json
from anabranch.operations.reports.explain import HourFacts
from anabranch.operations.reports.explain_text import explain_sentences


def print_explanation(facts: HourFacts, output: str) -> None:
    sentences = explain_sentences(facts)
    if output == "json":
        print_json(plain(facts) | {"sentences": [f"{subject}: {text}" for subject, text in sentences]})
        return
    print(_aligned(sentences))


def _aligned(sentences: Sequence[tuple[str, str]]) -> str:
    width = max(len(subject) for subject, _ in sentences)
    return "\n".join(f"{subject:<{width}}  {text}" for subject, text in sentences)
