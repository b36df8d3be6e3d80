"""oneCCL as a Peer, and the building of its shim (_oneccl.cpp) against the wheel.

For CPUs oneCCL has a C++ face alone, so a compiler makes a shim of it with C names, once per
environment. (`pip install oneccl-devel` brings the library and the headers, and 2 GB with them.)

Invariant: the ranks meet over torchrun's environment, as ringcomm's do; no MPI launcher is needed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
from _control import Star
from _peers import Call, Peer, Place, What, fill_buffer, flat_result, make_array

SHIM = "PEERS_ONECCL"
"""Environment variable with the path of the built shim."""

_SOURCE = Path(__file__).with_name("_oneccl.cpp")
_ADDRESS_BYTES = 256
_DTYPES = {"i8": 0, "u8": 1, "i32": 4, "i64": 6, "f16": 8, "f32": 9, "f64": 10}  # ccl::datatype
_OPS = {"sum": 0, "prod": 1, "min": 2, "max": 3}  # ccl::reduction


class OneCclPeer(Peer):
    """oneCCL's CPU communicator over libfabric's TCP provider, all-reduce alone."""

    name = "oneccl"

    def why_not(self) -> str | None:
        return None if SHIM in os.environ else f"{SHIM} does not name its shim: start peers.py"

    def setup(self, place: Place | None) -> None:
        self._star = Star()
        self.rank, self.world = self._star.rank, self._star.world
        os.environ["CCL_LOCAL_RANK"] = os.environ["LOCAL_RANK"]
        os.environ["CCL_LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]
        self._lib = ctypes.CDLL(os.environ[SHIM])
        self._lib.oneccl_error.restype = ctypes.c_char_p
        self._lib.oneccl_allreduce.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
                                               ctypes.c_int]
        address = ctypes.create_string_buffer(_ADDRESS_BYTES)
        if self.rank == 0:
            self._check(self._lib.oneccl_make_store(address))
        found = self._star.gather(np.frombuffer(address.raw, np.uint8))[0].tobytes()
        self._check(self._lib.oneccl_join(self.world, self.rank, found))

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"oneCCL: {self._lib.oneccl_error().decode(errors='replace')}")

    def unsupported(self, what: What) -> str | None:
        if what.collective != "allreduce" or what.op not in _OPS or what.dtype not in _DTYPES:
            return "of oneCCL only all-reduce is measured, and not avg or bf16"
        return super().unsupported(what)

    def prepare(self, what: What, count: int) -> Call:
        buffer = make_array(what.dtype, count)
        reduce, check = self._lib.oneccl_allreduce, self._check
        at, dtype, op = buffer.ctypes.data, _DTYPES[what.dtype], _OPS[what.op]

        def run() -> np.ndarray:
            check(reduce(at, count, dtype, op))
            return np.asarray(buffer)

        return Call(run, lambda values: fill_buffer(buffer, values), flat_result)

    def barrier(self) -> None:
        self._check(self._lib.oneccl_barrier())

    def gather(self, values: np.ndarray) -> np.ndarray:
        return self._star.gather(values)

    def close(self) -> None:
        self._lib.oneccl_leave()
        self._star.close()


def build_shim(prefix: Path) -> Path | str:
    """The shim for the wheels under ``prefix`` (a virtual environment), built unless it is there.

    Returns the reason in one line if it cannot be had.
    """
    library = prefix / "lib/libccl.so.1"
    if not library.exists() or not (prefix / "include/oneapi/ccl.hpp").exists():
        return f"{prefix} has no oneccl-devel"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        return "oneCCL's C++ face needs a C++ compiler (g++)"
    mark = hashlib.sha256(_SOURCE.read_bytes() + str(library.stat().st_mtime_ns).encode())
    target = prefix / f"oneccl-{mark.hexdigest()[:12]}.so"
    if target.exists():
        return target
    fresh = target.with_suffix(f".{os.getpid()}")
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{prefix / 'include'}",
               str(_SOURCE), f"-L{prefix / 'lib'}", "-l:libccl.so.1", "-lmpi", "-lfabric",
               f"-Wl,-rpath,{prefix / 'lib'}", "-o", str(fresh)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[0]
        return f"oneCCL's shim does not build: {said}"
    fresh.rename(target)
    return target
