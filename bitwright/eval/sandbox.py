"""Runs code that a model wrote, in bubblewrap; without a sandbox it refuses.

No network, no home, the system read-only, an empty environment, closed standard input, and limits
on CPU, memory, processes, file size and wall time. A pass is a secret that is printed after the
tests by a program which does not know it before: an early exit with code 0 is no pass.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from bitwright.errors import ConfigError, EngineError

Verdict = Literal["correct", "failed", "timeout", "memory", "too_much_output", "exited_early"]
MOST_OUTPUT_BYTES = 1 << 16
NOBODY = 65534
# As root each program is a user of its own, since the kernel counts processes by user: programs
# that run at the same time would use up each other's limit.
FIRST_USER, USERS = 1 << 30, 1 << 20
CORRECT: Literal["correct"] = "correct"


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one program. `processes` counts threads too; the temporary folder is in memory."""

    wall_s: float = 10.0
    cpu_s: int = 8
    memory_bytes: int = 512 << 20
    processes: int = 8
    file_bytes: int = 1 << 20
    folder_bytes: int = 32 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """What happened to one program; `message` is the last line it wrote to standard error."""

    verdict: Verdict
    message: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that the sandbox needs."""

    what: str
    ok: bool
    advice: str = ""


def doctor() -> list[Check]:
    """What is there and what is missing for executing code."""
    checks = [
        Check("Linux", sys.platform == "linux", "code is executed on Linux only (WSL will do)"),
    ]
    found = shutil.which("bwrap") is not None
    checks.append(Check("bubblewrap (bwrap)", found, "install it: apt install bubblewrap"))
    if not found or sys.platform != "linux":
        return checks
    limits = Limits(wall_s=20.0)
    works = _probe("pass", limits)
    advice = "the kernel or a container forbids user namespaces; allow them or use another host"
    checks.append(Check("a program runs in the sandbox", works, advice))
    if works:
        offline = "import socket\ntry:\n    socket.create_connection(('192.0.2.1', 9), 1)\n"
        offline += "except OSError as e:\n    assert e.errno in (101, 99, 1, 13, 113), e\n"
        offline += "else:\n    raise SystemExit('network')"
        checks.append(Check("no network inside", _probe(offline, limits), "do not use it"))
        home = f"import os; assert not os.path.exists({str(Path.home())!r})"
        checks.append(Check("no home folder inside", _probe(home, limits), "do not use it"))
        write = (
            "try:\n    open('/usr/x', 'w')\nexcept OSError:\n    pass\nelse:\n    raise SystemExit"
        )
        checks.append(Check("the system is read-only inside", _probe(write, limits), "do not use"))
    return checks


def _probe(program: str, limits: Limits) -> bool:
    return run_program(program, limits).verdict == CORRECT


def require_sandbox() -> None:
    """Raise ConfigError that names what is missing."""
    missing = [check for check in doctor() if not check.ok]
    if missing:
        first = missing[0]
        raise ConfigError(
            f"code cannot be executed safely here: {first.what} is missing or does not work; "
            f"{first.advice}"
        )


def run_program(program: str, limits: Limits | None = None) -> Run:
    """Run Python source in the sandbox; `correct` if it got to its end.

    Raises:
        ConfigError: there is no bubblewrap. EngineError: it could not start the program.
    """
    limits = limits or Limits()
    if shutil.which("bwrap") is None:
        raise ConfigError(
            "bubblewrap is not installed and model-written code runs in it only: install it "
            "(apt install bubblewrap), or leave code tasks out"
        )
    source, secret = program.encode("utf-8", errors="replace"), secrets.token_hex(16).encode()
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as output,
        tempfile.TemporaryFile() as errors,
    ):
        given.write(b"%d\n" % len(source) + source + secret)
        given.seek(0)
        code, timed_out = _run(given, output, errors, limits)
        size = max(file.seek(0, os.SEEK_END) for file in (output, errors))
        printed, complained = _tail(output), _tail(errors)
    passed = code == 0 and printed.endswith(secret)
    return Run(CORRECT) if passed else _failure(code, timed_out, complained, size, limits)


# Runs inside. The program's own input is empty; the secret is read when the program has ended.
_BOOTSTRAP = r"""
import os, resource, sys
def main(cpu, memory, processes, size, user):
    given = os.fdopen(os.dup(0), "rb", 0)
    source = b""
    head = b""
    while not head.endswith(b"\n"):
        head += given.read(1)
    while len(source) < int(head):
        source += given.read(int(head) - len(source))
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    for what, most in ((resource.RLIMIT_CPU, cpu), (resource.RLIMIT_AS, memory),
                       (resource.RLIMIT_NPROC, processes), (resource.RLIMIT_FSIZE, size),
                       (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64)):
        resource.setrlimit(what, (most, most))
    own, out = os.getpid(), os.dup(1)
    try:
        exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
    except SystemExit:
        os._exit(17)
    sys.stdout.flush()
    if os.getpid() == own:
        os.write(out, b"\n" + given.read())
    os._exit(0)
sys.setrecursionlimit(5000)
main(*map(int, sys.argv[1:]))
"""


def _arguments(limits: Limits) -> list[str]:
    python = os.path.realpath(sys.executable)
    prefix = os.path.realpath(sys.base_prefix)
    given = [
        *("bwrap", *_namespaces(), "--die-with-parent", "--new-session", "--clearenv"),
        *("--setenv", "PATH", "/usr/bin", "--setenv", "PYTHONDONTWRITEBYTECODE", "1"),
        *("--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"),
        *("--perms", "1777", "--size", str(limits.folder_bytes), "--tmpfs", "/tmp"),
        *("--chdir", "/tmp"),
        *("--hostname", "sandbox"),
    ]
    for name in ("lib", "lib64", "bin"):
        if Path("/", name).is_symlink():
            given += ["--symlink", f"usr/{name}", f"/{name}"]
        elif Path("/", name).is_dir():
            given += ["--ro-bind", f"/{name}", f"/{name}"]
    if not prefix.startswith("/usr"):
        given += ["--ro-bind", prefix, "/python"]
        python = python.replace(prefix, "/python", 1)
    user = FIRST_USER + secrets.randbelow(USERS) if os.getuid() == 0 else NOBODY
    most = (limits.cpu_s, limits.memory_bytes, limits.processes, limits.file_bytes, user)
    return [*given, python, "-I", "-S", "-c", _BOOTSTRAP, *map(str, most)]


def _namespaces() -> tuple[str, ...]:
    """As a user: all of them. As root: without a user namespace, and the bootstrap drops root.

    The kernel exempts root's processes from the limit on their number, also where a user namespace
    shows them under another id.
    """
    if os.getuid() != 0:
        nobody = str(NOBODY)
        return ("--unshare-all", "--cap-drop", "ALL", "--uid", nobody, "--gid", nobody)
    kinds = ("ipc", "pid", "net", "uts", "cgroup-try")
    keep = ("--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
    return (*(f"--unshare-{kind}" for kind in kinds), *keep)


def _run(
    stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes], limits: Limits
) -> tuple[int, bool]:
    """(exit code, whether the wall time ran out); all it started is gone afterwards.

    The program lives in a pid namespace of its own, which ends with bwrap.
    """
    try:
        process = subprocess.Popen(
            _arguments(limits),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"bubblewrap cannot be started: {error}") from None
    try:
        return process.wait(limits.wall_s), False
    except subprocess.TimeoutExpired:
        return -1, True
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(file: IO[bytes]) -> bytes:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - MOST_OUTPUT_BYTES))
    return file.read()


def _failure(code: int, timed_out: bool, complained: bytes, size: int, limits: Limits) -> Run:
    lines = complained.decode("utf-8", errors="replace").strip().splitlines()
    message = lines[-1][:200] if lines else ""
    if timed_out:
        return Run("timeout", f"no end within {limits.wall_s:g} s")
    signals = {128 + int(s): s for s in (signal.SIGXCPU, signal.SIGKILL, signal.SIGXFSZ)}
    stopped = signals.get(code if code > 0 else 128 - code)
    if stopped in (signal.SIGXCPU, signal.SIGKILL):
        return Run("timeout", f"no end within {limits.cpu_s} s of CPU time")
    if message.startswith("MemoryError"):
        return Run("memory", message)
    if size >= limits.file_bytes or stopped is signal.SIGXFSZ:
        return Run("too_much_output", message)
    if code in (0, 17):
        return Run("exited_early", message)
    return Run("failed", message or f"exit code {code}")
