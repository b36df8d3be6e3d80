"""Compares two commits by what they do: a gate for changes that must not change behaviour.

    python tools/compare.py OLD NEW                 all parts; about a quarter of an hour
    python tools/compare.py main . --parts bits --scenes 'optim*' --worlds 2

OLD and NEW are commits, or "." for this working copy as it is built. Each commit is built once,
under build/compare/COMMIT, by and for the interpreter that runs this; numpy and torch are its own.
What is run of both is in scenes.py, which uses public names alone: their insides may differ.

    bits     the parameters after 12 steps of every method, on 2 and on 3 ranks, over the loopback's
             ports and over shared memory: a digest for each; where two differ, the elements that do
             and the largest difference. A scene that differs is run again in OLD, which tells
             one that is not repeatable. HookState("auto") is left out: it follows measured times.
    frames   tests/golden/*.hex, remarks aside; and whether each commit's own encoder makes them
    counts   what eight calls of two ranks, threads of one process, need over ports and over memory:
             system calls (by strace) that transfer, that wait and others; calls of memcpy and the
             bytes that they copy, bytes sent and received (by counting.c, preloaded; kernels that
             copy are not seen); instructions of the core and of all (by callgrind, with kernels of
             AVX2 at most). A figure is of one call on both ranks, the least of some rounds, less
             what no calls take. OLD is counted before and behind NEW, which tells the noise, its
             least..most: NEW has more where it exceeds both by more than they differ by, and than
             1 %, and does so again in two more tries. What cannot be counted is named, and differs.

The exit status is 0 if nothing differs, 1 if something does, 2 if it could not be compared.
Scenes that raise in one commit alone differ; those that raise in both are named.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from scenes import CALLS, COUNTED, MARK, NOTHING

ROOT = Path(__file__).resolve().parent.parent
SCENES = Path(__file__).with_name("scenes.py")
PARTS = ("bits", "frames", "counts")
LIMIT_S = 1800.0  # of one run of all scenes
LAUNCHERS = ("RINGCOMM_", "OMPI_", "PMI", "SLURM_", "TORCHELASTIC_", "MASTER_")
Results = dict[str, list[Any]]  # by scene, of each rank: parameters, or the text of an exception


class CannotCompareError(Exception):
    """What was asked for cannot be built or run."""


# ---- two trees ----


@dataclasses.dataclass(frozen=True)
class Tree:
    """A commit that is built: its name here, its sources, and the folder to import it from."""

    name: str
    source: Path
    site: Path


def git(*arguments: str) -> bytes:
    """What git says of this repository."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True)
    if done.returncode != 0:
        raise CannotCompareError(f"git {' '.join(arguments)}: {done.stderr.decode().strip()}")
    return done.stdout


def build(revision: str) -> Tree:
    """The commit's sources and its package, built unless they are there already."""
    if revision == ".":
        return Tree("this working copy", ROOT, ROOT)
    commit = git("rev-parse", "--verify", f"{revision}^{{commit}}").decode().strip()
    place = ROOT / "build" / "compare" / commit[:12]
    tree = Tree(revision, place / "source", place / sys.implementation.cache_tag)
    if not tree.source.exists():
        with tempfile.TemporaryDirectory(dir=_made(place)) as folder:
            with tarfile.open(fileobj=BytesIO(git("archive", commit))) as archive:
                archive.extractall(folder, filter="data")
            os.chmod(folder, 0o755)
            os.rename(folder, tree.source)
            os.mkdir(folder)  # to be removed by who made it
    if not (tree.site / "ringcomm").exists():
        print(f"building {revision}", file=sys.stderr)
        pip = [
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            str(tree.site),
            str(tree.source),
        ]
        run([sys.executable, *pip], {**os.environ, "NVCC": ""}, f"building {revision}")
    return tree


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(command: Sequence[str], env: Mapping[str, str], what: str) -> str:
    """A command's output, with the last lines of its errors where it fails."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd="/")
    if done.returncode != 0:
        raise CannotCompareError(f"{what}: {(done.stderr or done.stdout)[-2000:]}")
    return done.stdout


def environment(tree: Tree, **more: str) -> dict[str, str]:
    """Of a process that imports the tree's package, without what would make it part of a job."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return {
        **ours,
        "PYTHONPATH": str(tree.site),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RINGCOMM_INTERFACES": "lo",
        "RINGCOMM_LOG": "error",
        **more,
    }


def free_port() -> int:
    """A port of the loopback that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


# ---- bits ----


@dataclasses.dataclass(frozen=True)
class World:
    """So many ranks as processes of this host, over its memory or over ports."""

    ranks: int
    memory: bool

    def __str__(self) -> str:
        return f"{self.ranks} {'memory' if self.memory else 'ports'}"


def steps_of(tree: Tree, world: World, patterns: Sequence[str]) -> Results:
    """Runs scenes.py on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        env = environment(
            tree,
            WORLD_SIZE=str(world.ranks),
            RINGCOMM_SHARED_MEMORY=str(int(world.memory)),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
            RINGCOMM_TIMEOUT="120",
        )
        errors = [Path(folder, f"{rank}.err") for rank in range(world.ranks)]
        with contextlib.ExitStack() as stack:
            ranks = [
                subprocess.Popen(
                    [sys.executable, str(SCENES), "bits", folder, *patterns],
                    env={**env, "RANK": str(rank)},
                    cwd="/",
                    stderr=stack.enter_context(error.open("w")),
                )
                for rank, error in enumerate(errors)
            ]
            stack.callback(lambda: [rank.kill() for rank in ranks])
            deadline = time.monotonic() + LIMIT_S
            with contextlib.suppress(subprocess.TimeoutExpired):
                for rank in ranks:
                    rank.wait(deadline - time.monotonic())
        if any(rank.wait() != 0 for rank in ranks):
            said = "\n".join(error.read_text()[-1500:] for error in errors)
            raise CannotCompareError(f"the scenes of {tree.name}, {world}: {said}")
        found = []
        for rank in range(world.ranks):
            with np.load(Path(folder, f"{rank}.npz")) as saved:
                found.append({name: saved[name] for name in saved.files})
        return {name: [one[name] for one in found] for name in found[0]}


def digest(values: Sequence[Any]) -> str:
    """Eight figures for what all ranks have; "raises" for an exception."""
    if any(one.dtype.kind == "U" for one in values):
        return "raises"
    return hashlib.sha256(b"".join(one.tobytes() for one in values)).hexdigest()[:8]


def difference(old: Sequence[Any], new: Sequence[Any]) -> str:
    """How two results differ, in words; empty where they do not."""
    for ours, others, name in ((old, new, "OLD"), (new, old, "NEW")):
        said = [str(one) for one in ours if one.dtype.kind == "U"]
        if said and digest(others) != "raises":
            return f"{name} raises {said[0]}"
        if said:
            return "" if [*map(str, old)] == [*map(str, new)] else f"OLD: {old[0]}; NEW: {new[0]}"
    a, b = np.concatenate(old), np.concatenate(new)
    if a.shape != b.shape:
        return f"{a.size} and {b.size} elements"
    if a.tobytes() == b.tobytes():
        return ""
    unlike = a.view(np.uint32) != b.view(np.uint32)
    largest = np.abs(a.astype(np.float64) - b.astype(np.float64))[unlike].max()
    return f"{np.count_nonzero(unlike)} of {a.size} elements unlike, by up to {largest:.3g}"


@dataclasses.dataclass
class Verdict:
    """What a part has found: lines of its report, and how many things differ."""

    lines: list[str]
    differ: int


def compare_bits(
    old: Mapping[World, Results], new: Mapping[World, Results]
) -> tuple[Verdict, dict[World, list[str]]]:
    """The report of all worlds' results, and the names of the scenes that differ."""
    worlds = list(old)
    names = list(dict.fromkeys(n for side in (old, new) for w in worlds for n in side[w]))
    width = max(map(len, names), default=0)
    table = [f"{'scene':{width}}  " + "  ".join(f"{w!s:>8}" for w in worlds)]
    details: list[str] = []
    apart: dict[World, list[str]] = {world: [] for world in worlds}
    for name in names:
        cells = []
        for world in worlds:
            one, other = old[world].get(name), new[world].get(name)
            if one is None or other is None:
                cells.append("alone")
                details.append(f"{name}, {world}: in {'NEW' if one is None else 'OLD'} only")
            elif said := difference(one, other):
                cells.append("DIFFERS")
                details.append(f"{name}, {world}: {digest(one)}, {digest(other)}: {said}")
                apart[world].append(name)
            else:
                cells.append(digest(one))
                if cells[-1] == "raises":
                    table.append(f"  both raise: {name}, {world}: {one[0]}")
        table.append(f"{name:{width}}  " + "  ".join(f"{cell:>8}" for cell in cells))
    return Verdict([*table, "", *details], len(details)), apart


def part_bits(old: Tree, new: Tree, worlds: Sequence[World], patterns: Sequence[str]) -> Verdict:
    """Runs both trees in all worlds, and again in OLD what differs."""
    found: list[dict[World, Results]] = [{}, {}]
    for world in worlds:
        for results, tree in zip(found, (old, new), strict=True):
            print(f"bits: {tree.name}, {world}", file=sys.stderr)
            results[world] = steps_of(tree, world, patterns)
        soon, _ = compare_bits(*({world: results[world]} for results in found))
        print(f"bits: {world}: {soon.differ or 'nothing'} differs", file=sys.stderr)
    verdict, apart = compare_bits(*found)
    for world, names in apart.items():
        if names:
            again = steps_of(old, world, names)
            for name in names:
                if said := difference(found[0][world][name], again[name]):
                    verdict.lines.append(f"{name}, {world}: OLD differs from itself: {said}")
    return verdict


# ---- frames ----


def frames_of(tree: Tree) -> dict[str, str]:
    """The golden frames, as hexadecimal digits without remarks."""
    found = {}
    for path in sorted((tree.source / "tests" / "golden").glob("*.hex")):
        lines = path.read_text().splitlines()
        found[path.name] = "".join("".join(line.split("#")[0].split()) for line in lines)
    return found


def encodes(tree: Tree) -> str:
    """What became of the tree's own test that encodes the golden frames; empty if it passes."""
    place = tree.source / "tests" / "c"
    if not (place / "test_frame.c").exists():
        return "has no tests/c/test_frame.c"
    command = ["make", "-s", "-C", str(place), "NAMES=frame", "run"]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).strip()[-500:]


def part_frames(old: Tree, new: Tree) -> Verdict:
    """The golden files of both, and their own encoders."""
    a, b = frames_of(old), frames_of(new)
    details = [f"{name}: in {'OLD' if name in a else 'NEW'} only" for name in sorted(a.keys() ^ b)]
    details += [f"{name}: the bytes differ" for name in sorted(a.keys() & b) if a[name] != b[name]]
    if not a.keys() & b.keys():
        details.append("there are no golden frames to compare")
    for tree in (old, new):
        print(f"frames: {tree.name}", file=sys.stderr)
        if said := encodes(tree):
            details.append(f"the encoder of {tree.name}: {said}")
    equal = sum(a[name] == b[name] for name in a.keys() & b)
    return Verdict([f"golden frames: {equal} of {len(a)} equal", *details], len(details))


# ---- counts ----

Rounds = dict[str, list[dict[str, float]]]  # by section, of each round: figures by name
Figures = dict[str, dict[str, float]]  # by call

TRANSFERS = re.compile(r"(p?(read|write)v?2?|(p?read|pwrite)64|(send|recv)(to|from|m?msg)|splice)$")
WAITS = re.compile(r"(futex|epoll_p?wait2?|p?poll|p?select6?|sched_yield|(clock_)?nanosleep)$")
ROUNDS = {"system calls": 8, "bytes": 8, "instructions": 3}
TRIES = 3
SLACK = {"core": 100.0, "all": 2000.0, "copied": 64.0, "sent": 64.0, "received": 64.0}


def count_system_calls(tree: Tree, env: Mapping[str, str], folder: Path) -> Rounds:
    """By kind, as strace lists them."""
    log = folder / "strace"
    counting = [str(SCENES), "counts", str(folder), str(ROUNDS["system calls"])]
    tracing = ["strace", "-f", "-qq", "-s", "80", "-e", "signal=none", "-o", str(log)]
    run([*tracing, sys.executable, *counting], env, f"strace of {tree.name}")
    with log.open() as lines:
        return sections_of_log(lines)


def sections_of_log(lines: Iterator[str]) -> Rounds:
    """The calls of each section of strace's log, a section being over where it is marked."""
    found: Rounds = collections.defaultdict(list)
    counts = dict.fromkeys(("transfers", "waits", "others"), 0.0)
    for line in lines:
        called = re.match(r"\d+ +(\w+)\(", line)
        if called is None:  # the rest of a call that was told before, or the end of a thread
            continue
        if marked := re.search(f'"{MARK}([^"]+)"', line):
            found[marked[1]].append(counts)
            counts = dict.fromkeys(counts, 0.0)
            continue
        is_wait = WAITS.match(called[1])
        kind = "waits" if is_wait else "transfers" if TRANSFERS.match(called[1]) else "others"
        counts[kind] += 1
    return found


def count_bytes(tree: Tree, env: Mapping[str, str], folder: Path) -> Rounds:
    """By the library that is preloaded."""
    library = counting_library()
    counting = [str(SCENES), "counts", str(folder), str(ROUNDS["bytes"]), library]
    run([sys.executable, *counting], {**env, "LD_PRELOAD": library}, f"counts of {tree.name}")
    told = json.loads((folder / "bytes.json").read_text())
    return {name: [dict(zip(COUNTED, one, strict=True)) for one in told[name]] for name in told}


def count_instructions(tree: Tree, env: Mapping[str, str], folder: Path) -> Rounds:
    """By callgrind."""
    library = counting_library()
    kernels = {"RINGCOMM_KERNEL_SET": "avx2"} if platform.machine() == "x86_64" else {}
    counting = [str(SCENES), "counts", str(folder), str(ROUNDS["instructions"]), library]
    grinding = [
        "valgrind",
        "-q",
        "--tool=callgrind",
        "--instr-atstart=no",
        "--fair-sched=try",
        f"--callgrind-out-file={folder}/callgrind",
    ]
    what = f"callgrind of {tree.name}"
    run([*grinding, sys.executable, *counting], {**env, **kernels}, what)
    found: Rounds = collections.defaultdict(list)
    dumps = sorted(folder.glob("callgrind.*"), key=lambda path: int(path.suffix[1:]))
    for path in dumps:
        name, by_object = instructions_of(path.read_text().splitlines())
        core = sum(n for file, n in by_object.items() if file.startswith(f"{tree.site}/ringcomm/"))
        found[name].append({"core": core, "all": sum(by_object.values())})
    if not found:
        raise CannotCompareError(f"{what}: no section; valgrind/callgrind.h was missing")
    return found


def instructions_of(lines: Sequence[str]) -> tuple[str, collections.Counter[str]]:
    """The name of the section that a dump of callgrind's is of, and its instructions by object."""
    section, file, called = "", "", False
    names: dict[str, str] = {}
    found: collections.Counter[str] = collections.Counter()
    for line in lines:
        if line.startswith("desc: Trigger: Client Request: "):
            section = line.removeprefix("desc: Trigger: Client Request: ")
        elif named := re.match(r"(c?ob)=\((\d+)\)(?: (.*))?", line):
            name = names.setdefault(named[2], named[3])
            file = name if named[1] == "ob" else file
        elif line.startswith("calls="):
            called = True
        elif line[:1] in {*"0123456789+-*"}:  # a position and its cost, a callee's after calls=
            found[file] += 0 if called else int(line.split()[1])
            called = False
    return section, found


def counting_library() -> str:
    """counting.c, built."""
    target = _made(ROOT / "build" / "compare") / "counting.so"
    compiling = [
        os.environ.get("CC", "gcc"),
        "-O2",
        "-fno-builtin",
        "-D_GNU_SOURCE",
        "-shared",
        "-fPIC",
        "-o",
        str(target),
        str(SCENES.with_name("counting.c")),
    ]
    run([*compiling, "-ldl"], os.environ, "building counting.c")
    return str(target)


COUNTERS: dict[str, tuple[str, Callable[[Tree, Mapping[str, str], Path], Rounds]]] = {
    "system calls": ("strace", count_system_calls),
    "bytes": ("gcc", count_bytes),
    "instructions": ("valgrind", count_instructions),
}


def figures(rounds: Rounds) -> Figures:
    """Of one call, of each kind: the least of the rounds, less what nothing takes."""
    least = {
        section: {kind: min(one[kind] for one in several) for kind in several[0]}
        for section, several in rounds.items()
    }
    return {
        name: {kind: (n - least[NOTHING][kind]) / times for kind, n in least[name].items()}
        for name, (_, _, times) in CALLS.items()
    }


def count(tree: Tree, memory: bool, what: str) -> Figures:
    """One run."""
    print(f"counts: {what}, {tree.name}, {'memory' if memory else 'ports'}", file=sys.stderr)
    env = environment(tree, RINGCOMM_SHARED_MEMORY=str(int(memory)))
    with tempfile.TemporaryDirectory() as folder:
        return figures(COUNTERS[what][1](tree, env, Path(folder)))


def has_more(kind: str, olds: Sequence[float], news: Sequence[float]) -> bool:
    """Whether all figures of NEW's are beyond OLD's, and beyond what these differ by."""
    most = max(olds)
    return min(news) > most + max(most - min(olds), 0.01 * most, SLACK.get(kind, 0.5))


def compare_counts(olds: Sequence[Figures], news: Sequence[Figures], where: str) -> Verdict:
    """A table, of one call: the least and the most of OLD's runs, and the least of NEW's."""
    kinds = list(next(iter(olds[0].values())))
    table = [f"{where:26}" + "".join(f"{kind:>32}" for kind in kinds)]
    differ = 0
    for name in CALLS:
        cells = []
        for kind in kinds:
            a, b = ([one[name][kind] for one in several] for several in (olds, news))
            more = has_more(kind, a, b)
            differ += more
            cells.append(f"{min(a):.4g}..{max(a):.4g} {min(b):.4g}{' MORE' * more}")
        table.append(f"{name:26}" + "".join(f"{cell:>32}" for cell in cells))
    return Verdict(table, differ)


def part_counts(old: Tree, new: Tree, what: str, memory: bool) -> Verdict:
    """Runs OLD, NEW and OLD again under one counter; up to three times where NEW has more."""
    where = f"{what}, {'memory' if memory else 'ports'}"
    needs, _ = COUNTERS[what]
    olds: list[Figures] = []
    news: list[Figures] = []
    verdict = Verdict([f"{where}: NOT COUNTED: {needs} is not installed"], 1)
    if shutil.which(needs) is None:
        return verdict
    try:
        for _ in range(TRIES):
            for tree, several in ((old, olds), (new, news), (old, olds)):
                several.append(count(tree, memory, what))
            verdict = compare_counts(olds, news, where)
            if not verdict.differ:
                break
    except CannotCompareError as error:
        verdict = Verdict([f"{where}: NOT COUNTED: {error}"], 1)
    return verdict


# ---- the command ----


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    about, _, more = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", metavar="OLD", help='a commit, or "." for this working copy')
    parser.add_argument("new", metavar="NEW", help="the other")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--worlds", nargs="+", type=int, choices=(2, 3), default=(2, 3))
    parser.add_argument(
        "--scenes", nargs="+", default=(), metavar="PATTERN", help="names, as of the shell's files"
    )
    return parser.parse_args(arguments)


def verdicts(args: argparse.Namespace) -> Iterator[tuple[str, Verdict]]:
    """Of each part that is asked for, one after the other."""
    old, new = build(args.old), build(args.new)
    if "bits" in args.parts:
        worlds = [World(ranks, memory) for ranks in args.worlds for memory in (False, True)]
        yield "bits", part_bits(old, new, worlds, args.scenes)
    if "frames" in args.parts:
        yield "frames", part_frames(old, new)
    if "counts" in args.parts:
        for what, memory in itertools.product(COUNTERS, (False, True)):
            yield "counts", part_counts(old, new, what, memory)


def main(arguments: Sequence[str]) -> int:
    """Prints each part's report, and returns the exit status."""
    args = parse(arguments)
    differ = 0
    try:
        for name, verdict in verdicts(args):
            print(f"\n{name}: {verdict.differ or 'nothing'} differs")
            print("\n".join(verdict.lines), flush=True)
            differ += verdict.differ
    except CannotCompareError as error:
        print(f"cannot compare: {error}", file=sys.stderr)
        return 2
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
