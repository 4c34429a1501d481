"""The command line: one thin verb per stage. What a verb does is in bitwright/workflows.

stdout carries the result, stderr the progress. Exit codes: 0 done, 1 refused (one line says why),
2 usage, 130 interrupted.
"""

import io
import signal
import sys
from types import FrameType

from bitwright.cli import build, scores  # their verbs register themselves, in the order of --help
from bitwright.cli.app import app
from bitwright.errors import BitwrightError

__all__ = ["app", "build", "main", "scores"]


class Interrupted(BaseException):
    """Ctrl-C. Not KeyboardInterrupt, which Typer would turn into exit code 1."""


def main() -> None:
    """Entry point: turns every refusal into one line on stderr and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a console of another code page: no crash
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGINT, _interrupt)
    try:
        app()
    except BitwrightError as error:
        if "--debug" in sys.argv:
            raise
        _fail(f"bitwright: {error}", 1)
    except OSError as error:  # a path that the system refuses, wherever it was met
        if "--debug" in sys.argv or error.filename is None:
            raise
        _fail(f"bitwright: {error.filename}: {error.strerror}; check the path", 1)
    except Interrupted:
        _fail("bitwright: interrupted; the same command goes on where it stopped", 130)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise Interrupted


def _fail(message: str, code: int) -> None:
    print(message, file=sys.stderr)
    sys.exit(code)
