"""The program in a model's answer: bare, fenced, with prose around it, or the body alone.

What is cut away is never mended: text that is no Python at the end of an answer, and statements
outside of definitions (demonstrations, prints) in a fenced one.
"""

import ast
import re

_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_PYTHON = ("", "python", "py", "python3")
_KEPT = (
    *(ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef),
    *(ast.Assign, ast.AnnAssign),
)
_CODE_LINE = re.compile(r"(?:from\s+\S+\s+import\b|import\s+\w|def\s+\w|class\s+\w|@\w)")


def extract_program(answer: str, entry_point: str, prompt: str = "") -> str | None:
    """Python source that defines `entry_point`, or None when the answer has none.

    `prompt`: the start of the function as it was given, which a body alone goes on from; its
    imports and helpers are kept before a whole function too.
    """
    text = answer.replace("\r\n", "\n").replace("\r", "\n")
    blocks = [body for language, body in _FENCE.findall(text) if language.lower() in _PYTHON]
    for found in (_defining(blocks, entry_point), _bare(text, entry_point)):
        if found is not None:
            return f"{_stub(prompt)}\n{found}\n"
    if not prompt:
        return None
    for body in blocks or [text]:
        whole = _longest(prompt + _as_body(body, prompt))
        if whole is not None and len(whole) > len(prompt) and _defines(whole, entry_point):
            return whole + "\n"
    return None


def _defining(blocks: list[str], entry_point: str) -> str | None:
    """Definitions of all blocks, if the entry point is among them; later ones win."""
    parts = [definitions for body in blocks if (definitions := _definitions(body)) is not None]
    program = "\n\n".join(parts)
    return program if _defines(program, entry_point) else None


def _definitions(body: str) -> str | None:
    whole = _longest(body)
    if whole is None:
        return None
    kept = [node for node in ast.parse(whole).body if isinstance(node, _KEPT)]
    return "\n\n".join(ast.unparse(node) for node in kept) or None


def _bare(text: str, entry_point: str) -> str | None:
    """From the first line of code on, as far as it is Python; prose may stand around it."""
    lines = text.replace("```python", "").replace("```", "").split("\n")
    starts = [i for i, line in enumerate(lines) if _CODE_LINE.match(line)]
    for start in starts:
        whole = _longest("\n".join(lines[start:]))
        if whole is not None and _defines(whole, entry_point):
            return _definitions(whole)
    return None


def _as_body(body: str, prompt: str) -> str:
    """A body as it continues the prompt; one without indentation is the function's first line on.

    Chat models strip the space before the first line, and only that.
    """
    if not prompt.endswith("\n"):
        return body
    lines = body.strip("\n").split("\n")
    if lines and lines[0] and not lines[0][0].isspace():
        lines[0] = "    " + lines[0]
    return "\n".join(lines)


def _longest(source: str) -> str | None:
    """The longest start of whole lines that is Python, None if there is nothing."""
    lines = source.rstrip().split("\n")
    while lines:
        text = "\n".join(lines)
        problem_line = _problem(text)
        if problem_line is None:
            return text if text.strip() else None
        lines = lines[: min(len(lines) - 1, max(problem_line - 1, 0) or len(lines) - 1)]
    return None


def _problem(source: str) -> int | None:
    """None for Python; else the line where it stops being Python, at least 1."""
    try:
        ast.parse(source)
    except SyntaxError as error:
        # An unclosed bracket or string is reported where it opens: only lines after it can go.
        return max(error.lineno or 1, 1)
    except (ValueError, RecursionError, MemoryError):
        return 1
    return None


def _defines(source: str, entry_point: str) -> bool:
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(
        (isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == entry_point)
        or (
            isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == entry_point for t in node.targets)
        )
        for node in body
    )


def _stub(prompt: str) -> str:
    """The prompt as a program of its own, for its imports and helper functions."""
    if not prompt:
        return ""
    stub = prompt.rstrip() + "\n    pass\n"
    return stub if _problem(stub) is None else ""
