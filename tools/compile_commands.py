"""Prints compile_commands.json for editors, from the sources and flags that the build uses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import build_ffi  # noqa: E402

commands = [
    {
        "directory": str(ROOT),
        "file": source,
        "arguments": ["gcc", "-I.", *build_ffi.compile_args(), "-c", source],
    }
    for source in build_ffi.sources()
]
json.dump(commands, sys.stdout, indent=1)
