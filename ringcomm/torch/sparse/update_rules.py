"""The optimizers, which update the blocks that arrive.

    SGD    the momentum of a block last touched k steps ago is multiplied by mu^k, and has moved
           nothing in the meantime
    Adam   moments of untouched blocks do not decay, while the bias correction counts all steps:
           equal to torch's Adam only at density 1

Weight decay applies to the blocks that arrive, and no others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.chunks import AdamStep, SgdStep, adam, sgd
from ..argument_checks import require
from ..optim.checks import at_least, require_adam, require_at_least
from .host_bucket import States, in_lines
from .optimizer import SparseOptimizer
from .pipeline import BucketRound


class SGD(SparseOptimizer):
    """SGD of the largest blocks, with momentum that decays lazily.

    Args:
        lr, momentum, weight_decay, nesterov: as in torch.optim.SGD.
        more: arguments of SparseOptimizer.
    """

    method = "SGD"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **more: Any,
    ) -> None:
        require_at_least(0.0, {"learning rate": lr, "weight_decay value": weight_decay})
        require("momentum value", momentum, at_least(momentum, 0) and momentum < 1)
        require("Nesterov momentum requires a momentum", None, not nesterov or momentum > 0)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, **more)

    def states(self, count: int, blocks: int) -> States:
        return {"momentum": in_lines(count), "last": in_lines(blocks, np.uint32)}

    def apply(self, one: BucketRound, kernel_set: str) -> None:
        group, states = one.group, one.bucket.states
        step = SgdStep(
            float(group["lr"]),
            group["momentum"],
            group["weight_decay"],
            group["nesterov"],
            one.number,
        )
        sgd(one.entries, kernel_set, step, one.bucket.master, states["momentum"], states["last"])


class Adam(SparseOptimizer):
    """Adam of the largest blocks.

    Args:
        lr, betas, eps, weight_decay: as in torch.optim.Adam.
        decoupled_weight_decay: as in torch.optim.AdamW.
        more: arguments of SparseOptimizer.
    """

    method = "Adam"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        **more: Any,
    ) -> None:
        require_adam(lr, betas, eps, weight_decay)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, defaults, **more)

    def states(self, count: int, _blocks: int) -> States:
        return {name: in_lines(count) for name in ("exp_avg", "exp_avg_sq")}

    def apply(self, one: BucketRound, kernel_set: str) -> None:
        group, states = one.group, one.bucket.states
        beta1, beta2 = group["betas"]
        step = AdamStep(
            float(group["lr"]),
            beta1,
            beta2,
            group["eps"],
            group["weight_decay"],
            group["decoupled_weight_decay"],
            one.number,
        )
        adam(
            one.entries,
            kernel_set,
            step,
            one.bucket.master,
            states["exp_avg"],
            states["exp_avg_sq"],
        )
