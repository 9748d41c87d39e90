"""CPU time of commands, as the kernel counts it."""

from __future__ import annotations

import resource


def children_cpu() -> float:
    """Return the CPU seconds of all ended child processes and their descendants."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
