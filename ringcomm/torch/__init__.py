"""ringcomm for PyTorch: the process-group backend, and the gradient hook of DDP.

    import ringcomm.torch
    torch.distributed.init_process_group("ringcomm")                # under torchrun

    ddp.register_comm_hook(ringcomm.torch.HookState(compression="bf16"),
                           ringcomm.torch.allreduce_hook)

Under mpirun and srun give ``init_process_group("ringcomm", init_method="ringcomm://")``.
"""

from __future__ import annotations

from . import backend, meeting, untraced
from .attach import attach
from .auto import Auto
from .hierarchy import HierarchicalState
from .hooks import HookState, allreduce_hook
from .options import Options
from .outer import IdenticalDataWarning, OuterStep
from .silence import SilenceWarning
from .stale import Stale1

backend.register()
meeting.register()
untraced.leave_alone("ringcomm")

__all__ = [
    "Auto", "HierarchicalState", "HookState", "IdenticalDataWarning", "Options", "OuterStep",
    "SilenceWarning", "Stale1", "allreduce_hook", "attach",
]  # fmt: skip
