"""ringcomm for PyTorch: the process-group backend, and the gradient hook of DDP.

    import ringcomm.torch
    torch.distributed.init_process_group("ringcomm")                # under torchrun

    ddp.register_comm_hook(ringcomm.torch.HookState(compression="bf16"),
                           ringcomm.torch.allreduce_hook)

Under mpirun and srun give ``init_process_group("ringcomm", init_method="ringcomm://")``.

For users are the names in ``__all__``, the packages optim, outer and sparse, and the modules fsdp,
lightning and transformers, which import what they are for. All other modules are this package's
own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ..errors import did_you_mean
from . import backend, init_method, optim, outer, sparse, untraced
from .auto import Auto
from .frameworks import attach
from .guards import IdenticalDataWarning, SilenceWarning
from .hierarchy import HierarchicalState
from .hooks import HookState, allreduce_hook
from .options import Options
from .outer import OuterStep
from .stale import Stale1

backend.register()
init_method.register()
untraced.leave_alone("ringcomm")

__all__ = [
    "Auto",
    "HierarchicalState",
    "HookState",
    "IdenticalDataWarning",
    "Options",
    "OuterStep",
    "SilenceWarning",
    "Stale1",
    "allreduce_hook",
    "attach",
]


def __dir__() -> list[str]:
    return [*__all__, "optim", "outer", "sparse"]


if not TYPE_CHECKING:  # else type checkers would accept every name

    def __getattr__(name: str) -> NoReturn:
        """Raises AttributeError, which names the submodule that has the name, or a similar name."""
        for module in (optim, outer, sparse):
            if name in module.__all__:
                raise AttributeError(
                    f"ringcomm.torch has no {name!r}: did you mean {module.__name__}.{name}?"
                )
        raise AttributeError(f"ringcomm.torch has no {name!r}{did_you_mean(name, __dir__())}")
