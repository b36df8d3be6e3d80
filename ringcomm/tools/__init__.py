"""The commands of ``python -m ringcomm``, one module each."""
