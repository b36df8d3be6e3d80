"""Outer steps: ranks train apart for many iterations, and then exchange what they have learnt.

``OuterStep`` is the whole; its parts are exported for who wants other settings of them.
"""

from __future__ import annotations

from ..guards import IdenticalDataWarning
from .peers import FixedPeers
from .report import OuterReport
from .rules import Nesterov, Sparse
from .step import OuterStep

__all__ = [
    "FixedPeers",
    "IdenticalDataWarning",
    "Nesterov",
    "OuterReport",
    "OuterStep",
    "Sparse",
]
