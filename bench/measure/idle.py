"""What an open communicator costs while nothing is in flight, as a rank program.

Each rank joins, makes a few calls, sleeps, and counts the CPU seconds of all its threads meanwhile.

Invariant: rank 0 writes the mean over the ranks, in cores, as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from libraries.adapters import PEERS
from libraries.peer import Peer, What

SETTLE_S = 0.5  # what a library does after the last call is not idleness


def idle_cores(peer: Peer, seconds: float) -> float:
    """Cores that a rank takes, the mean over the ranks; called by all of them."""
    call = peer.prepare(What("allreduce", "sum", "f32"), 1024)
    for _ in range(10):
        call.run()
    peer.barrier()
    time.sleep(SETTLE_S)
    cpu, began = time.process_time(), time.perf_counter()
    time.sleep(seconds)
    mine = (time.process_time() - cpu) / (time.perf_counter() - began)
    return float(peer.gather(np.array([mine])).mean())


def main(argv: Sequence[str] | None = None) -> int:
    """The rank program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="idle.py", description="CPU of an idle communicator.")
    parser.add_argument("--subject", choices=tuple(PEERS), default="ringcomm")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(argv)
    peer = PEERS[options.subject]()
    reason = peer.why_not()
    if reason:
        print(f"sweep: {reason}", file=sys.stderr)
        return 2
    peer.setup(None)
    cores = idle_cores(peer, options.seconds)
    if peer.rank == 0:
        options.json.write_text(json.dumps({"cores": cores}) + "\n")
    peer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
