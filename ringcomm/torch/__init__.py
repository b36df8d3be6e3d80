"""ringcomm for PyTorch: the gradient hook of DistributedDataParallel.

    ddp.register_comm_hook(ringcomm.torch.HookState(compression="bf16"),
                           ringcomm.torch.allreduce_hook)
"""

from __future__ import annotations

from .hooks import HookState, allreduce_hook

__all__ = ["HookState", "allreduce_hook"]
