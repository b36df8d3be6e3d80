"""Makes ringcomm/functions.pyi, the types of the module's collectives, from Communicator's methods.

    python tools/make_stub.py            after an overload in ringcomm/collectives.py has changed

A function takes what the method takes, and ``comm``. A test compares (tests/test_typing.py).
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
METHODS = ROOT / "ringcomm" / "collectives.py"
STUB = ROOT / "ringcomm" / "functions.pyi"
HEAD = '''"""Types of the collectives as functions; made by tools/make_stub.py."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, overload

from .codecs import Compression
from .communicator import Communicator
from .core.calls import Feedback, Op
from .core.residuals import Residuals
from .core.work import Work
from .fusion import Works

T = TypeVar("T")

'''


def stub() -> str:
    """Returns the text, laid out as ast does."""
    functions = [
        node
        for part in ast.parse(METHODS.read_text()).body
        if isinstance(part, ast.ClassDef) and part.name == "Collectives"
        for node in part.body
        if isinstance(node, ast.FunctionDef) and "overload" in map(ast.unparse, node.decorator_list)
    ]
    for function in functions:
        del function.args.args[0]  # self
        function.args.kwonlyargs.append(
            ast.arg("comm", ast.parse("Communicator | None").body[0].value)
        )
        function.args.kw_defaults.append(ast.Constant(...))
    return HEAD + "\n".join(map(ast.unparse, functions)) + "\n"


if __name__ == "__main__":
    STUB.write_text(stub())
    subprocess.run(["ruff", "format", str(STUB)], check=True, cwd=ROOT)
