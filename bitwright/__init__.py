"""Bitwright: the GGUF of a given size that is best at a task."""

__version__ = "0.1.0"
