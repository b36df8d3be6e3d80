"""``python -m ringcomm jobs``: shows the lanes of the jobs that run on this host.

Those of this user's communicators that make lost lanes anew (setting recovery); the others cannot
be asked.
"""

from __future__ import annotations

import sys
from typing import Any

from ..bootstrap.status import ask_all


def main() -> int:
    """Prints a line for each communicator and lane. Returns the exit status: 1 if there is none, 2
    if that cannot be told."""
    try:
        reports = ask_all()
    except OSError as error:
        print(f"jobs cannot be found here: {error}", file=sys.stderr)
        return 2
    if not reports:
        print("no job of this user answers here; those of one host, or without recovery, do not")
        return 1
    for report in reports:
        rank, lanes = f"rank {report['rank']} of {report['world_size']}", report["lanes"]
        lost = sum(lane["why"] is not None for lane in lanes)
        state = f"{lost} of {len(lanes)} lanes lost" if lost else f"all {len(lanes)} lanes open"
        print(f"process {report['pid']}: {rank}, {state}")
        for lane in lanes:
            print(f"  {_line(lane)}")
    return 0


def _line(lane: dict[str, Any]) -> str:
    if lane["why"] is not None:
        return f"{lane['name']}: lost: {lane['why']}"
    sent, received = (lane[way] / 1e6 for way in ("sent_bytes", "received_bytes"))
    again = f", connection {lane['made']}" if lane["made"] > 1 else ""
    return f"{lane['name']}: open{again}, {sent:.1f} MB sent, {received:.1f} MB received"
