"""Progress display of a run, and its log on disk.

On a terminal: rich's progress bar. Elsewhere: a plain line each time. A terminal means both
standard output and standard error, since mpirun gives its ranks a terminal for the former alone,
whatever its own output goes to. The log is JSON lines, one object per line, each with an "event":

    config     the settings, at the start of each run (a resumed run appends: read the last object
               of a step)
    step       step, epoch, loss (mean over the global batch), lr, and on rank 0 the seconds of the
               step and of its input
    held_out   step, epoch and the held-out figures
    report     ``report.build``

Invariants: rank 0 alone shows and writes; each line of the log is whole on disk before the next
event.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import rich.progress
from rich.console import Console

from ..errors import ConfigError


class Log:
    """JSON lines appended to a file; without a path, to none."""

    def __init__(self, path: str | None) -> None:
        """Open the file. Raises ConfigError if that fails."""
        place = Path(os.devnull if path is None else path)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            self._file = place.open("a", encoding="utf-8")
        except OSError as error:
            reason = error.strerror
            raise ConfigError(f"--log-file {path} cannot be written: {reason}") from None

    def write(self, event: str, **fields: Any) -> None:
        """Append one object."""
        self._file.write(json.dumps({"event": event, **fields}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Progress(rich.progress.Progress):
    """Display of the run's state. Used as a context manager; quiet on all ranks but 0."""

    def __init__(self, steps: int, first: int, *, quiet: bool) -> None:
        terminal = sys.stdout.isatty() and sys.stderr.isatty()
        console = Console(
            quiet=quiet, highlight=False, force_terminal=terminal, width=None if terminal else 80
        )
        super().__init__(console=console, disable=not terminal)
        self._steps = steps
        self._run = self.add_task("", total=steps, completed=first)

    def show(self, step: int, loss: float, rate: float, samples_per_s: float) -> None:
        """Show the state of the run after ``step`` steps."""
        text = (
            f"step {step}/{self._steps}  loss {loss:.4f}  lr {rate:.2g}  "
            f"{samples_per_s:,.0f} samples/s"
        )
        self.update(self._run, completed=step, description=text)
        if self.disable:
            self.say(text)

    def say(self, text: str) -> None:
        """Print one line for people, above the bar."""
        self.console.print(text, soft_wrap=True, markup=False)
