"""`peers.py --all` with scenes of its own, which take a few seconds; a script, for beside.py.

A sweep in two wire formats, an idle communicator.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import peers
from comparison.scenes import Goal, Scene


def small(goals: tuple[Goal, ...], name: str, **settings: object) -> Scene:
    return Scene("loopback", name, 2, ("ringcomm", "gloo"), goals, **settings)


SCENES = (
    small(
        (
            Goal("time_us", 1e9, 4096),
            Goal("gloo", 1e9, 1024),
            Goal("cpu", 0.0, 4096),
            Goal("time_us", 1e9, 4096, "bf16"),
        ),
        "a",
        rounds=1,
    ),
    small((Goal("idle", 1e9),), "b", kind="idle"),
)

if __name__ == "__main__":
    sys.exit(peers.run_all(peers.parse(sys.argv[1:]), SCENES))
