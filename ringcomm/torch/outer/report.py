"""Counts and times of an OuterStep, whose times and bytes are its account's."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class OuterReport:
    """Counts and times of this rank; ``print`` shows them in a line.

    Attributes:
        iterations: number of iterations.
        rounds: number of finished rounds.
        payload_bytes: bytes of its deltas, before compression.
        sent_bytes: payload that this rank has sent for them, over links or through shared memory.
        training_s: seconds between OuterStep's calls.
        waited_s: seconds that it has waited for other ranks and for transfers.
        own_s: seconds of its own computations in OuterStep's calls: copies and rebases; and deltas
            and outer rules, if no other thread computes them.
        repeated: number of rounds that were begun anew, as a peer was lost.
        left: ranks that were lost or late, in the order of their leaving.
        joined: ranks that came back.
        dropped: rounds in which this rank's deltas did not count, as its weights were not finite.
        skipped: steps that were skipped on this rank, as a gradient was not finite.
    """

    iterations: int = 0
    rounds: int = 0
    payload_bytes: int = 0
    sent_bytes: int = 0
    training_s: float = 0.0
    waited_s: float = 0.0
    own_s: float = 0.0
    repeated: int = 0
    left: list[int] = dataclasses.field(default_factory=list)
    joined: list[int] = dataclasses.field(default_factory=list)
    dropped: int = 0
    skipped: int = 0

    @property
    def utilisation(self) -> float:
        """Share of the time in which the rank has trained; 1.0 before any time has passed."""
        spent = self.training_s + self.waited_s + self.own_s
        return self.training_s / spent if spent else 1.0

    def __str__(self) -> str:
        return (
            f"{self.iterations} iterations, {self.rounds} rounds, "
            f"{self.sent_bytes / 1e6:.3f} MB sent of {self.payload_bytes / 1e6:.3f} MB, "
            f"waited {self.waited_s:.3f} s, {100 * self.utilisation:.1f} % of the time trained"
        )
