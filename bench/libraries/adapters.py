"""The libraries that sweep.py measures: ringcomm, gloo (through PyTorch) and MPI.

Invariant: nothing of a library is imported before its why_not() is asked, so a missing one costs a
line of output and nothing else.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from libraries.peer import (
    Call,
    Peer,
    Place,
    What,
    fill_buffer,
    flat_result,
    make_array,
    make_tensor,
)

START_S = 180  # a peer that has not found its ranks by then, on a busy machine, never will


def _missing(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"the module {module} is not installed"


# --- ringcomm ---


class RingcommPeer(Peer):
    """The library that this repository is about."""

    name = "ringcomm"

    def why_not(self) -> str | None:
        missing = _missing("ringcomm")
        return missing and f"{missing} (pip install -e .)"

    def setup(self, place: Place | None) -> None:
        self._lib: Any = importlib.import_module("ringcomm")
        self._lib.init()
        self._comm = self._lib.default_communicator()
        self.rank, self.world = self._lib.rank(), self._lib.world_size()

    def unsupported(self, what: What) -> str | None:
        if what.compression != "none" and what.collective != "allreduce":
            return "rows with compression are of allreduce alone"
        codec = importlib.import_module("ringcomm.codecs").parse(what.compression)
        ops = ("sum", "avg") if codec.quantises else (what.op,)
        if what.op not in ops:
            return f"it is for --op {' or '.join(ops)}"
        if what.dtype == "bf16" and _missing("torch"):
            return "bf16 tensors need torch"
        return None

    def prepare(self, what: What, count: int) -> Call:
        lib, codecs = self._lib, importlib.import_module("ringcomm.codecs")
        buffer = make_array(what.dtype, count)
        every = what.collective == "allgather"
        out = make_array(what.dtype, count * self.world if every else count // self.world)
        codec = codecs.parse(what.compression)
        kept = lib.ErrorFeedback() if codec.quantises else None

        def allreduce(compression: str | None) -> Any:
            return lib.allreduce(buffer, what.op, compression=compression, feedback=kept)

        run: Callable[[], Any] = {
            "allreduce": lambda: allreduce(None if codec.name == "none" else codec.name),
            "broadcast": lambda: lib.broadcast(buffer, root=0),
            "allgather": lambda: lib.allgather(buffer, out=out.reshape(self.world, -1)),
            "reduce_scatter": lambda: lib.reduce_scatter(buffer, what.op, out=out),
        }[what.collective]
        flush = (lambda: allreduce(None)) if codec.quantises else None
        return Call(run, lambda values: fill_buffer(buffer, values), flat_result, flush)

    def barrier(self) -> None:
        self._lib.barrier()

    def gather(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(self._lib.allgather(values)).reshape(self.world, -1)

    def sent(self) -> tuple[float, float] | None:
        stats = self._comm.stats()
        return float(stats["wire_bytes"] + stats["shared_bytes"]), float(stats["payload_bytes"])

    def rails(self) -> list[tuple[str, str]]:
        return [(rail.interface, rail.address) for rail in self._comm.rails]

    def notes(self) -> list[str]:
        shares = {rail.index: 0 for rail in self._comm.rails}
        for lane in self._comm.stats()["lanes"]:
            shares[lane["rail"]] += lane["sent_bytes"]
        total = sum(shares.values())
        if len(shares) < 2 or not total:
            return []
        parts = (
            f"{rail.interface} {100 * shares[rail.index] / total:.1f} %"
            for rail in self._comm.rails
        )
        return [f"rails: of all bytes that rank 0 sent, {', '.join(parts)}"]

    def close(self) -> None:
        self._lib.shutdown()


# --- gloo ---

SHARES = "PEERS_SHARES"
"""Rates of the ports in GLOO_SOCKET_IFNAME in their order, by which gloo's tensors are cut."""


def cuts(count: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Where to cut ``count`` elements into consecutive parts that are as large as the shares."""
    total = sum(shares)
    return tuple(round(count * sum(shares[:part]) / total) for part in range(1, len(shares)))


class GlooPeer(Peer):
    """torch.distributed with the gloo backend, over the first rail's interface.

    Where GLOO_SOCKET_IFNAME names several ports, an all-reduce is cut into as many parts, all in
    flight at once, each in a process group that has that port alone: gloo gives a whole collective
    to one port. The parts are as large as the rates in SHARES say, or equal. A 16-bit wire format
    is a cast before and after, as DDP's compression hooks do it.
    """

    name = "gloo"

    def why_not(self) -> str | None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of hosts without a name
        missing = _missing("torch")
        if missing is None and not self._dist().is_gloo_available():
            return "this PyTorch is built without gloo"
        return missing

    @staticmethod
    def _dist() -> Any:
        return importlib.import_module("torch.distributed")

    def setup(self, place: Place | None) -> None:
        dist = self._dist()
        if place is None:
            self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 50
            interface = os.environ.get("RINGCOMM_INTERFACES", "lo").split(",")[0]
        else:
            self.rank, self.world = place.rank, place.world
            host, port = _meeting_point(place)
            interface = place.interface
        ports = os.environ.setdefault("GLOO_SOCKET_IFNAME", interface).split(",")
        limit = timedelta(seconds=START_S)
        store = dist.TCPStore(host, port, self.world, self.rank == 0, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world)
        self._groups = [self._over(port) for port in ports] if len(ports) > 1 else [None]

    def _over(self, port: str) -> Any:
        """A group of all ranks over this port; gloo reads the variable for each group."""
        os.environ["GLOO_SOCKET_IFNAME"] = port
        return self._dist().new_group(backend="gloo")

    def unsupported(self, what: What) -> str | None:
        if what.op == "avg" and what.collective in ("allreduce", "reduce_scatter"):
            return "gloo has no avg"
        if what.compression in ("bf16", "f16", "fp16") and what.collective == "allreduce":
            return None
        return super().unsupported(what)

    def prepare(self, what: What, count: int) -> Call:
        dist, buffer = self._dist(), make_tensor(what.dtype, count)
        several = len(self._groups) > 1 or what.compression != "none"
        if what.collective == "allreduce" and several:
            return self._prepare_parts(what, buffer)
        if what.collective == "allgather":
            out = make_tensor(what.dtype, count * self.world)
        else:
            out = make_tensor(what.dtype, count // self.world)
        op = self._op(what)
        # PyTorch 2.13 renamed these two and warns of the old names
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        calls: dict[str, tuple[Callable[[], Any], Any]] = {
            "allreduce": (lambda: dist.all_reduce(buffer, op), buffer),
            "broadcast": (lambda: dist.broadcast(buffer, 0), buffer),
            "allgather": (lambda: gather(out, buffer), out),
            "reduce_scatter": (lambda: scatter(out, buffer, op), out),
        }
        call, result = calls[what.collective]

        def run() -> Any:
            call()
            return result

        return Call(run, lambda values: fill_buffer(buffer, values), flat_result)

    def _op(self, what: What) -> Any:
        return getattr(self._dist().ReduceOp, {"prod": "PRODUCT"}.get(what.op, what.op.upper()))

    def _prepare_parts(self, what: What, buffer: Any) -> Call:
        """An all-reduce in one part per port, cast to the wire format and back."""
        dist, op = self._dist(), self._op(what)
        sent = buffer
        if what.compression != "none":
            wire = {"bf16": "bf16"}.get(what.compression, "f16")
            sent = make_tensor(wire, buffer.numel())
        told = os.environ.get(SHARES, "")
        shares = [float(rate) for rate in told.split(",")] if told else [1.0] * len(self._groups)
        parts = sent.tensor_split(cuts(sent.numel(), shares))

        def run() -> Any:
            if sent is not buffer:
                sent.copy_(buffer)
            for work in [
                dist.all_reduce(part, op, group=group, async_op=True)
                for part, group in zip(parts, self._groups, strict=True)
            ]:
                work.wait()
            if sent is not buffer:
                buffer.copy_(sent)
            return buffer

        return Call(run, lambda values: fill_buffer(buffer, values), flat_result)

    def barrier(self) -> None:
        self._dist().barrier()

    def gather(self, values: np.ndarray) -> np.ndarray:
        torch = importlib.import_module("torch")
        rows = [torch.from_numpy(np.empty_like(values)) for _ in range(self.world)]
        self._dist().all_gather(rows, torch.from_numpy(np.array(values)))
        return np.stack([row.numpy() for row in rows])

    def close(self) -> None:
        self._dist().destroy_process_group()


def _meeting_point(place: Place) -> tuple[str, int]:
    """Host and free port of rank 0, for a store that all ranks are about to open."""
    with socket.socket() as probe:
        probe.bind((place.address, 0))
        mine = np.array([*map(int, place.address.split(".")), probe.getsockname()[1]], np.int64)
    chosen = place.gather(mine)[0]
    return ".".join(map(str, chosen[:4])), int(chosen[4])


# --- MPI ---


class MpiPeer(Peer):
    """mpi4py on MPI.COMM_WORLD."""

    name = "mpi"

    def why_not(self) -> str | None:
        if not any(
            name in os.environ
            for name in (
                "OMPI_COMM_WORLD_SIZE",
                "PMI_SIZE",
                "PMI_RANK",
                "PMIX_RANK",
                "MPI_LOCALRANKID",
            )
        ):
            return "an MPI job must be started by mpirun; torchrun and netlab start plain processes"
        return _missing("mpi4py")

    def setup(self, place: Place | None) -> None:
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._comm = self._mpi.COMM_WORLD
        self.rank, self.world = self._comm.rank, self._comm.size
        if place is not None and (place.rank, place.world) != (self.rank, self.world):
            raise RuntimeError(
                f"MPI calls this rank {self.rank} of {self.world}, the job {place.rank} of "
                f"{place.world}"
            )

    def unsupported(self, what: What) -> str | None:
        if what.dtype in ("f16", "bf16"):
            return "MPI has no 16-bit floats"
        if what.op == "avg" and what.collective in ("allreduce", "reduce_scatter"):
            return "MPI has no avg"
        return super().unsupported(what)

    def prepare(self, what: What, count: int) -> Call:
        mpi, comm, buffer = self._mpi, self._comm, make_array(what.dtype, count)
        size = count * self.world if what.collective == "allgather" else count // self.world
        out = np.zeros(size, buffer.dtype)
        op = getattr(mpi, what.op.upper(), mpi.SUM)
        calls: dict[str, tuple[Callable[[], Any], Any]] = {
            "allreduce": (lambda: comm.Allreduce(mpi.IN_PLACE, buffer, op), buffer),
            "broadcast": (lambda: comm.Bcast(buffer, 0), buffer),
            "allgather": (lambda: comm.Allgather(buffer, out), out),
            "reduce_scatter": (lambda: comm.Reduce_scatter_block(buffer, out, op), out),
        }
        call, result = calls[what.collective]

        def run() -> Any:
            call()
            return result

        return Call(run, lambda values: fill_buffer(buffer, values), flat_result)

    def barrier(self) -> None:
        self._comm.Barrier()

    def gather(self, values: np.ndarray) -> np.ndarray:
        rows = np.empty((self.world, values.size), values.dtype)
        self._comm.Allgather(np.ascontiguousarray(values), rows)
        return rows

    def notes(self) -> list[str]:
        library = self._mpi.Get_library_version().split(",")[0].splitlines()[0]
        return [f"mpi: {library}; ranks of one host may use its shared memory"]


PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (RingcommPeer, GlooPeer, MpiPeer)}
