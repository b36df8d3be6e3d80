"""Types of the collectives as functions; made by tools/make_stub.py."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, overload

from .codecs import Compression
from .communicator import Communicator
from .core.calls import Feedback, Op
from .core.residuals import Residuals
from .core.work import Work
from .fusion import Works

T = TypeVar("T")

@overload
def allreduce(
    tensor: T,
    op: Op = ...,
    *,
    compression: Compression | None = ...,
    feedback: Feedback = ...,
    out: T | None = ...,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    on_done: Callable[[Work], None] | None = ...,
    comm: Communicator | None = ...,
) -> T: ...
@overload
def allreduce(
    tensor: T,
    op: Op = ...,
    *,
    compression: Compression | None = ...,
    feedback: Feedback = ...,
    out: T | None = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    on_done: Callable[[Work], None] | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...
@overload
def allreduce_many(
    tensors: Iterable[T],
    op: Op = ...,
    *,
    compression: Compression | None = ...,
    feedback: Sequence[Residuals] | Literal[False] | None = ...,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> list[T]: ...
@overload
def allreduce_many(
    tensors: Iterable[T],
    op: Op = ...,
    *,
    compression: Compression | None = ...,
    feedback: Sequence[Residuals] | Literal[False] | None = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Works: ...
@overload
def broadcast(
    tensor: T,
    root: int = ...,
    *,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> T: ...
@overload
def broadcast(
    tensor: T,
    root: int = ...,
    *,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...
@overload
def reduce(
    tensor: T,
    root: int = ...,
    op: Op = ...,
    *,
    out: T | None = ...,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> T: ...
@overload
def reduce(
    tensor: T,
    root: int = ...,
    op: Op = ...,
    *,
    out: T | None = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...
@overload
def allgather(
    tensor: Any,
    *,
    compression: Compression | None = ...,
    feedback: Feedback = ...,
    out: Any = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...
@overload
def allgather(
    tensor: Any,
    *,
    compression: Compression | None = ...,
    feedback: Feedback = ...,
    out: Any = ...,
    async_op: bool = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Any: ...
@overload
def gather(
    tensor: Any,
    root: int = ...,
    *,
    out: Any = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...
@overload
def gather(
    tensor: Any,
    root: int = ...,
    *,
    out: Any = ...,
    async_op: bool = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Any: ...
@overload
def scatter(
    tensor: Any,
    root: int = ...,
    *,
    out: Any = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...
@overload
def scatter(
    tensor: Any,
    root: int = ...,
    *,
    out: Any = ...,
    async_op: bool = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Any: ...
@overload
def reduce_scatter(
    tensor: Any,
    op: Op = ...,
    *,
    compression: Compression | None = ...,
    feedback: Feedback = ...,
    out: Any = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...
@overload
def reduce_scatter(
    tensor: Any,
    op: Op = ...,
    *,
    compression: Compression | None = ...,
    feedback: Feedback = ...,
    out: Any = ...,
    async_op: bool = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Any: ...
@overload
def alltoall(
    tensor: Any,
    *,
    out: Any = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...
@overload
def alltoall(
    tensor: Any,
    *,
    out: Any = ...,
    async_op: bool = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Any: ...
@overload
def barrier(
    *, async_op: Literal[False] = ..., timeout: float | None = ..., comm: Communicator | None = ...
) -> None: ...
@overload
def barrier(
    *, async_op: Literal[True], timeout: float | None = ..., comm: Communicator | None = ...
) -> Work: ...
@overload
def send(
    tensor: T,
    dst: int,
    *,
    tag: int = ...,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> T: ...
@overload
def send(
    tensor: T,
    dst: int,
    *,
    tag: int = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...
@overload
def recv(
    tensor: T,
    src: int | None,
    *,
    tag: int = ...,
    async_op: Literal[False] = ...,
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> T: ...
@overload
def recv(
    tensor: T,
    src: int | None,
    *,
    tag: int = ...,
    async_op: Literal[True],
    timeout: float | None = ...,
    comm: Communicator | None = ...,
) -> Work: ...
