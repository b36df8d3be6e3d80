"""Last warning of an OuterStep that was never ended: only this rank's model has its training, and
no other error would show that.

    never attached                  a forgotten "with": repeats the SilenceWarning at the end
    attached, and never detached    unsent iterations: logged when it is deleted, or at exit
    left by SystemExit              unsent iterations, too; other exceptions need no warning

Invariants: logged once; it does not keep an OuterStep alive.
"""

from __future__ import annotations

import logging
import weakref

_log = logging.getLogger("ringcomm")


class LastWord:
    """Logs a warning when an OuterStep is deleted without its end.

    Args:
        owner: that OuterStep.

    Attributes:
        unsent: iterations of this rank that are in no round yet.
        was_forgotten: whether optimizers of its model have stepped while it was not attached.
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
