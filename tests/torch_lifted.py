"""Lifts the gates of PyTorch's distributed tests that ask for a backend's name or for a GPU.

Most of these tests use a GPU only because NCCL needs one: what they check holds on a CPU, too. With
the gates lifted and GPUs mapped to the CPU, they run on any backend that takes tensors of the CPU.

Invariants: gates by world size, by platform and for flakiness stay. A test that has no meaning
without a GPU fails then, on every backend alike; who compares backends leaves it out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

_KEPT = ("world size", "flakiness", "github.com")
"""Parts of the reasons that say nothing of a backend or a GPU."""


def lift_gates() -> None:
    """To be called before the tests are imported."""
    from torch.testing._internal import common_distributed, common_utils

    def pass_unless_kept(reason: str) -> Callable[[Any], Any]:
        return lambda test: _skipped(test, reason) if _is_kept(reason) else test

    def pass_if(condition: bool, reason: str) -> Callable[[Any], Any]:
        return pass_unless_kept(reason) if condition else _same

    for name in ("skip_if_no_gpu", "skip_if_rocm_multiprocess"):
        setattr(common_distributed, name, _same)
    for name in (
        "skip_if_lt_x_gpu",
        "nccl_skip_if_lt_x_gpu",
        "require_n_gpus_for_nccl_backend",
        "requires_nccl_version",
    ):
        setattr(common_distributed, name, lambda *_, **__: _same)
    common_utils.skip_but_pass_in_sandcastle = pass_unless_kept
    common_utils.skip_but_pass_in_sandcastle_if = pass_if


def _same(test: Any) -> Any:
    return test


def _is_kept(reason: str) -> bool:
    return any(part in reason for part in _KEPT)


def _skipped(test: Any, reason: str) -> Any:
    test.__unittest_skip__ = True
    test.__unittest_skip_why__ = reason
    return test


def map_gpus_to_cpu(count: int) -> None:
    """Gives this process, and what it forks, so many GPUs, all of which are the CPU."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    made = DistributedDataParallel.__init__

    def without_devices(self: Any, module: Any, *_: Any, **options: Any) -> None:
        for name in ("device_ids", "output_device"):
            options.pop(name, None)
        made(self, module, **options)

    DistributedDataParallel.__init__ = without_devices  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    _pretend(torch.cuda, count)
    _make_mode().__enter__()


def _pretend(cuda: Any, count: int) -> None:
    cuda.device_count = lambda: count
    cuda.current_device = lambda: 0
    for name in ("set_device", "synchronize", "manual_seed", "manual_seed_all", "empty_cache"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("stream", "device"):
        setattr(cuda, name, lambda *_, **__: contextlib.nullcontext())
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, _Stream)
    cuda.Stream, cuda.Event = _Stream, _Event


class _Stream:
    """One on which all is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: None


class _Event(_Stream):
    """One that has happened."""


def _make_mode() -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    def is_gpu(value: Any) -> bool:
        if isinstance(value, str):
            return value.startswith("cuda")
        return type(value) is int or (isinstance(value, torch.device) and value.type == "cuda")

    movers = (torch.Tensor.to, torch._C._nn._parse_to)

    class OnCpu(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            if func is torch.Tensor.cuda:
                return args[0]
            if is_gpu(kwargs.get("device")):
                kwargs["device"] = "cpu"
            if func in movers:
                args = tuple("cpu" if is_gpu(value) else value for value in args)
            return func(*args, **kwargs)

    return OnCpu()
