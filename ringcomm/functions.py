"""The collectives as functions, on the default communicator or on the one given as ``comm``.

Each is made from the method of Communicator of its name, which has the text: signature and
documentation. functions.pyi has the same for type checkers; tools/make_stub.py makes it from the
methods' overloads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .api import given_or_default
from .communicator import Communicator


def _function(name: str) -> Callable[..., Any]:
    method = getattr(Communicator, name)

    def function(*args: Any, comm: Communicator | None = None, **options: Any) -> Any:
        return method(given_or_default(comm), *args, **options)

    signature = inspect.signature(method)
    _, *parameters = signature.parameters.values()  # without self
    added = inspect.signature(function).parameters["comm"]
    function.__signature__ = signature.replace(parameters=[*parameters, added])  # type: ignore[attr-defined]
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{inspect.getdoc(method)}\n\nOn the default communicator, or on ``comm``."
    return function


allreduce = _function("allreduce")
allreduce_many = _function("allreduce_many")
broadcast = _function("broadcast")
reduce = _function("reduce")
allgather = _function("allgather")
gather = _function("gather")
scatter = _function("scatter")
reduce_scatter = _function("reduce_scatter")
alltoall = _function("alltoall")
barrier = _function("barrier")
send = _function("send")
recv = _function("recv")
