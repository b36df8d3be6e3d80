"""``python -m ringcomm.train``: runs the trainer and turns errors into a sentence and a code.

Exit codes: 0 done; 1 the run failed, e.g. by a lost peer; 2 something in the command, the files or
the installation must be changed; 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..errors import ConfigError, RingcommError
from . import launcher
from .command_line import Options, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Train by the command line (``sys.argv`` for None) and return the exit code."""
    shared = True
    try:
        options = parse(arguments)
        shared = False
        _run(options)
    except ConfigError as error:
        # An error that all ranks share is printed once.
        if launcher.rank() == 0 or not (shared or isinstance(error, launcher.SharedError)):
            print(f"ringcomm.train: {error}", file=sys.stderr)
        return 2
    except RingcommError as error:
        print(f"ringcomm.train, rank {launcher.rank()}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _run(options: Options) -> None:
    launcher.let_idle_threads_sleep()
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ConfigError(
            "the trainer needs PyTorch, which is missing; pip install 'ringcomm[torch]'"
        ) from None
    from .distributed import join
    from .run import train

    with join(options) as world:
        train(options, world)


if __name__ == "__main__":
    sys.exit(main())
