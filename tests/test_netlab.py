"""The emulated cluster itself: what it builds, how its faults show, and that it leaves nothing.

Rates are judged generously, and by the best of several looks: the shaper is exact, but the machine
under it may be busy.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE, PROMPT, until

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import netlab  # noqa: E402
from lab import wiring  # noqa: E402
from netlab import NetLab, NetLabError  # noqa: E402

GOODPUT = 1448 / 1514  # TCP payload per layer 2 byte at MTU 1500


@pytest.fixture(scope="module")
def possible() -> None:
    reason = netlab.why_unavailable()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def two_hosts(possible: None) -> Iterator[NetLab]:
    with NetLab(2, [200, 0], slowest=20) as lab:
        yield lab


# --- helpers ---


def python(lab: NetLab, host: int, code: str, *args: str) -> subprocess.Popen[str]:
    return lab.run(
        host,
        [sys.executable, "-u", "-c", textwrap.dedent(code), *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )


class Asked:
    """A Python program on a host that answers each line with one."""

    def __init__(self, lab: NetLab, host: int, code: str, *args: str) -> None:
        argv = [sys.executable, "-u", "-c", textwrap.dedent(code), *args]
        program = lab.run(host, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert program.stdin is not None
        assert program.stdout is not None
        self._questions, self._answers = program.stdin, program.stdout

    def read(self) -> str:
        return self._answers.readline()

    def ask(self) -> str:
        self._questions.write("go\n")
        self._questions.flush()
        return self.read()


def output(lab: NetLab, host: int, *argv: str) -> str:
    text, _ = lab.run(host, argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).communicate()
    return text.strip()


class Stream:
    """Bytes without end from host 0 to host 1 on one NIC, counted at the receiver."""

    RECEIVE = """
        import socket, sys, time
        listener = socket.create_server((sys.argv[1], 9000))
        print("ready")
        stream = listener.accept()[0]
        stream.setblocking(False)
        total = 0
        while True:
            time.sleep(0.005)
            try:
                while got := len(stream.recv(1 << 20)):
                    total += got
            except BlockingIOError:
                pass
            print(time.monotonic(), total)
    """
    SEND = """
        import socket, sys
        stream = socket.create_connection((sys.argv[1], 9000))
        while True:
            stream.sendall(bytes(1 << 16))
    """

    def __init__(self, lab: NetLab, nic: int) -> None:
        receiver = python(lab, 1, self.RECEIVE, lab.address(1, nic))
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        self._lines = receiver.stdout
        self._samples: list[tuple[float, int]] = []
        threading.Thread(target=self._read, daemon=True).start()
        python(lab, 0, self.SEND, lab.address(1, nic))
        self.wait_for(1.0)

    def _read(self) -> None:
        with contextlib.suppress(ValueError):
            for line in self._lines:
                when, total = line.split()
                self._samples.append((float(when), int(total)))

    def mbit(self, seconds: float) -> float:
        """Mbit/s received over the next ``seconds``."""
        first = self._samples[-1]
        time.sleep(seconds)
        while self._samples[-1] is first:  # a busy machine
            time.sleep(0.05)
        last = self._samples[-1]
        return (last[1] - first[1]) * 8e-6 / (last[0] - first[0])

    def wait_for(self, mbit: float) -> None:
        """Return once more than ``mbit`` Mbit/s arrive."""
        assert until(lambda: len(self._samples) and self.mbit(0.2) > mbit), f"never {mbit} Mbit/s"

    def expect(self, mbit: float, seconds: float, rel: float = 0.0) -> None:
        """So many Mbit/s must arrive over some stretch of so many ``seconds``; over others the
        machine may have had no time for them."""
        seen: list[float] = []

        def fits() -> bool:
            seen.append(self.mbit(seconds))
            return seen[-1] == pytest.approx(mbit, rel=rel)

        assert until(fits), f"{seen} Mbit/s, and never {mbit}"


def left(prefix: str) -> list[str]:
    return wiring.list_namespaces(prefix)


# --- topology ---


@pytest.mark.netns
def test_every_nic_of_every_host_reaches_its_counterparts(possible: None) -> None:
    connect = """
        import socket, sys
        for source, target in zip(sys.argv[1::2], sys.argv[2::2]):
            socket.create_connection((target, 9000), 10, (source, 0)).close()
        print("all")
    """
    listen = """
        import socket, sys
        listeners = [socket.create_server((address, 9000)) for address in sys.argv[1:]]
        print("ready", flush=True)
        sys.stdin.read()
        import time; time.sleep(60)
    """
    with NetLab(3, [0, 100]) as lab:
        assert lab.address(2, 1) == "10.78.0.3"
        server = python(lab, 2, listen, lab.address(2, 0), lab.address(2, 1))
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        for host in (0, 1):
            pairs = [lab.address(end, nic) for nic in (0, 1) for end in (host, 2)]
            assert python(lab, host, connect, *pairs).communicate()[0] == "all\n"


@pytest.mark.netns
def test_a_host_sees_its_own_ports_only(two_hosts: NetLab) -> None:
    assert output(two_hosts, 0, "ls", "/sys/class/net").split() == ["eth0", "eth1", "lo"]
    control = output(two_hosts, 1, "cat", "/proc/sys/net/ipv4/tcp_congestion_control")
    assert control == two_hosts.congestion
    assert control in ("cubic", "reno")


@pytest.mark.netns
def test_one_subnet_mtu_and_sysctls(possible: None) -> None:
    settings = {"net.ipv4.conf.all.arp_ignore": "1"}
    with NetLab(2, [0, 0], one_subnet=True, mtu=9000, congestion="reno", sysctls=settings) as lab:
        assert lab.address(1, 1) == "10.77.1.2"
        assert "10.77.1.2/16" in output(lab, 1, "ip", "-br", "addr")
        assert output(lab, 1, "cat", "/sys/class/net/eth1/mtu") == "9000"
        assert output(lab, 1, "cat", "/proc/sys/net/ipv4/conf/all/arp_ignore") == "1"
        assert lab.congestion == "reno"
        if os.path.exists("/proc/sys/net/ipv6"):
            shown = output(lab, 1, "ip", "-6", "addr", "show", "scope", "link")
            assert shown.count("fe80::") == 2
            assert "tentative" not in shown


@pytest.mark.netns
def test_an_unknown_sysctl_is_named_and_nothing_stays(possible: None) -> None:
    with pytest.raises(NetLabError, match=r"does not take net\.no\.such=1"):
        NetLab(1, [0], sysctls={"net.no.such": "1"}).__enter__()
    assert left(wiring.namespace_prefix()) == []


# --- rates and faults ---


@pytest.mark.netns
def test_shaped_rate_and_slow_and_restore(two_hosts: NetLab) -> None:
    stream = Stream(two_hosts, 0)
    stream.expect(200 * GOODPUT, 0.5, rel=0.1)
    two_hosts.slow(0, 0, 50)
    time.sleep(0.3)
    stream.expect(50 * GOODPUT, 0.5, rel=0.15)
    two_hosts.restore(0, 0)
    stream.wait_for(120)


@pytest.mark.netns
def test_a_rested_cable_carries_no_faster_and_neither_does_a_changed_one(possible: None) -> None:
    """64 KiB from a port that has saved all it can; the time is bounded from below alone."""
    receive = """
        import socket, sys
        with socket.create_server((sys.argv[1], 9000)) as listener:
            print("ready")
            stream = listener.accept()[0]
            for _ in range(2):
                left = 1 << 16
                while left:
                    left -= len(stream.recv(left))
                stream.sendall(b"!")
    """
    send = """
        import socket, sys, time
        stream = socket.create_connection((sys.argv[1], 9000))
        for line in sys.stdin:
            began = time.monotonic()
            stream.sendall(bytes(1 << 16))
            stream.recv(1)
            print(time.monotonic() - began)
    """
    with NetLab(2, [10], slowest=8) as lab:
        receiver = python(lab, 1, receive, lab.address(1, 0))
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "ready\n"
        sender = Asked(lab, 0, send, lab.address(1, 0))
        for mbit in (10, 8):
            for host in (0, 1):
                lab.slow(host, 0, mbit)
            least_s = ((1 << 16) - wiring.burst_bytes(mbit, 1500)) * 8e-6 / mbit
            assert float(sender.ask()) >= least_s


@pytest.mark.netns
def test_a_rate_that_falls_holds_no_packet_back(possible: None) -> None:
    """Packets of 2,000 bytes wait uncut at 20 Mbit/s, and are more than 3 lets through at once."""
    echo = """
        import socket, sys, threading
        def serve(stream):
            while stream.recv(2000, socket.MSG_WAITALL):
                stream.sendall(b"!")
        with socket.create_server((sys.argv[1], 9000), backlog=64) as listener:
            print("ready")
            while True:
                threading.Thread(target=serve, args=listener.accept()[:1], daemon=True).start()
    """
    ask = """
        import socket, sys, threading
        answers = threading.Semaphore(0)
        def call():
            stream = socket.create_connection((sys.argv[1], 9000))
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                stream.sendall(bytes(2000))
                stream.recv(1)
                answers.release()
        for _ in range(24):
            threading.Thread(target=call, daemon=True).start()
        for line in sys.stdin:
            for _ in range(200):
                answers.acquire()
            print("done")
    """
    with NetLab(2, [20], slowest=3) as lab:
        server = python(lab, 1, echo, lab.address(1, 0))
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        client = Asked(lab, 0, ask, lab.address(1, 0))
        for mbit in (20, 3, 20, 3):
            for host in (0, 1):
                lab.slow(host, 0, mbit)
            assert client.ask() == "done\n"


@pytest.mark.netns
@pytest.mark.parametrize(("slowest", "loses_queue"), [(3, False), (26, True)])
def test_a_stream_goes_on_where_its_rate_falls(
    slowest: float, loses_queue: bool, possible: None
) -> None:
    """Of a stream TCP sends two segments at once where it may, which no bucket of the lower rates
    lets through."""
    take = """
        import socket, sys
        listener = socket.create_server((sys.argv[1], 5201))
        print("ready")
        stream, _ = listener.accept()
        for line in sys.stdin:
            left = 60_000
            while left > 0:
                left -= len(stream.recv(left))
            print("done")
    """
    send = """
        import socket, sys
        stream = socket.create_connection((sys.argv[1], 5201), 30)
        while True:
            stream.sendall(bytes(60_000))
    """
    with NetLab(2, [26], slowest=slowest) as lab:
        server = Asked(lab, 1, take, lab.address(1, 0))
        assert server.read() == "ready\n"
        python(lab, 0, send, lab.address(1, 0))
        for mbit in (26, 20, 26, 8, 26, 18):
            for host in (0, 1):
                lab.slow(host, 0, mbit, loses_queue=loses_queue)
            assert server.ask() == "done\n"


@pytest.mark.netns
def test_a_rate_falls_where_the_lab_was_made_for_it(possible: None) -> None:
    with NetLab(1, [0]) as lab:
        lab.slow(0, 0, 20)
        with pytest.raises(NetLabError, match="make it with slowest=10"):
            lab.slow(0, 0, 10)


@pytest.mark.netns
def test_broken_cable_is_silent_and_comes_back(two_hosts: NetLab) -> None:
    stream = Stream(two_hosts, 0)
    for fault, to, carrier in (
        ("cut", (), "Invalid argument"),
        ("unplug", (), "0"),
        ("blackhole", (), "1"),
        ("flush", (), "1"),
        ("mute", (1,), "1"),
    ):
        getattr(two_hosts, fault)(0, 0, *to)
        time.sleep(0.1)
        stream.expect(0, 0.2)
        carriers = output(
            two_hosts, 0, "cat", *(f"/sys/class/net/eth{nic}/carrier" for nic in (0, 1))
        )
        assert carriers.splitlines()[0].endswith(carrier), fault
        assert carriers.splitlines()[1] == "1", fault
        two_hosts.restore(0, 0)
        stream.wait_for(50)


# --- jobs ---


@pytest.mark.netns
def test_ranks_find_torchruns_environment_and_one_secret(two_hosts: NetLab) -> None:
    show = (
        "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR "
        "$RINGCOMM_INTERFACES $EXTRA; stat -c %a $RINGCOMM_SECRET_FILE; "
        "cat $RINGCOMM_SECRET_FILE"
    )
    job = two_hosts.start(["sh", "-c", show], 2, {"EXTRA": "more"}, quiet=True)
    assert job.wait(PATIENCE) == 0
    told = [job.output(rank).splitlines() for rank in range(4)]
    assert [lines[0] for lines in told] == [
        f"{rank}/4 {rank % 2}/2 10.77.0.1 eth0,eth1 more" for rank in range(4)
    ]
    assert {lines[1] for lines in told} == {"600"}
    secrets = {lines[2] for lines in told}
    assert len(secrets) == 1
    assert len(secrets.pop()) == 64


@pytest.mark.netns
def test_how_a_job_ends(two_hosts: NetLab) -> None:
    assert two_hosts.launch(["sleep", "60"], quiet=True, timeout=0.3) == 124
    assert two_hosts.launch(["sh", "-c", "exit $((RANK * 3))"], quiet=True) == 3
    assert two_hosts.launch(["sh", "-c", "[ $RANK = 1 ] && kill -9 $$; true"], quiet=True) == 137
    began = time.monotonic()
    job = two_hosts.start(["sh", "-c", "[ $RANK = 1 ] && exit 7; exec sleep 60"], quiet=True)
    assert job.wait(30, grace=0.2) == 7
    assert time.monotonic() - began < PROMPT
    assert all(rank.poll() is not None for rank in job.ranks)


# --- leaving nothing behind ---


@pytest.mark.netns
def test_nothing_stays_after_the_end_or_an_error(possible: None) -> None:
    lab = NetLab(2, [0])
    with lab:
        process = lab.run(0, ["sh", "-c", "trap '' TERM; sleep 60 & wait"])
        job = lab.start(["sleep", "60"], quiet=True)
        folder = next(Path(tempfile.gettempdir()).glob(wiring.namespace_prefix() + "*"))
        assert len(left(wiring.namespace_prefix())) == 3
    assert left(wiring.namespace_prefix()) == []
    assert process.poll() is not None
    assert all(rank.poll() is not None for rank in job.ranks)
    assert not folder.exists()
    with pytest.raises(NetLabError, match="closed"):
        lab.run(0, ["true"])
    with pytest.raises(ZeroDivisionError), NetLab(2, [0]):
        _ = 1 // 0
    assert left(wiring.namespace_prefix()) == []


def _end_at_hangup() -> None:
    """As in a terminal; under nohup programs begin without."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _start_command() -> tuple[subprocess.Popen[str], str]:
    """The command with a job that sleeps; returns it and the prefix of its namespaces."""
    command = subprocess.Popen(
        [
            sys.executable,
            str(BENCH / "netlab.py"),
            "--hosts",
            "2",
            "--nics",
            "0",
            "--",
            "sh",
            "-c",
            "echo up; exec sleep 60",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=_end_at_hangup,
    )
    assert command.stdout is not None
    assert command.stdout.readline() == "up\n"
    return command, f"netlab-{command.pid}-"


@pytest.mark.netns
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_signal_cleans_up(possible: None, number: signal.Signals, code: int) -> None:
    command, prefix = _start_command()
    assert len(left(prefix)) == 3
    command.send_signal(number)
    assert command.wait(PATIENCE) == code
    assert left(prefix) == []
    assert not list(Path(tempfile.gettempdir()).glob(prefix + "*"))


@pytest.mark.netns
def test_clean_removes_what_a_killed_lab_left_and_no_more(possible: None) -> None:
    with NetLab(1, [0]) as running:
        command, prefix = _start_command()
        command.kill()
        command.wait()
        assert len(left(prefix)) == 3
        assert netlab.main(["--clean"]) == 0
        assert left(prefix) == []
        assert not list(Path(tempfile.gettempdir()).glob(prefix + "*"))
        assert output(running, 0, "echo", "still here") == "still here"


# --- wrong arguments, and places where no lab can be built ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hosts": 0, "nics": [0]}, "hosts=0"),
        ({"hosts": 17, "nics": [0]}, "1 to 16"),
        ({"hosts": 2, "nics": []}, "0 NICs"),
        ({"hosts": 2, "nics": [-5]}, "-5 Mbit/s"),
        ({"hosts": 2, "nics": [1], "mtu": 100}, "mtu=100"),
        ({"hosts": 2, "nics": [1], "congestion": "bbr"}, "cubic or reno"),
    ],
)
def test_wrong_shapes_are_named(options: dict[str, object], said: str) -> None:
    with pytest.raises(NetLabError, match=said):
        NetLab(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--hosts", "99"], "hosts=99"),
        (["--nics", "fast"], "give numbers"),
        (["--sysctl", "net.core.x"], "KEY=VALUE"),
        (["--fault", "1:melt:0:0"], "SECONDS:KIND:HOST:NIC"),
        (["--fault", "1:slow:0:0"], "3:slow:0:1:100"),
        (["--fault", "1:cut:5:0"], "host 5"),
        (["--fault", "1:cut:0:5"], "NIC 5"),
    ],
)
def test_wrong_options_are_one_sentence(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert netlab.main([*argv, "--", "true"]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_without_root_or_tools_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if wiring.shutil.which("ip") and wiring.shutil.which("tc"):
        assert "needs root" in (netlab.why_unavailable() or "")
    monkeypatch.setattr(wiring.shutil, "which", lambda tool: None)
    assert "needs the command `ip`" in (netlab.why_unavailable() or "")
    with pytest.raises(NetLabError, match="iproute2"):
        NetLab(1, [0]).__enter__()
