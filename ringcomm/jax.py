"""All-reduces of JAX's pytrees, in jit and out of it: ``grads = ringcomm.jax.pmean(grads)``.

    out of jit   leaves are read where they lie, and JAX takes over the memory of the results:
                 nothing is copied but the small leaves that are sent together
    in jit       an ordered io_callback reduces copies, so that all collectives of the program,
                 which is the same on all ranks, have one order

A process is one rank, with one CPU device of JAX.

Invariants: leaves are never written to. What cannot work is refused before anything is sent, in
jit while it traces, but for ``feedback``. Collectives out of jit come after those of functions that
were called before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from .api import given_or_default
from .codecs import Compression
from .communicator import Communicator
from .core.calls import Op, Prepared
from .core.native import lib
from .core.residuals import Residuals
from .core.views import NUMPY_NAMES, unsupported
from .errors import ConfigError, TensorError
from .fusion import Works, allreduce_many

__all__ = ["TreeWork", "allreduce", "pmean"]

Feedbacks = Sequence[Residuals] | Literal[False] | None

_ALIGNMENT = 64  # bytes; JAX takes over no memory that begins elsewhere


class TreeWork(Works):
    """All-reduce of a pytree in flight, as returned with ``async_op=True``."""

    def __init__(self, works: Works, leaves: Sequence[Any], structure: Any) -> None:
        super().__init__(works.works, works.result)
        self._devices = [leaf.sharding if leaf.committed else None for leaf in leaves]
        self._structure = structure

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the result and returns it; otherwise as ``Work.wait``."""
        arrays = jax.device_put(super().wait(timeout), self._devices, may_alias=True)
        return jax.tree.unflatten(self._structure, arrays)


def allreduce(
    tree: Any,
    op: Op = "sum",
    *,
    compression: Compression | None = None,
    feedback: Feedbacks = None,
    async_op: bool = False,
    comm: Communicator | None = None,
) -> Any:
    """Reduces the leaves of a pytree over all ranks, small ones of a dtype together. All ranks get
    the same bits, those of ``ringcomm.allreduce_many`` of the same numpy arrays.

    Within jit, scan, while_loop and cond it is an ordered effect of the program. It has no gradient
    and cannot be vmapped: reduce gradients after ``jax.grad``. An error of the collective reaches
    the caller of a jitted function as JAX's JaxRuntimeError, with the error's text; the error
    itself is ``ringcomm.default_communicator().failure()``. Before a collective of another module
    call ``jax.effects_barrier()``, as jitted functions may return before theirs have run.

    Args:
        tree: its leaves are JAX arrays on one CPU device, or become such by ``jnp.asarray``; of the
            dtypes that ringcomm takes, and the same dtypes and shapes on all ranks. They are
            reduced now if all are known, as constants within jit are, while it traces.
        op, compression: as for ``ringcomm.allreduce``. avg truncates integers.
        feedback: an ErrorFeedback for each leaf, in the order of ``jax.tree.leaves``, or False; as
            for ``ringcomm.allreduce_many``.
        async_op: return a TreeWork at once; not within jit.
        comm: the communicator; None: the default one at the time of the call or, of a jitted
            function, of each of its runs.

    Returns:
        A pytree of new arrays like ``tree``, or the TreeWork.

    Raises:
        TensorError: a leaf has another dtype, or lies elsewhere, as on a GPU; within jit JAX
            itself brings it to the host and back, which was not tested with a GPU.
        ConfigError: an argument cannot work; async_op within jit, or its gradient is asked for.
        NotInitializedError, MismatchError, PeerLostError, CommTimeoutError, AbortedError: as
            ``ringcomm.allreduce``.
    """
    leaves, structure = jax.tree.flatten(tree)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    for index, leaf in enumerate(arrays):
        if problem := _problem_of(leaf):
            path, _ = jax.tree_util.tree_leaves_with_path(tree)[index]
            name = f"tree{jax.tree_util.keystr(path)}"
            raise TensorError(f"{name}: {problem}")
    if any(isinstance(leaf, jax.core.Tracer) for leaf in arrays):
        if async_op:
            raise ConfigError(
                "async_op=True does not go within jit, where nothing can wait later; leave it out, "
                "or call outside of jit"
            )
        return jax.tree.unflatten(structure, _in_jit(arrays, op, compression, feedback, comm))
    jax.effects_barrier()
    sources = [np.asarray(leaf) for leaf in arrays]  # no copies; by DLPack numpy has no bfloat16
    room = [_room_for(source) for source in sources]
    where = given_or_default(comm)
    works = allreduce_many(where, sources, op, compression, feedback, True, None, out=room)
    work = TreeWork(works, arrays, structure)
    return work if async_op else work.wait()


def pmean(
    tree: Any,
    *,
    compression: Compression | None = None,
    feedback: Feedbacks = None,
    async_op: bool = False,
    comm: Communicator | None = None,
) -> Any:
    """Returns the mean of a pytree over all ranks; otherwise as ``allreduce``."""
    return allreduce(
        tree, "avg", compression=compression, feedback=feedback, async_op=async_op, comm=comm
    )


def _problem_of(leaf: Any) -> str:
    """Says why a leaf cannot be reduced; "" if it can."""
    if str(leaf.dtype) not in NUMPY_NAMES:
        return str(unsupported(str(leaf.dtype)))
    if isinstance(leaf, jax.core.Tracer):
        return ""
    devices = leaf.devices()
    if len(devices) == 1 and next(iter(devices)).platform == "cpu":
        return ""
    return (
        f"it lies on {', '.join(sorted(map(str, devices)))}; bring it to one CPU device by "
        'jax.device_put(x, jax.devices("cpu")[0]), and the result back in the same way'
    )


def _room_for(source: Any) -> Any:
    """Makes memory for the result of a numpy array, such as JAX takes over."""
    room = np.empty(source.nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + source.nbytes].view(source.dtype).reshape(source.shape)


def _in_jit(
    leaves: Sequence[Any],
    op: Op,
    compression: Compression | None,
    feedback: Feedbacks,
    comm: Communicator | None,
) -> Any:
    """Makes the all-reduce a part of the program that JAX traces."""
    now = given_or_default(comm)
    for dtype in {NUMPY_NAMES[str(leaf.dtype)] for leaf in leaves}:
        about = dtype, op, compression, 0, now.world_size, now.config.timeout
        Prepared(lib.RC_ALLREDUCE, *about).require_feedback(None if feedback is None else False)

    def run(*arrays: Any) -> list[Any]:
        # Copies, as XLA's own memory is lent until this returns, also if it is interrupted.
        own = [np.array(each) for each in arrays]
        return given_or_default(comm).allreduce_many(
            own, op, compression=compression, feedback=feedback
        )

    like = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    def ringcomm_allreduce(*arrays: Any) -> Any:
        return io_callback(run, like, *arrays, ordered=True)

    call = jax.custom_jvp(ringcomm_allreduce)
    call.defjvp(_refuse_gradient)
    return call(*leaves)


def _refuse_gradient(primals: Any, tangents: Any) -> NoReturn:
    raise ConfigError(
        "an all-reduce of ringcomm.jax has no gradient, as ranks may mean the sum of their losses "
        "or one that they share: reduce the gradients, as by ringcomm.jax.pmean(jax.grad(loss)(x)),"
        " or give it jax.lax.stop_gradient(x)"
    )
