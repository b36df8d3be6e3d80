"""``python -m ringcomm explain``: which algorithm an all-reduce goes by, and why.

The figures are the core's cost model's (csrc/plan/choose.c), by which every rank chooses.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from ..config import ALGORITHMS
from ..core import native

_MOST = 1_000_000
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table for the call that argv describes. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ringcomm explain",
        description="Print which algorithm an all-reduce goes by among hosts with a rank each, and "
        "the time of each by the cost model. algorithm= (RINGCOMM_ALGORITHM) overrules it.",
    )
    parser.add_argument(
        "--size", type=_size, required=True, help="bytes of the tensor, as 4M; half of it in bf16"
    )
    parser.add_argument("--hosts", type=int, required=True, help="2 or more")
    parser.add_argument(
        "--rate",
        type=int,
        default=0,
        help="of a port in Mbit/s, as it reports it; of the slowest link, where they differ",
    )
    options = parser.parse_args(argv)
    if not 2 <= options.hosts <= _MOST or not 0 <= options.rate <= _MOST:
        parser.error(f"give 2 to {_MOST} hosts, and a rate of 0 to {_MOST} Mbit/s")
    print(table(options.size, options.hosts, options.rate))
    return 0


def table(size: int, hosts: int, mbit: int) -> str:
    """Returns the time of each algorithm, in lines; the chosen one is marked.

    Args:
        size: of the tensor on the wire, in bytes.
        mbit: of a port in Mbit/s; 0: not known.
    """
    chosen, seconds = native.estimate(hosts, size, mbit)
    ports = f"ports of {mbit} Mbit/s" if mbit else "ports of unknown rate"
    lines = [f"an all-reduce of {size} bytes among {hosts} hosts, {ports}"]
    for name, number in ALGORITHMS.items():
        if number:
            mark = "   chosen" if number == chosen else ""
            lines.append(f"  {name:9}{seconds[number] * 1e3:12.3f} ms{mark}")
    lines.append(
        "The ring is chosen unless another saves 5 % of its time: it alone does not send to many "
        "at once.\nCodecs from int8 on have no choice: one_shot between two ranks, else "
        "direct. Within a host ranks use shared memory."
    )
    return "\n".join(lines)


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d{1,9})([KMG]?)(?:i?B)?", text, re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give bytes, as 65536, 64K or 4M")
    return int(found[1]) * _UNITS[found[2].upper()]
