"""Whether ranks train on the same data.

Local steps on the same data make the same weights: the exchange then averages equal things, and
more ranks are of no use. Loaders without a sampler for each rank do just that, silently. So a
digest of each rank's first batch travels with its first header.

Invariants: a digest is of the tensors of the model's latest call in training mode before the first
iteration is over, so of no call that only sets the model up. No bit of the batch leaves the rank
but its digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_MOST_ELEMENTS = 1 << 16  # of each tensor
NOTHING = bytes(16)


class IdenticalDataWarning(UserWarning):
    """Two ranks have trained on the same first batch."""


class FirstBatch:
    """The digest of the batch that a model is called with in training mode.

    Attributes:
        digest: 16 bytes, of the latest call before ``stop``; zeros as long as there was none, or
            none with a tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self.digest = NOTHING
        self._handle: Any = model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model.training and self._handle is not None:
            self.digest = digest_of((args, kwargs))

    def stop(self) -> None:
        """Looks no more. Not from within a forward."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def digest_of(batch: Any) -> bytes:
    """Of the tensors in nested lists, tuples and dictionaries; zeros where there are none."""
    digest, is_empty = hashlib.blake2b(digest_size=16), True
    for tensor in tensors_in(batch):
        is_empty = False
        some = tensor.detach().flatten()[:_MOST_ELEMENTS].cpu().contiguous()
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes() if some.numel() else b"")
    return NOTHING if is_empty else digest.digest()


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """The dense tensors in nested lists, tuples and dictionaries."""
    if isinstance(batch, torch.Tensor):
        if batch.layout == torch.strided:
            yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_in(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from tensors_in(value)
