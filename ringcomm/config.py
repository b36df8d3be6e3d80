"""Settings: one frozen dataclass, each field with its environment variable in one table.

Invariants: a value is checked when the Config is made, never later; what the caller gives wins
over the environment, which wins over the default. Nothing else in the package reads a
RINGCOMM_ variable, save the secret's (bootstrap/secret.py).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

from .errors import ConfigError

_MIB = 1 << 20

#: Name -> number in the C header (rc_algorithm).
ALGORITHMS = {"auto": 0, "ring": 1, "direct": 2, "one_shot": 3, "doubling": 4, "halving": 5}


#: The value of Config.tune_table that stands for no table at all.
TUNE_TABLE_OFF = "off"


@dataclasses.dataclass(frozen=True)
class Config:
    """How a communicator is built. Fields that all ranks must share are marked so."""

    interfaces: tuple[str, ...] = ()
    """Network ports to use, in rail order, as named by the kernel. Empty: every port that is up
    and real; on a single host, the loopback. A name may stand twice (two rails on one port)."""

    lanes: int = 1
    """TCP connections per rail and peer, 1 to 16. More than one helps only where a single flow is
    capped (clouds, link aggregation). Same on all ranks."""

    probe: bool = True
    """Measure the rails while the ranks are joined, for up to 0.3 s, where two ranks have more than
    one; otherwise the first collectives find out. Same on all ranks."""

    segment_bytes: int = 0
    """Largest payload of one frame in bytes, a multiple of 4096, 4 KiB to 4 MiB. 0: 1 MiB if all
    ranks share a host, else 256 KiB. Same on all ranks."""

    timeout: float = 300.0
    """Seconds until a collective that has not completed fails, unless the call says otherwise."""

    connect_timeout: float = 30.0
    """Seconds in which all ranks must have found each other."""

    heartbeat: float = 1.0
    """Seconds between signs of life on a silent lane."""

    peer_timeout: float = 10.0
    """Seconds without any sign of life after which a peer is lost, or a lane whose peer lives."""

    algorithm: str = "auto"
    """How an all-reduce runs: ring, direct, one_shot, doubling or halving; auto: what the tuned
    table or, without one, the cost model says of its size. Same on all ranks."""

    shared_memory: bool = True
    """Let all-reduces among ranks of one host go through memory that they share. Off on one rank
    means off on all."""
    tune_table: str = ""
    """File with the table that ``python -m ringcomm tune`` makes, followed where algorithm is auto.
    Rank 0's counts. Empty: this cluster's in the user's cache, if there is one; off: none."""

    spin_us: int = -1
    """Microseconds for which a thread that waits for a collective polls before it sleeps, 0 to
    10000. That saves the delays of falling asleep and waking up, but takes a core; where the ranks
    on this machine outnumber its cores, only what they share in memory is polled, and each look
    lets another rank run. -1: 50, and 500 where they do."""

    threads: int = 0
    """Threads that carry the traffic: 1, or 2, of which one sends what collectives over 1 MiB send.
    0: 2 where each rank on this machine has two cores and its ports are faster than one thread."""

    kernel_set: str = ""
    """Instruction set of the elementwise kernels (scalar, avx2, avx512, neon). Empty: the fastest
    that this CPU supports."""

    congestion: tuple[str, ...] = ("cubic", "reno")
    """TCP congestion controls to try on each lane, in order; the first that the kernel lets us
    have is used. Empty: the system's (bbr, a common default, can halve a fast LAN's throughput)."""

    timeline: str = ""
    """File to write what collectives did when, as a Chrome trace; ``{rank}`` in it, or else what
    goes before its ending, is this rank's number. Empty: none."""

    insecure: bool = False
    """Run without a secret off loopback. Anyone who reaches the ports can then join the job."""

    secret_file: str = ""
    """File with the job's secret, mode 0600 (see ``python -m ringcomm keygen``)."""

    secret_fd: int = -1
    """File descriptor to read the job's secret from; -1: none."""

    def __post_init__(self) -> None:
        _check_names(self, "interfaces")
        _check_names(self, "congestion")
        for name in ("insecure", "probe", "shared_memory"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: give True or False")
        _check(self, "lanes", 1, 16)
        if self.segment_bytes != 0:
            _check(self, "segment_bytes", 4096, 4 * _MIB)
        if self.segment_bytes % 4096:
            raise ConfigError(f"segment_bytes={self.segment_bytes}: give a multiple of 4096")
        if self.algorithm not in ALGORITHMS:
            raise ConfigError(f"algorithm={self.algorithm!r}: give one of {', '.join(ALGORITHMS)}")
        if not isinstance(self.tune_table, str) or "\0" in self.tune_table:
            raise ConfigError(f"tune_table={self.tune_table!r}: give a file's path, or off")
        if not isinstance(self.timeline, str) or "\0" in self.timeline:
            raise ConfigError(f"timeline={self.timeline!r}: give a file's path")
        _check(self, "spin_us", -1, 10000)
        _check(self, "threads", 0, 2)
        _check(self, "timeout", 0.001, 1e6)
        _check(self, "connect_timeout", 0.1, 1e6)
        _check(self, "heartbeat", 0.05, 3600)
        _check(self, "peer_timeout", 0.1, 3600)
        if self.peer_timeout < 2 * self.heartbeat:
            raise ConfigError(
                f"peer_timeout={self.peer_timeout} must be at least twice heartbeat="
                f"{self.heartbeat}, or healthy peers are declared lost"
            )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, **overrides: Any) -> Config:
        """Defaults, then RINGCOMM_* variables, then ``overrides`` (None means not given).

        Raises ConfigError naming the variable whose value cannot be read.
        """
        env = os.environ if env is None else env
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            name = _variable(field.name)
            if name in env:
                values[field.name] = _parse(name, field.default, env[name])
        values.update({k: v for k, v in overrides.items() if v is not None})
        try:
            return cls(**values)
        except ConfigError as error:
            set_here = [
                field for field in values
                if overrides.get(field) is None and re.search(rf"\b{field}=", str(error))
            ]  # fmt: skip
            if not set_here:
                raise
            names = ", ".join(map(_variable, set_here))
            raise ConfigError(f"{error} (set by {names})") from None

    def shared_fields(self) -> dict[str, int | str]:
        """The fields that must be equal on all ranks; compared when the ranks meet."""
        shared = ("lanes", "probe", "segment_bytes", "algorithm")
        return {name: getattr(self, name) for name in shared}


def compression_from_env(env: Mapping[str, str] | None = None) -> str:
    """RINGCOMM_COMPRESSION, "none" where it is not set: how a torch process group compresses."""
    return (os.environ if env is None else env).get("RINGCOMM_COMPRESSION", "").strip() or "none"


def _variable(field: str) -> str:
    return "RINGCOMM_" + field.upper()


def _check(config: Config, name: str, low: float, high: float) -> None:
    value = getattr(config, name)
    whole = isinstance(getattr(Config, name), int)
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        number = "whole number" if whole else "number"
        raise ConfigError(f"{name}={value!r}: give a {number} from {low} to {high}")


def _check_names(config: Config, name: str) -> None:
    """Keeps a tuple of names; a lone string would fall apart into its letters."""
    value = getattr(config, name)
    listed = isinstance(value, (tuple, list))
    if not listed or not all(isinstance(part, str) for part in value):
        raise ConfigError(f'{name}={value!r}: give a tuple of names, such as ("eth0", "eth1")')
    object.__setattr__(config, name, tuple(value))


def _parse(name: str, default: Any, text: str) -> Any:
    try:
        if isinstance(default, bool):
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False,
                    "": False}[text.strip().lower()]
        if isinstance(default, tuple):
            return tuple(part.strip() for part in text.split(",") if part.strip())
        return type(default)(text)
    except (KeyError, ValueError):
        kind = "1 or 0" if isinstance(default, bool) else f"a value like {default!r}"
        raise ConfigError(f"{name}={text!r} cannot be read; give {kind}") from None
