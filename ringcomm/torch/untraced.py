"""Keeps torch.compile out of this package.

C++ calls a group's methods and DDP's hook in the middle of compiled code, where the compiler would
try, and fail, to trace them. This module makes it skip the code of this package, as
``torch.compiler.disable`` does, but at no cost to a call, and without ``torch._dynamo``, which
takes seconds to import.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch


def leave_alone(package: str) -> None:
    """Makes torch.compile skip all functions and methods of the package's imported modules, and
    their callees. Does nothing where PyTorch has no compiler."""
    skip = _skipper()
    modules = [m for name, m in list(sys.modules.items()) if f"{name}.".startswith(f"{package}.")]
    for module in modules:
        for function in _functions(module, module.__name__):
            skip(function.__code__)


def leave_function_alone(function: Any) -> Any:
    """Makes torch.compile skip a function that no module has, and its callees. Returns it."""
    _skipper()(function.__code__)
    return function


def _skipper() -> Callable[[types.CodeType], object]:
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        strategy = frames._FrameExecStrategy(skip, skip)
        return lambda code: frames.set_code_exec_strategy(code, strategy)
    return getattr(frames, "skip_code", lambda code: None)


def _functions(owner: Any, module: str) -> Iterator[types.FunctionType]:
    """Yields the functions of a module or class that were written in this module."""
    for member in list(vars(owner).values()):
        if isinstance(member, property):
            parts = [member.fget, member.fset]
        else:
            parts = [getattr(member, "__func__", member)]  # function of a static or class method
        for part in map(inspect.unwrap, filter(callable, parts)):
            if getattr(part, "__module__", None) != module:
                continue
            if isinstance(part, types.FunctionType):
                yield part
            elif isinstance(part, type) and part is not owner:
                yield from _functions(part, module)
