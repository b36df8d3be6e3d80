"""Settings of OuterStep: their checks, and the parts that they choose.

Invariants: these checks need no model, no optimizer and no other rank, so a callback can refuse a
setting when it is made, long before training starts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, TypedDict

from ...codecs import Compression, parse
from ...communicator import Communicator
from ...errors import ConfigError
from ...membership import Membership
from ..argument_checks import require_number, require_whole, takes
from .rounds import FixedPeers, Peers, RoundPace
from .rules import Rule, Sparse, rule_of
from .wires import DenseWires, SparseWires, Wires


class OuterSettings(TypedDict, total=False):
    """Arguments of OuterStep that other functions pass on unchanged: all but model, optimizer,
    scaler."""

    every: int | None
    outer: Literal["mean", "nesterov", "sparse"] | Rule | None
    compression: Compression | Literal["default"] | None
    feedback: bool | None
    fragments: int
    delay: int
    comm: Communicator | Membership | None
    timeout: float | None


_OF_MEMBERSHIP = "is gone: give comm=ringcomm.membership.Membership({}=...), which all ranks make"

takes_settings = takes(
    OuterSettings,
    {"codec": "compression"},
    {
        "merge": "is gone: what is trained during a delay is added to the new anchor",
        "peers": "is gone: give a Membership as comm=",
        "min_peers": _OF_MEMBERSHIP.format("min_peers"),
        "grace_s": _OF_MEMBERSHIP.format("grace_s"),
    },
)
"""Decorates a function that takes these arguments: others raise ConfigError."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Parts that the settings choose.

    Attributes:
        peers: decides on the members of rounds; None: the default communicator's ranks are.
        timeout: seconds that a rank waits for the others in a round; None: the communicator's.
    """

    pace: RoundPace
    rule: Rule
    wires: Wires
    peers: Peers | None
    timeout: float | None


def choose(
    *,
    every: int | None,
    outer: str | Rule | None,
    compression: Compression | Literal["default"] | None,
    feedback: bool | None,
    fragments: int,
    delay: int,
    comm: Communicator | Membership | None,
    timeout: float | None,
) -> Chosen:
    """Returns the parts for OuterStep's settings. Raises ConfigError for one that cannot work."""
    pace = RoundPace(every, require_whole("fragments", fragments, 1))
    delay = require_whole("delay", delay, 0)
    if delay and pace.every is None:
        raise ConfigError(f"Invalid delay: {delay}; with every=None nothing goes on meanwhile")
    if pace.every is not None and delay * fragments >= pace.every:
        raise ConfigError(
            f"Invalid delay: {delay}; a fragment must be applied before the next one is sent, so "
            f"give less than every / fragments = {pace.every / fragments:g}"
        )
    if outer is None:
        outer = "mean" if every is None else "nesterov"
    rule = rule_of(outer)
    if timeout is not None:
        timeout = require_number("timeout", timeout, 0, math.inf, open_least=True)
    return Chosen(pace, rule, _wires(rule, compression, feedback), _peers(comm), timeout)


def _wires(
    rule: Rule, compression: Compression | Literal["default"] | None, feedback: bool | None
) -> Wires:
    if not isinstance(rule, Sparse):
        return DenseWires("int4" if compression == "default" else compression, feedback)
    if compression != "default" and parse(compression).name != "bf16":
        raise ConfigError(f"compression={compression!r}: a sparse rule sends bf16; leave it out")
    if feedback is not None:
        raise ConfigError(
            f"feedback={feedback!r}: a sparse rule always keeps what it does not send, by its "
            "decay; leave it out"
        )
    return SparseWires(rule)


def _peers(comm: Communicator | Membership | None) -> Peers | None:
    if isinstance(comm, Communicator):
        return FixedPeers(comm)
    able = not isinstance(comm, type) and callable(getattr(comm, "begin_round", None))
    if comm is not None and not able:
        raise ConfigError(f"comm={comm!r}: give a ringcomm.Communicator, a Membership, or None")
    return comm
