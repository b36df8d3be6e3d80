"""A Python whose programs start as forks of one process, which has imported PyTorch once for all.

    `FOLDER/python ARGUMENTS`  --order, descriptors-->  server  --fork-->  guard  --fork-->  program
                               <--pid, exit code-----------------------------

What is made in FOLDER stands in for sys.executable, in the program as well: ranks that it starts so
are forks, too. A program has the arguments, environment, folder, stdin to stderr and namespaces of
the process that asks for it, which passes signals on and ends as the program does. What needs an
interpreter of its own is given one: options other than -c, -m and -u, LD_PRELOAD, workers of
multiprocessing, ranks of an MPI launcher. As a script: the server, `warm_python.py FOLDER`.

Invariants: the server starts no thread; a program does not outlive the process that asked for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

MODULES = ("torch", "torch._dynamo", "torch.distributed.pipelining", "ringcomm.torch")
NAMESPACES = ("mnt", "net", "uts")
_MAX_ORDER = 1 << 17
_START_S = 600.0  # until the server listens, on a busy machine


def write(folder: Path) -> Path:
    """The stand-in, made in this folder."""
    path = folder / "python"
    path.write_text(
        f"#!{sys.executable} -IS\n"
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import warm_python\n"
        f"warm_python.ask({str(folder)!r})\n"
    )
    path.chmod(0o755)
    return path


def _address(folder: str) -> str:
    """Of the server: short, as addresses must be, however deep the folder lies."""
    return f"/proc/self/fd/{os.open(folder, os.O_PATH)}/socket"


# ---- the process that asks ----


def ask(folder: str) -> None:
    """Has this command line run by the server, and ends as that does."""
    first = sys.argv[1][:2] if sys.argv[1:] else "-"
    its_own = first[:1] == "-" and first not in ("-c", "-m", "-u")
    inherits = any(name.startswith(("LD_PRELOAD", "PMI", "OMPI_")) for name in os.environ)
    if its_own or inherits or "--multiprocessing-fork" in sys.argv:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    link = _connected(_address(folder))
    namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    order = {
        "python": sys.argv[0],
        "argv": sys.argv[1:],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
    }
    socket.send_fds(link, [json.dumps(order).encode()], [0, 1, 2, *namespaces])
    pid = int(link.recv(64))

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    code = int(link.recv(64) or 1)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _connected(address: str) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    give_up = time.monotonic() + _START_S
    while True:
        try:
            link.connect(address)
            return link
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.02)


# ---- the server ----


def serve(listener: socket.socket) -> dict[str, Any]:
    """Forks on request. Returns in every program, with its order."""
    signal.signal(signal.SIGCHLD, _bury)
    while True:
        link, _ = listener.accept()
        with link:
            assert len(os.listdir("/proc/self/task")) == 1, "a module has started a thread"
            if os.fork():
                continue
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            data, fds, _, _ = socket.recv_fds(link, _MAX_ORDER, 3 + len(NAMESPACES))
            pid = os.fork()
            if pid:
                for fd in fds:
                    os.close(fd)
                guard(link, pid)
        order: dict[str, Any] = json.loads(data)
        return {**order, "fds": fds}


def _bury(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def guard(link: socket.socket, pid: int) -> None:
    """Ends the program when nobody waits for it any more; tells how it ended."""
    link.send(str(pid).encode())
    pidfd = os.pidfd_open(pid)
    if pidfd not in select.select([link, pidfd], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        link.send(str(code).encode())
    os._exit(0)


# ---- the program ----


def become(order: dict[str, Any]) -> None:
    """Takes over what the process that asked has."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    for fd, name in zip(order["fds"][3:], NAMESPACES, strict=True):
        if os.fstat(fd).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino and libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), f"setns: {name}")
    for place, fd in enumerate(order["fds"][:3]):
        os.dup2(fd, place)
    for fd in order["fds"]:
        os.close(fd)
    os.chdir(order["folder"])
    found = sys.path[1 + len(_import_path()) :]
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[1:] = [*_import_path(), *found]
    sys.executable = order["python"]


def _import_path() -> list[str]:
    return list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


def run(argv: list[str]) -> None:
    """What Python does with these arguments; ends the process."""
    import atexit
    import threading
    import traceback

    code: Any = 0
    try:
        _run(argv)
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for those that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else code is not None)


def _run(argv: list[str]) -> None:
    import runpy

    if argv[0].startswith("-u"):
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        argv = [f"-{argv[0][2:]}", *argv[1:]] if argv[0][2:] else argv[1:]
    if argv[0] == "-c":
        sys.path[0], sys.argv = "", ["-c", *argv[2:]]
        exec(compile(argv[1], "<string>", "exec"), {"__name__": "__main__"})
    elif argv[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = os.path.dirname(os.path.abspath(argv[0])), argv
        runpy.run_path(argv[0], run_name="__main__")


def main() -> None:
    import gc
    import importlib
    import importlib.util

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(_address(sys.argv[1]))
    listener.listen(128)
    if importlib.util.find_spec("torch") is not None:
        for name in MODULES:
            importlib.import_module(name)
    gc.freeze()  # collections in the programs shall not copy what they share
    order = serve(listener)
    become(order)
    run(order["argv"])


if __name__ == "__main__":
    main()
