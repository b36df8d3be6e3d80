"""The short way for the commonest calls: an all-reduce or a broadcast of a dense tensor, in place,
and a barrier.

The long way makes a View and a Work for each call and checks all arguments, which takes longer
than a small message takes over the wire: 15 us against 3. Here the call is prepared once for each
dtype and kind of call, the memory is found directly, the core submits and waits in one call,
and a Work is made only if that takes long or is interrupted.

No lock of the communicator is held while a call waits. Instead the call registers in ``_inside``
before it reads the handle, and close() clears the handle, waits until no other thread is
registered, then frees it.

Invariants: all other calls, and calls that the core refuses, are left to the long way with
nothing submitted, so that it alone words the errors. A call that was submitted and is not over when
an exception leaves is held by a Work of the communicator.
"""

from __future__ import annotations

import sys
from threading import get_ident
from typing import TYPE_CHECKING, Any

import numpy as np

from ._native import OK, ffi, lib
from .calls import make_call
from .devices import view
from .work import SLICE_MS, Work

if TYPE_CHECKING:
    from .communicator import Communicator

_VOID = ffi.typeof("void *")
_cast, _from_buffer, _buffer = ffi.cast, ffi.from_buffer, ffi.buffer
_CALL = ffi.typeof("rc_call *")
_SLOT = ffi.typeof("rc_work **")
_ALLREDUCE, _BROADCAST, _BARRIER = lib.RC_ALLREDUCE, lib.RC_BROADCAST, lib.RC_BARRIER

Kind = tuple[int, str, str | None, int]
"""Kind of a call: collective, op, compression, root."""
Plain = tuple[Any, Any, int, Any]
"""Memory of a tensor: dtype object, pointer, count of elements, and the object that keeps it."""

_NO_MEMORY: Plain = (None, ffi.NULL, 0, None)


def plain_memory(obj: Any) -> Plain | None:
    """Finds the memory of the commonest tensors: of numpy's or torch's own class, dense, on the
    CPU, and writable.

    Returns:
        Its dtype object (of any dtype), a pointer to its memory, its count of elements, and the
        object that keeps that memory valid: for torch the storage, as ``tensor.data = other``
        gives the tensor another one. None for any other object.
    """
    kind = type(obj)
    if kind is np.ndarray:
        if not obj.flags.carray:
            return None
        try:
            address = _from_buffer(obj)  # it keeps the array alive
        except (TypeError, ValueError, BufferError):  # a dtype that the buffer protocol lacks
            return None
        return obj.dtype, address, obj.size, address
    torch: Any = sys.modules.get("torch")
    if kind is not getattr(torch, "Tensor", None):  # missing while torch is being imported
        return None
    strided = obj.is_cpu and obj.layout is torch.strided and not obj.is_nested
    if not strided or not obj.is_contiguous() or obj.is_neg():
        return None
    if obj.requires_grad and torch.is_grad_enabled():  # the long way checks autograd
        return None
    return obj.dtype, _cast(_VOID, obj.data_ptr()), obj.numel(), obj.untyped_storage()


class Memory:
    """The whole memory of a plain tensor, held for a Work.

    Args:
        keep: object that plain_memory returned last: a storage of torch, or a buffer of cffi.
    """

    __slots__ = ("_base", "_keep")

    def __init__(self, keep: Any) -> None:
        self._keep = keep
        self._base = self._start()

    def _start(self) -> int:
        keep = self._keep
        return int(keep.data_ptr() if hasattr(keep, "data_ptr") else _cast("uintptr_t", keep))

    def finish(self) -> None:
        """Raises ValueError if the storage was moved while the core wrote to its old memory."""
        if self._start() != self._base:
            raise ValueError("its storage was resized in flight")

    def overlaps(self, start: int, stop: int) -> bool:
        """True if any of it lies from address start to stop."""
        keep = self._keep
        nbytes = keep.nbytes() if hasattr(keep, "nbytes") else len(_buffer(keep))
        return start < self._base + nbytes and self._base < stop


class Shortcut:
    """Short way of one communicator."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        # By dtype and kind: an rc_call, and its name with "{}" for the count of elements.
        self._templates: dict[tuple[Any, Kind], tuple[Any, str]] = {}
        self._slots: list[Any] = []  # unused slots, all NULL

    def allreduce(self, tensor: Any, op: str, compression: str | None) -> bool:
        """All-reduces the tensor in place.

        Returns:
            True once it is done. False for any other case and for a refused call: nothing was
            submitted then, and the long way raises the error.

        Raises:
            TensorError, ConfigError: as the long way does.
            RingcommError: the collective failed; the class tells how.
        """
        return self._run(tensor, plain_memory(tensor), (_ALLREDUCE, op, compression, 0))

    def broadcast(self, tensor: Any, root: int) -> bool:
        """Broadcasts root's tensor, writable on all ranks; otherwise like allreduce()."""
        if type(root) is not int:  # True and 1.0 are equal to 1
            return False
        return self._run(tensor, plain_memory(tensor), (_BROADCAST, "sum", None, root))

    def barrier(self) -> bool:
        """Waits for all ranks; otherwise like allreduce()."""
        return self._run(None, _NO_MEMORY, (_BARRIER, "sum", None, 0))

    def _run(self, tensor: Any, memory: Plain | None, kind: Kind) -> bool:
        comm = self._comm
        if memory is None or comm._engine.forked or comm.is_timed:
            return False
        dtype, address, count, keep = memory
        try:
            known = self._templates.get((dtype, kind))
        except TypeError:  # an op or compression that is not hashable, and so no name
            return False
        call = (known or self._remember(tensor, dtype, kind))[0]
        if comm._pipe is not None:
            comm._pipe.drain()
        try:
            slot = self._slots.pop()
        except IndexError:
            slot = ffi.new(_SLOT)
        try:
            # Registered before the handle is read, as close() waits for registered calls. No signal
            # handler, which may close, runs between the reading and C.
            comm._inside[slot] = get_ident(), keep
            handle = comm._handle
            if handle is None:
                return False
            result = lib.rc_run(handle, call, count, address, SLICE_MS, slot)
        finally:  # after an interrupt, too, the core still uses the tensor
            work = self._make_work(slot, tensor, memory, kind) if slot[0] else None
            comm._inside.pop(slot, None)
        if work is not None:
            work.wait()
            return True
        if result == OK:
            self._slots.append(slot)
        return bool(result == OK)

    def submit(self, tensor: Any, op: str, compression: str | None) -> Work | None:
        """Submits an all-reduce of a torch tensor without waiting.

        Returns:
            The Work; None for any other case and for a refused call, as in ``allreduce``.
        """
        comm = self._comm
        memory = plain_memory(tensor)
        if memory is None or comm.is_inherited or comm.is_timed:
            return None
        dtype, address, count, keep = memory
        kind = (_ALLREDUCE, op, compression, 0)
        template, name = self._templates.get((dtype, kind)) or self._remember(tensor, dtype, kind)
        call = ffi.new(_CALL, template[0])
        call.count = count
        call.src = call.dst = address
        call.waits = 0
        work = Work(comm, name.format(count), (Memory(keep),), tensor)
        if comm._pipe is not None:
            comm._pipe.drain()
        with comm._lock:
            handle = comm._handle
            try:  # held before the core has it: an interrupt must not free borrowed memory
                comm._in_flight[id(work)] = work
                if handle is not None:
                    lib.rc_submit(handle, call, work._slot, ffi.NULL)
            finally:
                if not work._slot[0]:
                    comm._in_flight.pop(id(work), None)
        if not work._slot[0]:
            return None
        if len(comm._in_flight) > 1:
            comm._collect()
        return work

    def _remember(self, tensor: Any, dtype: Any, kind: Kind) -> tuple[Any, str]:
        collective, op, compression, root = kind
        comm, src = self._comm, None if tensor is None else view(tensor, writable=True)
        count = src.count if src else 0
        call, name = make_call(
            collective,
            src,
            src,
            count,
            op,
            compression,
            root,
            comm.world_size,
            comm.config.timeout,
            False,
            False,
        )
        call.caller = 0  # later calls by this template are part of other calls, or of none
        made = self._templates[dtype, kind] = call, name.replace(f"[{count}]", "[{}]")
        return made

    def _make_work(self, slot: Any, tensor: Any, memory: Plain, kind: Kind) -> Work:
        dtype, _, count, keep = memory
        name = self._templates[dtype, kind][1].format(count)
        held = () if keep is None else (Memory(keep),)
        work = Work(self._comm, name, held, tensor, slot)
        self._comm._in_flight[id(work)] = work
        return work
