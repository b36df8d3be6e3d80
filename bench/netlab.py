"""An emulated cluster on one Linux box: a network namespace per host, shaped cables, faults.

    python bench/netlab.py --hosts 4 --nics 1000,1000 -- python bench/sweep.py --sizes 4:64M

Every rank of a job finds torchrun's environment, the ports in RINGCOMM_INTERFACES and a fresh
secret in RINGCOMM_SECRET_FILE. Cables can be cut, unplugged, silently dropped and slowed while the
job runs. Needs root, iproute2 and nothing else; no address of the machine itself is touched.

The lab itself is in lab/cluster.py, whose head shows how it is wired; this is the command, and the
name to import it by. What a killed lab left behind, `--clean` removes.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lab.cluster import MAX_HOSTS, NetLab
from lab.job import Job, exit_name
from lab.wiring import NetLabError, del_namespaces, is_leftover, list_namespaces, why_unavailable

__all__ = ["Job", "NetLab", "NetLabError", "why_unavailable"]

FAULTS = ("cut", "unplug", "blackhole", "flush", "mute", "slow", "restore")
_LAST = {"mute": int, "slow": float}  # what these take after the NIC: a host, a rate


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="netlab.py",
        usage="%(prog)s --hosts N --nics MBIT[,MBIT...] [options] -- COMMAND [ARGUMENT...]",
        description="Run a job on an emulated cluster: a namespace per host, shaped cables.",
        epilog="COMMAND runs once per rank; `python` stands for the Python that runs netlab.",
    )
    parser.add_argument("--hosts", type=int, default=2, help=f"2 unless given, up to {MAX_HOSTS}")
    parser.add_argument(
        "--nics",
        default="1000",
        metavar="MBIT[,MBIT...]",
        help="rate of each NIC of a host in Mbit/s; 0: unshaped; 1000 unless given",
    )
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N")
    parser.add_argument(
        "--cc",
        default="",
        metavar="NAME",
        help="congestion control: cubic or reno; cubic, if allowed, unless given",
    )
    parser.add_argument(
        "--sysctl",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="kernel setting for every host; may be given several times",
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="SECONDS:KIND:HOST:NIC",
        help=f"break a cable that long after the start: {', '.join(FAULTS)} "
        "(mute takes :TO at the end, slow :MBIT); may be given several times",
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="end the job after S seconds")
    parser.add_argument(
        "--clean",
        action="store_true",
        help="remove what labs that were killed left behind, and exit",
    )
    argv = list(argv)
    at = argv.index("--") if "--" in argv else len(argv)
    options, command = parser.parse_args(argv[:at]), argv[at + 1 :]
    if not options.clean and not command:
        parser.error("give a command after `--`")
    return options, command


def _parse_nics(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise NetLabError(f"--nics {text}: give numbers, as in 1000,100") from None


def _parse_sysctls(texts: Sequence[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise NetLabError(f"--sysctl {text}: give KEY=VALUE")
    return dict(text.split("=", 1) for text in texts)


def _parse_fault(text: str) -> tuple[float, str, list[float]]:
    """(seconds, kind, [host, nic, mbit?]) of one --fault."""
    try:
        after, kind, *numbers = text.split(":")
        if kind not in FAULTS or len(numbers) != (3 if kind in _LAST else 2):
            raise ValueError
        host, nic = int(numbers[0]), int(numbers[1])
        return float(after), kind, [host, nic, *(_LAST[kind](last) for last in numbers[2:])]
    except ValueError:
        raise NetLabError(
            f"--fault {text}: give SECONDS:KIND:HOST:NIC with KIND one of {', '.join(FAULTS)}, "
            "after slow the rate, as in 3:slow:0:1:100, and after mute the host that hears nothing"
        ) from None


def _play_faults(lab: NetLab, job: Job, faults: list[tuple[float, str, list[float]]]) -> None:
    began = time.monotonic()
    for after, kind, numbers in sorted(faults):
        while time.monotonic() - began < after:
            if all(rank.poll() is not None for rank in job.ranks):
                return
            time.sleep(0.01)
        try:
            getattr(lab, kind)(*numbers)
        except NetLabError as error:  # the lab may be on its way out
            print(f"netlab: {kind}: {error}", file=sys.stderr)
            return
        named = f"{after:g} s: {kind} host {numbers[0]} eth{numbers[1]}"
        last = {"mute": " towards host {:g}", "slow": " to {:g} Mbit/s"}.get(kind, "")
        print(f"netlab: {named}{last.format(*numbers[2:])}", file=sys.stderr)


def _describe(lab: NetLab, ranks_per_host: int) -> str:
    nics = ", ".join(
        f"eth{k} {mbit:g} Mbit/s" if mbit else f"eth{k} unshaped" for k, mbit in enumerate(lab.nics)
    )
    return f"netlab: {lab.hosts} hosts x {ranks_per_host} ranks; {nics}; {lab.congestion}"


def _run(options: argparse.Namespace, command: list[str]) -> int:
    faults = [_parse_fault(text) for text in options.fault]
    lab = NetLab(
        options.hosts,
        _parse_nics(options.nics),
        congestion=options.cc,
        sysctls=_parse_sysctls(options.sysctl),
    )
    for _, kind, (host, nic, *last) in faults:
        for named in (host, *(last if kind == "mute" else ())):
            lab.namespace(int(named))
        if not 0 <= nic < len(lab.nics):
            raise NetLabError(f"--fault names NIC {nic}: hosts have NICs 0 to {len(lab.nics) - 1}")
    with lab:
        print(_describe(lab, options.ranks_per_host), file=sys.stderr)
        if command[0] in ("python", "python3"):
            command[0] = sys.executable
        job = lab.start(command, options.ranks_per_host)
        threading.Thread(target=_play_faults, args=(lab, job, faults), daemon=True).start()
        code = job.wait(options.timeout)
        if code:
            print(f"netlab: `{shlex.join(command)}` ended with {exit_name(code)}", file=sys.stderr)
        return code


def clean() -> int:
    """Remove what labs whose process was killed left behind; the number of namespaces removed."""
    reason = why_unavailable()
    if reason:
        raise NetLabError(reason)
    leftovers = [name for name in list_namespaces() if is_leftover(name)]
    del_namespaces(leftovers)
    for folder in Path(tempfile.gettempdir()).glob("netlab-*"):
        if is_leftover(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    return len(leftovers)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options, command = _parse(sys.argv[1:] if argv is None else argv)
    try:
        if options.clean:
            print(f"netlab: {clean()} namespaces removed")
            return 0
        return _run(options, command)
    except NetLabError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
