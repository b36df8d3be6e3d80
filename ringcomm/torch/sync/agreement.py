"""Agreement of all ranks before data moves: on settings, and on a step.

A step is agreed on by a message of a few bytes, summed over all ranks:

    not finite | sum of squares | d | d * d | one for each parameter that has a gradient here

d is a digest of the values that must be alike: the number of the step, and the hyperparameters.
They are if the mean of d squared is the square of its mean. d is below 2^20, so the sums are exact;
their products are compared as integers.

A rank whose gradients are not finite sends no sum of squares. A GradScaler's verdict travels in the
same message, so that no rank skips a step alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...communicator import Communicator, gather_bytes
from ...errors import MismatchError
from .bucket import master_dtype


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Result of the agreement on one step; ``finite`` and ``present`` are alike on all ranks.

    Attributes:
        finite: whether all gradients of all ranks are finite.
        factor: number to multiply this rank's gradients by. It differs between ranks that have
            different loss scales.
        present: for each parameter, whether any rank has a gradient.
        has_any: whether this rank has a gradient.
    """

    finite: bool
    factor: float
    present: Sequence[bool]
    has_any: bool


def agree(
    comm: Communicator,
    gradients: Sequence[torch.Tensor | None],
    *,
    loss_scale: float,
    found_inf: bool,
    max_norm: float | None,
    alike: Mapping[str, object],
) -> Verdict:
    """Agrees on the coming step. A collective.

    Args:
        gradients: this rank's, of each parameter.
        loss_scale: the factor that is in the gradients of this rank.
        found_inf: whether a GradScaler has found values that are not finite.
        max_norm: as in WireOptimizer.
        alike: values that must be the same on all ranks, but for last bits of numbers.

    Raises MismatchError on all ranks if these differ.
    """
    squares = _squares(gradients) / loss_scale**2
    digest = zlib.crc32(repr(_rounded(alike)).encode()) & 0xFFFFF
    bad = found_inf or not math.isfinite(squares)
    own = [one is not None for one in gradients]
    message = torch.tensor(
        [bad, 0.0 if bad else squares, digest, digest**2, *own], dtype=torch.float64, device="cpu"
    )
    bad, squares, digest, square, *present = comm.allreduce(message, "sum").tolist()
    ranks = comm.world_size
    if int(digest) ** 2 != ranks * int(square):
        raise difference(comm, alike)
    norm = math.sqrt(squares / ranks)
    clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    return Verdict(not bad, clip / loss_scale, [bool(one) for one in present], any(own))


def require_alike(comm: Communicator, about: Mapping[str, object]) -> None:
    """Raises MismatchError on all ranks, naming the setting that differs, unless all have the same
    by each name, but for last bits of numbers. A collective."""
    require_equal(comm, comm.allgather(fingerprint(about)), about)


def fingerprint(about: Mapping[str, object]) -> np.ndarray[Any, Any]:
    """Returns 16 bytes that tell settings apart; ``require_equal`` takes them when they are
    gathered."""
    digest = hashlib.blake2b(repr(_rounded(about)).encode(), digest_size=16).digest()
    return np.frombuffer(digest, np.uint8)


def require_equal(comm: Communicator, rows: Any, about: Mapping[str, object]) -> None:
    """Raises as ``require_alike``, given the fingerprints of all ranks. A collective if they
    differ."""
    if (np.asarray(rows) != rows[0]).any():
        raise difference(comm, about)


def difference(comm: Communicator, about: Mapping[str, object]) -> MismatchError:
    """Returns the error that names the setting that differs. A collective of ranks that have found
    that one does."""
    own = json.dumps({name: str(_rounded(value)) for name, value in about.items()}).encode()
    every = [json.loads(part) for part in gather_bytes(comm, own)]
    for name in dict.fromkeys(name for one in every for name in one):
        values = [one.get(name, "not there") for one in every]
        for rank, value in enumerate(values):
            if value != values[0]:
                return MismatchError(
                    f"the ranks have different settings: {name} is {values[0]} on rank 0 and "
                    f"{value} on rank {rank}. Give the same on all ranks, and load the same "
                    "checkpoint",
                    rank=rank,
                )
    return MismatchError("the ranks have different settings")


def _rounded(value: object) -> object:
    """Rounds each number to nine digits: hosts' mathematical libraries differ in the last ones of a
    schedule's results."""
    if isinstance(value, Mapping):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    is_float = isinstance(value, float) or (
        isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()
    )
    return f"{float(value):.9g}" if is_float else value  # type: ignore[arg-type]


def _squares(gradients: Sequence[torch.Tensor | None]) -> float:
    """Returns the sum of squares of all gradients; waits once for each GPU."""
    norms: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient is None:
            continue
        norm = torch.linalg.vector_norm(gradient, dtype=master_dtype(gradient.dtype))
        norms.setdefault(gradient.device, []).append(norm.double())
    return sum(float(torch.stack(found).square().sum()) for found in norms.values())
