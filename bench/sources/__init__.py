"""What results.py reproduces: a module for each source. source.py says what such a module has."""
