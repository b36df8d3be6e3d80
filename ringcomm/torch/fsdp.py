"""FSDP2 with compressed exchanges: ``compress(model)`` after ``fully_shard``.

    fully_shard(model)                                           # shards over all ranks
    compress(model, gradients="int8", weights="int8")

    fully_shard(model, mesh=ranks_of_this_host)                  # shards in a host, whose means
    compress(model, gradients="int4", across=one_of_each_host)   # travel to the other hosts

In the first case gradients are reduce-scattered and weights all-gathered by codecs. A sum is not
rounded again; all ranks, the owner too, compute with the same decoded weights, and as the owner's
own stay exact, rounding errors of weights do not add up. In the second case FSDP works as ever
inside the host, and its hook averages each shard over the hosts.

Invariants: 16-bit tensors travel by the codec of their float32 values; tensors that no codec takes
travel as they are. All ranks make the same calls in the same order, which is FSDP's. A call returns
when its result is there, as FSDP follows collectives by streams alone.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ..codecs import Codec, Compression, parse
from ..communicator import Communicator
from ..core.calls import naming
from ..errors import ConfigError
from ..feedback import FeedbackStore
from .argument_checks import require, takes
from .group import group_behind
from .guards import ONEBIT, AdamWatch
from .ops import as_reduced, reduction
from .sync.account import Moved
from .sync.agreement import require_alike
from .sync.pending import Wire
from .tensors import as_moved
from .wrapped import plain_name

_COMPRESSIBLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@takes()
def compress(
    model: torch.nn.Module,
    gradients: Compression | None = "int8",
    weights: Compression | None = None,
    *,
    across: Communicator | None = None,
) -> Compressed:
    """Compresses what FSDP2 exchanges for a model. With ``across`` a collective of its ranks.

    Args:
        model: with ``fully_shard`` applied to it, to parts of it, or both, over a mesh of one
            dimension. Modules that are sharded later are not compressed.
        gradients: codec of the gradients. Without ``across`` one that needs no error feedback:
            residuals would take the memory that sharding has saved.
        weights: codec of the weights that are gathered, one that needs no error feedback; None:
            they are not rounded. With ``across`` they stay in the host, and it must be None.
        across: the communicator of the ranks that have the same shard, one on each host, if the
            model is sharded over the ranks of a host. Weights must be the same on all hosts at the
            start. None: the model is sharded over a group of backend "ringcomm".

    Returns:
        The residuals, for a checkpoint, and the bytes that this rank has sent.

    With ``across`` each backward crosses the hosts, unless ``set_requires_gradient_sync(False)``,
    and all hosts must run the same modules in it. With feedback a parameter that is not used has a
    zero gradient, and with a GradScaler set ``.feedback.loss_scale`` of the result to its scale
    before each backward.

    Raises ConfigError for a model without ``fully_shard``, and for settings that cannot work;
    MismatchError if ranks of ``across`` have other shards or settings.
    """
    found = _sharded(model)
    codec, rounded = parse(gradients, "gradients="), parse(weights, "weights=")
    is_comm = across is None or isinstance(across, Communicator)
    require("across, give a ringcomm.Communicator", repr(across), is_comm)
    require(
        "with across= weights are gathered in the host: leave weights= out",
        None,
        across is None or rounded.name == "none",
    )
    require(
        f"weights={weights!r} needs error feedback: give int8 or fp8",
        None,
        not rounded.needs_feedback,
    )
    mesh = _mesh_of(model, found.values())
    compressed = Compressed(across, mesh.get_local_rank(), mesh.size(), found)
    if across is not None:
        held = {name: [tuple(p.shape) for p in one.parameters()] for name, one in found.items()}
        about = {"gradients": codec.name, "shard": compressed.shard, "shards": compressed.shards}
        with naming("compress() across hosts"):
            require_alike(across, {**about, "modules": held})
        if codec.name == "onebit":
            compressed.watch = AdamWatch(ONEBIT)
            compressed.watch.see(model.parameters())
        for name, module in found.items():
            module.set_all_reduce_hook(functools.partial(compressed.average, name, codec, across))
            if codec.needs_feedback:  # a shard is always of one size
                module.set_reduce_scatter_unused_params(True)
        return compressed
    require(
        f"gradients={codec.name!r} needs error feedback, whose residuals would be as large as all "
        "gradients on each rank: give int8 or fp8, or shard in a host, with across=",
        None,
        not codec.needs_feedback,
    )
    comm_of(mesh.get_group())
    for module in found.values():
        module.set_custom_reduce_scatter(_ReduceScatter(codec, compressed))
        module.set_custom_all_gather(_AllGather(rounded, compressed))
    return compressed


def comm_of(group: Any) -> Communicator:
    """Returns the communicator of a process group. Raises ConfigError for another backend's."""
    behind = group_behind(group)
    if behind is None:
        raise ConfigError(
            'compress() needs meshes of backend "ringcomm", those of reshard_after_forward=, too: '
            'init_process_group("ringcomm"), or shard in a host, and give across='
        )
    return behind.comm


class Compressed:
    """Result of ``compress``.

    Attributes:
        shard, shards: number of this rank's shard, and of all.
        feedback: residuals of the gradients, by the modules' names; only with ``across``.
        sent: bytes that this rank has sent by codecs, over ports and through shared memory; with
            ``across`` to the other hosts alone.
    """

    def __init__(
        self, across: Communicator | None, shard: int, shards: int, names: Collection[str]
    ) -> None:
        self._across, self.shard, self.shards = across, shard, shards
        self._names = set(names)
        self.watch: AdamWatch | None = None  # of 1-bit gradients
        self.feedback = FeedbackStore()
        self.sent = Moved()

    def state_dict(self) -> dict[str, Any]:
        """State of this rank: the residuals of its shard. Nothing is sent; for the same rank of a
        world of the same size. Empty without ``across``."""
        if self._across is None:
            return {}
        residuals = self.feedback.state_dict(self._across)
        return {"shard": self.shard, "shards": self.shards, "feedback": residuals}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned; an empty state changes nothing. Raises ConfigError
        for a state of another shard or model, or in a world of another size."""
        keys = {"shard", "shards", "feedback"}
        known = isinstance(state, Mapping) and set(state) in (keys, set())
        require("this is no state of what compress() returns", None, known)
        there = state.get("shard", self.shard), state.get("shards", self.shards)
        if there != (self.shard, self.shards):
            raise ConfigError(
                f"the state has the residuals of shard {there[0]} of {there[1]}, and this rank has "
                f"shard {self.shard} of {self.shards}: each rank saves and loads its own"
            )
        unknown = sorted(set(state["feedback"]["tensors"]) - self._names) if state else []
        require(f"the state is of another model: it has {unknown[:3]}", None, not unknown)
        if self._across is not None and state:
            scale = self.feedback.loss_scale  # in the coming gradients, not in the state's
            self.feedback.load_state_dict(state["feedback"], self._across, strict=False)
            self.feedback.loss_scale = scale

    # ---- what FSDP calls ----

    def average(self, name: str, codec: Codec, across: Communicator, shard: torch.Tensor) -> None:
        """Averages a module's gradients over the hosts."""
        flat = _as_sent(shard, codec).view(-1)
        feedback = self.feedback[name] if codec.needs_feedback else None
        with naming("the exchange of gradients across hosts"):
            pending = Wire(codec, feedback).submit(across, flat)
            shard.copy_(pending.wait().view(shard.shape))
        if shard.is_cuda:  # FSDP frees it by another stream
            shard.record_stream(torch.cuda.current_stream(shard.device))
        self.sent.add([pending.work.stats()])


class _Exchange:
    """Base of the two: allocates memory as FSDP does, and finds the communicator."""

    def __init__(self, codec: Codec, compressed: Compressed) -> None:
        self._codec, self._compressed = codec, compressed

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Makes a tensor of undefined values."""
        return torch.empty(size, dtype=dtype, device=device)


class _ReduceScatter(_Exchange):
    """Reduces gradients, and leaves each rank its part."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        how, sent = reduction(op, input_tensor), _as_sent(input_tensor, self._codec)
        if how.factor is not None:
            sent = sent * how.factor
        settings: Any = {"op": how.op, "compression": self._codec.name, "feedback": False}
        with naming("FSDP's exchange of gradients"):
            work = comm_of(group).reduce_scatter(as_reduced(sent), async_op=True, **settings)
            output_tensor.copy_(work.wait())
        self._compressed.sent.add([work.stats()])


class _AllGather(_Exchange):
    """Gathers weights."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> None:
        comm, codec = comm_of(group), self._codec
        # A smaller group gathers anew, for backward, what was rounded for forward.
        is_rounded = (
            input_tensor.dtype in _COMPRESSIBLE and comm.world_size == self._compressed.shards
        )
        settings: Any = {"compression": codec.name if is_rounded else None, "feedback": False}
        sent = _as_sent(input_tensor, codec) if is_rounded else as_moved(input_tensor)
        with naming("FSDP's exchange of weights"):
            work = comm.allgather(sent, async_op=True, **settings)
            target = output_tensor if is_rounded else as_moved(output_tensor)
            target.copy_(work.wait().view(-1))
        self._compressed.sent.add([work.stats()])


def _as_sent(tensor: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Returns what a codec takes in place of a tensor: the same, or a copy in float32 of a 16-bit
    one."""
    if codec.name == "none":
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _sharded(model: torch.nn.Module) -> dict[str, Any]:
    """Returns the parts of a model that fully_shard was applied to, by name. Raises ConfigError if
    there are none, or PyTorch's FSDP2 takes no exchange."""
    from torch.distributed import fsdp  # which takes a second to import

    kind: Any = getattr(fsdp, "FSDPModule", None)
    for needed in ("set_custom_all_gather", "set_reduce_scatter_unused_params"):
        if not hasattr(kind, needed):
            raise ConfigError(f"compress() needs an FSDP2 with {needed}, as PyTorch 2.13 has it")
    require("model, give a torch.nn.Module", repr(model), isinstance(model, torch.nn.Module))
    named = model.named_modules()
    found = {plain_name(name): one for name, one in named if isinstance(one, kind)}
    if not found:
        raise ConfigError(
            "compress() takes a model after fully_shard(), and this has no part of it"
        )
    return found


def _mesh_of(model: torch.nn.Module, modules: Iterable[Any]) -> Any:
    """Returns the mesh over which a model is sharded. Raises ConfigError unless it is one, of one
    dimension."""
    for module in modules:
        module.reshard()  # a forward leaves the outermost one whole
    held: list[Any] = [one for one in model.parameters() if hasattr(one, "device_mesh")]
    placements = [one.placements[0] for one in held if one.device_mesh.ndim == 1]
    is_shard = all(placement.is_shard() for placement in placements)
    require("the model is in replicate(), which shards nothing", None, is_shard)
    meshes = {one.device_mesh for one in held}
    require(
        "the model is sharded over several meshes, or one of several dimensions, whose own "
        "all-reduce no codec takes: shard it over the ranks of a host alone, and give across= for "
        "the hosts",
        None,
        len(meshes) == 1 and all(mesh.ndim == 1 for mesh in meshes),
    )
    return meshes.pop()
