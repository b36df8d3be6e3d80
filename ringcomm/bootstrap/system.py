"""The operating system: its errors while ranks are joined, as ringcomm's own; its numbers in files.

Invariants: an OSError that reaches typed_errors() leaves it as a BootstrapError; where descriptors
are missing, the text names the limit, the open ones and the needed ones.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from ..errors import BootstrapError, RingcommError

_SPARE = 12
"""Descriptors beside the counted ones: loops, the engine, shared memory, a file just read."""
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """Turns an OSError of its body into a BootstrapError."""
    try:
        yield
    except RingcommError:
        raise
    except OSError as error:
        raise BootstrapError(f"the bring-up failed: {describe(error)}") from error


def describe(error: OSError) -> str:
    """Returns the system's message, with the limit of open files if that was reached."""
    said = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        return f"{said} (this process may have {_limit()}: `ulimit -n` raises it)"
    return said


def read_number(path: str, default: int) -> int:
    """Returns the number in a file of /proc or /sys; default where there is none to be read."""
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return default


def require_descriptors(count: int, purpose: str) -> None:
    """Raises BootstrapError if this process may not open count more files and _SPARE besides."""
    limit = _limit()
    needed = count + _SPARE
    try:
        used = len(os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        if error.errno not in OUT_OF_RESOURCES:
            return  # no /proc: a later call will fail instead
        used = limit
    if limit != resource.RLIM_INFINITY and used + needed > limit:
        raise BootstrapError(
            f"too few open files are allowed: the limit is {limit} (ulimit -n), {used} are open, "
            f"and {purpose} takes {needed} more: run `ulimit -n {used + needed}` before the job"
        )


def _limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
