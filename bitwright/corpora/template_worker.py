"""Renders chat templates in a process of its own; run as a script, it imports only Jinja2.

A chat template is code that came with a model file. The sandbox keeps it from reaching Python's
objects; this process, with its limits, keeps loops and huge strings from taking the machine.
Protocol: one JSON value a line; first the template, then lists of jobs (see chat_template.py).
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_OUTPUT_CHARS = 4 << 20
MAX_MEMORY_BYTES = 1 << 30
CPU_SECONDS_PER_REQUEST = 20  # a backstop: the parent gives up earlier, if it is still there
# Some templates print today's date; a fixed day keeps corpora the same on every day.
TODAY = datetime(2025, 1, 1)

Reply = dict[str, str]


class Generation(Extension):
    """The {% generation %} block that marks assistant text in some templates: passed through."""

    tags = {"generation"}  # noqa: RUF012 - the base class wants a set

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def environment() -> ImmutableSandboxedEnvironment:
    """The dialect that published templates are written for."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = TODAY.strftime
    return env


def render(template: Template, variables: Mapping[str, Any]) -> Reply:
    """{"text": ...}, or {"error": kind, "message": ...}."""
    parts, size = [], 0
    try:
        for part in template.generate(**variables):
            size += len(part)
            if size > MAX_OUTPUT_CHARS:
                return {"error": "limit", "message": "it writes more than 4 MiB for one text"}
            parts.append(part)
    except SecurityError as error:
        return {"error": "unsafe", "message": str(error)}
    except (MemoryError, OverflowError) as error:
        return {
            "error": "limit",
            "message": f"it needs too much memory or too long a range {error}",
        }
    except RecursionError:
        return {"error": "limit", "message": "it calls itself without end"}
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as e:
        return {"error": "failed", "message": str(e)}
    return {"text": "".join(parts)}


def _limit_cpu() -> None:
    try:
        import resource
    except ImportError:  # Windows: only the parent's clock
        return
    soft = int(time.process_time()) + CPU_SECONDS_PER_REQUEST
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    except (ImportError, ValueError, OSError):  # Windows; macOS refuses the limit
        return


def _compile(source: str) -> Template | Reply:
    try:
        return environment().from_string(source)
    except TemplateSyntaxError as error:
        return {"error": "syntax", "message": f"line {error.lineno}: {error.message}"}
    except SyntaxError as error:  # from Python: what Jinja's parser lets pass, a stray break
        return {"error": "syntax", "message": error.msg}
    except (RecursionError, MemoryError, OverflowError):
        return {"error": "limit", "message": "it is nested too deeply"}


def _answer(write: Callable[[str], object], value: object) -> None:
    write(json.dumps(value) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until the input ends."""
    _limit_memory()
    _limit_cpu()
    template = _compile(json.loads(sys.stdin.readline()))
    if isinstance(template, dict):
        _answer(sys.stdout.write, template)
        return
    _answer(sys.stdout.write, {"text": ""})
    for line in sys.stdin:
        _limit_cpu()
        _answer(sys.stdout.write, [render(template, job) for job in json.loads(line)])


if __name__ == "__main__":
    main()
