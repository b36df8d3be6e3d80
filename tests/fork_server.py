"""A server that starts Python programs as forks of itself, without the seconds that imports take.

    asker  --(order, descriptors)-->  server  --fork-->  program
           <--pid; exit code, time--

A program is a command line of Python: -u, -c, -m or a file. The order brings its environment,
stdin, stdout and stderr; its folder and namespaces are the asker's.
FOLDER/python, which `write` makes, stands in for sys.executable: it asks for a program, passes
signals on to it and ends as it does. It is the program's sys.executable as well, so the ranks that
a program starts are forks, too. What needs an interpreter of its own is given one: options other
than -c, -m and -u, LD_PRELOAD, workers of multiprocessing, ranks of an MPI launcher.

A program leaves through the interpreter's own exit. Where PyTorch is imported, the exit ends with
the atexit handlers, unless the program's environment has WHOLE_EXIT: taking PyTorch apart makes
copies of all pages that the programs share, which takes each of them a second and more.
As a script: the server, `fork_server.py FOLDER MODULE...`, which imports these modules.

Invariants: the server starts no thread, so a program is as good as a fresh interpreter; a program
inherits nothing but its three descriptors, and does not outlive its asker; the server ends, with
all of its process group, when its parent does.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_NAMESPACES = ("mnt", "net", "uts")
_MAX_ORDER = 1 << 18
_START_S = 600.0  # until the server listens, on a busy machine


@contextlib.contextmanager
def _short(folder: str | Path) -> Iterator[str]:
    """A name for the folder as short as a socket's address must be, however deep the folder is."""
    fd = os.open(folder, os.O_PATH)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


# ---- the process that asks ----


def fork(
    folder: str | Path,
    argv: Sequence[str],
    environment: Mapping[str, str],
    stdio: Sequence[int],
    python: str = "",
) -> tuple[socket.socket, int]:
    """Has the server in the folder start a program.

    Args:
        stdio: descriptors of its stdin, stdout and stderr.
        python: its sys.executable; the server's if empty.

    Returns:
        a socket, by which `answer` learns how the program ends, and which ends the program when it
        closes; the program's pid.
    """
    order = {"python": python, "argv": argv, "folder": os.getcwd(), "environment": environment}
    link = _connect(folder)
    namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]
    try:
        socket.send_fds(link, [json.dumps(order).encode()], [*stdio, *namespaces])
    finally:
        for fd in namespaces:
            os.close(fd)
    return link, answer(link)


def answer(link: socket.socket) -> Any:
    """Waits for the server's next word on a program: first its pid, then its exit code (minus the
    signal's number) and the time at which it ended."""
    word = link.recv(64)
    if not word:
        raise RuntimeError("the fork server is gone")
    return json.loads(word)


def _connect(folder: str | Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    give_up = time.monotonic() + _START_S
    with _short(folder) as short:
        while True:
            try:
                link.connect(f"{short}/socket")
                return link
            except FileNotFoundError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.02)


def write(folder: Path) -> Path:
    """Makes FOLDER/python."""
    path = folder / "python"
    path.write_text(
        f"#!{sys.executable} -IS\n"
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import fork_server\n"
        f"fork_server.ask({str(folder)!r})\n"
    )
    path.chmod(0o755)
    return path


def ask(folder: str) -> None:
    """Has this command line run by the server, and ends as that does."""
    first = sys.argv[1][:2] if sys.argv[1:] else "-"
    its_own = first[:1] == "-" and first not in ("-c", "-m", "-u")
    inherits = any(name.startswith(("LD_PRELOAD", "PMI", "OMPI_")) for name in os.environ)
    if its_own or inherits or "--multiprocessing-fork" in sys.argv:
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    link, pid = fork(folder, sys.argv[1:], dict(os.environ), [0, 1, 2], python=sys.argv[0])

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    code, _ = answer(link)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


# ---- the server ----


def listen(folder: str) -> socket.socket:
    """Makes the server's socket, which has its address only once it can be connected to."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with _short(folder) as short:
        listener.bind(f"{short}/unheard")
        listener.listen(128)
        os.rename(f"{short}/unheard", f"{short}/socket")
    return listener


def serve(listener: socket.socket, parent: int) -> dict[str, Any]:
    """Forks on request, until the process of this pidfd ends. Returns in every program, with its
    order."""
    programs: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: pid and link
    awaited: dict[socket.socket, int] = {}  # pid by link, while the asker lives
    while True:
        for one in select.select([*awaited, *programs, listener, parent], [], [])[0]:
            if one in awaited:
                os.kill(awaited.pop(one), signal.SIGKILL)
            elif one in programs:
                pid, link = programs.pop(one)
                awaited.pop(link, None)
                os.close(one)
                _say(link, [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), time.monotonic()])
                link.close()
            elif one == parent:
                os.killpg(0, signal.SIGKILL)
            else:
                link, _ = listener.accept()
                data, fds, _, _ = socket.recv_fds(link, _MAX_ORDER, 3 + len(_NAMESPACES))
                if not data:  # the asker has ended
                    link.close()
                    continue
                assert len(os.listdir("/proc/self/task")) == 1, "a module has started a thread"
                pid = os.fork()
                if pid == 0:
                    for held in (listener, link, *(other for _, other in programs.values())):
                        held.close()
                    for fd in (parent, *programs):
                        os.close(fd)
                    return {**json.loads(data), "fds": fds}
                for fd in fds:
                    os.close(fd)
                programs[os.pidfd_open(pid)] = pid, link
                awaited[link] = pid
                _say(link, pid)


def _say(link: socket.socket, word: Any) -> None:
    with contextlib.suppress(OSError):  # the asker has ended
        link.send(json.dumps(word).encode())


def main() -> None:
    import gc
    import importlib

    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start some jobs deaf to it
    parent = os.pidfd_open(os.getppid())
    listener = listen(sys.argv[1])
    given = set(os.environ)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    from_imports = {name: value for name, value in os.environ.items() if name not in given}
    gc.freeze()  # collections in the programs shall not copy what they share
    order = serve(listener, parent)
    order["environment"] = {**from_imports, **order["environment"]}
    become(order)
    run(order["argv"])


# ---- the program ----


def become(order: dict[str, Any]) -> None:
    """Takes over what the order gives."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    for fd, name in zip(order["fds"][3:], _NAMESPACES, strict=True):
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
    sys.executable = order["python"] or sys.executable


def _import_path() -> list[str]:
    return list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))


def run(argv: list[str]) -> None:
    """What Python does with these arguments; ends the process where PyTorch is imported."""
    import atexit
    import threading

    code: Any = None
    try:
        _run(argv)
    except SystemExit as end:
        code = end.code
    if "torch" not in sys.modules or "WHOLE_EXIT" in os.environ:
        sys.exit(code)
    if isinstance(code, str):
        print(code, file=sys.stderr)
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


if __name__ == "__main__":
    main()
