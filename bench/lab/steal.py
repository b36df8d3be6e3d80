"""Processor time that the host of a virtual machine gave to others meanwhile ("steal").

While a virtual processor is not run, packets wait and ranks wait for each other: what was timed
then says how busy the host was. Machines of their own never lose any.

Invariant: times are those of the whole machine, whatever the namespace, in ticks of 10 ms on most
kernels; 0 where the kernel does not tell.
"""

from __future__ import annotations

import os
from pathlib import Path

_STAT = Path("/proc/stat")
_FIELD = 8  # of the line "cpu": user nice system idle iowait irq softirq steal


def stolen() -> float:
    """Seconds that were taken from all processors together since the machine started."""
    if not _STAT.exists():
        return 0.0
    with _STAT.open() as file:
        fields = file.readline().split()
    return int(fields[_FIELD]) / os.sysconf("SC_CLK_TCK") if len(fields) > _FIELD else 0.0
