"""ringcomm for PyTorch: the process-group backend, and the gradient hook of DDP.

import ringcomm.torch
torch.distributed.init_process_group("ringcomm")

ddp.register_comm_hook(ringcomm.torch.HookState(compression="bf16"),
                       ringcomm.torch.allreduce_hook)
"""

from __future__ import annotations

from .backend import register
from .hooks import HookState, allreduce_hook
from .options import Options

register()

__all__ = ["HookState", "Options", "allreduce_hook"]
