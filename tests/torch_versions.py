"""Which PyTorch is there, for tests of what older releases do not have."""

from __future__ import annotations

import torch

_HERE = tuple(int(part) for part in torch.__version__.split(".")[:2])


def before(major: int, minor: int) -> bool:
    """Whether it is older than that release."""
    return (major, minor) > _HERE
