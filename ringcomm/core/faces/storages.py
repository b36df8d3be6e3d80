"""Keeps torch from moving a storage while a collective uses its memory.

Holding a storage keeps the object, not its memory: ``resize_``, and methods that move a tensor to
shared memory, free it under every holder. So these methods of torch's classes, once a torch tensor
was given to a collective, first check whether one in flight uses the memory, and raise if so.

Limit: a resize that torch's C++ makes by itself, as for ``out=`` of another shape, is not checked.
Where it is detected afterwards, the collective raises TensorError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...errors import TensorError

_TO_SHARED = ("_share_fd_cpu_", "_share_filename_cpu_")
#: Names the collective in flight that uses memory from one address to another; "" if there is none.
#: Set by communicator.py.
user_of: Callable[[int, int], str] = lambda start, stop: ""  # noqa: E731
_guarded: list[Any] = []  # holds the module torch once it is guarded


def guard(torch: Any) -> None:
    """Wraps the methods of torch that move a storage's memory in a check. Once for a process."""
    if _guarded:
        return
    _guarded.append(torch)
    storage, tensor = torch.UntypedStorage, torch.Tensor
    for kind, names in ((storage, ("resize_", *_TO_SHARED)), (tensor, ("resize_", "resize_as_"))):
        for name in names:
            setattr(kind, name, _checked(getattr(kind, name)))


def _checked(move: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(move)
    def check_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            storage = self.untyped_storage() if hasattr(self, "untyped_storage") else self
            stays = move.__name__ in _TO_SHARED and storage.is_shared()
            start, nbytes = (0, 0) if stays else (storage.data_ptr(), storage.nbytes())
        except (RuntimeError, NotImplementedError):  # a fake tensor, which has no memory
            return move(self, *args, **kwargs)
        if start and (user := user_of(start, start + nbytes)):
            raise TensorError(
                f"the memory of this tensor is used by {user}, which is in flight: wait for it "
                f"before {move.__name__}()"
            )
        return move(self, *args, **kwargs)

    return check_first
