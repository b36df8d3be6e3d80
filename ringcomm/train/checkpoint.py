"""The state of a run on disk: one file, replaced whole or not at all.

It holds the model, the optimizer, the number of steps done, the settings that shape the loss
curve, and the state of the method. The rest follows from the step: epoch, place
in the data, learning rate and the seed of the random numbers are functions of it.

Invariants: rank 0 writes to a temporary file, flushes it to the disk and renames it over the old
one, so that a kill at any moment leaves a whole checkpoint; reading runs no code from the file
(``weights_only``).
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any, TypedDict, cast

import torch

from ..errors import ConfigError

FORMAT = 2
_NAME = "checkpoint.pt"


class State(TypedDict):
    """Contents of a checkpoint; epoch and position are only for human readers."""

    format: int
    settings: dict[str, Any]
    step: int
    epoch: int
    position: int
    model: dict[str, Any]
    optimizer: dict[str, Any]
    method: dict[str, Any]


def save(folder: Path, state: State) -> bytes:
    """Replace the checkpoint in ``folder`` and return its path, encoded.

    Raises ConfigError if it cannot be written.
    """
    path = folder / _NAME
    unfinished = folder / (_NAME + ".tmp")
    try:
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        _sync_folder(folder)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        # torch.save writes an end after a failure, and raises what that raises.
        reason = error if isinstance(error, OSError) else error.__context__
        if not isinstance(reason, OSError):
            raise
        raise ConfigError(f"the checkpoint {path} cannot be written: {reason.strerror}") from None
    return os.fsencode(path)


def open_folder(folder: Path, resume: bool) -> bytes:
    """Make ``folder`` ready; return the bytes of the checkpoint to resume, or none.

    Raises ConfigError if the folder cannot be made, or holds a checkpoint that a run which does
    not resume would overwrite.
    """
    path = folder / _NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return b""
        if resume:
            return path.read_bytes() or b"damaged"  # empty bytes would mean: no checkpoint
    except OSError as error:
        raise ConfigError(f"--checkpoint {folder} cannot be used: {error.strerror}") from None
    raise ConfigError(
        f"{path} exists; add --resume to go on from it, or give another --checkpoint folder"
    )


def read(content: bytes, settings: dict[str, Any]) -> State:
    """Read the State in the bytes of a file.

    Raises ConfigError if they are damaged, or the run that wrote them had other settings. A setting
    that an earlier version did not save fits.
    """
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        number, written = state["format"], dict(state["settings"])
    except Exception:  # torch.load raises IndexError, struct.error and others
        raise ConfigError("the checkpoint is damaged; remove it or restore a copy") from None
    if number != FORMAT:
        raise ConfigError(f"the checkpoint has format {number}; this version reads {FORMAT}")
    for name, value in settings.items():
        if (before := written.get(name, value)) != value:
            raise ConfigError(
                f"the checkpoint was written with {name} = {before}, this run has {value}; resume "
                "with the same"
            )
    return cast(State, state)


def _sync_folder(folder: Path) -> None:
    """Flush the rename to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
