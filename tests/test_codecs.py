"""bench/codecs.py and bench/hops.py: what they conclude, and a short run of each."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import codecs as _standard  # noqa: F401  # the bench has the same name, see below

