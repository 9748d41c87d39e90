"""CPU that commands took, as the kernel counts it."""

from __future__ import annotations

import resource


def children_cpu() -> float:
    """CPU seconds of all processes that this one started and that have ended, their own children's
    with them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
