"""Step of gpu_check.py: kernels give the bits of the core's scalar kernel set.

All 2^32 floats for the 16-bit formats (on the fake driver a sample of every class), every 16-bit
float back; random values, special ones and tails of every length for the formats of blocks.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gpu_checks.driver import PTX, Driver, Values
from gpu_checks.report import tell

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "cuda")]

HALVES = {"bf16": 1, "fp16": 2}
BLOCKS = {"int8": 3, "int4": 4, "onebit": 5, "fp8": 6}
LIMITS = {"int8": 127, "int4": 7, "onebit": 1, "fp8": 448}
AVG = 1  # as the core numbers ops
CHUNK = 1 << 26
FENCE = 0xA5  # what lies behind a result, and must stay


class Bench:
    """A GPU with our kernels, and the reference."""

    def __init__(self, folder: Path) -> None:
        self.driver = Driver()
        self.driver.load(PTX.read_bytes() + b"\0")
        self.core = ctypes.CDLL(str(folder / "reference.so"))
        self.pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1)
        self._room: dict[str, tuple[int, int]] = {}

    def room(self, name: str, nbytes: int) -> int:
        """Device memory for one purpose, kept and grown."""
        address, size = self._room.get(name, (0, 0))
        if size < nbytes:
            if address:
                self.driver.free(address)
            address, size = self.driver.alloc(nbytes), nbytes
            self._room[name] = address, size
        return address

    def on_gpu(self, name: str, values: Values | None) -> int | None:
        """A copy of the values; None stays None."""
        if values is None:
            return None
        address = self.room(name, values.nbytes)
        self.driver.put(address, values)
        return address

    def split(self, call: Any, n: int) -> None:
        """call(first, count) for parts of n elements, on all cores."""
        step = max(1 << 16, -(-n // (os.cpu_count() or 1)))
        jobs = [self.pool.submit(call, at, min(step, n - at)) for at in range(0, n, step)]
        for job in jobs:
            job.result()


def pointer(array: Values | None, at: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data + at * array.itemsize)


def first_difference(got: Values, want: Values) -> str:
    """In words; "" if they have the same bits."""
    a, b = got.reshape(-1).view(np.uint8), want.reshape(-1).view(np.uint8)
    if np.array_equal(a, b):
        return ""
    width = got.itemsize
    at = int(np.flatnonzero(a != b)[0]) // width
    return (
        f"element {at} is 0x{a[at * width :][:width][::-1].tobytes().hex()}, not "
        f"0x{b[at * width :][:width][::-1].tobytes().hex()}"
    )


# ---- 16-bit floats ----


def all_floats() -> Iterator[Values]:
    for at in range(0, 1 << 32, CHUNK):
        yield np.arange(at, at + CHUNK, dtype=np.uint32).view(np.float32)


def sampled_floats() -> Iterator[Values]:
    from sides import floats_of_all_classes

    yield floats_of_all_classes()


def check_halves(bench: Bench, whole: bool) -> None:
    """Both formats in one go over all floats; then back."""
    wrong = dict.fromkeys(HALVES, "")
    done = 0
    for src in all_floats() if whole else sampled_floats():
        n = src.size
        bench.on_gpu("src", src)
        for codec, number in HALVES.items():
            wrong[codec] = wrong[codec] or _pack_half(bench, codec, number, src)
        done += n
    for codec, why in wrong.items():
        tell(f"pack {codec}", "wrong" if why else "ok", _count(done), "", why)
    wire = np.arange(1 << 16, dtype=np.uint16)
    for codec, number in HALVES.items():
        want, got = np.zeros(wire.size, np.float32), np.ones(wire.size, np.float32)
        dst, src_at = bench.room("dst", got.nbytes), bench.on_gpu("wire", wire)
        bench.driver.put(dst, got)
        bench.driver.launch(f"unpack_{codec}", [dst, src_at, wire.size])
        bench.core.core_unpack_half(
            number, pointer(want), pointer(wire), ctypes.c_size_t(wire.size)
        )
        why = first_difference(bench.driver.get(dst, got), want)
        tell(f"unpack {codec}", "wrong" if why else "ok", "all 2^16", "", why)


def _count(done: int) -> str:
    return "all 2^32" if done == 1 << 32 else f"a sample of {done:,}"


def _pack_half(bench: Bench, codec: str, number: int, src: Values) -> str:
    n = src.size
    got, want = np.empty(n, np.uint16), np.empty(n, np.uint16)
    wire = bench.room("wire", got.nbytes)
    bench.driver.launch(
        f"pack_{codec}", [wire, bench.room("src", 0), 1.0, n], blocks=1024 if n >= CHUNK else 16
    )

    def reference(at: int, count: int) -> None:
        bench.core.core_pack_half(
            number, pointer(want, at), pointer(src, at), ctypes.c_float(1), ctypes.c_size_t(count)
        )

    bench.split(reference, n)
    why = first_difference(bench.driver.get(wire, got), want)
    return f"of 0x{src.view(np.uint32)[0]:08x} and on: {why}" if why else ""


# ---- blocks that share a scale ----


def payload_bytes(codec: str, n: int) -> int:
    blocks = -(-n // (64 if codec == "int4" else 256))
    return 2 * blocks + (n if codec in ("int8", "fp8") else 32 * blocks)


def check_block(bench: Bench, codec: str, src: Values) -> str:
    """Packs and unpacks one segment; what differs, in words."""
    n, wire_bytes = src.size, payload_bytes(codec, src.size)
    want, want_dst = np.full(wire_bytes + 16, FENCE, np.uint8), np.zeros(n, np.float32)
    bench.core.core_pack(BLOCKS[codec], pointer(want), pointer(src), ctypes.c_size_t(n))
    bench.core.core_unpack(BLOCKS[codec], pointer(want_dst), pointer(want), ctypes.c_size_t(n))
    driver, segment = bench.driver, -(-max(n, 1) // 256) * 256
    wire = bench.on_gpu("wire", np.full(want.size, FENCE, np.uint8))
    dst = bench.on_gpu("dst", np.full(n + 1, 7, np.float32))
    driver.launch(f"pack_{codec}", [wire, bench.on_gpu("src", src), n, segment, 0])
    driver.launch(f"unpack_{codec}", [dst, wire, n, segment, 0])
    fenced = np.append(want_dst, np.float32(7))
    for name, address, expected in (("wire", wire, want), ("decoded", dst, fenced)):
        assert address is not None
        why = first_difference(driver.get(address, np.empty_like(expected)), expected)
        if why:
            return f"{name} of {n} elements: {why}"
    return ""


def check_sum(bench: Bench, codec: str, tensors: tuple[Values, Values]) -> str:
    """Adds two payloads of one segment, for an average; what differs, in words."""
    n, size = tensors[0].size, payload_bytes(codec, tensors[0].size)
    apart = size + size % 2
    both = np.zeros(2 * apart, np.uint8)
    want = np.zeros(n, np.float32)
    for at, values in zip((0, apart), tensors, strict=True):
        bench.core.core_pack(BLOCKS[codec], pointer(both[at:]), pointer(values), ctypes.c_size_t(n))
    bench.core.core_add(
        BLOCKS[codec], pointer(want), pointer(both), pointer(both[apart:]), AVG, ctypes.c_size_t(n)
    )
    want[np.isnan(want)] = np.uint32(0x7FC00000).view(np.float32)  # made of infinities: any
    wire = bench.on_gpu("wire", both)
    dst = bench.on_gpu("dst", np.full(n + 1, 7, np.float32))
    assert dst is not None
    segment = -(-max(n, 1) // 256) * 256
    bench.driver.launch(f"add_{codec}", [dst, wire, apart, 0.5, n, segment, 0])
    expected = np.append(want, np.float32(7))
    why = first_difference(bench.driver.get(dst, np.empty_like(expected)), expected)
    return f"sum of {n} elements: {why}" if why else ""


def check_blocks(bench: Bench, whole: bool) -> None:
    try:
        from sides import CLASSES
    except ImportError as error:  # the tests' values need pytest
        tell("formats of blocks", "skipped", why=str(error))
        return
    random = np.random.default_rng(9)
    lengths = [0, 1, 33, 64, 65, 255, 256, 257, 1025] if whole else [65, 1025]
    lengths += [100_003] if whole else []
    for codec, limit in LIMITS.items():
        why, wrong, cases, sums = "", "", 0, 0
        for values in CLASSES:
            for n in lengths:
                src, rest = values(random, n, limit), values(random, n, limit)
                cases += 1
                why = why or check_block(bench, codec, src)
                sums += 1
                wrong = wrong or check_sum(bench, codec, (src, rest))
        for n in range(1026 if whole else 0):  # tails
            cases += 1
            src = random.standard_normal(n, np.float32)
            why = why or check_block(bench, codec, src)
            sums += 1
            wrong = wrong or check_sum(bench, codec, (src, random.standard_normal(n, np.float32)))
        if whole and not why:
            cases += 1
            why = check_block(bench, codec, random.standard_normal(1 << 24, np.float32))
        how = f"{cases} tensors" if whole else f"a sample of {cases} tensors"
        tell(f"pack and unpack {codec}", "wrong" if why else "ok", how, "", why)
        how = f"{sums} sums" if whole else f"a sample of {sums} sums"
        tell(f"add {codec}", "wrong" if wrong else "ok", how, "", wrong)


def run(options: argparse.Namespace) -> None:
    bench = Bench(options.folder)
    whole = not (options.fake or options.quick)
    with np.errstate(all="ignore"):
        check_halves(bench, whole)
        check_blocks(bench, whole)
