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
    """Makes a function with the method's parameters, from its text, as dataclasses does. (To pass
    arguments on by ``*args`` shows in the time of a small call.)"""
    method = getattr(Communicator, name)
    _, *parameters = inspect.signature(method).parameters.values()  # without self
    comm = inspect.Parameter("comm", inspect.Parameter.KEYWORD_ONLY, default=None)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in (*parameters, comm)]
    passed = ", ".join(
        each.name if each.kind is each.POSITIONAL_OR_KEYWORD else f"{each.name}={each.name}"
        for each in parameters
    )
    text = f"def {name}{inspect.Signature(bare)}: return _comm(comm).{name}({passed})"
    made: dict[str, Any] = {"_comm": given_or_default, "__name__": __name__}
    exec(compile(text, f"<ringcomm.{name}>", "exec"), made)
    function: Callable[..., Any] = made[name]
    function.__annotations__ = {**method.__annotations__, "comm": "Communicator | None"}
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
