"""How many steps AdamW gets in the time that another method takes, on a given link.

A step of DDP lasts as long as forward and, behind it, the longer of backward and the exchange, for
the gradients travel while backward computes and not before:

    F + max(B, bits / 8 x parameters x 2 (N-1)/N / goodput)        F = compute / 3, B = 2 F

One step stale the exchange has a whole step: max(compute, exchange). Apart there is compute alone,
and the exchange of a round once in ``every`` steps. The toy itself has neither such a link nor such
a model: what is emulated is one of GPT-2's size, 124 M parameters on 4 hosts, where a step computes
for half a second; goodput is 0.94 of the line rate. Compute is a figure, not a measurement.
"""

from __future__ import annotations

import dataclasses

PARAMETERS = 124e6
HOSTS = 4
COMPUTE_S = 0.5
GOODPUT = 0.94


@dataclasses.dataclass(frozen=True)
class Link:
    """A link of so many Gbit/s."""

    gbit: float

    def exchange_s(self, bits: float) -> float:
        """An all-reduce of all gradients at so many bits each."""
        sent = bits / 8 * PARAMETERS * 2 * (HOSTS - 1) / HOSTS
        return sent / (self.gbit * 1e9 / 8 * GOODPUT)

    def ddp_s(self, bits: float) -> float:
        """A step of DDP."""
        return COMPUTE_S / 3 + max(COMPUTE_S * 2 / 3, self.exchange_s(bits))

    def stale_s(self, bits: float) -> float:
        """A step one step stale."""
        return max(COMPUTE_S, self.exchange_s(bits))

    def outer_s(self, bits: float, every: int) -> float:
        """A step of which one in ``every`` is followed by a round."""
        return COMPUTE_S + self.exchange_s(bits) / every


def share_of_steps(seconds: float, baseline_s: float) -> float:
    """Of the steps of a method, how many a slower baseline makes in the same time."""
    return seconds / baseline_s


BF16, INT8, INT4 = 16.0, 8.0625, 4.25
SLOW = Link(1.0)
#: The link on which an int8 exchange just fills the time in which a step computes.
JUST = Link(SLOW.exchange_s(INT8) / COMPUTE_S)
EQUAL_TIME = {
    "adamw-bf16-1g": share_of_steps(SLOW.outer_s(INT4, 10), SLOW.ddp_s(BF16)),
    "adamw-int8-1g": share_of_steps(SLOW.outer_s(INT4, 10), SLOW.ddp_s(INT8)),
    "adamw-waits": share_of_steps(JUST.stale_s(INT8), JUST.ddp_s(INT8)),
}
