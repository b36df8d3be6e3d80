"""Accounts of exchanges, and the reports of those who keep one: hook, optimizers, OuterStep."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from optim_steps import Net  # noqa: E402
from ranks import run_ranks  # noqa: E402

from ringcomm import Communicator  # noqa: E402
from ringcomm.core.work import WorkStats  # noqa: E402
from ringcomm.torch import OuterStep, sparse  # noqa: E402
from ringcomm.torch.optim import Muon, OneBitAdam  # noqa: E402
from ringcomm.torch.sync import account as module  # noqa: E402
from ringcomm.torch.sync.account import KEPT, Account, covered  # noqa: E402


@pytest.mark.parametrize(
    ("intervals", "until", "length"),
    [
        ([], 5.0, 0.0),
        ([(8.0, 9.0), (2.0, 5.0), (4.0, 6.0)], 8.0, 4.0),  # two overlap, one is later
        ([(2.0, 9.0), (6.0, 10.0)], 6.0, 4.0),  # cut at its end
    ],
)
def test_what_intervals_cover(
    intervals: list[tuple[float, float]], until: float, length: float
) -> None:
    assert covered(intervals, until) == length


def test_an_account_of_two_steps() -> None:
    account = Account()
    account.reset()
    for step in range(2):
        first = account.submit(100, last=False)
        first([WorkStats(sent_bytes=30, rail_bytes=(80, 0))])
        second, third = account.submit(50, last=False), account.submit(10, last=True)
        assert len(account.report()["steps"]) == step
        third([WorkStats(sent_bytes=20, rail_bytes=(0, 70)), WorkStats(shared_bytes=7)])
        second([WorkStats(sent_bytes=10, rail_bytes=(60, 0))])
    report = account.report()
    assert (report["buckets"], report["payload_bytes"], report["wire_bytes"]) == (6, 320, 120)
    assert (report.buckets, report.payload_bytes, report.wire_bytes) == (6, 320, 120)
    assert (report.shared_bytes, report.rail_bytes, account.submitted) == (14, [280, 140], 6)
    for told in report["steps"]:
        assert (told["buckets"], told["payload_bytes"], told["wire_bytes"]) == (3, 160, 60)
        assert told["shared_bytes"] == 7
        assert told["step_s"] == pytest.approx(told["compute_s"] + told["exposed_s"], abs=1e-12)
        assert 0 < told["hidden_s"] <= told["compute_s"]
        assert told["exposed_s"] > 0
    works = report["works"]
    assert report["comm_s"] == pytest.approx(sum(done - begun for begun, done in works))
    account.reset()
    assert account.report()["steps"] == account.report()["works"] == []


def test_an_account_of_steps_that_travel_during_the_next() -> None:
    account = Account()
    account.deferred = True
    sent = [WorkStats(sent_bytes=10)]
    overs: list[Any] = []
    for _ in range(3):
        with account.stall():
            for over in overs:
                over(sent)
        overs = [account.submit(100, last=False), account.submit(100, last=True)]
    assert len(account.report().steps) == 2
    for over in overs:
        over(sent)
    first, second, third = account.report().steps
    for step in (first, second, third):
        assert step["step_s"] == pytest.approx(step["compute_s"] + step["exposed_s"])
        assert step["wire_bytes"] == 20
        assert step["hidden_s"] <= step["in_flight_s"]
    assert first["exposed_s"] < 1.0
    assert second["exposed_s"] > 0
    assert [len(account.unreported_steps()), len(account.unreported_steps())] == [3, 0]


def test_a_bucket_of_before_a_reset_does_not_count() -> None:
    account = Account()
    overs = [account.submit(100, last=True), account.submit(100, last=False)]
    account.reset()
    overs.append(account.submit(10, last=True))
    for over in overs:
        over([WorkStats(sent_bytes=5)])
    report = account.report()
    assert (report.buckets, report.payload_bytes, report.wire_bytes) == (1, 10, 5)
    assert [step["payload_bytes"] for step in report.steps] == [10]
    assert [step["payload_bytes"] for step in account.unreported_steps()] == [100, 10]


def test_an_account_does_not_grow_for_ever() -> None:
    account = Account()
    for _ in range(KEPT + 5):
        account.submit(8, last=True)([])
    report = account.report()
    assert len(report["steps"]) == len(report["works"]) == KEPT
    assert report["buckets"] == KEPT + 5


def test_a_report_is_printed_as_a_table() -> None:
    account = Account()
    assert "0 buckets, 0 steps" in str(account.report())
    for _ in range(2):
        over = account.submit(4_000_000, last=True)
        sent = WorkStats(sent_bytes=1_500_000, shared_bytes=20_000, rail_bytes=(1_000_000, 500_100))
        over([sent])
    lines = [line.split("  ") for line in str(account.report()).splitlines()]
    told = {parts[0]: parts[1:] for line in lines if (parts := [p.strip() for p in line if p])}
    assert "exchanged: 2 buckets, 2 steps" in told
    assert told["before compression"] == ["8.00 MB", "4.00 MB"]
    assert told["sent over ports"] == ["3.00 MB", "1.50 MB"]
    assert told["rail 1, headers too"] == ["1.00 MB"]
    assert told["through shared memory"] == ["40.00 KB", "20.00 KB"]
    assert all(told[name][0].endswith(" ms") for name in ("step", "hidden communication"))
    assert repr(account.report()) == repr(dict(account.report()))


def stats(submitted_s: float, finished_s: float, sent: int) -> WorkStats:
    return WorkStats(int(1e9 * submitted_s), 0, int(1e9 * finished_s), sent, 0, (sent,))


def test_an_account_of_steps_that_wait_between_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buckets overlap; the step waits for each, and computes between and after."""
    moments = iter([0.0, 1.0, 1.5, 2.0, 2.25, 3.0, 4.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(moments))
    account = Account()
    account.reset()
    for work in (stats(0.5, 1.4, 30), stats(0.75, 2.25, 10)):
        with account.stall():
            pass
        account.note(50, [work])
    account.end_step()
    report = account.report()
    (step,) = report.steps
    times = {key: value for key, value in step.items() if key.endswith("_s")}
    assert times == pytest.approx(
        {
            "step_s": 3.0,
            "compute_s": 2.25,
            "backward_s": 0.25,
            "hidden_s": 1.0,
            "exposed_s": 0.75,
            "in_flight_s": 1.75,
        }
    )
    assert (step["buckets"], step["payload_bytes"], step["wire_bytes"]) == (2, 100, 40)
    assert (report.wire_bytes, report.rail_bytes, account.waited_s) == (40, [40], 0.75)
    account.reset()
    assert (account.report().buckets, account.sent.total, account.payload) == (0, 0, 0)


def test_what_an_account_has_waited_before_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step begins with it; of what spans a reset the part behind counts; transfers that
    were over before are hidden."""
    moments = iter([1.0, 2.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(moments))
    account = Account()
    with account.stall():
        pass
    account.note(8, [stats(3.0, 4.0, 8)])
    account.end_step()
    (step,) = account.report().steps
    assert (step["step_s"], step["exposed_s"], step["hidden_s"]) == (4.0, 1.0, 1.0)
    with account.stall():
        account.reset()
    account.note(8, [stats(7.5, 7.75, 8)])
    account.end_step()
    (step,) = account.report().steps
    assert (step["step_s"], step["exposed_s"], step["hidden_s"]) == (2.0, 1.0, 0.0)


def test_a_step_that_a_reset_has_cut_holds_up_no_other() -> None:
    account = Account()
    account.note(8, [stats(0.0, 1.0, 8)])
    account.reset()
    account.note(8, [stats(0.0, 1.0, 8)])
    account.end_step()
    assert len(account.unreported_steps()) == 1


def test_an_account_of_steps_without_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step waits that exchanges nothing is lost by the next."""
    moments = iter([0.0, 0.0, 1.0, 1.0, 4.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(moments))
    account = Account()
    account.reset()
    with account.stall():
        pass
    account.end_step()
    account.note(8, [stats(2.0, 3.0, 8)])
    account.end_step()
    (step,) = account.report().steps
    assert (step["step_s"], step["exposed_s"], step["hidden_s"]) == (4.0, 1.0, 1.0)


def one_bit_adam(comm: Communicator, model: Net) -> Any:
    return OneBitAdam(model.parameters(), 1e-3, freeze=1, threshold=1, comm=comm)


def muon(comm: Communicator, model: Net) -> Any:
    return Muon([model.embed, model.head], comm=comm)


def gathered(comm: Communicator, model: Net) -> Any:
    return sparse.SGD(model.parameters(), 0.1, comm=comm, exchange="gather", overlap=False)


def by_owners(comm: Communicator, model: Net) -> Any:
    return sparse.Adam(
        model.parameters(), 0.1, comm=comm, exchange="owner", overlap=False, staleness=1
    )


@pytest.mark.parametrize("make", [one_bit_adam, muon, gathered, by_owners])
def test_an_optimizer_reports_its_steps(make: Any) -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        optimizer = make(comm, model)
        before = optimizer.comm.stats()["payload_bytes"]
        for _ in range(4):
            model.zero_grad()
            sum((p * p).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
            optimizer.step()
        report = optimizer.report()
        late = int(getattr(optimizer, "staleness", 0))
        assert len(report.steps) == 4 - late
        assert report.wire_bytes + report.shared_bytes == optimizer.carried > 0
        for step in report.steps:
            assert step["compute_s"] >= 0
            assert step["step_s"] == pytest.approx(step["compute_s"] + step["exposed_s"])
            assert 0 <= step["hidden_s"] <= step["in_flight_s"]
        assert sum(step["exposed_s"] for step in report.steps) <= optimizer.waited_s
        assert "exchanged: " in str(report)
        getattr(optimizer, "flush", lambda: None)()
        sent = optimizer.comm.stats()["payload_bytes"] - before
        assert optimizer.carried < sent < optimizer.carried + 5000  # the agreements
        optimizer.reset_report()
        assert optimizer.report().steps == []
        assert optimizer.carried == 0
        if hasattr(optimizer, "close"):
            optimizer.close()

    run_ranks(2, body)


@pytest.mark.parametrize("delay", [0, 1])
def test_an_outer_step_reports_its_rounds(delay: int) -> None:
    def body(comm: Communicator) -> None:
        model = Net()
        time.sleep(0.1 * comm.rank)  # rank 0 waits before there is anything in flight
        inner = torch.optim.SGD(model.parameters(), 0.01)
        with OuterStep(model, inner, every=2, delay=delay, compression="int8", comm=comm) as outer:
            for _ in range(6):
                model.zero_grad()
                sum((p * p).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
                inner.step()
            outer.flush()
        told = outer.report()
        rounds = outer.exchanges()
        assert len(rounds.steps) == told.rounds == 3
        assert rounds.wire_bytes + rounds.shared_bytes == told.sent_bytes
        assert copy.deepcopy(told) == told
        assert rounds.payload_bytes == told.payload_bytes > 2 * (told.sent_bytes or 1)
        for one in rounds.steps:
            assert one["step_s"] == pytest.approx(one["compute_s"] + one["exposed_s"])
            assert one["compute_s"] >= 0
            assert one["exposed_s"] <= told.waited_s

    run_ranks(2, body)
