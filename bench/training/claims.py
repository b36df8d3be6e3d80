"""What convergence.py is to show: each comparison with its margin, fixed before the runs.

Invariant: a margin is changed only by an edit of this file, never by what the rows say.

The correction of staleness is to leave at most HALF of the gap that staleness 1 makes. NULL is the
margin of a baseline beside itself with other seeds: the widest of all, as such pairs are none.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Kind = Literal["margin", "bad", "null", "printed", "correction"]
HALF = 0.5
NULL = 0.05


@dataclasses.dataclass(frozen=True)
class Claim:
    """A method beside a baseline.

    Attributes:
        row: the group of the table.
        kind: margin: no worse by more than ``margin`` nats; bad: loses by 5 standard errors; null:
            the same as itself; printed: the difference is shown without a verdict; correction: at
            most HALF of the gap of ``stale`` is left.
        setting: of the runs.
        lr: both at this rate; None: each at its own. Pairs at one rate differ by the method alone,
            and by about half the noise.
        advised: docs/METHODS.md shows it beside its advice, and docs/RESULTS.md does not.
    """

    row: str
    method: str
    baseline: str
    kind: Kind = "margin"
    margin: float | None = None
    setting: str = "T1"
    stale: str = ""
    lr: float | None = None
    advised: bool = False


STALE = ("adamw", "sgd")

CLAIMS = (
    Claim("controls", "adamw-other-seeds", "adamw", "null", NULL),
    Claim("controls", "adamw-dealt", "adamw", "null", 0.005),
    Claim("codecs", "bf16", "adamw", "margin", 0.005),
    Claim("codecs", "int8", "adamw", "margin", 0.005),
    Claim("codecs", "int4", "adamw", "margin", 0.01),
    Claim("codecs", "int2", "adamw", "printed"),
    Claim("codecs", "int8", "adamw", "margin", 0.005, "T4"),
    Claim("codecs", "int4", "adamw", "margin", 0.01, "T4"),
    Claim("codecs", "muon-int4", "muon", "margin", 0.01),
    Claim("FSDP2", "fsdp-int8", "fsdp", "margin", 0.01),
    Claim("FSDP2", "fsdp-hosts-int4", "fsdp", "margin", 0.01),
    Claim("Muon by owner", "muon-owner-int8", "muon", "margin", 0.01, advised=True),
    Claim("Muon by owner", "muon-owner-int4", "muon", "margin", 0.01),
    Claim("codecs, at equal rates", "int8", "adamw", "margin", 0.005, lr=0.01, advised=True),
    Claim("codecs, at equal rates", "int4", "adamw", "margin", 0.01, lr=0.02),
    Claim("codecs, at equal rates", "int4", "adamw", "margin", 0.01, lr=0.01, advised=True),
    Claim("codecs, at equal rates", "int8", "adamw", "margin", 0.005, "T4", lr=1e-3),
    Claim("codecs, at equal rates", "int4", "adamw", "margin", 0.01, "T4", lr=1e-3),
    Claim("1-bit Adam", "onebit-adam-5", "freeze-5", "margin", 0.03),
    Claim("1-bit Adam", "onebit-adam", "adamw", "margin", 0.05, advised=True),
    Claim("1-bit Adam", "onebit-adam", "adamw", "margin", 0.05, "T4"),
    Claim("1-bit Adam", "onebit-adam-5", "adamw", "printed"),
    Claim("1-bit Adam", "freeze-5", "adamw", "printed"),
    Claim("1-bit Adam", "onebit-adam-int8", "onebit-adam", "margin", 0.01),
    Claim("1-bit Adam", "adam-clipped", "adamw", "printed"),
    Claim("1-bit Adam", "onebit-adam", "adam-clipped", "printed"),
    Claim("1-bit Adam", "zero-one-adam", "adamw", "printed"),
    Claim("1-bit LAMB", "onebit-lamb", "lamb", "margin", 0.03),
    Claim("1-bit LAMB", "lamb", "adamw", "printed"),
    Claim("Lion", "lion-momentum", "lion", "margin", 0.02),
    Claim("Lion", "lion", "adamw", "printed"),
    Claim("SGD", "sgd-onebit", "sgd", "printed"),
    Claim("outer", "outer-int4", "outer", "margin", 0.015),
    Claim("outer", "outer-int2", "outer-int4", "margin", 0.015),
    Claim("outer", "outer-sparse", "outer-often", "margin", 0.05),
    Claim("outer", "outer-sparse-64", "outer-often", "printed"),
    Claim("outer", "outer-k1", "adamw", "printed"),
    Claim("outer", "outer-fragments", "outer-int4", "printed"),
    Claim("outer", "outer-delayed", "outer-int4", "printed"),
    Claim("outer, equal time", "outer-delayed", "outer-waits", "printed"),
    Claim("outer, equal tokens", "outer-int4", "adamw", "printed", advised=True),
    Claim("outer, equal tokens", "outer-sparse", "adamw", "printed"),
    Claim("outer, equal tokens", "outer-mean", "adamw", "printed"),
    Claim("outer, equal tokens", "outer-end", "adamw", "printed", None, "T4"),
    Claim("outer, equal tokens", "outer-int4", "adamw", "printed", None, "T4"),
    Claim("outer, equal tokens", "outer-muon", "adamw", "printed", advised=True),
    Claim("outer, equal tokens", "outer-muon", "muon", "printed"),
    Claim("outer, equal tokens", "outer-muon-30", "adamw", "printed"),
    Claim("outer, equal tokens", "outer-muon-30", "muon", "printed"),
    *(
        Claim(
            "outer, equal time at 1 Gbit/s",
            "outer-int4",
            f"adamw-{codec}-1g",
            "printed",
            advised=codec == "int4",
        )
        for codec in ("bf16", "int8", "int4")
    ),
    Claim("outer, equal time at 1 Gbit/s", "outer-int4", "onebit-adam-1g", "printed"),
    Claim("outer, equal time at 1 Gbit/s", "outer-muon", "muon-int4-1g", "printed", advised=True),
    Claim("outer, equal time at 1 Gbit/s", "outer-muon-30", "muon-int4-1g", "printed"),
    *(Claim("staleness 1", f"{name}-stale-raw", name, "printed") for name in STALE),
    *(
        Claim("staleness 1", f"{name}-stale", name, "correction", stale=f"{name}-stale-raw")
        for name in STALE
    ),
    Claim("staleness 1, equal time", "adamw-stale", "adamw-waits", "printed"),
    Claim("staleness 1, equal time", "adamw-stale", "int4", "printed", advised=True),
    Claim("staleness 1, equal time", "int4-stale", "int4", "printed"),
    Claim("staleness 1, equal time", "int4-stale", "int4-waits", "printed"),
    Claim("staleness 1, equal time", "int4-stale", "int4-waits-1g", "printed"),
    Claim("known bad", "onebit-adamw", "adamw", "bad"),
    Claim("known bad", "onebit-adam-no-mask", "onebit-adam-5", "bad"),
    Claim("known bad", "int4-no-feedback", "adamw", "bad"),
    Claim("known bad", "sgd-onebit-no-feedback", "sgd", "bad"),
    Claim("known bad", "outer-momentum-.9", "outer-mean", "bad", None, "T4"),
    Claim("known bad", "adamw-stale-raw", "adamw", "bad"),
    Claim("other baselines", "accumulate-4", "adamw", "printed"),
    Claim("other baselines", "torch-fp16", "adamw", "printed"),
    Claim("other baselines", "powersgd-4", "adamw", "printed"),
    Claim("other baselines", "muon", "adamw", "printed"),
    Claim("other baselines", "sgd", "adamw", "printed"),
)
