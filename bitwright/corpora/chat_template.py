"""A model's chat template, rendered in a limited process (see template_worker.py)."""

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from bitwright.errors import InputError

MAX_TEMPLATE_BYTES = 1 << 20
START_TIMEOUT_S = 30.0  # a cold interpreter on a busy machine
RENDER_TIMEOUT_S = 5.0

_WORKER = Path(__file__).with_name("template_worker.py")
_REFUSALS = {
    "unsafe": "unsafe access",
    "limit": "beyond its limits",
    "syntax": "a syntax error",
}


@dataclass(frozen=True, slots=True)
class Job:
    """One rendering; ``generate`` appends the header of an assistant turn."""

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] | None = None
    generate: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """The template did not take these messages, such as 'roles must alternate'."""

    message: str


class ChatTemplate:
    """A compiled template; a context manager, since it holds a process.

    Raises:
        InputError: 'chat template refused' for unsafe access, a syntax error (with its line),
            too much output, memory or time.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_text: str = "",
        eos_text: str = "",
        timeout_s: float = RENDER_TIMEOUT_S,
    ) -> None:
        size = len(source.encode("utf-8", "replace"))
        if size > MAX_TEMPLATE_BYTES:
            raise InputError(
                f"chat template refused: it has {size} bytes, more than 1 MiB; set another template"
            )
        self._texts = {"bos_token": bos_text, "eos_token": eos_text}
        self._timeout_s = timeout_s
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(
            target=_read_lines, args=(self._process.stdout, self._lines), daemon=True
        )
        self._reader.start()
        try:
            reply = self._ask(source, START_TIMEOUT_S)
            self._text(reply)
        except InputError:
            self.close()
            raise

    def render(self, jobs: Sequence[Job]) -> list[str | Failure]:
        """The text of each job, or the template's own complaint about it."""
        requests = [
            {
                "messages": list(job.messages),
                "tools": list(job.tools) if job.tools else None,
                "documents": None,
                "add_generation_prompt": job.generate,
                **self._texts,
            }
            for job in jobs
        ]
        replies = self._ask(requests, self._timeout_s)
        return [self._text(reply) for reply in replies]  # type: ignore[attr-defined]

    def _ask(self, request: object, timeout_s: float) -> object:
        if self._process.poll() is not None:
            raise InputError("chat template refused: its process has ended; start again")
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self.close()
            raise InputError(
                f"chat template refused: rendering took longer than {timeout_s:g} s"
            ) from None
        except BrokenPipeError:
            line = ""
        if not line:
            self.close()
            raise InputError("chat template refused: beyond its limits (its process was stopped)")
        return json.loads(line)

    def _text(self, reply: object) -> str | Failure:
        assert isinstance(reply, dict)
        if "text" in reply:
            return str(reply["text"])
        kind, message = reply["error"], reply["message"]
        if kind in _REFUSALS:
            raise InputError(f"chat template refused: {_REFUSALS[kind]} ({message})")
        return Failure(message)

    def close(self) -> None:
        """End the process; a second call does nothing."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                try:
                    stream.close()
                except BrokenPipeError:  # an unsent request of a stopped process
                    continue

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def _read_lines(stream: IO[str], lines: "queue.SimpleQueue[str]") -> None:
    """Hand on the worker's answers; an empty one says that it is gone."""
    for line in stream:
        lines.put(line)
    lines.put("")
