"""Every error that Bitwright raises on purpose, at a glance.

A message is one sentence: what was given, the rule it breaks, and what to do next.
The command line prints it and exits with 1; anything else that escapes is a bug.
"""


class BitwrightError(Exception):
    """Base of all of them: catch this one to catch every refusal."""


class InputError(BitwrightError):
    """A file or text that was given cannot be used (model, imatrix, corpus, layout)."""


class ConfigError(BitwrightError):
    """A workflow, recipe, option or pin does not say something that can be done."""


class BudgetError(BitwrightError):
    """No layout fits what was asked for (size, ladder, pins)."""


class EngineError(BitwrightError):
    """llama.cpp refused, or returned something that must not be used (NaN, drifted structs)."""


class NotFiniteError(EngineError):
    """Logits hold NaN or infinity: this result cannot be scored, others can."""


class StorageError(BitwrightError):
    """A file cannot be written where it should go (space, permission, would overwrite)."""
