"""Optimizers that send their own state instead of gradients: the momentum on the wire.

    import ringcomm.torch.optim
    optimizer = ringcomm.torch.optim.SGD(model.parameters(), lr=0.1, compression="onebit")

The model is not in DistributedDataParallel: the optimizer's step does the exchange.

For users are the optimizers; and to write another one WireOptimizer, Rule, Exchange and Span.
"""

from __future__ import annotations

from .adam import OneBitAdam
from .lamb import OneBitLamb
from .lion import Lion
from .muon import Muon
from .rule import Exchange, Rule
from .sgd import SGD
from .span import Span
from .wire import WireOptimizer
from .zero_one import ZeroOneAdam

__all__ = [
    "Lion",
    "Muon",
    "SGD",
    "Exchange",
    "OneBitAdam",
    "OneBitLamb",
    "Rule",
    "Span",
    "WireOptimizer",
    "ZeroOneAdam",
]
