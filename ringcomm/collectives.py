"""The collectives of a communicator: arguments and results of its methods.

Each method finds the memory of its tensors, checks that they fit each other, and names the core's
call; the Dispatcher runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, overload

from .codecs import Compression
from .core.calls import Feedback, Op, check_tag
from .core.dispatch import Dispatcher
from .core.faces import view
from .core.faces.torch import check_autograd
from .core.native import lib
from .core.residuals import Residuals
from .core.views import View
from .core.work import Work
from .errors import ConfigError, TensorError
from .fusion import Works, allreduce_many, as_list

T = TypeVar("T")


class Collectives(Dispatcher):
    """Collective operations of a Communicator."""

    @overload
    def allreduce(
        self,
        tensor: T,
        op: Op = ...,
        *,
        compression: Compression | None = ...,
        feedback: Feedback = ...,
        out: T | None = ...,
        async_op: Literal[False] = ...,
        timeout: float | None = ...,
        on_done: Callable[[Work], None] | None = ...,
    ) -> T: ...

    @overload
    def allreduce(
        self,
        tensor: T,
        op: Op = ...,
        *,
        compression: Compression | None = ...,
        feedback: Feedback = ...,
        out: T | None = ...,
        async_op: Literal[True],
        timeout: float | None = ...,
        on_done: Callable[[Work], None] | None = ...,
    ) -> Work: ...

    def allreduce(
        self,
        tensor: Any,
        op: Op = "sum",
        *,
        compression: Compression | None = None,
        feedback: Feedback = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
        on_done: Callable[[Work], None] | None = None,
    ) -> Any:
        """Reduces a tensor over all ranks; every rank gets the same bits.

        Args:
            tensor: any shape and supported dtype, the same on all ranks. Overwritten with the
                result unless ``out`` is given.
            op: sum, avg, min, max or prod. avg is the sum times 1/world_size; integers are
                divided and truncated towards zero. 16-bit floats are summed in float32 and rounded
                at each hop.
            compression: encoding of a float32 or float64 tensor on the wire. None: as it is.
                "bf16", "fp16": 16 bits, and every hop rounds to nearest even. "int8", "fp8",
                "int4", "int2" and "onebit": 8.06, 8.06, 4.25, 2.25 and 1.06 bits, for sum and avg,
                rounded twice (where there are two ranks, once); a value that is not finite makes
                the whole result NaN.
            feedback: an ErrorFeedback, one for each tensor and kept from call to call: rounding
                errors are sent with the next call. "int4", "int2" and "onebit" need one, or False
                to go without. It is left as it was if the result is not finite.
            out: tensor to put the result into, of the same size and dtype as ``tensor``.
            async_op: return a Work at once.
            timeout: seconds until the collective fails; default ``config.timeout``.
            on_done: with async_op: called with the Work once it is over, from a thread for such
                calls, in the order in which works are over and one at a time, but beside one that
                waits or takes long. Its exceptions are logged.

        For a tensor on a GPU the call returns before the result is there, and the current stream
        waits for it. float32 tensors are packed on the GPU.

        Returns:
            The tensor that holds the result, or the Work.

        Raises:
            TensorError, ConfigError: an argument cannot work; nothing was sent.
            NotInitializedError: the communicator is closed, or a forked child's parent's.
            MismatchError, PeerLostError, CommTimeoutError, AbortedError: the collective failed.
            DeviceError: the tensor is on a GPU, and its driver failed or is missing.
        """
        if async_op and out is None and on_done is None:
            work = self.submit_in_place(
                tensor, lib.RC_ALLREDUCE, op, compression, feedback=feedback, timeout=timeout
            )
            if work is not None:
                return work
        plain = feedback is None and out is None and timeout is None and on_done is None
        if plain and not async_op and self.run_in_place(tensor, lib.RC_ALLREDUCE, op, compression):
            return tensor
        if on_done is not None and not callable(on_done):
            raise ConfigError(f"on_done={on_done!r}: give a function that takes the Work")
        src = _written(tensor) if out is None else view(tensor, writable=False)
        dst = src if out is None else self._out(out, src, src.count)
        return self.run_collective(
            lib.RC_ALLREDUCE,
            src,
            dst,
            src.count,
            op=op,
            compression=compression,
            feedback=feedback,
            async_op=async_op,
            timeout=timeout,
            on_done=on_done,
        )

    @overload
    def allreduce_many(
        self,
        tensors: Iterable[T],
        op: Op = ...,
        *,
        compression: Compression | None = ...,
        feedback: Sequence[Residuals] | Literal[False] | None = ...,
        async_op: Literal[False] = ...,
        timeout: float | None = ...,
    ) -> list[T]: ...

    @overload
    def allreduce_many(
        self,
        tensors: Iterable[T],
        op: Op = ...,
        *,
        compression: Compression | None = ...,
        feedback: Sequence[Residuals] | Literal[False] | None = ...,
        async_op: Literal[True],
        timeout: float | None = ...,
    ) -> Works: ...

    def allreduce_many(
        self,
        tensors: Iterable[Any],
        op: Op = "sum",
        *,
        compression: Compression | None = None,
        feedback: Sequence[Residuals] | Literal[False] | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Reduces several tensors in place, the small ones (below 256 KiB) of a dtype together.

        For many small tensors this is many times faster than one call for each. The order of a sum
        may differ from that of ``allreduce`` of one tensor; it is the same on all ranks.

        Args:
            tensors: the same number, dtypes and counts in the same order on all ranks. Where
                some are sent together, only the sum of their counts is compared.
            feedback: an ErrorFeedback for each tensor, which are then sent one by one; or False.

        Returns:
            The tensors as a list; with ``async_op`` an object with the ``wait``, ``done`` and
            ``exception`` of a Work. The other arguments, and the errors raised, are those
            of ``allreduce``.
        """
        given = as_list(tensors)
        for tensor in given:
            check_autograd(tensor)
        return allreduce_many(self, given, op, compression, feedback, async_op, timeout)

    @overload
    def broadcast(
        self,
        tensor: T,
        root: int = ...,
        *,
        async_op: Literal[False] = ...,
        timeout: float | None = ...,
    ) -> T: ...

    @overload
    def broadcast(
        self,
        tensor: T,
        root: int = ...,
        *,
        async_op: Literal[True],
        timeout: float | None = ...,
    ) -> Work: ...

    def broadcast(
        self, tensor: Any, root: int = 0, *, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Copies root's tensor into every rank's ``tensor``, in place, and returns that (or the
        Work). Root's tensor is only read."""
        waits = timeout is None and not async_op
        if waits and self.run_in_place(tensor, lib.RC_BROADCAST, root=root):
            return tensor
        check_autograd(tensor)  # on root, too, or only the other ranks would raise
        dst = view(tensor, writable=self.rank != root)
        return self.run_collective(
            lib.RC_BROADCAST, dst, dst, dst.count, root=root, async_op=async_op, timeout=timeout
        )

    @overload
    def reduce(
        self,
        tensor: T,
        root: int = ...,
        op: Op = ...,
        *,
        out: T | None = ...,
        async_op: Literal[False] = ...,
        timeout: float | None = ...,
    ) -> T: ...

    @overload
    def reduce(
        self,
        tensor: T,
        root: int = ...,
        op: Op = ...,
        *,
        out: T | None = ...,
        async_op: Literal[True],
        timeout: float | None = ...,
    ) -> Work: ...

    def reduce(
        self,
        tensor: Any,
        root: int = 0,
        op: Op = "sum",
        *,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Reduces to root by ``op`` as allreduce does, in place there unless ``out`` is given;
        elsewhere the tensor is only read, and returned as it is."""
        here = self.rank == root
        src = _written(tensor) if here and out is None else view(tensor, writable=False)
        dst = None
        if here:
            dst = src if out is None else self._out(out, src, src.count)
        return self.run_collective(
            lib.RC_REDUCE,
            src,
            dst,
            src.count,
            op=op,
            root=root,
            async_op=async_op,
            timeout=timeout,
            result=None if here else tensor,
        )

    @overload
    def allgather(
        self,
        tensor: Any,
        *,
        compression: Compression | None = ...,
        feedback: Feedback = ...,
        out: Any = ...,
        async_op: Literal[True],
        timeout: float | None = ...,
    ) -> Work: ...

    @overload
    def allgather(
        self,
        tensor: Any,
        *,
        compression: Compression | None = ...,
        feedback: Feedback = ...,
        out: Any = ...,
        async_op: bool = ...,
        timeout: float | None = ...,
    ) -> Any: ...

    def allgather(
        self,
        tensor: Any,
        *,
        compression: Compression | None = None,
        feedback: Feedback = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Returns all ranks' tensors, which are only read, stacked in order of rank: shape
        (world_size, *tensor.shape). With ``compression`` every rank, the sender too, gets the
        rounded values; ``feedback``, of the tensor's size, adds the rounding errors to the next
        call's tensor."""
        src = view(tensor, writable=False)
        dst = self._result(out, src, (self.world_size, *src.shape))
        return self.run_collective(
            lib.RC_ALLGATHER,
            src,
            dst,
            src.count,
            compression=compression,
            feedback=feedback,
            async_op=async_op,
            timeout=timeout,
        )

    @overload
    def gather(
        self,
        tensor: Any,
        root: int = ...,
        *,
        out: Any = ...,
        async_op: Literal[True],
        timeout: float | None = ...,
    ) -> Work: ...

    @overload
    def gather(
        self,
        tensor: Any,
        root: int = ...,
        *,
        out: Any = ...,
        async_op: bool = ...,
        timeout: float | None = ...,
    ) -> Any: ...

    def gather(
        self,
        tensor: Any,
        root: int = 0,
        *,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Gathers all ranks' tensors on root, stacked as by allgather; returns None elsewhere."""
        src = view(tensor, writable=False)
        here = self.rank == root
        dst = self._result(out, src, (self.world_size, *src.shape)) if here else None
        return self.run_collective(
            lib.RC_GATHER, src, dst, src.count, root=root, async_op=async_op, timeout=timeout
        )

    @overload
    def scatter(
        self,
        tensor: Any,
        root: int = ...,
        *,
        out: Any = ...,
        async_op: Literal[True],
        timeout: float | None = ...,
    ) -> Work: ...

    @overload
    def scatter(
        self,
        tensor: Any,
        root: int = ...,
        *,
        out: Any = ...,
        async_op: bool = ...,
        timeout: float | None = ...,
    ) -> Any: ...

    def scatter(
        self,
        tensor: Any,
        root: int = 0,
        *,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Gives rank i the i-th of root's rows.

        Args:
            tensor: on root: shape (world_size, *s). Elsewhere: None with ``out`` given, or a
                tensor of root's shape and dtype, of which only these two are used.
            out: tensor of shape s to put the result into; made if not given.

        Returns:
            Shape s, on root too.
        """
        if tensor is None:
            if self.rank == root or out is None:
                raise TensorError("scatter: give root's tensor, and on the other ranks out=")
            src, dst = None, _written(out)
        else:
            given = view(tensor, writable=False)
            rows = self._rows("scatter", given, exactly_one=True)
            src, dst = given if self.rank == root else None, self._result(out, given, rows[1:])
        return self.run_collective(
            lib.RC_SCATTER, src, dst, dst.count, root=root, async_op=async_op, timeout=timeout
        )

    @overload
    def reduce_scatter(
        self,
        tensor: Any,
        op: Op = ...,
        *,
        compression: Compression | None = ...,
        feedback: Feedback = ...,
        out: Any = ...,
        async_op: Literal[True],
        timeout: float | None = ...,
    ) -> Work: ...

    @overload
    def reduce_scatter(
        self,
        tensor: Any,
        op: Op = ...,
        *,
        compression: Compression | None = ...,
        feedback: Feedback = ...,
        out: Any = ...,
        async_op: bool = ...,
        timeout: float | None = ...,
    ) -> Any: ...

    def reduce_scatter(
        self,
        tensor: Any,
        op: Op = "sum",
        *,
        compression: Compression | None = None,
        feedback: Feedback = None,
        out: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Reduces over all ranks and gives rank i the i-th of world_size equal parts.

        Args:
            tensor: its first dimension is a multiple of world_size. Only read.
            op, compression, feedback: as for allreduce; the feedback is of the tensor's size. The
                result is not rounded again. A value that is not finite turns the part that it
                belongs to, and the part of the rank that had it, into NaN; other ranks do not know.

        Returns:
            Shape (tensor.shape[0] / world_size, *tensor.shape[1:]).
        """
        src = view(tensor, writable=False)
        dst = self._result(out, src, self._rows("reduce_scatter", src))
        return self.run_collective(
            lib.RC_REDUCE_SCATTER,
            src,
            dst,
            dst.count,
            op=op,
            compression=compression,
            feedback=feedback,
            async_op=async_op,
            timeout=timeout,
        )

    @overload
    def alltoall(
        self,
        tensor: Any,
        *,
        out: Any = ...,
        async_op: Literal[True],
        timeout: float | None = ...,
    ) -> Work: ...

    @overload
    def alltoall(
        self,
        tensor: Any,
        *,
        out: Any = ...,
        async_op: bool = ...,
        timeout: float | None = ...,
    ) -> Any: ...

    def alltoall(
        self, tensor: Any, *, out: Any = None, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Sends the i-th of world_size equal parts to rank i; returns the parts received, in order
        of rank, in the shape of ``tensor``, whose first dimension is a multiple of world_size."""
        src = view(tensor, writable=False)
        self._rows("alltoall", src)
        dst = self._result(out, src, src.shape)
        return self.run_collective(
            lib.RC_ALLTOALL,
            src,
            dst,
            src.count // self.world_size,
            async_op=async_op,
            timeout=timeout,
        )

    @overload
    def barrier(
        self,
        *,
        async_op: Literal[False] = ...,
        timeout: float | None = ...,
    ) -> None: ...

    @overload
    def barrier(
        self,
        *,
        async_op: Literal[True],
        timeout: float | None = ...,
    ) -> Work: ...

    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Waits until every rank has called it; with async_op returns a Work that is over then."""
        if timeout is None and not async_op and self.run_in_place(None, lib.RC_BARRIER):
            return None
        return self.run_collective(
            lib.RC_BARRIER, None, None, 0, async_op=async_op, timeout=timeout
        )

    @overload
    def send(
        self,
        tensor: T,
        dst: int,
        *,
        tag: int = ...,
        async_op: Literal[False] = ...,
        timeout: float | None = ...,
    ) -> T: ...

    @overload
    def send(
        self,
        tensor: T,
        dst: int,
        *,
        tag: int = ...,
        async_op: Literal[True],
        timeout: float | None = ...,
    ) -> Work: ...

    def send(
        self,
        tensor: Any,
        dst: int,
        *,
        tag: int = 0,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Sends a tensor to another rank, dst, where a ``recv`` of the same tag (0 to 2^31 - 1)
        takes it; sends of a tag to one rank keep their order. Returns the tensor (or the Work)
        when it may be changed, which can be before it is received."""
        src = view(tensor, writable=False)
        return self.run_collective(
            lib.RC_SEND,
            src,
            None,
            src.count,
            root=dst,
            tag=check_tag(tag),
            async_op=async_op,
            timeout=timeout,
            result=tensor,
        )

    @overload
    def recv(
        self,
        tensor: T,
        src: int | None,
        *,
        tag: int = ...,
        async_op: Literal[False] = ...,
        timeout: float | None = ...,
    ) -> T: ...

    @overload
    def recv(
        self,
        tensor: T,
        src: int | None,
        *,
        tag: int = ...,
        async_op: Literal[True],
        timeout: float | None = ...,
    ) -> Work: ...

    def recv(
        self,
        tensor: Any,
        src: int | None,
        *,
        tag: int = 0,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Receives into ``tensor``, of the count and dtype that another rank, src, sends with this
        tag; returns it (or the Work). With src None it takes the next send of the tag by any rank,
        which is the Work's ``root``."""
        dst = _written(tensor)
        return self.run_collective(
            lib.RC_RECV,
            None,
            dst,
            dst.count,
            root=src,
            tag=check_tag(tag),
            async_op=async_op,
            timeout=timeout,
        )

    # ---- helpers ----

    def _rows(self, name: str, src: View, exactly_one: bool = False) -> tuple[int, ...]:
        """Returns the shape of one of world_size equal parts along the first dimension."""
        n = self.world_size
        if not src.shape or src.shape[0] % n or (exactly_one and src.shape[0] != n):
            wanted = f"be {n}" if exactly_one else f"divide by {n}"
            raise TensorError(
                f"{name}: the first dimension must {wanted} (the world size), and "
                f"the tensor's shape is {src.shape}"
            )
        return (src.shape[0] // n, *src.shape[1:])

    def _out(self, out: Any, src: View, count: int) -> View:
        dst = _written(out)
        if dst.count != count or dst.dtype != src.dtype:
            raise TensorError(
                f"out is {dst.dtype}[{dst.count}], the result is "
                f"{src.dtype}[{count}]: give one of its size and dtype, or none"
            )
        return dst

    def _result(self, out: Any, src: View, shape: tuple[int, ...]) -> View:
        return self._out(src.new(shape) if out is None else out, src, math.prod(shape))


def _written(tensor: Any) -> View:
    """Makes a View of a tensor that a result is written to."""
    check_autograd(tensor)
    return view(tensor, writable=True)
