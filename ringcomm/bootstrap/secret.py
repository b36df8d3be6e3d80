"""The job's secret: its sources, and an object that never shows the key.

Sources, first match wins: ``Config.secret_fd``, ``Config.secret_file``, the RINGCOMM_SECRET
variable. The variable is removed from os.environ once a secret was read from it, so that children
do not inherit it. A pipe can be read only once, and later the number of secret_fd may be another
file's. Both are therefore read once, and remembered for this process's later communicators.

Invariants: at least 32 bytes of key material; a file must be private to this user; neither repr,
str nor pickle of a Secret, nor any error raised here, shows a byte of the key.
"""

from __future__ import annotations

import hashlib
import os
import select
import shlex
import stat
import threading
from collections.abc import Iterable

from ..config import Config
from ..errors import ConfigError
from .interfaces import is_loopback

MIN_BYTES = 32
VARIABLE = "RINGCOMM_SECRET"
KEYGEN_HINT = "python -m ringcomm keygen FILE"

_HEX_DIGITS = b"0123456789abcdefABCDEF"
_LONG_KEY = 48  # length from which a nearly hexadecimal text counts as a damaged key
_MAX_TEXT = 4096  # bytes of any source
_FD_PATIENCE = 5.0  # seconds for a launcher to write into secret_fd

_lock = threading.Lock()
_taken: dict[str, Secret] = {}


class Secret:
    """Key material of at least 32 bytes. Shows only its key id."""

    __slots__ = ("_material", "key_id")

    def __init__(self, material: bytes) -> None:
        if len(material) < MIN_BYTES:
            raise ConfigError(
                f"the secret has {len(material)} bytes, at least {MIN_BYTES} are needed: make one "
                f"with `{KEYGEN_HINT}`"
            )
        self._material = bytes(material)
        self.key_id = key_id(self._material)

    def material(self) -> bytes:
        """Returns the key itself, for key derivation only."""
        return self._material

    def __repr__(self) -> str:
        return f"Secret(key id {self.key_id.hex()})"

    def __reduce__(self) -> str:
        raise TypeError("a Secret is not pickled: load it in each process")


def key_id(material: bytes) -> bytes:
    """Returns 4 bytes that tell keys apart in messages and reveal nothing else about them."""
    return hashlib.sha256(b"id" + material).digest()[:4]


def load(config: Config) -> Secret | None:
    """Loads the job's secret; returns None if no source is configured.

    A secret in RINGCOMM_SECRET is removed from os.environ. Raises ConfigError for a source that
    cannot be read, is not private or holds no good secret; each time, until it is mended.
    """
    variable = _from_variable()
    if config.secret_fd >= 0:
        return _from_fd(config.secret_fd)
    if config.secret_file:
        return _from_file(config.secret_file)
    return variable


def check(config: Config) -> None:
    """Raises ConfigError as load() does, but takes nothing: neither the variable nor what secret_fd
    holds."""
    if VARIABLE in os.environ:
        parse(os.fsencode(os.environ[VARIABLE]), VARIABLE)
    if config.secret_fd < 0 and config.secret_file:
        _from_file(config.secret_file)


def parse(text: bytes, source: str) -> Secret:
    """Parses a Secret: hexadecimal digits as keygen writes them, else the bytes themselves.

    Raises ConfigError where the text is no secret, or a damaged one.
    """
    if len(text) > _MAX_TEXT:
        raise ConfigError(f"{source} has more than {_MAX_TEXT} bytes: give at most so many")
    text = text.strip()
    if not text:
        raise ConfigError(f"{source} holds no secret: make one with `{KEYGEN_HINT}`")
    damage = _damage(text)
    if damage:
        raise ConfigError(
            f"{source} {damage}: copy the file again from where it was made, or make a new one "
            f"with `{KEYGEN_HINT}` and copy that to every host"
        )
    try:
        material = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        material = text
    if len(set(material)) == 1:
        raise ConfigError(
            f"{source} holds one byte over and over, which anyone can guess: make a secret with "
            f"`{KEYGEN_HINT}`"
        )
    try:
        return Secret(material)
    except ConfigError as short:
        raise ConfigError(f"{source}: {short}") from None


def _damage(text: bytes) -> str:
    """Describes the damage of a text that was a hexadecimal key; "" for any other text.

    A passphrase may be any text: even a long one is never nearly all hexadecimal digits.
    """
    printed = text.replace(b"\0", b"")
    others = [byte for byte in printed if byte not in _HEX_DIGITS]
    if printed and not others:
        if len(printed) < len(text):
            return "has hexadecimal digits and zero bytes: it was not written to its end"
        if len(printed) % 2:
            return f"has an odd number of hexadecimal digits ({len(printed)}), so one is missing"
    elif len(printed) >= _LONG_KEY and len(others) <= len(printed) // 16:
        return f"has hexadecimal digits and {len(others)} other characters among them"
    return ""


def _from_variable() -> Secret | None:
    with _lock:
        text = os.environ.get(VARIABLE)
        if text is not None:
            _taken[VARIABLE] = parse(os.fsencode(text), VARIABLE)
            del os.environ[VARIABLE]
        return _taken.get(VARIABLE)


def _from_file(path: str) -> Secret:
    path = os.path.expanduser(path)  # no shell expands ~ in a Config or in `mpirun -x NAME=~/key`
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(
            f"secret_file {path!r} cannot be read: {error.strerror}; make one with `{KEYGEN_HINT}`"
        ) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"secret_file {path!r} is not a regular file")
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"secret_file {path!r} belongs to user {status.st_uid}, not to you "
                f"({os.geteuid()}): keep a copy of your own"
            )
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(
                f"secret_file {path!r} has mode {stat.S_IMODE(status.st_mode):04o}, others may "
                f"read or change it: run `chmod 600 {shlex.quote(path)}`"
            )
        return parse(os.read(fd, _MAX_TEXT + 1), f"secret_file {path!r}")
    finally:
        os.close(fd)


def _from_fd(fd: int) -> Secret:
    source = f"secret_fd {fd}"
    with _lock:
        if source not in _taken:
            try:
                text = _drain(fd)
            except OSError as error:
                raise ConfigError(f"{source} cannot be read: {error.strerror}") from None
            _taken[source] = parse(text, source)
        return _taken[source]


def _drain(fd: int) -> bytes:
    """Reads fd up to its end, or a byte more than a secret may have. Raises ConfigError if the end
    does not come."""
    text = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while len(text) <= _MAX_TEXT:
        if not poll.poll(_FD_PATIENCE * 1000):
            raise ConfigError(
                f"secret_fd {fd} gave no end of file within {_FD_PATIENCE:g} s: close its writing "
                "end after the secret"
            )
        part = os.read(fd, _MAX_TEXT + 1 - len(text))
        if not part:
            break
        text += part
    return text


def check_exposed(addresses: Iterable[str], secret: Secret | None, insecure: bool) -> None:
    """Raises ConfigError if others reach one of these addresses, without a secret or insecure.

    Call it before anything listens on, or connects to, the numeric addresses.
    """
    exposed = sorted({address for address in addresses if not is_loopback(address)})
    if exposed and secret is None and not insecure:
        raise ConfigError(
            f"this job uses {', '.join(exposed)}, which others can reach, but has no secret: make "
            f"one with `{KEYGEN_HINT}`, copy FILE to every host and set RINGCOMM_SECRET_FILE=FILE "
            "(RINGCOMM_INSECURE=1 runs without)"
        )
