"""A word where an OuterStep is left without its end: what was trained is in no model but this
rank's, and nothing else would tell.

    never attached                  a forgotten "with": said again, as SilenceWarning is, at its end
    attached, and never detached    iterations that no round has: said when it goes, or at exit
    left by SystemExit              the same; any other exception speaks for itself

Invariants: said once; an OuterStep is not kept alive by it.
"""

from __future__ import annotations

import logging
import weakref

_log = logging.getLogger("ringcomm")


class LastWord:
    """Of one OuterStep.

    Args:
        owner: that OuterStep.

    Attributes:
        unsent: iterations of this rank that are in no round yet.
        was_forgotten: optimizers of its model have stepped, and it was not attached.
    """

    def __init__(self, owner: object) -> None:
        self.unsent = 0
        self.was_forgotten = False
        weakref.finalize(owner, self._say)

    def _say(self) -> None:
        if self.was_forgotten:
            _log.warning(
                "OuterStep was never attached, and the ranks have trained apart: train "
                'in a "with" of it, or call attach()'
            )
        elif self.unsent:
            _log.warning(
                "OuterStep was left without its end: %d iterations of this rank are in no "
                'round, and the ranks\' models differ. Leave its "with", or call flush() '
                "and detach()",
                self.unsent,
            )
