"""Outer steps: ranks train apart for many iterations, and then average their changes.

For users is ``OuterStep``, with its OuterReport and IdenticalDataWarning; the other names customize
its parts.
"""

from __future__ import annotations

from ..guards import IdenticalDataWarning
from .report import OuterReport
from .rules import Nesterov, Sparse
from .step import OuterStep

__all__ = [
    "IdenticalDataWarning",
    "Nesterov",
    "OuterReport",
    "OuterStep",
    "Sparse",
]
