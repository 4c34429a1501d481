"""Progress of long work: a bar on a terminal, plain lines elsewhere, always on stderr."""

import sys
import time
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Reporter(Protocol):
    """Where stages say what they do. All methods return at once and never raise."""

    def stage(self, name: str, text: str) -> None:
        """A stage begins (or is taken from the run folder)."""

    def step(self, done: float, total: int, label: str) -> None:
        """``done`` of ``total`` units of the current stage; a fraction is a part of a unit."""

    def note(self, text: str) -> None:
        """A line that the user should see and that is no error."""

    def close(self) -> None:
        """No more work."""


class Silent:
    """A reporter that says nothing (library use, tests)."""

    def stage(self, name: str, text: str) -> None:
        """Nothing."""

    def step(self, done: float, total: int, label: str) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class PlainReporter:
    """One line per stage, and one per ``every_s`` seconds of a long one, with elapsed and ETA."""

    def __init__(self, every_s: float = 10.0) -> None:
        self.every_s = every_s
        self.name = ""
        self.started = self.last = time.monotonic()

    def stage(self, name: str, text: str) -> None:
        """Print the stage's line."""
        self.name, self.started = name, time.monotonic()
        self.last = self.started
        self._print(f"[{name}] {text}")

    def step(self, done: float, total: int, label: str) -> None:
        """Print a line when the last one is old enough."""
        now = time.monotonic()
        if now - self.last < self.every_s or done <= 0:
            return
        self.last = now
        elapsed = now - self.started
        eta = elapsed / done * (total - done)
        times = f"{clock(elapsed)} elapsed · {clock(eta)} to go"
        self._print(f"[{self.name}] {int(done)}/{total} {label} · {times}")

    def note(self, text: str) -> None:
        """Print the note."""
        self._print(f"[{self.name or 'bitwright'}] {text}")

    def close(self) -> None:
        """Nothing is open."""

    @staticmethod
    def _print(text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class BarReporter:
    """Rich bars on a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("[bold]{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[label]}"),
            console=console,
        )
        self.task: TaskID | None = None
        self.progress.start()

    def stage(self, name: str, text: str) -> None:
        """Start a bar for the stage."""
        self._finish()
        self.progress.console.print(f"[bold]{name}[/bold] {text}", highlight=False)
        self.task = self.progress.add_task(name, total=None, label="")

    def step(self, done: float, total: int, label: str) -> None:
        """Move the bar."""
        if self.task is not None:
            self.progress.update(self.task, completed=done, total=total, label=label)

    def note(self, text: str) -> None:
        """Print above the bar."""
        self.progress.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        """Remove the bar."""
        self._finish()
        self.progress.stop()

    def _finish(self) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
            self.task = None


def make_reporter(*, quiet: bool = False) -> Reporter:
    """Bars on a terminal, plain lines elsewhere, nothing when quiet."""
    if quiet:
        return Silent()
    console = Console(stderr=True)
    return BarReporter(console) if console.is_terminal else PlainReporter()


def clock(seconds: float) -> str:
    """``h:mm:ss`` or ``m:ss``."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
