"""RINGCOMM_LOG: sets up the logger "ringcomm" for programs that do not configure logging.

    RINGCOMM_LOG=info     rank 0's summary of the job, then a line for each event: a port left out,
                          a peer lost, a mismatch, a timeout, a split, a close

Invariants: without the variable nothing of ``logging`` is changed. A handler is added only if
neither the logger nor any above it has one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from .errors import ConfigError, did_you_mean

VARIABLE = "RINGCOMM_LOG"

_LEVELS = ("debug", "info", "warning", "error")
_FORMAT = "%(asctime)s ringcomm[%(process)d] %(levelname)s: %(message)s"


def set_up(env: Mapping[str, str]) -> None:
    """Sets the level that RINGCOMM_LOG names. Raises ConfigError if it is no level."""
    asked = env.get(VARIABLE, "").strip().lower()
    if not asked:
        return
    if asked not in _LEVELS:
        raise ConfigError(
            f"{VARIABLE}={env[VARIABLE]!r}: give one of {', '.join(_LEVELS)}"
            f"{did_you_mean(asked, _LEVELS)}"
        )
    logger = logging.getLogger("ringcomm")
    logger.setLevel(asked.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT))
        logger.addHandler(handler)
