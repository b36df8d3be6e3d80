"""What the reference trainer wrote to its log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]
