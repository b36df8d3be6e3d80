"""1-bit Adam as published (arXiv 2102.02888, algorithm 1), for the row that shows what it loses.

    t <= T:  g = mean g_i;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    t >  T:  m = C(b1 m + (1 - b1) g_i)
    always:  p -= lr (m / (sqrt(v) + eps) + wd p)

Nothing is unbiased or masked. C is DeepSpeed's compressed all-reduce, of each parameter by itself.
With P the number of elements padded up to a multiple of N lcm(N, 8), N ranks, chunks of P / N:

    c = x padded with 0 + worker error;   s = ||c|| / sqrt(P);        worker error = c - s sgn(c)
    m = sum of s sgn / N + server error   of the chunk that a rank owns, over all ranks
    t = ||m|| / sqrt(P / N);              server error = m - t sgn(m);   the chunk's mean: t sgn(m)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from ringcomm import Communicator

Floats = np.ndarray[Any, np.dtype[np.float32]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class CompressedMean:
    """DeepSpeed's compressed all-reduce of one tensor, with the errors of this rank."""

    def __init__(self, comm: Communicator, count: int) -> None:
        n = comm.world_size
        step = n * math.lcm(n, 8)
        self._comm, self._count = comm, count
        padded = -(-count // step) * step
        self._worker = np.zeros(padded, np.float32)
        self._server = np.zeros(padded // n, np.float32)

    def __call__(self, x: Floats) -> Floats:
        """The mean of all ranks' x, float32[count]. A collective."""
        n = self._comm.world_size
        if n == 1:
            return x
        self._worker[: self._count] += x
        scale, bits = _taken_from(self._worker)
        scales = self._comm.allgather(np.array([scale]))
        every = _signs(self._comm.alltoall(bits.reshape(n, -1)))
        self._server += (every * (scales / np.float32(n))).sum(axis=0, dtype=np.float32)
        scale, bits = _taken_from(self._server)
        scales = self._comm.allgather(np.array([scale]))
        mean: Floats = (_signs(self._comm.allgather(bits)) * scales).reshape(-1)[: self._count]
        return mean


def _taken_from(x: Floats) -> tuple[np.float32, Bytes]:
    """The scale of x and its signs, a bit each; x is left with what they lack."""
    scale = np.float32(math.sqrt(np.dot(x, x.astype(np.float64)) / len(x)))
    negative = x < 0
    x += np.where(negative, scale, -scale)
    return scale, np.packbits(negative)


def _signs(rows: Bytes) -> Floats:
    """Rows of 1 and -1, float32, of rows of bits."""
    return 1 - 2 * np.unpackbits(rows, axis=1).astype(np.float32)


class PublishedAdam(torch.optim.Optimizer):
    """See above.

    Args:
        lr, betas, eps, weight_decay: as of torch.optim.AdamW.
        freeze: T, the last dense step, whose gradients travel at bf16.
        max_norm: clips all ranks' gradients by one factor, as WireOptimizer does.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        freeze: int,
        max_norm: float,
        comm: Communicator,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "decay": weight_decay})
        self._freeze, self._max_norm, self._comm, self._steps = freeze, max_norm, comm, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step, in which all parameters have gradients. A collective."""
        self._steps += 1
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        square = np.array([sum(float(g.norm()) ** 2 for g in gradients)])
        norm = math.sqrt(float(self._comm.allreduce(square, "avg")[0]))
        factor = min(1.0, self._max_norm / norm) if norm else 1.0
        for group in self.param_groups:
            for p in group["params"]:
                self._move(group, p, p.grad * factor)

    def _move(self, group: dict[str, Any], p: torch.Tensor, gradient: torch.Tensor) -> None:
        state, (b1, b2) = self.state[p], group["betas"]
        if not state:
            state.update(
                m=torch.zeros_like(p),
                v=torch.zeros_like(p),
                mean=CompressedMean(self._comm, p.numel()),
            )
        m, v = state["m"], state["v"]
        if self._steps <= self._freeze:
            self._comm.allreduce(gradient, "avg", compression="bf16")
            v.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
            m.lerp_(gradient, 1 - b1)
        else:
            own = (m * b1 + gradient * (1 - b1)).reshape(-1).numpy()
            m.copy_(torch.from_numpy(state["mean"](own)).view_as(m))
        update = m / (v.sqrt() + group["eps"]) + group["decay"] * p
        p.sub_(update, alpha=group["lr"])
