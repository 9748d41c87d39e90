"""Print the findings of `anabranch doctor`, as text in 80 columns or as JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from anabranch.common.output import print_json, print_table
from anabranch.operations.doctor import Report
from anabranch.operations.doctor.finding import Finding, Severity

_WIDTH = 80


def print_report(report: Report, output: str) -> None:
    if output == "json":
        print_json(
            {
                "ready": report.ready,
                "next": report.next,
                "findings": report.findings,
                "examined": report.examined,
            }
        )
        return
    rows = [(one.name, _counted(one.findings), f"{one.seconds:.1f} s") for one in report.examined]
    print_table(("examined", "found", "took"), rows)
    for severity in Severity:
        for finding in (f for f in report.findings if f.severity is severity):
            print("\n" + "\n".join(_lines(finding)))
    print()
    print(f"ready; next: {report.next}" if report.ready else f"not ready; first: {report.next}")


def _counted(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    return ", ".join(f"{counts[s]} {s}" for s in Severity if counts[s]) or "in order"


def _lines(finding: Finding) -> list[str]:
    """Return the lines of a finding. The remedy is one line, so that it can be copied. Pure."""
    lines = [f"{finding.severity} {finding.check}: {finding.subject}"]
    for word, said in (("expected", finding.expected), ("found", finding.found)):
        lines += textwrap.wrap(
            f"{word:<8} {said}",
            _WIDTH,
            initial_indent="  ",
            subsequent_indent=" " * 11,
            break_on_hyphens=False,
            break_long_words=False,
        )
    return [*lines, f"  {'remedy':<8} {finding.remedy}"]
