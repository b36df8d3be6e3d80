"""torch's CUDA for tests without its CUDA build: tensors, streams, events and Futures of it, over
the fake driver.

    torch_gpu = TorchGpu(gpu, monkeypatch)          in place of torch.cuda and torch.futures.Future
    x = torch_gpu.tensor(torch.ones(5))             a torch.Tensor; x.device is cuda:0
    y = x * 2                                       queued on the thread's current stream
    torch_gpu.read(y)                               as a program sees it that waits for that stream

Every operation on such a tensor is a kernel of the fake driver, which runs as late as streams and
events allow. What torch's Futures do about streams is done here as ivalue_inl.h has it: a Future
takes events of the GPUs that its value lies on and of no others, from the current streams of who
completes it; its callbacks have streams of their own, behind these events.

What torch's allocator would do is not done but told: memory that is dropped by the program while a
stream other than its own has still work with it, of which the allocator was not told.

Invariants: a kernel gets at device memory by the driver's view of it, and runs in the thread that
is the GPU. All GPUs' memory is kept until the driver is reset.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from gpu import Gpu
from patience import PATIENCE
from torch.utils import _pytree as pytree

_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_aten = torch.ops.aten


class TorchGpu:
    """torch.cuda on the fake driver.

    Attributes:
        problems: what a program must not do, as sentences.
        waited: names of threads that had the host wait for a stream or an event.
    """

    def __init__(self, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = gpu
        self.problems: list[str] = []
        self.waited: set[str] = set()
        self._here = threading.local()
        self._kernels: dict[int, Callable[[], None]] = {}
        self._numbers = itertools.count(1)
        self._run = _CALL(self._run_kernel)
        self._events: list[ctypes.c_void_p] = []
        self._pinned: set[int] = set()
        gpu.driver.fake_cuda_view.restype = ctypes.c_void_p
        gpu.driver.fake_cuda_view.argtypes = [ctypes.c_uint64, ctypes.c_size_t]
        real_empty = torch.empty

        def empty(*shape: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
            device = torch.device(how.get("device", "cpu"))
            if device.type == "cuda":
                return self.empty(*shape, how["dtype"], device.index)
            made = real_empty(*shape, **how)
            if pin_memory:
                made.fill_(1)  # what nobody may take for the result
                self._pinned.add(made.untyped_storage().data_ptr())
            return made

        monkeypatch.setattr(torch, "empty", empty)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: Stream(self, device))
        monkeypatch.setattr(torch.cuda, "ExternalStream", self._external)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream(self, device, 0))
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(torch.futures, "Future", lambda **how: Future(self, **how))

    def close(self) -> None:
        """Gives back what the driver counts."""
        for event in self._events:
            self.gpu.call("cuEventDestroy_v2", event)

    def _external(self, handle: int, device: Any) -> Stream:
        """As torch's: a number that is odd tells a stream of its own, and for 0 it makes one."""
        if handle % 2:
            raise RuntimeError(f"invalid StreamId {handle}")
        return Stream(self, device, handle or None)

    # ---- what is current in a thread ----

    def current_stream(self, device: Any = None) -> Stream:
        """At first the default one, whose handle is 0."""
        streams = self._here.__dict__.setdefault("streams", {})
        index = self._index(device)
        return streams.setdefault(index, Stream(self, index, 0))

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """As torch's: it makes the stream's GPU the current one, too."""
        device = self._index(None)
        if device != stream.device.index:
            self.problems.append(f"from GPU {device} to a stream of GPU {stream.device.index}")
        before = self.current_stream(stream.device)
        self._here.streams[stream.device.index] = stream
        try:
            yield
        finally:
            self._here.streams[stream.device.index] = before

    @contextlib.contextmanager
    def streams(self, streams: Sequence[Stream]) -> Iterator[None]:
        """Makes each the current one of its GPU, and leaves the current GPU as it is."""
        before = [self.current_stream(stream.device) for stream in streams]
        for stream in streams:
            self._here.streams[stream.device.index] = stream
        try:
            yield
        finally:
            for stream in before:
                self._here.streams[stream.device.index] = stream

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Makes it the current one."""
        before, self._here.device = self._index(None), self._index(device)
        try:
            yield
        finally:
            self._here.device = before

    def _index(self, device: Any) -> int:
        if device is None:
            return int(getattr(self._here, "device", 0))
        return device if isinstance(device, int) else int(torch.device(device).index or 0)

    # ---- kernels ----

    def queue(
        self, stream: Stream, kernel: Callable[[], None], used: Sequence[Memory] = ()
    ) -> None:
        """Runs the kernel when it is the stream's turn."""
        number, handle = next(self._numbers), stream.cuda_stream
        counts = [memory.pending for memory in used]
        for count in counts:
            count[handle] += 1

        def run() -> None:
            kernel()
            for count in counts:
                count[handle] -= 1

        self._kernels[number] = run
        self.gpu.enter(stream.device.index)
        self.gpu.call(
            "fake_cuda_run", ctypes.c_void_p(stream.cuda_stream), self._run, ctypes.c_void_p(number)
        )

    def _run_kernel(self, number: int) -> None:
        try:
            self._kernels.pop(number)()
        except Exception as error:
            self.problems.append(f"a kernel failed: {type(error).__name__}: {error}")

    # ---- tensors ----

    def tensor(self, values: torch.Tensor, device: int = 0) -> Tensor:
        """A copy of the values on the GPU, at once."""
        made = self.empty(values.shape, values.dtype, device)
        made.twin.copy_(values)
        return made

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: int = 0) -> Tensor:
        """Memory of the current stream's, never written."""
        strides = torch.empty(tuple(shape), device="meta").stride()
        memory = Memory(self, _span(shape, strides) * dtype.itemsize, device)
        return Tensor(memory.view.view(dtype).as_strided(tuple(shape), strides), memory)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of its values when the current stream has done what it has to do."""
        assert isinstance(tensor, Tensor)
        self.current_stream(tensor.device).synchronize()
        return tensor.twin.clone()

    def linger(self, handle: int) -> None:
        """Who waits for this stream on the host is slow to: what does not wait gets ahead."""
        self.gpu.driver.fake_cuda_linger(ctypes.c_void_p(handle), 20)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in host memory that was asked for as pinned."""
        return tensor.untyped_storage().data_ptr() in self._pinned


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


class Memory:
    """A piece of a GPU's memory.

    Attributes:
        view: the host's view of it, as bytes.
        pending: kernels that use it and have not run, by stream.
        told: streams that torch's allocator was told of.
    """

    def __init__(self, owner: TorchGpu, nbytes: int, device: int) -> None:
        self.owner, self.device = owner, device
        self.home = owner.current_stream(device).cuda_stream
        self.address = owner.gpu.empty((nbytes,), "u1", None, device).address
        at = owner.gpu.driver.fake_cuda_view(self.address, nbytes)
        self.view = torch.frombuffer(
            (ctypes.c_uint8 * max(1, nbytes)).from_address(at), dtype=torch.uint8
        )
        self.pending: collections.Counter[int] = collections.Counter()
        self.told: set[int] = set()

    def __del__(self) -> None:
        for stream, count in self.pending.items():
            if count and stream != self.home and stream not in self.told:
                self.owner.problems.append("memory was dropped that another stream still needs")


class Tensor(torch.Tensor):
    """A tensor that says it is on a GPU.

    Attributes:
        twin: a tensor of the host's view of its memory.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    twin: torch.Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, twin: torch.Tensor, memory: Memory) -> Tensor:
        made: Tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            twin.shape,
            strides=twin.stride(),
            storage_offset=twin.storage_offset(),
            dtype=twin.dtype,
            device=torch.device("cuda", memory.device),
        )
        made.twin, made.memory = twin, memory
        return made

    def data_ptr(self) -> int:
        """On the device."""
        return self.memory.address + self.twin.data_ptr() - self.memory.view.data_ptr()

    def __getitem__(self, index: Any) -> Tensor:
        """By slices; torch would look for its CUDA build."""
        return Tensor(self.twin[index], self.memory)

    def contiguous(self) -> Any:
        """A copy, as of one that is not."""
        how = {"memory_format": torch.contiguous_format}
        return _dispatch(_aten.clone.default, (self,), how)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Tensor:
        """The same."""
        _dispatch(_aten.copy_.default, (self, source, non_blocking), {})
        return self

    def record_stream(self, stream: Any) -> None:
        """Tells the allocator."""
        self.memory.told.add(stream.cuda_stream)

    def __repr__(self, **_: Any) -> str:
        return f"Tensor({self.dtype}, {tuple(self.shape)}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})


def _dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat = pytree.tree_leaves((args, kwargs))
    used = [one for one in flat if isinstance(one, Tensor)]
    owner, device = used[0].memory.owner, used[0].memory.device
    stream = owner.current_stream(device)
    if func is _aten._local_scalar_dense.default:
        return owner.read(used[0]).item()
    if func is _aten.copy_.default and len(used) == 1:
        return _copy(owner, stream, *args)
    kwargs.pop("device", None), kwargs.pop("pin_memory", None)
    twins, named = pytree.tree_map_only(Tensor, lambda one: one.twin, (args, kwargs))
    returned = func._schema.returns[0].alias_info
    if returned is not None and not returned.is_write:  # a view
        memory = args[0].memory
        views = func(*twins, **named)
        return pytree.tree_map_only(torch.Tensor, lambda one: Tensor(one, memory), views)
    if returned is not None:
        result = kwargs.get("out", args[0])
        owner.queue(stream, lambda: func(*twins, **named), [one.memory for one in used])
        return result
    alike = pytree.tree_map_only(Tensor, lambda one: torch.empty_like(one.twin), (args, kwargs))
    shape = func(*alike[0], **alike[1])  # the device "meta" would take a second to load
    made = owner.empty(shape.shape, shape.dtype, device)
    if not str(func).startswith(("aten.new_empty", "aten.empty_like")):
        twin = made.twin
        owner.queue(
            stream,
            lambda: twin.copy_(func(*twins, **named)),
            [made.memory, *(one.memory for one in used)],
        )
    return made


def _copy(
    owner: TorchGpu, stream: Stream, to: torch.Tensor, source: torch.Tensor, late: bool = False
) -> torch.Tensor:
    """Between host and device."""
    host = source if isinstance(to, Tensor) else to
    target = to.twin if isinstance(to, Tensor) else to
    values = source.twin if isinstance(source, Tensor) else source
    if not owner.is_pinned(host):
        late = False
    used = [one.memory for one in (to, source) if isinstance(one, Tensor)]
    owner.queue(stream, lambda: target.copy_(values), used)
    if not late:
        stream.synchronize()
    return to


# ---- streams ----


class Stream:
    """torch.cuda.Stream.

    Attributes:
        cuda_stream: its handle.
    """

    def __init__(self, owner: TorchGpu, device: Any = None, handle: int | None = None) -> None:
        self._owner = owner
        index = owner._index(device)
        self.device = torch.device("cuda", index)
        self.cuda_stream = owner.gpu.stream(index) if handle is None else handle

    def synchronize(self) -> None:
        """Waits on the host."""
        self._owner.waited.add(threading.current_thread().name)
        self._owner.gpu.enter(self.device.index)
        self._owner.gpu.call("cuStreamSynchronize", ctypes.c_void_p(self.cuda_stream))

    def wait_event(self, event: Event) -> None:
        """Goes on behind it."""
        handle = ctypes.c_void_p(self.cuda_stream)
        self._owner.gpu.enter(self.device.index)
        self._owner.gpu.call("cuStreamWaitEvent", handle, event.handle, 0)

    def wait_stream(self, other: Stream) -> None:
        """Goes on behind what is there now."""
        event = Event(self._owner)
        event.record(other)
        self.wait_event(event)


class Event:
    """torch.cuda.Event."""

    def __init__(self, owner: TorchGpu) -> None:
        self._owner = owner
        self.handle = ctypes.c_void_p()

    def record(self, stream: Stream) -> None:
        """Takes note of where the stream stands."""
        self._owner.gpu.enter(stream.device.index)
        if not self.handle:
            self._owner.gpu.call("cuEventCreate", ctypes.byref(self.handle), 2)
            self._owner._events.append(self.handle)
        self._owner.gpu.call("cuEventRecord", self.handle, ctypes.c_void_p(stream.cuda_stream))

    def query(self) -> bool:
        """Whether the stream has got there."""
        return int(self._owner.gpu.driver.cuEventQuery(self.handle)) == 0

    def synchronize(self) -> None:
        """Waits on the host."""
        self._owner.waited.add(threading.current_thread().name)
        self._owner.gpu.call("cuEventSynchronize", self.handle)


# ---- Futures ----


class Future:
    """torch.futures.Future."""

    def __init__(self, owner: TorchGpu, *, devices: Sequence[Any] = ()) -> None:
        self._owner, self._devices = owner, list(devices)
        self._value: Any = None
        self._error: BaseException | None = None
        self._events: list[tuple[int, Event]] = []
        self._memories: list[Memory] = []
        self._current = 0
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._over = threading.Event()

    def set_result(self, value: Any) -> None:
        """Completes it: its value is what the current streams make."""
        found = [one for one in pytree.tree_leaves(value) if isinstance(one, Tensor)]
        self._memories = [one.memory for one in found]
        for device in sorted({one.device.index for one in found}):
            assert device in [self._owner._index(known) for known in self._devices]
            event = Event(self._owner)
            event.record(self._owner.current_stream(device))
            self._events.append((device, event))
        self._complete(value, None)

    def _complete(self, value: Any, error: BaseException | None) -> None:
        with self._lock:
            assert not self._over.is_set(), "completed twice"
            self._value, self._error = value, error
            self._current = self._owner._index(None)
            self._over.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def then(self, callback: Callable[[Any], Any]) -> Future:
        """A Future of what the callback returns, which has streams of its own, and for its current
        GPU that of who completed this one."""
        child = Future(self._owner, devices=self._devices)

        def call() -> None:
            own = [Stream(self._owner, device) for device in self._devices]
            with self._owner.device(self._current), self._owner.streams(own):
                self._order()
                try:
                    value = callback(self)
                except Exception as error:
                    child._complete(None, error)
                else:
                    child.set_result(value)

        with self._lock:
            late = self._over.is_set()
            if not late:
                self._callbacks.append(call)
        if late:
            call()
        return child

    def _order(self) -> None:
        for device, event in self._events:
            self._owner.current_stream(device).wait_event(event)
        for memory in self._memories:
            memory.told.add(self._owner.current_stream(memory.device).cuda_stream)

    def done(self) -> bool:
        """Whether it is completed."""
        return self._over.is_set()

    def value(self) -> Any:
        """Of a completed one; no stream waits for it."""
        return self._value

    def wait(self) -> Any:
        """Waits on the host until it is completed; the current streams go on behind its value."""
        assert self._over.wait(PATIENCE), "a Future was not completed"
        if self._error is not None:
            raise RuntimeError(f"{type(self._error).__name__}: {self._error}") from self._error
        self._order()
        return self._value


# ---- a process group ----


class Meeting:
    """Where some ranks, threads of this process, show each other what they bring."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=PATIENCE)
        self._brought: list[Any] = [None] * size

    def exchange(self, place: int, brought: Any) -> list[Any]:
        """What all bring."""
        self._barrier.wait()
        self._brought[place] = brought
        self._barrier.wait()
        return list(self._brought)


class LocalGroup:
    """One rank's process group of some, with collectives as NCCL has them: queued on a stream of
    its own, behind the current one; who waits has the current one go on behind that. Of host
    tensors all is over when a call returns.

    Args:
        ranks: their numbers in the job.
        place: of this one among them.
    """

    def __init__(self, owner: TorchGpu, ranks: Sequence[int], place: int, meeting: Meeting) -> None:
        self.ranks, self.place = list(ranks), place
        self._owner, self._meeting = owner, meeting
        self._stream: Stream | None = None

    def reduce_scatter(self, out: torch.Tensor, table: torch.Tensor) -> Any:
        """out = the sum of all ranks' rows of this place."""

        def kernel(tables: list[torch.Tensor]) -> Callable[[], None]:
            mine, rows = _twin(out), [one.view(len(self.ranks), -1)[self.place] for one in tables]

            def run() -> None:
                mine.zero_()
                for row in rows:
                    mine.add_(row)

            return run

        return self._together(table, out, kernel)

    def all_gather(self, table: torch.Tensor, shard: torch.Tensor) -> Any:
        """table = all ranks' shards."""

        def kernel(shards: list[torch.Tensor]) -> Callable[[], None]:
            rows = _twin(table).view(len(self.ranks), -1)

            def run() -> None:
                for row, one in zip(rows, shards, strict=True):
                    row.copy_(one)

            return run

        return self._together(shard, table, kernel)

    def _together(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        kernel: Callable[[list[torch.Tensor]], Callable[[], None]],
    ) -> Any:
        if not isinstance(source, Tensor) or not isinstance(target, Tensor):
            kernel(self._meeting.exchange(self.place, source.clone()))()
            return Waiter(None, None, [])
        owner = self._owner
        stream = self._stream = self._stream or Stream(owner, source.device)
        stream.wait_stream(owner.current_stream(source.device))
        brought = self._meeting.exchange(self.place, (source.twin, self._event(stream)))
        for _, event in brought:
            stream.wait_event(event)
        memories = [source.memory, target.memory]
        for memory in memories:
            memory.told.add(stream.cuda_stream)
        owner.queue(stream, kernel([twin for twin, _ in brought]), memories)
        for event in self._meeting.exchange(self.place, self._event(stream)):
            stream.wait_event(event)
        return Waiter(owner, self._event(stream), memories)

    def _event(self, stream: Stream) -> Event:
        event = Event(self._owner)
        event.record(stream)
        return event


class Waiter:
    """A collective's Work, which keeps its tensors until it is waited for. From then on it is for
    the stream that waits to keep them."""

    def __init__(self, owner: TorchGpu | None, event: Event | None, used: list[Memory]) -> None:
        self._owner, self._event, self._used = owner, event, used

    def wait(self) -> None:
        """The current stream goes on behind it."""
        if self._owner is not None and self._event is not None:
            stream = self._owner.current_stream()
            stream.wait_event(self._event)
            self._owner.queue(stream, lambda: None, self._used)
            self._used = []


def _twin(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.twin if isinstance(tensor, Tensor) else tensor
