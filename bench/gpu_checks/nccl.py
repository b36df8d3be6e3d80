"""Step of gpu_check.py: NCCL's socket transport on the links of the step links.

NCCL takes ranks on one GPU for ranks of different hosts if each has another NCCL_HOSTID; then only
its network is left to it. Its kernels wait for one another on the GPU, so ranks must run there at
once, for which they need MPS: a daemon of our own, in a folder of its own, which is ended after it.
Without MPS they would take turns, and the time would be that of turns.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lab.site import Site
from netlab import NetLabError, why_unavailable

from gpu_checks.arrays import why_no_torch
from gpu_checks.links import BYTES, LINKS, WORLDS, lines_of, name_of
from gpu_checks.report import tell

CONTROL = "nvidia-cuda-mps-control"
SETTINGS = {
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_DEBUG": "INFO",
}
TUNED = {
    "NCCL_SOCKET_NTHREADS": "2",
    "NCCL_NSOCKS_PERTHREAD": "2",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}


@contextlib.contextmanager
def private_mps() -> Iterator[dict[str, str]]:
    """A daemon of ours; the environment of its clients. Raises RuntimeError."""
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        env = {
            "CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe",
            "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        }
        for path in env.values():
            os.mkdir(path)
        _control(["-d"], env, "")
        try:
            yield env
        finally:
            with contextlib.suppress(RuntimeError):
                _control([], env, "quit -t 3\n")


def _control(arguments: list[str], env: dict[str, str], said: str) -> None:
    """Runs the command. What it says goes to a file, for a daemon would keep a pipe open."""
    with tempfile.TemporaryFile("w+") as answer:
        try:
            done = subprocess.run(
                [CONTROL, *arguments],
                env={**os.environ, **env},
                input=said,
                stdout=answer,
                stderr=answer,
                text=True,
                timeout=15,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{CONTROL}: {error}") from None
        answer.seek(0)
        if done.returncode:
            raise RuntimeError(f"{CONTROL}: {answer.read().strip()[:200]}")


def measure(world: int, mbits: list[float], env: dict[str, str], ours: dict[str, float]) -> bool:
    """Both settings on one kind of links; False if neither worked."""
    works = False
    name = name_of(mbits, world)
    with Site(world, world, mbits) as site:
        ports = {"NCCL_SOCKET_IFNAME": ",".join(site.interfaces)}
        asked = {"backend": "nccl", "bytes": BYTES, "calls": 5, "device": "cuda"}
        for kind, settings in (("default", {}), ("tuned", TUNED)):
            given = {**SETTINGS, **env, **ports, **settings}
            try:
                (one,) = lines_of(site, "torch_rank.py", asked, given, 25)
            except (RuntimeError, ValueError) as error:
                tell(f"{name}, NCCL {kind}", "skipped", why=f"it failed: {error}")
                continue
            works = True
            why = f"NCCL {one['version']}" + ("" if one["right"] else ", and is wrong")
            for codec in ("none", "bf16"):
                time = ours.get(f"{name}, {codec}")
                why += f"; {one['seconds'] / time:.2f} x ringcomm's {codec}" if time else ""
            tell(
                f"{name}, NCCL {kind}",
                "ok" if one["right"] else "skipped",
                f"{one['seconds'] * 1e3:.1f} ms",
                why=why,
            )
    return works


def why_no_nccl() -> str | None:
    """None where several ranks on this GPU can be joined by NCCL; else why not. For torch with
    CUDA."""
    import torch.distributed

    if not torch.distributed.is_nccl_available():
        return "torch has no NCCL"
    if shutil.which(CONTROL) is None:
        return f"no {CONTROL} here, and without MPS ranks on one GPU take turns"
    return None


def run(options: argparse.Namespace) -> None:
    why = "fake driver" if options.fake else why_no_torch() or why_unavailable() or why_no_nccl()
    if why:
        tell("NCCL's sockets", "skipped", why=why)
        return
    path = Path(options.folder, "links.json")
    ours = json.loads(path.read_text()) if path.exists() else {}
    try:
        with private_mps() as env:
            for mbits, world in itertools.product(LINKS, WORLDS):
                if not measure(world, mbits, env, ours):
                    break
    except (RuntimeError, NetLabError) as error:
        tell("NCCL's sockets", "skipped", why=str(error))
