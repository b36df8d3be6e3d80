"""StellaTrain's path: the largest blocks of each gradient, and an optimizer on the CPU for them.

    import ringcomm.torch.sparse
    optimizer = ringcomm.torch.sparse.SGD(model.parameters(), lr=0.1, momentum=0.9, density=0.01)

As backward computes gradients, their largest cache lines are chosen, with error feedback, summed
over all ranks, and applied to a master copy in host memory by kernels that touch these lines only.
The model is not in DistributedDataParallel: the optimizer does the exchange.

For users are SGD and Adam; SparseOptimizer is their base.
"""

from __future__ import annotations

from .optimizer import SparseOptimizer
from .update_rules import SGD, Adam

__all__ = ["SGD", "Adam", "SparseOptimizer"]
