"""Settings of OuterStep: their checks, and the parts that they choose.

Invariants: these checks need no model, no optimizer and no other rank, so a callback can refuse a
setting when it is made, long before training starts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, TypedDict

from ...codecs import Compression
from ...communicator import Communicator
from ...errors import ConfigError
from ...membership.member import checked_grace
from ..argument_checks import require_number, require_whole
from .peers import Peers
from .rules import Rule, Sparse, rule_of
from .schedule import Pace
from .sparse_wires import SparseWires
from .wires import DenseWires, Wires


class OuterSettings(TypedDict, total=False):
    """Arguments of OuterStep that other functions pass on unchanged: all but model, optimizer,
    scaler."""

    every: int | None
    outer: Literal["mean", "nesterov", "sparse"] | Rule | None
    compression: Compression | None
    feedback: bool | None
    fragments: int
    delay: int
    comm: Communicator | None
    min_peers: int | None
    grace_s: float
    peers: Peers | None
    timeout: float | None


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Parts that the settings choose.

    Attributes:
        members: the least number of peers and the seconds of grace; None: peers are fixed.
        timeout: seconds that a rank waits for the others in a round; None: the communicator's.
    """

    pace: Pace
    rule: Rule
    wires: Wires
    members: tuple[int, float] | None
    timeout: float | None


def choose(
    *,
    every: int | None,
    outer: str | Rule | None,
    compression: Compression | None,
    feedback: bool | None,
    fragments: int,
    delay: int,
    comm: Communicator | None,
    min_peers: int | None,
    grace_s: float,
    peers: Peers | None,
    timeout: float | None,
) -> Chosen:
    """Returns the parts for OuterStep's settings. Raises ConfigError for one that cannot work."""
    pace = Pace(every, require_whole("fragments", fragments, 1))
    _require_delay(require_whole("delay", delay, 0), pace, fragments)
    if outer is None:
        outer = "mean" if every is None else "nesterov"
    rule = rule_of(outer)
    dense = DenseWires(compression, feedback)
    if sum(one is not None for one in (comm, peers, min_peers)) > 1:
        raise ConfigError("OuterStep: give one of comm, peers and min_peers")
    if comm is not None and not isinstance(comm, Communicator):
        raise ConfigError(f"comm={comm!r}: give a ringcomm.Communicator, or None")
    if timeout is not None:
        timeout = require_number("timeout", timeout, 0, math.inf, open_least=True)
    members = None
    if min_peers is not None:
        members = require_whole("min_peers", min_peers, 1), checked_grace(grace_s)
    return Chosen(
        pace,
        rule,
        SparseWires(rule) if isinstance(rule, Sparse) else dense,
        members,
        timeout,
    )


def _require_delay(delay: int, pace: Pace, fragments: int) -> None:
    if delay and pace.every is None:
        raise ConfigError(f"Invalid delay: {delay}; with every=None nothing goes on meanwhile")
    if pace.every is not None and delay * fragments >= pace.every:
        raise ConfigError(
            f"Invalid delay: {delay}; a fragment must be applied before the next one is sent, so "
            f"give less than every / fragments = {pace.every / fragments:g}"
        )
