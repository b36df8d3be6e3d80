"""FSDP2 with compressed exchanges: ``compress(model)`` after ``fully_shard``.

    fully_shard(model)                                           # shards over all ranks
    compress(model, gradients="int8", weights="int8")

    fully_shard(model, mesh=ranks_of_this_host)                  # shards in a host,
    compress(model, gradients="int4", across=one_of_each_host)   # its part goes to the other hosts

In the first case weights and gradients travel by codecs, in the second the mean across hosts does.
The sum of a reduce-scatter is not rounded again. An all-gather gives every rank, the owner too, the
same decoded weights; the owner's float32 part stays exact, so its rounding errors do not add up.

Invariants: 16-bit tensors travel by the codec of their float32 values. Tensors that are not of
floating point travel as they are. All ranks make the same calls in the same order, which is FSDP's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..codecs import Codec, Compression, parse
from ..communicator import Communicator
from ..errors import ConfigError, naming
from ..feedback import FeedbackStore
from .argument_checks import takes
from .group import group_behind
from .ops import core_op
from .sync.pending import Pending
from .wrapped import plain_name


@takes()
def compress(
    model: torch.nn.Module,
    gradients: Compression | None = "int8",
    weights: Compression | None = None,
    *,
    across: Communicator | None = None,
) -> Compressed:
    """Compresses what FSDP2 exchanges for a model.

    Args:
        model: with ``fully_shard`` applied to it, to parts of it, or both. Modules that are sharded
            later are not compressed.
        gradients: codec of the gradients. Without ``across`` one that needs no error feedback:
            residuals would take the memory that sharding has saved.
        weights: codec of the weights that are gathered; None: they are not rounded. With ``across``
            they stay in the host, and it must be None.
        across: the communicator of the ranks with the same shard, one on each host, if the model is
            sharded over the ranks of a host. Its mean completes FSDP's. None: the model is sharded
            over a group of backend "ringcomm".

    Returns:
        The residuals, for a checkpoint, and the bytes that this rank has sent.

    Raises ConfigError for a model without ``fully_shard``, and for settings that cannot work.
    """
    found = _sharded(model)
    if not found:
        raise ConfigError(
            "compress() takes a model after fully_shard(), and this has no part of it"
        )
    if not hasattr(torch.distributed.fsdp.FSDPModule, "set_custom_all_gather"):
        raise ConfigError("compress() needs PyTorch 2.9 or later, of which FSDP2 takes exchanges")
    codec, compressed = parse(gradients, "gradients="), Compressed(across)
    if across is None:
        if codec.needs_feedback:
            raise ConfigError(
                f"gradients={codec.name!r} needs error feedback, whose residuals would be as large "
                "as all gradients on each rank: give int8 or fp8, or shard in a host, with across="
            )
        for module in found.values():
            module.set_force_sum_reduction_for_comms(True)  # a mean by FSDP's own division
            module.set_custom_reduce_scatter(_ReduceScatter(codec, compressed))
            module.set_custom_all_gather(_AllGather(parse(weights, "weights="), compressed))
        return compressed
    if weights is not None:
        raise ConfigError("with across= weights are gathered in the host: leave weights= out")
    for name, module in found.items():
        module.set_all_reduce_hook(compressed.mean_of(name, codec, across))
    return compressed


@dataclasses.dataclass
class Compressed:
    """What ``compress`` has made of a model.

    Attributes:
        feedback: residuals of the gradients, by the modules' names; only with ``across``.
        carried: bytes that this rank has sent, over links or through shared memory.
    """

    across: Communicator | None
    feedback: FeedbackStore = dataclasses.field(default_factory=FeedbackStore)
    carried: int = 0

    def mean_of(
        self, name: str, codec: Codec, across: Communicator
    ) -> Callable[[torch.Tensor], None]:
        """Returns a hook that averages the shard of a module's gradients over the hosts."""

        def mean(shard: torch.Tensor) -> None:
            flat = shard.float().view(-1)
            feedback = self.feedback[name] if codec.needs_feedback else None
            with naming("the exchange of gradients across hosts"):
                pending = Pending(across, flat, codec, feedback)
                pending.wait()
            if not pending.is_finite:  # the residuals of before are worth more than NaN
                pending.undo()
            shard.copy_(flat.view(shard.shape))
            self.count(pending.work)

        return mean

    def count(self, work: Any) -> None:
        """Counts the bytes of a finished collective."""
        stats = work.stats()
        self.carried += stats.sent_bytes + stats.shared_bytes

    def state_dict(self) -> dict[str, Any]:
        """State of this rank: its residuals. Nothing is sent; for the same rank of a world of the
        same size."""
        return self.feedback.state_dict(self.across)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned. Raises ConfigError in a world of another size."""
        self.feedback.load_state_dict(state, self.across, strict=False)


class _Exchange:
    """Base of the two: allocates memory as FSDP does, and finds the communicator."""

    def __init__(self, codec: Codec, compressed: Compressed) -> None:
        self._codec, self._compressed = codec, compressed

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Makes a tensor of undefined values."""
        return torch.empty(size, dtype=dtype, device=device)

    def _comm(self, group: Any) -> Communicator:
        behind = group_behind(group)
        if behind is None:
            raise ConfigError(
                'compress() needs a mesh of backend "ringcomm": init_process_group("ringcomm"), or '
                "shard in the host and give across="
            )
        return behind.comm

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor as it travels: float32, unless it is wider or of no floating point."""
        is_narrow = tensor.is_floating_point() and tensor.element_size() < 4
        return tensor.float() if is_narrow and self._codec.name != "none" else tensor


class _ReduceScatter(_Exchange):
    """Sums gradients, and leaves each rank its part."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        codec: Any = self._codec.name
        name: Any = core_op(getattr(op, "op", op), input_tensor.dtype)
        with naming("FSDP's exchange of gradients"):
            work = self._comm(group).reduce_scatter(
                self._own(input_tensor), name, compression=codec, feedback=False, async_op=True
            )
            output_tensor.copy_(work.wait())
        self._compressed.count(work)


class _AllGather(_Exchange):
    """Gathers weights."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        codec: Any = self._codec.name if input_tensor.is_floating_point() else None
        with naming("FSDP's exchange of weights"):
            work = self._comm(group).allgather(
                self._own(input_tensor), compression=codec, feedback=False, async_op=True
            )
            output_tensor.copy_(work.wait().view(-1))
        self._compressed.count(work)


def _sharded(model: torch.nn.Module) -> dict[str, Any]:
    """Returns the parts of a model that fully_shard was applied to, by name."""
    from torch.distributed.fsdp import FSDPModule  # which takes a second to import

    named = model.named_modules()
    return {plain_name(name): one for name, one in named if isinstance(one, FSDPModule)}
