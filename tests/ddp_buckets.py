"""A model, the buckets that DDP makes of its gradients, and settings: for tests of the hook without
DDP."""

from __future__ import annotations

from typing import Any, ClassVar

import optim_steps
import torch
from optim_steps import THRESHOLD
from torch import nn

from ringcomm import Communicator
from ringcomm.codecs import Codec, parse
from ringcomm.torch import HookState, allreduce_hook
from ringcomm.torch.codec_policy import FixedCodec


class Net(optim_steps.Net):
    """The model of the optimizers' tests, with a long vector before its filter."""

    shapes: ClassVar = {
        "embed": (100, 48),
        "norm": (48,),
        "long": (5000,),
        **optim_steps.Net.shapes,
    }


LARGE = ("embed", "filter", "head")


class Bucket:
    """What DDP gives a hook: the gradients of some parameters, one after the other."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        gradients: list[torch.Tensor],
        last: bool = True,
        index: int = 0,
    ) -> None:
        self._parameters = parameters
        self._index = index
        self._last = last
        self._buffer = torch.cat([g.reshape(-1) for g in gradients])
        self._views = []
        start = 0
        for g in gradients:
            self._views.append(self._buffer[start : start + g.numel()].view(g.shape))
            start += g.numel()

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def gradients(self) -> list[torch.Tensor]:
        return self._views


class ByStep(FixedCodec):
    """A codec policy that takes these one after the other, and stays with the last one."""

    name = "by step"

    def __init__(self, *names: str) -> None:
        self._codecs = tuple(map(parse, names))

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return self._codecs

    def codec(self, step: int) -> Codec:
        return self.codecs[min(step, len(self.codecs) - 1)]


class Scaler:
    """What a hook asks of a GradScaler."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def get_scale(self) -> float:
        return self.scale


def state_of(comm: Communicator, model: nn.Module, codec: Any, **settings: object) -> HookState:
    return HookState(codec, comm, model=model, threshold=THRESHOLD, **settings)  # type: ignore[arg-type]


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def gradients_of(model: nn.Module, rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return {
        name: torch.randn(p.shape, generator=generator).to(p.dtype) * 0.1 + 0.05
        for name, p in trained(model)
    }


def reduce(
    state: HookState, model: nn.Module, gradients: dict[str, torch.Tensor], buckets: int = 1
) -> dict[str, torch.Tensor]:
    """The gradients by the hook, in so many buckets in reverse order, as DDP has them."""
    names = [name for name, _ in trained(model)][::-1]
    by_name = dict(model.named_parameters())
    size = -(-len(names) // buckets)
    flying = []
    for start in range(0, len(names), size):
        part = names[start : start + size]
        last = start + size >= len(names)
        index = start // size
        bucket = Bucket([by_name[n] for n in part], [gradients[n] for n in part], last, index)
        flying.append((part, bucket, allreduce_hook(state, bucket)))  # type: ignore[arg-type]
    results = {}
    for part, bucket, future in flying:
        assert future.wait().data_ptr() == bucket.buffer().data_ptr()
        results.update(dict(zip(part, bucket.gradients(), strict=True)))
    return results
