"""The ranks of a job as a grid: a row for each host, a column for each place on a host.

    place       0    1
    host a      0    1      row     ranks of one host, in a torch process group of their own
    host b      2    3      column  ranks of equal place, one on each host

Rows watch over a step. A failure of one rank reaches its column, as that communicator fails, and
its row, as this rank's watch messages fail; each rank that learns of it fails its own row and
column. So all ranks know at once, also those that wait in a process group that reports no failure.

Invariants: every rank is in one row and one column; all rows are equally long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch.distributed as dist

from ..communicator import Communicator
from ..core.calls import naming
from ..core.work import Work
from ..errors import ConfigError, RingcommError

_WATCH = 1  # tag of the message that a rank has finished a step


class Grid:
    """This rank's row and column. Making it is a collective.

    Args:
        comm: the communicator of all ranks.
        local_group: the process group of this host's ranks.

    Attributes:
        row, column: communicators of this rank's row and column.
        places: length of a row.
        place: this rank's place in its row.
        group: ``local_group``.

    Raises ConfigError, on all ranks alike, if the local groups do not form such a grid.
    """

    @naming("HierarchicalState()")
    def __init__(self, comm: Communicator, local_group: Any) -> None:
        is_group = isinstance(local_group, dist.ProcessGroup)
        members = list(dist.get_process_group_ranks(local_group)) if is_group else []
        self.group = local_group
        self.places = len(members)
        me = dist.get_rank()
        self.place = members.index(me) if me in members else -1
        first = members[0] if members else -1
        _require_grid(comm.allgather(np.array([first, self.place, self.places], np.int64)))
        self.row = _split(comm, first, self.place)
        self.column = _split(comm, self.place, first)
        equals = self.column.allgather(np.array([me], np.int64)).reshape(-1)
        self._names = {id(self.row): list(members), id(self.column): [int(n) for n in equals]}
        self._others = [place for place in range(self.places) if place != self.place]

    def watch(self, on_failure: Callable[[RingcommError], None]) -> None:
        """Calls ``on_failure``, from ringcomm's callback thread, if another rank of the row fails
        before it has finished this step."""

        def look(work: Work) -> None:
            error = work.exception()
            if error is not None:
                on_failure(self.named(self.row, error))

        for place in self._others:
            token = np.zeros(1, np.uint8)
            try:
                self.row.recv(token, place, tag=_WATCH, async_op=True).call_back(look)
            except RingcommError as error:
                on_failure(self.named(self.row, error))

    def pass_on(self) -> None:
        """Tells the row that this rank has finished the step."""
        for place in self._others:
            self.row.send(np.zeros(1, np.uint8), place, tag=_WATCH, async_op=True)

    def fail(self, error: BaseException) -> None:
        """Fails row and column, on all their ranks, with the first cause as the reason."""
        reason = f"{type(error).__name__}: {error}".rpartition(" aborted: ")[2]
        for comm in (self.row, self.column):
            with contextlib.suppress(RingcommError):  # it has failed or is closed
                comm.abort(reason)

    def named(self, comm: Communicator, error: RingcommError) -> RingcommError:
        """Returns an error of row or column with the ranks' numbers in the job."""
        names = self._names[id(comm)]
        if error.rank is None or not 0 <= error.rank < len(names):
            return error
        listed = ", ".join(map(str, names))
        return type(error)(
            f"in the group of ranks {listed}, its rank {error.rank} being rank "
            f"{names[error.rank]}: {error}",
            rank=names[error.rank],
            host=error.host,
            rail=error.rail,
            lane=error.lane,
            seq=error.seq,
            elapsed=error.elapsed,
        )

    @contextlib.contextmanager
    def ranks_named(self, comm: Communicator) -> Iterator[None]:
        """Raises errors of row or column as ``named``; the local group has the row's ranks."""
        try:
            yield
        except RingcommError as error:
            raise self.named(comm, error) from error.__cause__

    def close(self) -> None:
        """Closes both communicators."""
        self.row.close()
        self.column.close()


def _split(comm: Communicator, color: int, key: int) -> Communicator:
    made = comm.split(color, key)
    assert made is not None
    return made


def _require_grid(rows: Any) -> None:
    """Raises ConfigError if the local groups form no grid. A row has a rank's first group member,
    its own place and the size of its local group."""
    fix = (
        "give each rank the process group of its host's ranks, as "
        "dist.new_subgroups(ranks_per_host)[0] makes them"
    )
    if any(place < 0 for _, place, _ in rows):
        bad = [rank for rank, (_, place, _) in enumerate(rows) if place < 0]
        raise ConfigError(f"local_group: rank {bad[0]} is not in the group that it gave; {fix}")
    sizes = sorted({int(size) for _, _, size in rows})
    if len(sizes) > 1:
        raise ConfigError(
            f"local_group: hosts have {' or '.join(map(str, sizes))} ranks; HierarchicalState "
            "needs the same number on each"
        )
    seen = {(int(first), int(place)) for first, place, _ in rows}
    whole = {(first, place) for first, _ in seen for place in range(sizes[0])}
    if len(seen) < len(rows) or seen != whole:
        raise ConfigError(f"local_group: the ranks' groups overlap or leave ranks out; {fix}")
