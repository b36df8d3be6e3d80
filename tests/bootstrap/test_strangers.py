"""Whoever else connects: no harm, no delay, no noise."""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from bringup_world import identity, join_world, meshes, run, run_ranks
from patience import PATIENCE, PROMPT, until

from ringcomm.bootstrap import acceptor as acceptor_module
from ringcomm.bootstrap import sockets, strangers
from ringcomm.bootstrap.acceptor import (
    MAX_GREETED,
    MAX_NEW,
    NEW_PATIENCE,
    NEW_PER_ADDRESS,
    Acceptor,
)
from ringcomm.bootstrap.dialer import Dial, Target
from ringcomm.bootstrap.handshake import Client
from ringcomm.bootstrap.handshake_params import Key, RefusedError, Role, Terms, job_hash
from ringcomm.bootstrap.loop import Loop
from ringcomm.bootstrap.rendezvous import open_tcp
from ringcomm.bootstrap.strangers import StrangerLog
from ringcomm.config import Config

pytestmark = pytest.mark.usefixtures("no_leaked_fds")

JOB = job_hash("job")
KEY = Key.derive(None, JOB)
TERMS = Terms(Role.LANE, JOB, 2, 1, 0)


def scan(address: tuple[str, int]) -> None:
    """Connect and close, as a port scanner."""
    socket.create_connection(address).close()


def reset(address: tuple[str, int]) -> None:
    """Connect and reset."""
    with socket.create_connection(address) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def say(text: bytes) -> Callable[[tuple[str, int]], None]:
    """Says something that is not ours, and gets no answer."""

    def talk(address: tuple[str, int]) -> None:
        with socket.create_connection(address) as sock, contextlib.suppress(OSError):
            sock.sendall(text)
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(PATIENCE)
            assert sock.recv(100) == b""

    return talk


STRANGERS = [
    scan,
    reset,
    say(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    say(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500),
    say(bytes(range(256)) * 4000),
    say(b"short"),
]
NAMES = ["scan", "reset", "http", "tls", "noise", "short"]


@contextlib.contextmanager
def serving() -> Iterator[tuple[tuple[str, int], list[Terms], Acceptor]]:
    """An Acceptor in a thread: its address, and whom it welcomed."""
    listener = sockets.listen("127.0.0.1")
    welcomed: list[Terms] = []
    stop = threading.Event()
    loop = Loop()

    def welcome(sock: socket.socket, terms: Terms) -> None:
        welcomed.append(terms)
        sock.close()

    served = Acceptor(loop, [listener], KEY, TERMS, lambda _: None, welcome)
    address = listener.getsockname()

    def body() -> None:
        while not stop.is_set():
            loop.run(lambda: False, time.monotonic() + 0.02)

    thread = threading.Thread(target=body)
    thread.start()
    try:
        yield address, welcomed, served
    finally:
        stop.set()
        thread.join()
        served.close()
        loop.close()


@pytest.fixture
def enduring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is silent is not dropped in time for others to get in."""
    monkeypatch.setattr(acceptor_module, "NEW_PATIENCE", 60.0)


def get_in(address: tuple[str, int]) -> float:
    """Tries the handshake as dialer.py does; the seconds until it succeeded."""
    began = time.monotonic()
    while True:
        try:
            with socket.create_connection(address, timeout=3) as sock:
                run(sock, Client(KEY, TERMS), time.monotonic() + 3)
            return time.monotonic() - began
        except (RefusedError, OSError):
            assert time.monotonic() - began < PATIENCE
            time.sleep(0.02)


@pytest.mark.parametrize("stranger", STRANGERS, ids=NAMES)
def test_each_kind(stranger: Callable[[tuple[str, int]], None]) -> None:
    with serving() as (address, welcomed, served):
        for _ in range(20):
            stranger(address)
        get_in(address)
        assert until(lambda: welcomed == [TERMS])
        assert served.pending <= MAX_NEW


def test_silent_connections_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "NEW_PATIENCE", 0.3)
    with serving() as (address, _, served):
        with socket.create_connection(address) as silent:
            silent.settimeout(PATIENCE)
            assert silent.recv(1) == b""
        assert until(lambda: served.pending == 0)


def test_a_dripping_connection_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "NEW_PATIENCE", 0.3)
    with serving() as (address, _, served), socket.create_connection(address) as sock:
        drops = iter(Client(KEY, TERMS).first())  # which last for much longer than PROMPT

        def is_dropped() -> bool:
            try:
                sock.send(bytes([next(drops)]))
            except OSError:
                return True
            time.sleep(0.15)
            return False

        assert until(is_dropped, PROMPT)
        assert until(lambda: served.pending == 0)


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    """Some thousand are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4000 and hard != resource.RLIM_INFINITY and hard < 4000:
        pytest.skip("too few descriptors allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4000), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("enduring")
def test_a_thousand_silent_connections() -> None:
    crowd: list[socket.socket] = []
    try:
        with many_descriptors(), serving() as (address, welcomed, served):
            for _ in range(1000):
                sock = socket.socket()
                sock.setblocking(False)
                sock.connect_ex(address)
                crowd.append(sock)
            assert get_in(address) < 2 * PROMPT
            assert until(lambda: welcomed == [TERMS])
            assert served.pending <= MAX_NEW
    finally:
        for sock in crowd:
            sock.close()


@pytest.mark.usefixtures("enduring")
def test_a_world_comes_up_among_strangers(port: int, caplog: pytest.LogCaptureFixture) -> None:
    """They knock at the rendezvous, which waits for its last rank meanwhile."""
    caplog.set_level(logging.INFO, "ringcomm")
    stop = threading.Event()

    def pester(stranger: Callable[[tuple[str, int]], None]) -> None:
        while not stop.wait(0.005):
            with contextlib.suppress(OSError):
                stranger(("127.0.0.1", port))

    threads = [threading.Thread(target=pester, args=(stranger,)) for stranger in STRANGERS]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            outcomes = join_world(4, port, lanes=2, late={3: 0.3})
            for made in meshes(outcomes):
                made.close()
            assert max(outcome.seconds for outcome in outcomes.values()) < 0.3 + PROMPT
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    turned_away = [r for r in caplog.records if "turned away" in r.getMessage()]
    assert len(turned_away) == 1  # all come from one address
    assert strangers.LOG._seen["127.0.0.1"][1] > 20


@pytest.mark.usefixtures("enduring")
def test_lane_listeners_among_strangers(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every listener that a rank opens is scanned before its peers come."""
    honest = sockets.listen
    held: list[socket.socket] = []

    def listen(*place: Any, **options: Any) -> socket.socket:
        listener = honest(*place, **options)
        where = listener.getsockname()
        for text in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\0" * 4000):
            sock = socket.create_connection(where[:2])
            sock.sendall(text)
            held.append(sock)
        return listener

    monkeypatch.setattr("ringcomm.bootstrap.bringup.listen", listen)
    outcomes = join_world(4, port, lanes=3)
    for made in meshes(outcomes):
        made.close()
    for sock in held:
        sock.close()
    assert max(outcome.seconds for outcome in outcomes.values()) < PROMPT


@contextlib.contextmanager
def crowd(address: tuple[str, int], words: bytes, per_second: float = 500) -> Iterator[None]:
    """Strangers from eight addresses, who say this and then wait: many, and more at a steady
    rate."""
    stop = threading.Event()
    held: collections.deque[socket.socket] = collections.deque(maxlen=2000)

    def body() -> None:
        began, made = time.perf_counter(), 0
        while not stop.wait(0.002):
            while made < 500 + (time.perf_counter() - began) * per_second:
                sock = socket.socket()
                sock.setblocking(False)
                sock.bind((f"127.0.0.{2 + made % 8}", 0))
                sock.connect_ex(address)
                with contextlib.suppress(OSError):
                    sock.send(words)
                if len(held) == held.maxlen:
                    held[0].close()
                held.append(sock)
                made += 1

    thread = threading.Thread(target=body)
    thread.start()
    try:
        assert until(lambda: len(held) > 500)
        yield
    finally:
        stop.set()
        thread.join()
        for sock in held:
            sock.close()


CROWDS = {
    "one byte": b"R",
    "public bytes": b"RCOMMhi\n\1\0",
    "a recorded HELLO": Client(KEY, TERMS).first(),
    "a wrong proof": Client(KEY, TERMS).first() + bytes(32),
}


@pytest.mark.parametrize("words", CROWDS.values(), ids=CROWDS)
def test_a_crowd_keeps_nobody_out(words: bytes) -> None:
    with many_descriptors(), serving() as (address, welcomed, served), crowd(address, words):
        for number in range(1, 4):
            get_in(address)
            assert until(lambda n=number: welcomed == [TERMS] * n)
            assert served.pending <= MAX_NEW + MAX_GREETED


def held_by(address: tuple[str, int], count: int, words: bytes = b"") -> list[socket.socket]:
    """Connections from one address, which stay."""
    found = []
    for _ in range(count):
        sock = socket.create_connection(address)
        sock.sendall(words)
        found.append(sock)
    return found


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end has hung up."""
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.usefixtures("enduring")
def test_an_address_has_few_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a whole HELLO; the oldest gives way at once."""
    monkeypatch.setattr(acceptor_module, "CROWDED_PATIENCE", 60.0)
    with serving() as (address, _, served):
        held = held_by(address, NEW_PER_ADDRESS + 12, b"RCOMM")
        assert until(lambda: sum(map(is_closed, held)) == 12)
        assert [is_closed(sock) for sock in held] == [True] * 12 + [False] * NEW_PER_ADDRESS
        assert served.pending == NEW_PER_ADDRESS
        for sock in held:
            sock.close()


def test_who_says_nothing_goes_at_once_where_others_wait() -> None:
    with serving() as (address, _, served):
        held = held_by(address, NEW_PER_ADDRESS)
        began = time.monotonic()
        assert until(lambda: served.pending < NEW_PER_ADDRESS, NEW_PATIENCE)
        assert time.monotonic() - began < NEW_PATIENCE
        for sock in held:
            sock.close()


def test_a_recorded_hello_holds_no_place_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "PATIENCE", 0.3)
    with serving() as (address, _, served):
        held = held_by(address, 50, Client(KEY, TERMS).first())
        assert until(lambda: served.pending == 50 or is_closed(held[0]))
        assert until(lambda: served.pending == 0)
        for sock in held:
            sock.close()


def test_a_dialer_keeps_its_place_in_the_queue() -> None:
    """Strangers may be before it: it stays for as long as there is time."""
    listener = sockets.listen("127.0.0.1")
    loop, connected = Loop(), []
    target = Target("127.0.0.1", listener.getsockname()[1])
    dial = Dial(loop, target, KEY, TERMS, lambda _, sock: connected.append(sock))
    try:
        loop.run(lambda: dial.shaking, time.monotonic() + PATIENCE)
        first = dial._sock
        loop._timers = [(0.0, order, timer) for _, order, timer in loop._timers]  # much later
        loop.catch_up()
        assert dial._sock is first
        assert dial.state == "connected, but no answer to the handshake"
        acceptor = Acceptor(
            loop, [listener], KEY, TERMS, lambda _: None, lambda sock, _: sock.close()
        )
        assert loop.run(lambda: bool(connected), time.monotonic() + PATIENCE)
        assert connected == [first]
        acceptor.close()
    finally:
        dial.stop()
        loop.close()
        for sock in [listener, *connected]:
            sock.close()


def test_accept_errors_pause_and_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "_ERROR_PAUSE", 0.05)
    failures = iter([errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.ENOBUFS])

    class Failing:
        """A listener whose first accepts fail."""

        def __init__(self, listener: socket.socket) -> None:
            self._listener = listener

        def accept(self) -> tuple[socket.socket, tuple[str, int]]:
            code = next(failures, None)
            if code is not None:
                raise OSError(code, "no")
            return self._listener.accept()

        def fileno(self) -> int:
            return self._listener.fileno()

        def close(self) -> None:
            self._listener.close()

    honest = sockets.listen
    monkeypatch.setattr(sockets, "listen", lambda address: Failing(honest(address)))
    monkeypatch.setattr(
        Failing, "getsockname", lambda self: self._listener.getsockname(), raising=False
    )
    with serving() as (address, welcomed, _):
        get_in(address)
        assert until(lambda: welcomed == [TERMS])
    assert next(failures, None) is None


def test_a_stale_process_of_another_job(port: int) -> None:
    """It keeps trying to join; the world that it does not belong to comes up."""

    def call(rank: int) -> int:
        if rank == 2:
            stale = identity(1, 2, port, job="yesterday")
            with pytest.raises(ConnectionError, match=r"other job|refused"):
                open_tcp(stale, Config(), None, time.monotonic() + 1.0)
            return 0
        time.sleep(0.3)
        deadline = time.monotonic() + 30
        exchange = open_tcp(identity(rank, 2, port), Config(), None, deadline)
        try:
            return len(exchange.allgather(b"x", deadline))
        finally:
            exchange.close()

    outcomes = run_ranks(call, range(3))
    assert [outcomes[rank].value for rank in range(3)] == [2, 2, 0]


def test_one_line_per_address_and_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ringcomm")
    log = StrangerLog()
    for _ in range(500):
        log.note("192.0.2.1", "not ringcomm")
        log.note("192.0.2.2", "not ringcomm")
    assert len(caplog.records) == 2
    log._seen["192.0.2.1"][0] -= 61.0
    log.note("192.0.2.1", "not ringcomm")
    assert "499 more" in caplog.records[-1].getMessage()


def test_the_log_does_not_grow(caplog: pytest.LogCaptureFixture) -> None:
    """However many addresses there are: those that find no room share a line."""
    caplog.set_level(logging.INFO, "ringcomm")
    log = StrangerLog()
    for _ in range(2):
        for number in range(3000):
            log.note(f"2001:db8::{number:x}", "not ringcomm")
    assert len(log._seen) <= 256
    assert len(caplog.records) <= 256
    for entry in log._seen.values():
        entry[0] -= 61.0
    log.note("2001:db8::1:1", "not ringcomm")
    assert "2001:db8::1:1" in caplog.records[-1].getMessage()
