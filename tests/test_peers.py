"""The comparison with other libraries: what it makes of figures, and one real run of two."""

from __future__ import annotations

import json
import socket
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from beside import Done
from patience import PATIENCE

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.insert(0, str(BENCH))

from comparison import standings  # noqa: E402
from comparison.standings import Measurement  # noqa: E402
from lab.site import Ended, Site  # noqa: E402
from libraries import adapters, contenders  # noqa: E402
from measure import control  # noqa: E402
from measure.physical import Physical  # noqa: E402

# --- figures ---


def one(
    library: str, turn: int, time_us: float, size: int = 4096, wire: str = "none", wrong: int = 0
) -> Measurement:
    """A measurement on the loopback whose busbw follows from its time."""
    return Measurement(
        "loopback", library, wire, size, turn, time_us, size / time_us / 1e3, 0.5, wrong
    )


FLOOR = Physical(
    {4: 5.0, 4096: 6.0},
    stream=2.0,
    stream_cpu=0.3,
    copy=9.0,
    copy_near=20.0,
    copy_handed=10.0,
    congestion="reno",
)


def merge(rows: list[Measurement], floors: list[Physical] | None = None) -> list:
    return standings.merge(rows, {"loopback": floors or []}, {"loopback": 2})


def test_medians_over_rounds_and_ratios_within_them() -> None:
    ours, theirs = [10.0, 20.0, 12.0], [30.0, 40.0, 48.0]
    rows = [one("gloo", turn, us) for turn, us in enumerate(theirs)]
    rows += [one("ringcomm", turn, us) for turn, us in enumerate(ours)]
    first, second = merge(rows)
    assert (first.library, first.time_us, first.ratio, first.rounds) == ("ringcomm", 12.0, 1.0, 3)
    assert (second.library, second.time_us) == ("gloo", 40.0)
    assert second.ratio == 3.0  # of 3, 2 and 4; the ratio of the medians would be 3.3
    assert second.ratio_range == (2.0, 4.0)
    assert second.spread == pytest.approx((48 - 30) / 40)
    slower = [one("ringcomm", turn, us * 4) for turn, us in enumerate(ours[:1])] + rows[:3]
    assert merge(slower)[1].ratio == pytest.approx(0.75)  # only round 0 has both


def test_wrong_elements_add_up_and_wires_stay_apart() -> None:
    rows = [
        one("ringcomm", 0, 10.0, wrong=2),
        one("ringcomm", 1, 10.0, wrong=3),
        one("ringcomm", 0, 5.0, wire="bf16"),
    ]
    found = merge(rows)
    assert [(row.label, row.wrong) for row in found] == [("ringcomm", 5), ("ringcomm bf16", 0)]
    assert found[1].ratio == 0.5


def test_the_floor_is_one_way_or_the_bytes() -> None:
    assert standings.floor_us(FLOOR, 64, 2) == 5.0
    assert standings.floor_us(FLOOR, 1_000_000, 2) == pytest.approx(500.0)
    assert standings.floor_us(FLOOR, 1_000_000, 4) == pytest.approx(750.0)
    slower = Physical({4: 4.0, 4096: 9.0}, 1.0, 0.2, 10.0, 15.0, 12.0, "reno")
    best = standings.best_floor([FLOOR, slower])
    assert best == Physical({4: 4.0, 4096: 6.0}, 2.0, 0.2, 10.0, 20.0, 12.0, "reno")
    assert merge([one("gloo", 0, 10.0)], [FLOOR, slower])[0].floor_us == 4.0
    assert standings.best_floor([]) is None


def test_the_floor_of_shared_memory_is_a_copy() -> None:
    assert standings.floor_us(FLOOR, 4096, 2, shared=True) is None
    assert standings.floor_us(FLOOR, 1_000_000, 2, shared=True) == pytest.approx(100.0)
    assert standings.floor_us(FLOOR, 9_000_000, 2, shared=True) == pytest.approx(1000.0)


# --- who runs, and when ---


def test_a_library_that_is_not_there_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders, "_installed", lambda name: False)
    reason = contenders.CONTENDERS["mpich"].find(tmp_path)
    assert isinstance(reason, str)
    assert f"`pip install mpich mpi4py numpy` into {tmp_path / 'mpich'}" in reason
    own = tmp_path / "mpich/bin/python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert contenders.CONTENDERS["mpich"].find(tmp_path) == own


# --- several ports ---


def test_a_library_that_takes_one_port_takes_the_fastest() -> None:
    site = Site(2, 2, [1000, 2500, 100])
    assert site.interfaces == ["eth1", "eth0", "eth2"]
    assert Site(2, 2, [1000, 0]).interfaces == ["eth1", "eth0"]  # 0: not shaped
    assert Site(2, 2, [1000, 1000]).interfaces == ["eth0", "eth1"]
    assert Site(0, 2).rates == {"lo": 0.0}


def test_who_takes_several_ports_is_told_their_rates() -> None:
    """Open MPI's own guess and equal parts of a tensor are wrong for unequal emulated ports."""
    gloo, mpi = (contenders.CONTENDERS[name] for name in ("gloo-ports", "openmpi-tcp"))
    site = Site(2, 2, [1000, 2500])
    assert gloo._ports(site) == {"GLOO_SOCKET_IFNAME": "eth1,eth0", adapters.SHARES: "2500,1000"}
    assert gloo._ports(Site(2, 2, [1000, 0]))[adapters.SHARES] == ""
    line = " ".join(contenders._openmpi(mpi, site, Path("bin/python"), ["a", "b"], "agent"))
    assert "btl_tcp_bandwidth_eth1 2500 --mca btl_tcp_bandwidth_eth0 1000" in line
    for bare in (Site(0, 2), Site(2, 2, [0, 0])):
        assert "bandwidth" not in " ".join(
            contenders._openmpi(mpi, bare, Path("bin/python"), [], "")
        )


def test_parts_are_as_large_as_the_rates_of_their_ports() -> None:
    assert adapters.cuts(3500, [2500, 1000]) == (2500,)
    assert adapters.cuts(11, [1.0, 1.0]) == (6,)
    assert adapters.cuts(3, [1, 1, 1]) == (1, 2)
    assert adapters.cuts(8, [5]) == ()


def test_records_of_a_job() -> None:
    assert Ended(0, '# a remark\n{"at": 1}\n{"at": 2}\n').records() == [{"at": 1}, {"at": 2}]
    why = "ringcomm.errors.TimeoutError: rank 1 is late"
    raised = f"Traceback (most recent call last):\n[rank0]: {why}\nKeyError: 1\nbye\n"
    with pytest.raises(RuntimeError, match=rf"^\[rank0\]: {why}$"):
        Ended(1, raised).records()
    with pytest.raises(RuntimeError, match=r"^bye \(exit code 2\)$"):
        Ended(2, '{"at": 1}\nbye\n').records()


# --- the control channel ---


def test_the_star_takes_those_with_the_token_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = probe.getsockname()
    found: list[socket.socket] = []
    token = b"t" * 32
    taker = threading.Thread(target=lambda: found.extend(control._welcome(address, token, 2)))
    taker.start()
    stranger = control._dial(address, control._HELLO.pack(b"x" * 32, 1))
    friend = control._dial(address, control._HELLO.pack(token, 1))
    taker.join(PATIENCE)
    with stranger, friend, found[0]:
        assert stranger.recv(1) == b""
        assert found[0].getpeername() == friend.getsockname()


# --- all of it ---


@pytest.mark.beside(
    "{python}",
    str(BENCH / "peers.py"),
    "--libraries",
    "ringcomm,gloo,mpich",
    "--sizes",
    "4K",
    "--rounds",
    "1",
    "--budget",
    "0.05",
    "--floor",
    "0.2",
    "--envs",
    "{folder}/none",
    "--json",
    "{folder}/out.json",
)
def test_two_libraries_on_the_loopback(beside: Done) -> None:
    pytest.importorskip("ringcomm")
    pytest.importorskip("torch")
    assert beside.code == 0, beside.output
    told = json.loads((beside.folder / "out.json").read_text())
    found = {row["library"]: row for row in told["standings"]}
    assert {"ringcomm", "gloo"} <= set(found), beside.output
    assert all(row["wrong"] == 0 and row["time_us"] > 0 for row in found.values())
    assert found["ringcomm"]["ratio"] == 1.0
    assert found["gloo"]["floor_us"] > 0
    (floor,) = told["floors"]["loopback"]
    assert min(floor["stream"], floor["copy"], *floor["half_trip_us"].values()) > 0
    if "mpich" not in found:
        assert "mpich: skipped: not installed" in beside.output
    rates = np.array([row["busbw"] for row in found.values()])
    assert np.all(np.isfinite(rates))
