"""How a verb speaks: the result on stdout (a table, or one JSON line), the progress on stderr."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console, RenderableType

from bitwright.workflows.progress import Reporter, make_reporter


@dataclass(frozen=True, slots=True)
class Output:
    """Where and how results are printed."""

    json: bool = False
    quiet: bool = False

    def reporter(self) -> Reporter:
        """The progress reporter of this run."""
        return make_reporter(quiet=self.quiet)

    def result(self, data: Mapping[str, object], *shown: RenderableType) -> None:
        """Print the JSON line, or what a person reads."""
        if self.json:
            # ASCII, so that the line is the same in every locale and on every terminal.
            print(json.dumps(data, allow_nan=False), flush=True)
            return
        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
        for part in shown:
            console.print(part, highlight=False, markup=False, soft_wrap=isinstance(part, str))


def bytes_text(size_bytes: int) -> str:
    """``1,995,616 bytes (2.00 MB, 1.90 MiB)``; decimal and binary are never mixed."""
    if size_bytes >= 1e9:
        return f"{size_bytes:,} bytes ({size_bytes / 1e9:.2f} GB, {size_bytes / 2**30:.2f} GiB)"
    return f"{size_bytes:,} bytes ({size_bytes / 1e6:.2f} MB, {size_bytes / 2**20:.2f} MiB)"
