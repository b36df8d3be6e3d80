"""torch's reduce ops: how each runs in the core, or beside it.

SUM AVG PRODUCT MIN MAX   the core's own; bool is reduced by "or" and "and"
BAND BOR BXOR             all tensors are gathered, and reduced on each rank: exact, and rare
PREMUL_SUM                the tensor is scaled before it is sent
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..errors import TensorError
from .tensors import KNOWN, require_dense

_Kind: Any = dist.ReduceOp.RedOpType
_CORE = {
    _Kind.SUM: "sum",
    _Kind.AVG: "avg",
    _Kind.PRODUCT: "prod",
    _Kind.MIN: "min",
    _Kind.MAX: "max",
}
_TRUTH = {
    _Kind.SUM: "max",
    _Kind.MAX: "max",
    _Kind.BOR: "max",
    _Kind.PRODUCT: "min",
    _Kind.MIN: "min",
    _Kind.BAND: "min",
}
_BITWISE: dict[Any, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    _Kind.BAND: torch.bitwise_and,
    _Kind.BOR: torch.bitwise_or,
    _Kind.BXOR: torch.bitwise_xor,
}


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How a tensor is reduced.

    Attributes:
        op: the core's name of the op; "" if ``join`` reduces.
        join: reduces two ranks' tensors to one; None: the core reduces.
        factor: number that tensors are multiplied by first; None: no factor.
    """

    op: str
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    factor: Any = None


def reduction(op: Any, tensor: torch.Tensor) -> Reduction:
    """Returns how an op reduces a tensor.

    Args:
        op: a ReduceOp, or one of its kinds.

    Raises:
        TensorError: the op has no meaning for the dtype, or the core does not know the dtype.
    """
    require_dense(tensor)
    kind = getattr(op, "op", op)
    if tensor.dtype == torch.bool and kind in _TRUTH:
        return Reduction(_TRUTH[kind])
    if kind in _BITWISE and not tensor.is_floating_point() and not tensor.is_complex():
        return Reduction("", _BITWISE[kind])
    if tensor.is_complex() and kind not in (_Kind.SUM, _Kind.AVG):
        raise _no_such(kind, tensor)
    if kind == _Kind.PREMUL_SUM and tensor.is_floating_point():
        return Reduction("sum", factor=op.__getstate__()[1])
    if kind not in _CORE or tensor.dtype == torch.bool:
        raise _no_such(kind, tensor)
    return Reduction(_CORE[kind])


@functools.cache
def core_op(kind: Any, dtype: torch.dtype) -> str | None:
    """Returns the core's op for a kind of ReduceOp and a dtype if it reduces such tensors as they
    are; else None."""
    return _CORE.get(kind) if dtype in KNOWN else None


def as_reduced(tensor: torch.Tensor) -> torch.Tensor:
    """Views the tensor's memory in a dtype in which the core may reduce it."""
    if tensor.dtype == torch.bool:
        return tensor.detach().view(torch.uint8)
    if tensor.is_complex():
        return torch.view_as_real(tensor.detach())
    return tensor


def _no_such(kind: Any, tensor: torch.Tensor) -> TensorError:
    return TensorError(
        f"ReduceOp.{getattr(kind, 'name', kind)} is not defined for tensors of {tensor.dtype}"
    )
