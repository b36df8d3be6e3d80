"""The hook for hosts with several ranks: a torch process group in a host, ringcomm between hosts.

With L ranks on each host, NCCL sums their gradients and leaves each rank an L-th of the bucket;
ringcomm averages this share among the ranks of equal place, so that a host's gradients cross once;
NCCL gathers the shares again (trips.py).

Invariants: a rank keeps the residuals of its own share of a parameter, under the parameter's name;
a checkpoint has them joined. A step that fails on one rank fails on all (grid.py), wherever they
wait.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from ..codecs import Compression
from ..communicator import Communicator
from ..feedback import FeedbackStore
from .argument_checks import require_able, takes
from .codec_policy import CodecPolicy
from .grid import Grid
from .group import default_comm
from .hooks import REMOVED, HookState
from .stale import Stale1
from .trips import HierarchicalTransport


class HierarchicalState(HookState):
    """A HookState for several ranks per host, joined inside it by a process group of torch.

        local, _ = dist.new_subgroups(8, backend="nccl")           # the ranks of this host
        state = HierarchicalState("int8", local_group=local, model=model)
        ddp.register_comm_hook(state, allreduce_hook)

    Making it is a collective of all ranks: they join in communicators of their own, which
    ``close()`` leaves.

    Args:
        compression, model, feedback, threshold, warmup_steps, scaler, force, pace: as in
            HookState. Transfers between hosts are compressed; inside a host gradients are summed
            in their dtype.
        comm: the communicator of all ranks; None: that of the default process group if its backend
            is "ringcomm", else ringcomm's default one.
        local_group: the process group of this host's ranks, of any backend that has reduce-scatter
            and all-gather for the gradients' device. All hosts have equally many ranks. Nothing
            else should use it during backward.

    A gathered state has the form of HookState's, so a checkpoint fits either class, and any
    number of hosts and ranks.

    Attributes:
        comm: the communicator of the ranks of equal place, one on each host; ``report()`` counts
            its bytes.

    Raises ConfigError on all ranks for local groups that do not divide them into equal hosts, and
    MismatchError for settings that differ between them.
    """

    transport: HierarchicalTransport

    @takes(removed=REMOVED)
    def __init__(
        self,
        compression: Compression | Literal["auto"] | CodecPolicy | None = None,
        comm: Communicator | None = None,
        *,
        local_group: Any,
        model: torch.nn.Module | None = None,
        feedback: FeedbackStore | bool | None = None,
        threshold: int = 32 << 10,
        warmup_steps: int = 0,
        scaler: Any = None,
        force: bool = False,
        pace: Literal["every", "stale1"] | Stale1 = "every",
    ) -> None:
        require_able("comm", comm)
        require_able("model", model)
        comm = default_comm() if comm is None else comm
        grid = Grid(comm, local_group)
        super().__init__(
            compression,
            model=model,
            feedback=feedback,
            threshold=threshold,
            warmup_steps=warmup_steps,
            scaler=scaler,
            force=force,
            pace=pace,
            transport=HierarchicalTransport(grid),
        )
        self._require_alike(comm)

    @property
    def grid(self) -> Grid:
        """This rank's row and column. Raises ConfigError in a copy, which has none."""
        return self.transport.grid

    def close(self) -> None:
        """Closes the communicators that it made. The other ranks must have finished their steps,
        too."""
        self.transport.close()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.restore(state, HierarchicalTransport(None))
