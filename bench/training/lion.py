"""Lion (Chen et al. 2023) as torch would have it: the baseline under DDP.

c = b1 m + (1 - b1) g;   p <- p - lr (sign(c) + wd p);   m <- b2 m + (1 - b2) g
"""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Gradients are the means over the ranks already."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step."""
        assert closure is None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weight)
                momentum = state["exp_avg"]
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(momentum.lerp(weight.grad, 1 - beta1).sign_(), alpha=group["lr"])
                momentum.lerp_(weight.grad, 1 - beta2)
