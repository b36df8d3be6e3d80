"""Step of gpu_check.py: the kernels of topk give the core's bits.

Thresholds, payloads, residuals, and what is unpacked; also of segments with more than their limit.
"""

from __future__ import annotations

import argparse
import ctypes

import numpy as np

from gpu_checks.driver import Values
from gpu_checks.exact import FENCE, Bench, first_difference, pointer
from gpu_checks.report import tell

SEGMENT, ELEMENT_BYTES, TURN, NO_PART = 65536, 6, 5, 2**64 - 1
F32, U8, U32 = np.float32, np.uint8, np.uint32


def sample_sizes(n: int, density: float) -> tuple[int, int]:
    """(size, run) of the sample, as codec/topk.c lays it out."""
    run = min(max(int(256 / density / 4096), 8), 256) // 8 * 8
    size = int(min(max(256 / density, 4096), 1 << 20))
    return min(n, size - size % run), run


def check_topk(bench: Bench, src: Values, residual: Values, density: float, cap: int) -> str:
    """One tensor; what differs, in words."""
    n, stride, segments = src.size, ELEMENT_BYTES * cap, -(-src.size // SEGMENT)
    blank: list[Values] = [
        np.zeros(2, U32), np.full(segments * stride, FENCE, U8), np.zeros(segments, U32),
        np.zeros(n, F32),
    ]  # fmt: skip
    names = ("threshold", "wire", "kept", "left")
    threshold, wire, kept, left = want = [array.copy() for array in blank]
    sizes = map(ctypes.c_size_t, (n, SEGMENT, stride))
    poisoned = bench.core.core_pack_topk(
        pointer(wire), pointer(kept), pointer(left), pointer(src), pointer(residual), *sizes,
        pointer(threshold), ctypes.c_double(density), *map(ctypes.c_size_t, (cap, TURN, 0, 0)),
    )  # fmt: skip
    back = np.zeros(n, F32)
    bench.core.core_unpack_topk(
        pointer(back), pointer(wire), pointer(kept), *map(ctypes.c_size_t, (n, SEGMENT, stride))
    )
    at = {name: bench.on_gpu("topk " + name, array)
          for name, array in zip(names, blank, strict=True)}  # fmt: skip
    src_at, residual_at = bench.on_gpu("src", src), bench.on_gpu("residual", residual)
    flag, dst = bench.on_gpu("flag", np.zeros(1, U32)), bench.on_gpu("dst", np.full(n, 7, F32))
    assert flag is not None
    assert dst is not None
    size, run = sample_sizes(n, density)
    sample = bench.room("sample", 4 * size)
    launch = bench.driver.launch
    launch("sample_topk", [sample, src_at, residual_at, size, run, n, 0, 0, TURN])
    launch("least_topk", [at["threshold"], sample, size, int(density * size + 0.5)])
    place = [n, n, segments, SEGMENT, stride]  # one part
    launch("pack_topk", [at["wire"], at["kept"], at["left"], src_at, residual_at, *place,
                         NO_PART, at["threshold"], ctypes.c_double(density), ctypes.c_uint32(cap),
                         TURN, flag])  # fmt: skip
    found_flag = int(bench.driver.get(flag, np.zeros(1, U32))[0])
    launch("unpack_topk", [dst, at["wire"], at["kept"], *place, flag])
    for name, expected in zip((*names, "decoded"), (*want, back), strict=True):
        address = dst if name == "decoded" else at[name]
        assert address is not None
        why = first_difference(bench.driver.get(address, np.empty_like(expected)), expected)
        if why:
            return f"{name} of {n} elements, density {density:g}: {why}"
    return "" if found_flag == poisoned else f"poisoned is {found_flag}, not {poisoned}"


def run(options: argparse.Namespace) -> None:
    bench, whole = Bench(options.folder), not (options.fake or options.quick)
    random = np.random.default_rng(11)
    why, cases = "", 0
    for n in (1, 1000, 65537, 1 << 20, 12_345_678) if whole else (1000, 65537):
        for density in (0.3, 0.01, 0.001) if whole else (0.01,):
            for cap in (SEGMENT, max(1, int(SEGMENT * density))):
                src = random.standard_normal(n, F32)
                src[::97] = src[0]  # many of one size
                cases += 1
                rest = random.standard_normal(n, F32) * F32(0.1)
                why = why or check_topk(bench, src, rest, density, cap)
    how = f"{cases} tensors" if whole else f"a sample of {cases} tensors"
    tell("pack and unpack topk", "wrong" if why else "ok", how, "", why)
