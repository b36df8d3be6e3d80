"""The command line: ``python -m ringcomm [command]``, each command a module of ringcomm.tools."""

from __future__ import annotations

import importlib
import sys

_USAGE = """\
usage: python -m ringcomm            what is installed, what this machine offers, and the settings
       python -m ringcomm jobs       the connections of your jobs here that span several hosts
       python -m ringcomm explain    which algorithm an all-reduce goes by, and why (--help)
       python -m ringcomm keygen F   make a job secret in file F
       python -m ringcomm.train      the reference trainer (--help for its options)
       python -m ringcomm --version  the version alone
"""
_COMMANDS = ("info", "jobs", "explain", "keygen", "help")
_WITH_ARGUMENTS = ("explain", "keygen")


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    command, *rest = (sys.argv[1:] if argv is None else argv) or ["info"]
    if command in _WITH_ARGUMENTS:
        return int(importlib.import_module(f".tools.{command}", __package__).main(rest))
    if command in ("info", "jobs") and not {"-h", "--help"} & {*rest}:
        if rest:
            print(f"ringcomm: {command} takes no arguments\n{_USAGE}", end="", file=sys.stderr)
            return 2
        return int(importlib.import_module(f".tools.{command}", __package__).main())
    if command == "tune":
        print(
            "ringcomm: tune is gone: the cost model chooses all-reduces by the speed of the links, "
            "and RINGCOMM_ALGORITHM overrules it",
            file=sys.stderr,
        )
        return 2
    if command in ("-V", "--version", "version"):
        from . import __version__

        print(f"ringcomm {__version__}")
        return 0
    if command in ("-h", "--help", "help", "info", "jobs"):
        print(_USAGE, end="")
        return 0
    from .errors import did_you_mean

    near = did_you_mean(command, _COMMANDS)
    print(f"ringcomm: unknown command '{command}'{near}\n{_USAGE}", end="", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
