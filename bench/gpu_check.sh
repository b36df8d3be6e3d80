#!/bin/sh
# Proves ringcomm on a GPU in under nine minutes; --fake: as much of it as needs none.
# PYTHON names the interpreter; else .venv's, else python3.
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
if [ -z "$PYTHON" ]; then
    PYTHON=python3
    if [ -x "$here/../.venv/bin/python" ]; then PYTHON=$here/../.venv/bin/python; fi
fi
exec "$PYTHON" -u "$here/gpu_check.py" "$@"
