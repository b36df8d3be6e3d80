"""The table that ``python -m ringcomm tune`` makes: which algorithm an all-reduce of a size takes.

Rank 0 reads its file once all ranks know who has which ports, judges whether it was measured on
this very cluster, and hands the rows to all ranks in the last round of the bring-up. The file is
JSON:

    format      2
    ringcomm    version that measured it
    date        UTC
    cluster     digest; hosts: number of each rank's host; ports: each rank's, with their speeds
    rows        up_to (bytes on the wire), algorithm; ascending; auto: what the cost model says
    memory      1 if the ranks of each host shared memory when it was measured, else 0
    measured    bytes, seconds by algorithm, chosen: what the rows were made from

Invariants: a file that is missing, broken or of another cluster is never an error, and at most one
line in the log; nothing of a file or of rank 0's rows is used before it was checked; reading is
bounded; a file is replaced whole or not at all.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import itertools
import json
import logging
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from ..config import ALGORITHMS, TUNE_TABLE_OFF, Config
from ..errors import BootstrapError, ConfigError
from .blobs import Record
from .rails import Port

FORMAT = 2
MAX_ROWS = 64
"""RC_MAX_TUNED of the C interface."""
_MOST_BYTES = 2**63 - 1
_MOST_RANKS, _MOST_PORTS = 4096, 16
_MOST_FILE = 4 << 20
_MOST_SHOWN = 300  # characters of a path, told to other ranks
_log = logging.getLogger("ringcomm")


@dataclasses.dataclass(frozen=True)
class Row:
    """All-reduces of at most that many bytes on the wire, and more than the row before has."""

    up_to: int
    algorithm: str
    """A name of config.ALGORITHMS; auto: what the cost model says."""


@dataclasses.dataclass(frozen=True)
class Table:
    """What all ranks follow."""

    path: str
    """Of rank 0's file, for people."""
    rows: tuple[Row, ...]
    memory: bool = False
    """It was measured with memory that the ranks of each host share."""

    def to_fields(self) -> dict[str, Any]:
        """For a blob."""
        shown = self.path.encode("ascii", "backslashreplace").decode()[-_MOST_SHOWN:]
        printable = "".join(c if c.isprintable() else "?" for c in shown)
        return {
            "path": printable,
            "memory": int(self.memory),
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }

    @classmethod
    def from_record(cls, record: Record) -> Table:
        """From a blob. Raises BootstrapError."""
        return cls(record.text("path"), read_rows(record), bool(record.integer("memory", 0, 1)))


def read_rows(record: Record) -> tuple[Row, ...]:
    """The field ``rows``. Raises BootstrapError."""
    rows = tuple(
        Row(row.integer("up_to", 0, _MOST_BYTES), row.text("algorithm"))
        for row in record.records("rows", MAX_ROWS)
    )
    ascending = all(a.up_to < b.up_to for a, b in itertools.pairwise(rows))
    if not ascending or not all(row.algorithm in ALGORITHMS for row in rows):
        raise record.malformed("has a bad list 'rows'")
    return rows


def choose(rows: Sequence[Row], wire_bytes: int) -> str:
    """What the rows say of a size; auto where they say nothing."""
    return next((row.algorithm for row in rows if wire_bytes <= row.up_to), "auto")


# ---- which cluster ----


@dataclasses.dataclass(frozen=True)
class Cluster:
    """What a table depends on, as all ranks know it."""

    hosts: tuple[int, ...]
    """Number of each rank's host, counted from 0 in order of rank."""
    ports: tuple[tuple[str, ...], ...]
    """The network ports of each rank in its order: name and, where it is known, speed."""
    names: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    """Each rank's host name. They name the file, so that a cluster whose ports change finds it."""

    @classmethod
    def of(
        cls, host_numbers: Sequence[int], ports: Sequence[Sequence[Port]], names: Sequence[str]
    ) -> Cluster:
        """From what the ranks told each other."""
        shown = tuple(tuple(_show(port) for port in of_rank) for of_rank in ports)
        return cls(tuple(host_numbers), shown, tuple(names))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits: equal for equal clusters."""
        return _digest([self.hosts, self.ports])

    @property
    def file_name(self) -> str:
        """Of its table in the default folder."""
        return f"tune-{_digest([self.hosts, self.names])}.json"

    def to_fields(self) -> dict[str, Any]:
        """For the file."""
        return {
            "digest": self.digest,
            "world_size": self.world_size,
            "hosts": self.hosts,
            "ports": self.ports,
        }

    @classmethod
    def from_fields(cls, fields: Any) -> Cluster:
        """From a file. Raises ValueError."""
        if not isinstance(fields, dict):
            raise ValueError("it names no cluster")
        hosts, ports = fields.get("hosts"), fields.get("ports")
        if not _is_list(hosts, int, _MOST_RANKS) or not _is_list(ports, list, _MOST_RANKS):
            raise ValueError("it names no cluster")
        if not all(_is_list(of_rank, str, _MOST_PORTS) for of_rank in ports):
            raise ValueError("it names no cluster")
        made = cls(tuple(hosts), tuple(map(tuple, ports)))
        if len(made.ports) != len(made.hosts) or fields.get("digest") != made.digest:
            raise ValueError("its cluster does not have its digest")
        return made

    def difference(self, there: Cluster) -> str:
        """What another cluster has otherwise, in words; empty: nothing."""
        if there.world_size != self.world_size:
            return f"world_size was {there.world_size} and is {self.world_size}"
        if there.hosts != self.hosts:
            return f"ranks per host were {_layout(there.hosts)} and are {_layout(self.hosts)}"
        for rank, (then, now) in enumerate(zip(there.ports, self.ports, strict=True)):
            if then != now:
                return f"ports of rank {rank} were {', '.join(then)} and are {', '.join(now)}"
        return ""

    def describe(self) -> str:
        """One line: ranks, hosts, ports."""
        kinds = list(dict.fromkeys(", ".join(of_rank) for of_rank in self.ports))
        return f"{self.world_size} ranks, per host {_layout(self.hosts)}; ports {' | '.join(kinds)}"


def _show(port: Port) -> str:
    return f"{port.name} {port.mbit_per_s} Mbit/s" if port.mbit_per_s else port.name


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def _layout(hosts: Sequence[int]) -> str:
    """ "2+2"; where the ranks of a host do not follow each other, each rank's host."""
    if list(hosts) == sorted(hosts):
        return "+".join(str(hosts.count(host)) for host in dict.fromkeys(hosts))
    return "of hosts " + ",".join(map(str, hosts))


def _is_list(value: Any, kind: type, limit: int) -> TypeGuard[list[Any]]:
    return (
        isinstance(value, list)
        and len(value) <= limit
        and all(isinstance(item, kind) and not isinstance(item, bool) for item in value)
    )


# ---- the file ----


@dataclasses.dataclass(frozen=True)
class Measured:
    """One size."""

    bytes: int
    seconds: dict[str, float]
    """Median by algorithm; auto: the cost model's choice."""
    chosen: str


@dataclasses.dataclass(frozen=True)
class Document:
    """A file's content."""

    cluster: Cluster
    rows: tuple[Row, ...]
    memory: bool
    """The ranks of each host shared memory."""
    measured: tuple[Measured, ...]
    version: str
    date: str

    def write(self, path: str) -> None:
        """Replaces the file, with the folders above it. Raises ConfigError."""
        text = json.dumps(
            {
                "format": FORMAT,
                "ringcomm": self.version,
                "date": self.date,
                "cluster": self.cluster.to_fields(),
                "memory": int(self.memory),
                "rows": [dataclasses.asdict(row) for row in self.rows],
                "measured": [dataclasses.asdict(size) for size in self.measured],
            },
            indent=1,
        )
        folder = os.path.dirname(os.path.abspath(path))
        try:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            fd, draft = tempfile.mkstemp(prefix=".tune-", dir=folder)
            try:
                with os.fdopen(fd, "w", encoding="ascii") as file:
                    file.write(text + "\n")
                os.chmod(draft, 0o644)
                os.replace(draft, path)
            except BaseException:
                os.unlink(draft)
                raise
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def read(path: str) -> Document:
    """The file's content, checked. Raises OSError, or ValueError saying what is wrong with it."""
    with open(path, "rb", opener=_opener) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no regular file")
        data = file.read(_MOST_FILE + 1)
    if len(data) > _MOST_FILE:
        raise ValueError("it is too long")
    try:
        fields = json.loads(data.decode("ascii"))
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ValueError(f"it has not format {FORMAT}")
    record = Record("the file", fields)
    try:
        rows, sizes = read_rows(record), record.records("measured", MAX_ROWS)
        measured = tuple(map(_read_size, sizes))
        version, date = record.text("ringcomm"), record.text("date")
        memory = bool(record.integer("memory", 0, 1))
    except BootstrapError:
        raise ValueError("its rows cannot be read") from None
    cluster = Cluster.from_fields(fields.get("cluster"))
    return Document(cluster, rows, memory, measured, version, date)


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not hold us


def _read_size(record: Record) -> Measured:
    times = record.object("seconds")
    seconds = {name: times.number(name, 0.0, 1e9) for name in times.names()}
    return Measured(record.integer("bytes", 0, _MOST_BYTES), seconds, record.text("chosen"))


def default_folder() -> str:
    """The user's cache, by the XDG base directory rules."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):
        cache = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "ringcomm")


def default_tables() -> list[str]:
    """The files there, of whatever clusters."""
    return sorted(glob.glob(os.path.join(glob.escape(default_folder()), "tune-*.json")))


def path_of(config: Config, cluster: Cluster) -> str:
    """Where this cluster's table is, or would be."""
    if config.tune_table not in ("", TUNE_TABLE_OFF):
        return os.path.expanduser(config.tune_table)
    return os.path.join(default_folder(), cluster.file_name)


def load(config: Config, cluster: Cluster) -> Table | None:
    """The table to follow; None: the cost model, and where a table is there that cannot be used, or
    one was asked for, a line that says why."""
    if config.algorithm != "auto" or config.tune_table == TUNE_TABLE_OFF:
        return None
    path = path_of(config, cluster)
    try:
        found = read(path)
        trouble = cluster.difference(found.cluster)
    except FileNotFoundError:
        if not config.tune_table:
            return None
        trouble = "there is no such file"
    except OSError as error:
        trouble = f"it cannot be read: {error.strerror}"
    except ValueError as error:
        trouble = str(error)
    if trouble:
        _ignore(path, trouble)
        return None
    return Table(path, found.rows, found.memory)


def fitting(table: Table | None, in_memory: bool, rank: int) -> Table | None:
    """The table that all ranks have, once they know whether memory is shared; None: it was measured
    otherwise, which rank 0 says, or there is none."""
    if table is None or table.memory == in_memory:
        if table is not None and rank == 0:
            _log.info("all-reduces follow the tuned table %s", table.path)
        return table
    if rank == 0:
        then, now = ("with", "without") if table.memory else ("without", "with")
        _ignore(
            table.path,
            f"it was measured {then} memory shared by the ranks of each host, and "
            f"this job runs {now}",
        )
    return None


def _ignore(path: str, trouble: str) -> None:
    _log.warning(
        "the tuned table %s is ignored: %s; run python -m ringcomm tune again", path, trouble
    )
