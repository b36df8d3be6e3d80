"""``attach``: ringcomm for a model that a framework has wrapped in DDP, out of the caller's sight.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from typing_extensions import Unpack

from ..codecs import Compression
from ..errors import ConfigError
from .codec_policy import CodecPolicy
from .hooks import REMOVED, HookSettings, HookState, allreduce_hook
from .optim.exchanging import ExchangingOptimizer
from .settings import takes
from .wrapped import bare_optimizer, stop_exchange, wrappers_of


@takes(HookSettings, removed=REMOVED)
def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    compression: Compression | Literal["auto"] | CodecPolicy | None = None,
    **settings: Unpack[HookSettings],
) -> HookState | ExchangingOptimizer[Any, Any]:
    """Has the ranks' training of a model go by ringcomm. Call it on all ranks, once the framework
    has wrapped the model and before the first step.

    Args:
        model: as it is, or in DDP, whose module is then found by its parameters.
        optimizer: one of ringcomm.torch.optim or ringcomm.torch.sparse, or a framework's wrapper
            of it: DDP's own exchange is stopped for good, as the optimizer has its own. Any other
            optimizer, or None: DDP gets ringcomm's hook.
        compression, settings: of HookState.

    Returns:
        The state of the hook; or that optimizer of ringcomm's.

    Raises ConfigError for what is no model; where no DDP has the model, or its DDP has a hook
    already; for a setting that HookState does not have; and for any beside an optimizer that has
    its own.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model={model!r}: give the torch.nn.Module that is trained")
    ids = {id(parameter) for parameter in model.parameters()}
    wrappers = wrappers_of(ids)
    bare = bare_optimizer(optimizer)
    if isinstance(bare, ExchangingOptimizer):
        if compression is not None or settings:
            raise ConfigError(f"{type(bare).__name__} sends by settings of its own; give them "
                              "where it is made, not to attach()")  # fmt: skip
        stop_exchange(wrappers)
        return bare
    if not wrappers:
        raise ConfigError(
            "no DistributedDataParallel has this model, so there is nothing to attach to. Call "
            "attach() once the framework has wrapped it: after Accelerator.prepare, in Lightning's "
            "on_fit_start, in on_train_begin of a TrainerCallback; and start several ranks. On "
            "hosts without GPUs Accelerate wraps with Accelerator(cpu=True) only"
        )
    state = HookState(compression, model=model, **settings)
    for wrapper in wrappers:
        try:
            wrapper.register_comm_hook(state, allreduce_hook)
        except RuntimeError as error:
            raise ConfigError(
                f"the model's DDP has a hook already, and takes one only ({error})"
            ) from None
    return state
