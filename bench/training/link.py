"""How many steps AdamW gets in the time that another method takes, on a given link.

A step of DDP lasts as long as forward and, behind it, the longer of backward and the exchange, for
the gradients travel while backward computes and not before:

    F + max(B, bits / 8 x parameters x 2 (N-1)/N / goodput)        F = compute / 3, B = 2 F

One step stale the exchange has a whole step: max(compute, exchange). Apart there is compute alone,
and the exchange of a round once in ``every`` steps. OneBitAdam with overlap is a DDP whose exchange
is dense in the first steps, then at 1 bit, and at both in a renewal. The toy itself has neither
such a link nor such a model: what is emulated is one of GPT-2's size, 124 M parameters on 4 hosts,
where a step computes for half a second; goodput is 0.94 of the line rate. Compute is a figure, not
a measurement.
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

    def onebit_adam_s(self, dense: float) -> float:
        """A step of OneBitAdam whose dense exchanges have so many bits, on the mean of a run."""
        momentum = 1 - DENSE - RENEWED
        return (
            DENSE * self.ddp_s(dense)
            + RENEWED * self.ddp_s(dense + ONEBIT)
            + momentum * self.ddp_s(ONEBIT)
        )


def share_of_steps(seconds: float, baseline_s: float) -> float:
    """Of the steps of a method, how many a slower baseline makes in the same time."""
    return seconds / baseline_s


BF16, INT8, INT4, ONEBIT = 16.0, 8.0625, 4.25, 1.0625
#: Of OneBitAdam's steps: frozen at a fifth, and then renewed 26 times in what is left of 400.
DENSE, RENEWED = 0.2, 26 / 400
SLOW = Link(1.0)
#: The links on which an exchange just fills the time in which a step computes.
JUST = Link(SLOW.exchange_s(INT8) / COMPUTE_S)
JUST_INT4 = Link(SLOW.exchange_s(INT4) / COMPUTE_S)
#: Rounds every 10 steps. Those every 30 take a tenth less time, which their baselines are granted.
OUTER_S = SLOW.outer_s(INT4, 10)
EQUAL_TIME = {
    "adamw-bf16-1g": share_of_steps(OUTER_S, SLOW.ddp_s(BF16)),
    "adamw-int8-1g": share_of_steps(OUTER_S, SLOW.ddp_s(INT8)),
    "adamw-int4-1g": share_of_steps(OUTER_S, SLOW.ddp_s(INT4)),
    "onebit-adam-1g": share_of_steps(OUTER_S, SLOW.onebit_adam_s(INT8)),
    "muon-int4-1g": share_of_steps(OUTER_S, SLOW.ddp_s(INT4)),
    "adamw-waits": share_of_steps(JUST.stale_s(INT8), JUST.ddp_s(INT8)),
    "int4-waits": share_of_steps(JUST_INT4.stale_s(INT4), JUST_INT4.ddp_s(INT4)),
    "int4-waits-1g": share_of_steps(SLOW.stale_s(INT4), SLOW.ddp_s(INT4)),
}
