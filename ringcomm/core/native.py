"""The C core: loads the extension, owns the process's engine, and turns C errors into exceptions.

Invariants: one engine per process and kernel set, made with the first communicator and freed with
the last. After a fork the child calls rc_engine_after_fork at once, so it holds no connection open.
"""

from __future__ import annotations

import errno
import importlib.machinery
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import (
    AbortedError,
    CommTimeoutError,
    ConfigError,
    DeviceError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    ProtocolError,
    RingcommError,
)
from .callback_threads import CallbackThreads


def _why_no_core(error: ImportError, package: Path) -> str:
    """Says why the core cannot be imported from the package's folder, and the remedy."""
    if importlib.machinery.PathFinder.find_spec("_core", [str(package)]) is not None:
        return f"ringcomm's C core cannot be loaded: {error}. Install ringcomm again"
    sources = package.parent
    if not (sources / "setup.py").exists():
        return f"ringcomm in {package} has no C core. Install ringcomm again"
    return (
        f"Python imports ringcomm from its sources in {sources}, where the C core has not been "
        "built; a ringcomm that 'pip install .' put elsewhere is not seen from this folder. Run "
        f"'pip install -e {sources}', which builds it here (gcc and the Python headers are "
        "needed), or start from another folder"
    )


try:
    from .._core import ffi as ffi
    from .._core import lib as lib
except ImportError as error:
    raise ImportError(_why_no_core(error, Path(__file__).resolve().parents[1])) from None

OK, AGAIN = 0, 1
CALLBACK_THREAD = "ringcomm-done"
_CLASSES: dict[int, type[RingcommError]] = {
    2: CommTimeoutError,
    3: ConfigError,
    4: NotInitializedError,
    5: MismatchError,
    6: PeerLostError,
    7: ProtocolError,
    10: AbortedError,
    12: DeviceError,
}


def text(pointer: Any) -> str:
    """Converts a C string to str."""
    return bytes(ffi.string(pointer)).decode("utf-8", "replace")


def error_class(code: int) -> type[RingcommError]:
    """Returns the exception class of an rc_result."""
    return _CLASSES.get(code, RingcommError)


def check(result: int, about: str, error: Any = None) -> None:
    """Raises the error of an rc_result other than RC_OK. Its text is ``about``, and the message of
    the rc_error, or else the result's name."""
    if result != OK:
        why = lib.rc_result_name(result) if error is None else error.message
        raise error_class(result)(f"{about}{text(why)}")


def kernel_sets() -> list[tuple[str, bool]]:
    """Lists (name, supported by this CPU) of every kernel set in this build, slowest first."""
    names = itertools.takewhile(bool, map(lib.rc_kernel_set_name, itertools.count()))
    return [(text(name), bool(lib.rc_kernel_set_supported(i))) for i, name in enumerate(names)]


def require_kernel_set(name: str) -> None:
    """Raises ConfigError unless this build and CPU have the kernel set; "", the fastest, they have.
    Call it before ranks meet, as the others would see this rank's loss."""
    known = [known for known, supported in kernel_sets() if supported]
    if name and name not in known:
        raise ConfigError(f"kernel_set={name!r}: this CPU and build have {', '.join(known)}")


def estimate(hosts: int, size: int, mbit: int) -> tuple[int, list[float]]:
    """Returns the cost model's choice for an all-reduce of so many bytes, and the seconds of each
    algorithm, by its number. mbit: of a port in Mbit/s; 0: not known."""
    seconds = ffi.new("double[]", lib.RC_ALGORITHM_COUNT)
    return lib.rc_estimate(hosts, size, mbit, seconds), list(seconds)


def address_of(handle: Any) -> int:
    """Returns the address that a pointer of C holds."""
    return int(ffi.cast("uintptr_t", handle))


#: By errno, the limit that the user may raise, so that the engine can start.
_LIMITS = {
    errno.EAGAIN: "`ulimit -u`, or the container's limit of processes, as threads count",
    errno.EMFILE: "`ulimit -n`, this process's limit of open files",
    errno.ENFILE: "fs.file-max, the system's limit of open files",
    errno.ENOMEM: "`ulimit -v` or the container's memory, or use less of it",
}


def inherited() -> NotInitializedError:
    """Makes the error for the use of a communicator in a forked child of its process."""
    return NotInitializedError(
        "a forked child cannot use its parent's communicator; start workers with spawn, or call "
        "ringcomm.init() in the child"
    )


class Engine:
    """Owner of an rc_engine, which is an event loop with its progress thread.

    Attributes:
        forked: True in a forked child, where the engine does not work (``inherited``).
    """

    def __init__(self, kernel_set: str) -> None:
        require_kernel_set(kernel_set)
        out = ffi.new("rc_engine **")
        if lib.rc_engine_create(out, kernel_set.encode() or ffi.NULL) != OK:
            number = ffi.errno
            limit = _LIMITS.get(number, "the limit that the system names (`ulimit -a`)")
            raise RingcommError(
                f"the engine cannot start: {os.strerror(number)} "
                f"({errno.errorcode.get(number, 'unknown')}, {number}): raise {limit}"
            )
        self.handle = out[0]
        self.kernel_set = text(lib.rc_engine_kernel_set(self.handle))
        # Callbacks by slot, and by handle once rc_submit was seen to have filled the slot.
        self._watched: dict[Any, Callable[[], None]] = {}
        self._by_handle: dict[int, Callable[[], None]] = {}
        self._registered = threading.RLock()  # an RLock, for signal handlers (see work.py)
        self._callback_threads = CallbackThreads(
            CALLBACK_THREAD, self.take, lambda: lib.rc_engine_interrupt(self.handle)
        )
        self.forked = False
        _live.add(self)

    def watch(self, slot: Any, callback: Callable[[], None]) -> None:
        """Registers a callback for the work that is about to be submitted with notify and whose
        handle goes to ``slot``. A thread of callback_threads.py calls it once the work is over."""
        if not self._callback_threads.are_started:
            self._callback_threads.start()
        with self._registered:
            self._watched[slot] = callback

    def unwatch(self, slot: Any) -> None:
        """Removes a callback whose work was refused, or is over."""
        with self._registered:
            if self._watched.pop(slot, None) is None and slot[0]:
                self._by_handle.pop(address_of(slot[0]), None)

    def take(self, timeout_ms: int) -> Callable[[], None] | None:
        """Waits for the next work that is over and returns its callback; None if none is."""
        out = ffi.new("rc_work **")
        if lib.rc_engine_take_done(self.handle, timeout_ms, out) != OK:
            return None
        callback = self._callback_of(out[0])
        lib.rc_work_free(out[0])
        return callback

    def _callback_of(self, work: Any) -> Callable[[], None]:
        while True:
            with self._registered:
                callback = self._by_handle.pop(address_of(work), None)
                if callback is not None:
                    return callback
                found = False
                for slot in [slot for slot in self._watched if slot[0]]:
                    self._by_handle[address_of(slot[0])] = self._watched.pop(slot)
                    found = found or slot[0] == work
            if not found:
                time.sleep(1e-4)  # over before rc_submit, on another thread, has filled its slot

    def free(self) -> None:
        """Stops the threads and frees the engine; called on one of them, returns before that is
        done. All communicators must have been freed."""
        _live.discard(self)
        self._callback_threads.stop(lambda: lib.rc_engine_free(self.handle))


_live: weakref.WeakSet[Engine] = weakref.WeakSet()
_shared: dict[str, Engine] = {}
_users: list[str] = []  # a kernel set for each user of its engine
_shared_lock = threading.RLock()  # an RLock: a signal handler may open or close meanwhile


def acquire_engine(kernel_set: str) -> Engine:
    """Returns the process's engine for this kernel set; give it back with release_engine."""
    with _shared_lock:
        _users.append(kernel_set)  # first, so that a signal handler does not free the engine
        try:
            if kernel_set not in _shared:
                _shared[kernel_set] = Engine(kernel_set)
            return _shared[kernel_set]
        except BaseException:
            _users.remove(kernel_set)
            raise


def release_engine(kernel_set: str) -> None:
    """Gives an engine back, and frees it if no user is left."""
    with _shared_lock:
        _users.remove(kernel_set)
        engine = None if kernel_set in _users else _shared.pop(kernel_set, None)
    if engine is not None:
        engine.free()


def _after_fork() -> None:
    global _shared_lock
    _shared_lock = threading.RLock()
    _shared.clear()
    _users.clear()
    for engine in list(_live):
        engine.forked = True
        lib.rc_engine_after_fork(engine.handle)


os.register_at_fork(after_in_child=_after_fork)
