"""``python -m ringcomm keygen FILE``: makes a job's secret.

Writes 32 random bytes as hexadecimal digits into a new file that only its owner can read. Never
overwrites: running jobs may hold the old key.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
from collections.abc import Sequence

from ..bootstrap.secret import MIN_BYTES, key_id


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the secret file named in argv. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ringcomm keygen",
        description="Make the secret that lets a job's ranks recognise each other.",
    )
    parser.add_argument("file", metavar="FILE", help="file to create; must not exist")
    path = parser.parse_args(argv).file

    material = secrets.token_bytes(MIN_BYTES)
    try:
        _write_private(path, material.hex().encode("ascii") + b"\n")
    except FileExistsError:
        print(f"keygen: {path} exists and is left as it is: choose another name", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"keygen: {path} cannot be written: {error.strerror}", file=sys.stderr)
        return 1

    there = shlex.quote(os.path.abspath(path))  # jobs may start in another folder
    print(
        f"wrote {path} (key id {key_id(material).hex()})\n"
        f"Copy it to every host of the job, for example:  scp -p {there} HOST:{there}\n"
        f"and on every host:  export RINGCOMM_SECRET_FILE={there}"
    )
    return 0


def _write_private(path: str, text: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(path)
        raise
