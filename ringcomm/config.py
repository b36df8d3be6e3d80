"""Settings: one frozen dataclass, whose fields can be set by environment variables (variable_of).

``names_arguments`` refuses unknown arguments, here and of public constructors; it is in this file
because it also suggests fields of Config.

Invariants: a value is checked when the Config is made, never later; an argument overrides
the environment, which overrides the default, field by field, and each field knows its source. Every
RINGCOMM_ variable that the package reads is listed here; an unknown one causes a warning. Without
RINGCOMM_LOG nothing of ``logging`` is changed.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast, get_args

from .errors import ConfigError, did_you_mean

_log = logging.getLogger("ringcomm")
_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])

_MIB = 1 << 20
_LOG_LEVELS = ("debug", "info", "warning", "error")
_LOG_FORMAT = "%(asctime)s ringcomm[%(process)d] %(levelname)s: %(message)s"

Algorithm = Literal["auto", "ring", "one_shot", "doubling", "direct", "halving"]
Recovery = Literal["on", "off"]

#: Name -> number of the core's table (rc_algorithm_name).
ALGORITHMS = {name: number for number, name in enumerate(get_args(Algorithm))}

#: Removed fields, each with its replacement, as the end of a sentence.
REMOVED = {
    "tune_table": "is gone: the cost model goes by the speed of the links; leave it out, or give "
    "algorithm"
}

#: Variables that are no field of Config, with their meaning.
OTHER_VARIABLES = {
    "RINGCOMM_SECRET": "the job's secret itself",
    "RINGCOMM_COMPRESSION": "how the all-reduces of a torch process group travel",
    "RINGCOMM_LOG": "debug, info, warning or error: what the logger ringcomm tells",
    "RINGCOMM_LIBCUDA": "the CUDA driver's library, instead of libcuda.so.1",
    "RINGCOMM_WERROR": "1: warnings of the C compiler are errors, when ringcomm is built",
}

ARGUMENT, DEFAULT = "argument", "default"

#: Least and most value of each field that is a number.
_RANGES: dict[str, tuple[float, float]] = {
    "lanes": (1, 16),
    "segment_bytes": (0, 4 * _MIB),
    "secret_fd": (-1, 2**31 - 1),
    "spin_us": (-1, 10000),
    "threads": (0, 2),
    "timeout": (0.001, 1e6),
    "connect_timeout": (0.1, 1e6),
    "heartbeat": (0.05, 3600),
    "peer_timeout": (0.1, 3600),
}

#: Words in documents and messages for values that leave the choice to ringcomm.
_WORDS: dict[str, dict[Any, str]] = {
    "interfaces": {(): "all real ports; on one host, loopback"},
    "spin_us": {-1: "auto"},
    "threads": {0: "auto"},
    "kernel_set": {"": "fastest"},
    "secret_fd": {-1: ""},
}


@dataclasses.dataclass(frozen=True)
class _Found:
    """Value that the user did not give as an argument, and its source; "": a field's default, used
    if the environment does not set it."""

    value: Any
    source: str = ""

    def __repr__(self) -> str:
        return repr(self.value)


_warned: set[str] = set()  # unknown variables
_FIELDS: dict[str, Any] = {}
"""Fields of Config and their defaults."""


def _settings(cls: type[_T]) -> type[_T]:
    """Replaces the defaults of a class that is about to become a dataclass by _Found objects, so
    that a value that was not given differs from an equal argument."""
    for name in cls.__annotations__:
        _FIELDS[name] = getattr(cls, name)
        setattr(cls, name, _Found(_FIELDS[name]))
    return cls


def names_arguments(
    function: _F,
    more: Iterable[str] = (),
    renamed: Mapping[str, str] = MappingProxyType({}),
    removed: Mapping[str, str] = MappingProxyType({}),
) -> _F:
    """Wraps a function so that it refuses an unknown argument and suggests the right name.

    Args:
        more: names that it takes beside those of its signature.
        renamed: old names of arguments, each with its new one; an old name still works, with a
            DeprecationWarning.
        removed: removed arguments, each with its replacement, as the end of a sentence that
            begins with the argument.
    """
    known = [
        name
        for name, one in inspect.signature(function).parameters.items()
        if name not in ("self", "cls") and one.kind is not one.VAR_KEYWORD
    ] + list(more)
    is_made = function.__name__ == "__init__"

    @functools.wraps(function)
    def checked(*args: Any, **given: Any) -> Any:
        called = type(args[0]).__name__ if is_made else function.__qualname__
        for old in renamed.keys() & given.keys():
            new = renamed[old]
            if new in given:
                raise ConfigError(f"{called}(): {old}= is {new}= by its old name; give one of them")
            warnings.warn(f"{called}(): {old}= is {new}= now", DeprecationWarning, stacklevel=2)
            given[new] = given.pop(old)
        for name in given:
            if name in removed:
                raise ConfigError(f"{called}(): {name}= {removed[name]}")
            if name not in known:
                raise ConfigError(f"{called}() has no argument {name!r}{_meant(name, known)}")
        return function(*args, **given)

    return cast(_F, checked)


def _meant(name: str, known: Sequence[str]) -> str:
    field = difflib.get_close_matches(name, [*known, *_FIELDS], 1)
    if field and field[0] not in known:
        return f": give config=ringcomm.Config({field[0]}=...)"
    return did_you_mean(name, known) or f"; it has {', '.join(known)}"


@dataclasses.dataclass(frozen=True)
@_settings
class Config:
    """Settings of a communicator. Fields that must be equal on all ranks are marked so.

    A field that is not given is read from its variable, ``RINGCOMM_`` and the name in capitals,
    when the Config is made; without the variable it has its default.
    """

    interfaces: tuple[str, ...] = ()
    """Network ports to use, in rail order, as named by the kernel. Empty: every port that is up
    and real; on a single host, the loopback. A name may stand twice (two rails on one port)."""

    lanes: int = 1
    """TCP connections per rail and peer, 1 to 16. More than one helps only where a single flow is
    capped (clouds, link aggregation). Same on all ranks."""

    probe: bool = True
    """Measure the rails while the ranks are joined, for up to 0.3 s, where two ranks have more than
    one; else the first collectives measure them. Same on all ranks."""

    segment_bytes: int = 0
    """Largest payload of one frame in bytes, a multiple of 4096, 4 KiB to 4 MiB. 0: 1 MiB if all
    ranks share a host, else 256 KiB. Same on all ranks."""

    timeout: float = 300.0
    """Seconds until a collective that has not completed fails, unless the call gives its own."""

    connect_timeout: float = 30.0
    """Seconds within which all ranks must have found each other."""

    heartbeat: float = 0.4
    """Seconds between signs of life on a silent lane: what is lost on a lane that was idle is found
    that much later. Same on all ranks."""

    peer_timeout: float = 10.0
    """Seconds without any sign of life after which a peer is lost; without `recovery` also a lane
    whose peer lives. Same on all ranks."""

    recovery: Recovery = "on"
    """on: in a job of several hosts a lost lane ends nothing. It is made anew, and what it had on
    its way goes by another one to the same rank, or waits for it. A rank to which no lane is left
    is lost after `peer_timeout`, or in about 3 s if its host says that nobody listens for it any
    more. off: a lost lane ends the communicator, as in a job of one host. Same on all ranks."""

    algorithm: Algorithm = "auto"
    """Algorithm of all-reduces: ring, direct, one_shot, doubling or halving; auto: the cost model
    chooses by the size and the speed of the links. Same on all ranks."""

    shared_memory: bool = True
    """Let all-reduces among ranks of one host go through memory that they share, and in a job of
    one host broadcasts. Off on one rank means off on all."""

    spin_us: int = -1
    """Microseconds for which a thread that waits for a collective polls before it sleeps, 0 to
    10000. This saves the delays of falling asleep and waking up, but takes a core; where the ranks
    on this machine outnumber its cores, only shared memory is polled, and each poll
    lets another rank run. -1: 50, and 500 where they outnumber the cores."""

    threads: int = 0
    """Threads that carry the traffic: 1, or 2, of which one sends the data of collectives over
    1 MiB. 0: 2 if each rank on this machine has two cores and its ports outrun one thread."""

    kernel_set: str = ""
    """Instruction set of the elementwise kernels (scalar, avx2, avx512, neon). Empty: the fastest
    that this CPU supports."""

    congestion: tuple[str, ...] = ("cubic", "reno")
    """TCP congestion controls to try on each lane, in order; the first that the kernel permits
    is used. Empty: the system's (bbr, a common default, can halve a fast LAN's throughput)."""

    timeline: str = ""
    """File for a Chrome trace of all collectives; ``{rank}`` in the name becomes this rank's
    number, which else goes before the ending. Empty: none."""

    insecure: bool = False
    """Run without a secret off loopback. Anyone who reaches the ports can then join the job."""

    secret_file: str = ""
    """File with the job's secret, mode 0600 (see ``python -m ringcomm keygen``)."""

    secret_fd: int = -1
    """File descriptor to read the job's secret from, once in a process; -1: none."""

    def __post_init__(self) -> None:
        sources: dict[str, str] = {}
        for name, value in vars(self).items():
            if isinstance(value, _Found):
                found = value if value.source else _look_up(name, os.environ)
                object.__setattr__(self, name, found.value)
                sources[name] = found.source
        object.__setattr__(self, "_sources", sources)
        if sources:
            set_up_logging(os.environ)
            for name, sentence in unknown_variables(os.environ).items():
                if name not in _warned:  # once for each in a process
                    _warned.add(name)
                    _log.warning("%s", sentence)
        try:
            self._check()
        except ConfigError as error:
            raise ConfigError(f"{error} ({self._name_sources(str(error))})") from None

    def _check(self) -> None:
        _check_names(self, "interfaces")
        _check_names(self, "congestion")
        for name in ("insecure", "probe", "shared_memory"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: give True or False")
        for name, (low, high) in _RANGES.items():
            _check_number(self, name, low, high)
        if self.segment_bytes % 4096:
            raise ConfigError(f"segment_bytes={self.segment_bytes}: give a multiple of 4096")
        if self.recovery not in ("on", "off"):
            raise ConfigError(f"recovery={self.recovery!r}: give on or off")
        if not isinstance(self.algorithm, str) or self.algorithm not in ALGORITHMS:
            raise ConfigError(
                f"algorithm={self.algorithm!r}: give one of {', '.join(ALGORITHMS)}"
                f"{did_you_mean(self.algorithm, ALGORITHMS)}"
            )
        _check_path(self, "timeline", "a file's path")
        _check_path(self, "secret_file", "a file's path")
        if not isinstance(self.kernel_set, str):
            raise ConfigError(f"kernel_set={self.kernel_set!r}: give a name, such as avx2")
        if self.peer_timeout < 2 * self.heartbeat:
            raise ConfigError(
                f"peer_timeout={self.peer_timeout} must be at least twice heartbeat="
                f"{self.heartbeat}, or healthy peers are declared lost"
            )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, **overrides: Any) -> Config:
        """Makes ``Config(**overrides)``, in which None means not given, from the environment
        ``env``, or the process's if that is None.

        Raises ConfigError naming the variable whose value cannot be read.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        if env is not None:
            given = {**{name: _look_up(name, env) for name in _FIELDS}, **given}
        return cls(**given)

    def sources(self) -> dict[str, str]:
        """Returns each field's source: "default", "argument", or the variable's name."""
        found: dict[str, str] = self.__dict__["_sources"]
        return {name: found.get(name, ARGUMENT) for name in _FIELDS}

    def replaced(self, source: str = ARGUMENT, **changes: Any) -> Config:
        """Returns a copy with changes, as dataclasses.replace. Unchanged values keep their source;
        ``source`` is that of the others."""
        values: dict[str, Any] = {}
        for name, known in self.sources().items():
            before = getattr(self, name)
            value = changes.get(name, before)
            values[name] = _Found(value, known if value == before else source)
        return Config(**values)

    def shown(self, name: str) -> str:
        """Formats a field's value for documents and messages; empty for none."""
        value = getattr(self, name)
        if value in _WORDS.get(name, {}):
            return _WORDS[name][value]
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, tuple):
            return ",".join(value)
        return f"{value:g}" if isinstance(value, float) else str(value)

    def _name_sources(self, error: str) -> str:
        """Names the sources of the fields that an error names."""
        about = {ARGUMENT: "given as an argument", DEFAULT: "the default"}
        origins = {
            name: about.get(source, f"set by {source}")
            for name, source in self.sources().items()
            if re.search(rf"\b{name}=", error)
        }
        if len(origins) < 2:
            return "".join(origins.values())
        return ", ".join(f"{name}: {origin}" for name, origin in origins.items())

    def shared_fields(self) -> dict[str, str]:
        """Returns the fields that must be equal on all ranks, as ``shown``; they are compared when
        ranks meet."""
        shared = (
            "lanes",
            "probe",
            "segment_bytes",
            "algorithm",
            "peer_timeout",
            "heartbeat",
            "recovery",
        )
        return {name: self.shown(name) for name in shared}


Config.__init__ = names_arguments(Config.__init__, removed=REMOVED)  # type: ignore[method-assign]


def compression_from_env() -> str:
    """Returns RINGCOMM_COMPRESSION, the codec of a torch process group; "none" if it is not set."""
    return os.environ.get("RINGCOMM_COMPRESSION", "").strip() or "none"


def set_up_logging(env: Mapping[str, str]) -> None:
    """Sets the level of the logger "ringcomm" that RINGCOMM_LOG names, for programs that do not
    configure logging. Adds a handler only if neither the logger nor any above it has one. Raises
    ConfigError if it is no level."""
    asked = env.get("RINGCOMM_LOG", "").strip().lower()
    if not asked:
        return
    if asked not in _LOG_LEVELS:
        raise ConfigError(
            f"RINGCOMM_LOG={env['RINGCOMM_LOG']!r}: give one of {', '.join(_LOG_LEVELS)}"
            f"{did_you_mean(asked, _LOG_LEVELS)}"
        )
    _log.setLevel(asked.upper())
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_LOG_FORMAT))
        _log.addHandler(handler)


def variable_of(field: str) -> str:
    """Returns the name of a field's environment variable."""
    return "RINGCOMM_" + field.upper()


def unknown_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Returns RINGCOMM_ variables that ringcomm does not read, each with a sentence saying so."""
    known = {*map(variable_of, _FIELDS), *OTHER_VARIABLES}
    wrong = [name for name in env if name.upper().startswith("RINGCOMM_") and name not in known]
    words = [name.removeprefix("RINGCOMM_") for name in known]
    gone = {variable_of(field): text for field, text in REMOVED.items()}
    return {name: f"{name} {gone[name]}" for name in wrong if name in gone} | {
        name: f"{name} is set, and ringcomm has no such setting"
        f"{did_you_mean(name[9:].upper(), words, 'RINGCOMM_')}"
        for name in sorted(wrong)
        if name not in gone
    }


def _look_up(field: str, env: Mapping[str, str]) -> _Found:
    name, default = variable_of(field), _FIELDS[field]
    if name in env:
        words = {word: value for value, word in _WORDS.get(field, {}).items() if word}
        text = env[name].strip()
        return _Found(words[text] if text in words else _parse(name, default, env[name]), name)
    return _Found(default, DEFAULT)


def _check_number(config: Config, name: str, low: float, high: float) -> None:
    value = getattr(config, name)
    whole = isinstance(_FIELDS[name], int)
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        number = "whole number" if whole else "number"
        raise ConfigError(f"{name}={value!r}: give a {number} from {low} to {high}")


def _check_path(config: Config, name: str, wanted: str) -> None:
    """Checks a path and stores it as a string."""
    value = getattr(config, name)
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or "\0" in path:
        raise ConfigError(f"{name}={value!r}: give {wanted}")
    object.__setattr__(config, name, path)


def _check_names(config: Config, name: str) -> None:
    """Checks names and stores them as a tuple; refuses a lone string, which would be split into
    letters."""
    value = getattr(config, name)
    listed = isinstance(value, (tuple, list))
    if not listed or not all(isinstance(part, str) for part in value):
        raise ConfigError(f'{name}={value!r}: give a tuple of names, such as ("eth0", "eth1")')
    object.__setattr__(config, name, tuple(value))


def _parse(name: str, default: Any, text: str) -> Any:
    try:
        if isinstance(default, bool):
            return {
                "1": True,
                "true": True,
                "yes": True,
                "0": False,
                "false": False,
                "no": False,
                "": False,
            }[text.strip().lower()]
        if isinstance(default, tuple):
            return tuple(part.strip() for part in text.split(",") if part.strip())
        return type(default)(text)
    except (KeyError, ValueError):
        kind = "1 or 0" if isinstance(default, bool) else f"a value like {default!r}"
        raise ConfigError(f"{name}={text!r} cannot be read; give {kind}") from None
