"""Outer steps: ranks train apart for many iterations, and then exchange what they have learnt.

``OuterStep`` is the whole; its parts are exported for who wants other settings of them.
"""

from __future__ import annotations

from ..guards import IdenticalDataWarning
from .merges import Carry, Lerp, Replace
from .pace import AtEnd, BySpeed, Every, Fitted
from .peers import FixedPeers
from .report import OuterReport
from .rules import Mean, Nesterov, Sgd, Sparse
from .step import OuterStep

__all__ = [
    "AtEnd", "BySpeed", "Carry", "Every", "Fitted", "FixedPeers", "IdenticalDataWarning", "Lerp",
    "Mean", "Nesterov", "OuterReport", "OuterStep", "Replace", "Sgd", "Sparse",
]  # fmt: skip
