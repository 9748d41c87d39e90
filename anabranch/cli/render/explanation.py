"""Print an explanation of an hour."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.cli.render import print_result
from anabranch.common.output import plain
from anabranch.operations.reports.explain import HourFacts
from anabranch.operations.reports.explain_text import explain_sentences


def print_explanation(facts: HourFacts, output: str) -> None:
    sentences = explain_sentences(facts)
    view = plain(facts) | {"sentences": [f"{subject}: {text}" for subject, text in sentences]}
    print_result(view, [_aligned(sentences)], output)


def _aligned(sentences: Sequence[tuple[str, str]]) -> str:
    width = max(len(subject) for subject, _ in sentences)
    return "\n".join(f"{subject:<{width}}  {text}" for subject, text in sentences)
