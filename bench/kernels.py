"""The codecs' kernels on one core, each beside a memory copy of the same traffic.

    python bench/kernels.py
    python bench/kernels.py --sets avx2 --rounds 31 --markdown kernels.md

A row is a codec in one direction by one kernel set, on tensors larger than any cache. Traffic is
what is read and written, the wire's bytes included; the copy is the C library's memcpy of half as
many bytes. Each call (kernels.c, built by gcc with the flags of the extension) comes straight after
such a copy, and a ratio is that of one such pair. Goals are those of the fastest set; whether they
are met is told by medians. Exit code 2 if nothing could be measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from _build import build  # noqa: E402
from _columns import aligned, markdown  # noqa: E402

import build_ffi  # noqa: E402

SETS = ("scalar", "avx2", "avx512", "neon")  # slowest first
SOURCE = Path(__file__).with_name("kernels.c")
GOALS = {
    ("bf16", "encode"): 0.85, ("bf16", "decode-add"): 0.85,
    ("fp16", "encode"): 0.85, ("fp16", "decode-add"): 0.85,
    ("int8", "encode"): 0.70, ("int4", "encode"): 0.70, ("onebit", "encode"): 0.70,
    ("onebit", "decode-add"): 0.80,
}  # fmt: skip
HEADS = ("codec", "direction", "set", "B/element", "GB/s", "x copy", "(range)", "goal", "",
         "x copy, far=0")


@dataclasses.dataclass(frozen=True)
class Taken:
    """One codec in one direction by one set: medians, and the smallest and largest ratio."""

    kernels: str
    far: bool
    codec: str
    direction: str
    bytes: float
    seconds: float
    ratio: float
    low: float
    high: float


def take(program: Path, kernels: str, far: bool, options: argparse.Namespace) -> Iterator[Taken]:
    """All codecs by one set; nothing if this CPU does not run it."""
    words = (kernels, options.elements, options.rounds, int(far), options.offset)
    done = subprocess.run([str(program), *map(str, words)], capture_output=True, text=True,
                          check=False, timeout=600)  # fmt: skip
    if done.returncode == 2:
        return
    if done.returncode:
        raise OSError(f"kernels {kernels} ended with {done.returncode}: {done.stderr.strip()}")
    for line in done.stdout.splitlines():
        codec, direction, *figures = line.split()
        yield Taken(kernels, far, codec, direction, *map(float, figures))


def rows(taken: Sequence[Taken], elements: int) -> list[tuple[str, ...]]:
    """The table, a row for each codec, direction and set; goals stand beside the last set's."""
    fastest = max((one.kernels for one in taken), key=SETS.index)
    near = {(one.codec, one.direction, one.kernels): one for one in taken if not one.far}
    found = []
    for one in sorted((one for one in taken if one.far), key=lambda one: SETS.index(one.kernels)):
        goal = GOALS.get((one.codec, one.direction)) if one.kernels == fastest else None
        verdict = "" if goal is None else "met" if one.ratio >= goal else "short"
        found.append((
            one.codec, one.direction, one.kernels, f"{one.bytes:.2f}",
            f"{one.bytes * elements / one.seconds / 1e9:.1f}", f"{one.ratio:.2f}",
            f"{one.low:.2f}-{one.high:.2f}", "" if goal is None else f"{goal:.2f}", verdict,
            f"{near[one.codec, one.direction, one.kernels].ratio:.2f}",
        ))  # fmt: skip
    return found


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="kernels.py", description="The codecs' kernels.")
    add = parser.add_argument
    add("--sets", default=",".join(SETS), metavar=",".join(SETS))
    add("--elements", type=int, default=16 << 20, help="of each tensor")
    add("--rounds", type=int, default=15, help="copies and calls, in turn, at most 1000")
    add("--offset", type=int, default=16, help="bytes into a page at which tensors start")
    add("--markdown", type=Path, metavar="FILE")
    add("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = parse_arguments(argv)
    taken: list[Taken] = []
    try:
        with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
            program = build(SOURCE, Path(folder), [*build_ffi.compile_args(), "-D_GNU_SOURCE"],
                            sorted((ROOT / "csrc/kernels").glob("*.c")))
            for kernels in options.sets.split(","):
                for far in (True, False):
                    taken += take(program, kernels, far, options)
    except OSError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 2
    if not taken:
        print("kernels: this CPU runs none of these sets", file=sys.stderr)
        return 2
    table = [HEADS, *rows(taken, options.elements)]
    print("\n".join(aligned(table)))
    if options.markdown:
        options.markdown.write_text("\n".join(markdown(table)) + "\n", encoding="utf-8")
    if options.json:
        records = [dataclasses.asdict(one) for one in taken]
        options.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
