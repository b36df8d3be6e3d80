"""One face for the libraries that sweep.py measures; adapters.py holds the libraries.

Problem: the libraries differ in buffers, names and start-up, and the measuring loop must not know.
A Peer therefore prepares a Call: input filled in, function bound, nothing left to do but run it.

Invariant: every method is called by all ranks in the same order.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

DTYPES = {
    "f16": "float16",
    "bf16": "bfloat16",
    "f32": "float32",
    "f64": "float64",
    "i8": "int8",
    "u8": "uint8",
    "i32": "int32",
    "i64": "int64",
}
ITEM_BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8, "i8": 1, "u8": 1, "i32": 4, "i64": 8}
COLLECTIVES = ("allreduce", "broadcast", "allgather", "reduce_scatter")
OPS = ("sum", "avg", "min", "max", "prod")


@dataclasses.dataclass(frozen=True)
class What:
    """What is measured. ``compression`` is "none" or a codec's name; ``apart``: each call by
    itself, until the last rank is done, for calls back to back let a root run ahead."""

    collective: str
    op: str
    dtype: str
    compression: str = "none"
    apart: bool = False


@dataclasses.dataclass(frozen=True)
class Call:
    """One prepared collective.

    run() does it once and returns its result as the library gives it; fill(values) writes the
    input, an array of the count and dtype prepared for; read(result) gives the result as a flat
    numpy array (bf16 widened to f32). flush() is a run that delivers besides all that earlier runs
    have rounded away; None where runs are exact for the closed form.
    """

    run: Callable[[], Any]
    fill: Callable[[np.ndarray], None]
    read: Callable[[Any], np.ndarray]
    flush: Callable[[], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a peer finds the job: this rank, and how to tell the others something."""

    rank: int
    world: int
    interface: str
    address: str
    gather: Callable[[np.ndarray], np.ndarray]


class Peer:
    """A library under measurement. See the module's head for who calls what when."""

    name = ""
    rank = 0
    world = 1

    def why_not(self) -> str | None:
        """None if the library can be used in this process, else the reason in one line."""
        raise NotImplementedError

    def setup(self, place: Place | None) -> None:
        """Join the job: at ``place``, or where the launcher's environment says, if None."""
        raise NotImplementedError

    def unsupported(self, what: What) -> str | None:
        """None if the library can do this, else the reason in one line."""
        return None if what.compression == "none" else f"{self.name} does not compress"

    def prepare(self, what: What, count: int) -> Call:
        """A Call whose input holds ``count`` elements on this rank."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Return when all ranks are here."""
        raise NotImplementedError

    def gather(self, values: np.ndarray) -> np.ndarray:
        """The 1-d arrays of all ranks, equal in size and dtype, as (world, size)."""
        raise NotImplementedError

    def sent(self) -> tuple[float, float] | None:
        """(wire, payload) bytes that this rank has sent so far; None where it cannot be known."""
        return None

    def rails(self) -> list[tuple[str, str]]:
        """(name, IPv4 address) of this rank's ports; empty where the library does not tell."""
        return []

    def notes(self) -> list[str]:
        """Lines for the end of the report."""
        return []

    def close(self) -> None:
        """Leave the job."""


# --- buffers: numpy where it can hold the dtype, torch for bf16 ---


def make_array(dtype: str, count: int) -> Any:
    """Zeros, as a numpy array, or as a torch tensor for bf16."""
    if dtype != "bf16":
        return np.zeros(count, DTYPES[dtype])
    return make_tensor(dtype, count)


def make_tensor(dtype: str, count: int) -> Any:
    """Zeros, as a torch tensor."""
    torch = importlib.import_module("torch")
    return torch.zeros(count, dtype=getattr(torch, DTYPES[dtype]))


def fill_buffer(buffer: Any, values: np.ndarray) -> None:
    """Write values of the same count into an array or tensor."""
    if isinstance(buffer, np.ndarray):
        buffer[:] = values
    else:
        buffer.copy_(importlib.import_module("torch").from_numpy(np.ascontiguousarray(values)))


def flat_result(result: Any) -> np.ndarray:
    """An array or tensor as a flat numpy array, bf16 widened to f32."""
    if isinstance(result, np.ndarray):
        return result.reshape(-1)
    flat = result.reshape(-1)
    return np.asarray((flat.float() if "bfloat16" in str(flat.dtype) else flat).numpy())
