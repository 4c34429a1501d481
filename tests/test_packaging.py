"""The package as a whole: content folders, imports without effects, rooms that look one way."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bitwright.content import FOLDERS, content_dir, find_content
from bitwright.errors import ConfigError

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "bitwright"
ROOMS = ("cli", "workflows", "report", "eval", "allocator", "damage", "corpora", "engine")
BASE = ("content", "errors", "__init__")
HEAVY = ("llama_cpp", "datasets", "torch", "lm_eval", "optuna", "huggingface_hub")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if "_content" not in p.parts)


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every import of bitwright's own, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module and node.module.split(".")[0] == "bitwright":
                yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, "") for a in node.names if a.name.split(".")[0] == "bitwright")


def imported_room(module: str, name: str) -> str:
    parts = [*module.split(".")[1:], name]
    return parts[0] if parts[0] in (*ROOMS, *BASE) else "__init__"


def test_every_module_belongs_to_a_known_room():
    known = {*ROOMS, *BASE, "demo_model"}
    assert {room_of(path) for path in modules()} <= known


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path):
    room = room_of(path)
    order = {name: rank for rank, name in enumerate(ROOMS)}
    for module, name in imports_of(path):
        other = imported_room(module, name)
        if other in BASE:
            continue
        assert room in order, f"{path.name} may import nothing of {other}"
        assert order[other] >= order[room], f"{room}/{path.name} imports {module}: upwards"
        private = name.startswith("_") or any(p.startswith("_") for p in module.split("."))
        assert other == room or not private, f"{path.name} imports {module}.{name}: private"


def test_the_check_sees_an_import_upwards(tmp_path: Path):
    path = tmp_path / "x.py"
    text = "def f():\n    from bitwright.workflows import single\n    import bitwright.cli\n"
    path.write_text(text, encoding="utf-8")
    found = [imported_room(*entry) for entry in imports_of(path)]
    assert found == ["workflows", "cli"]


def test_only_one_module_imports_llama_cpp():
    importing = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "llama_cpp" for name in names):
                importing.append(path.relative_to(PACKAGE).as_posix())
    assert importing == ["engine/lib.py"]


def test_importing_has_no_effects():
    code = (
        "import os, sys, threading\n"
        "before = dict(os.environ)\n"
        "import bitwright, bitwright.cli, bitwright.errors, bitwright.content\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not heavy, heavy\n"
        "assert dict(os.environ) == before\n"
        "assert threading.active_count() == 1\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""


@pytest.mark.parametrize("folder", FOLDERS)
def test_content_folders_are_found_and_not_empty(folder: str):
    found = content_dir(folder)
    assert found.is_dir()
    assert list(found.glob("*.toml"))
    assert (found / "README.md").is_file() or folder == "workflows"


def test_content_travels_in_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    hook = {"bitwright/eval/bitwright_lm_eval.pth": "bitwright_lm_eval.pth"}
    assert included == {folder: f"bitwright/_content/{folder}" for folder in FOLDERS} | hook


def test_a_users_file_comes_before_a_built_in_and_unknown_names_are_refused(tmp_path: Path):
    mine = tmp_path / "code.toml"
    mine.write_text("", encoding="utf-8")
    assert find_content("corpora", mine) == mine
    assert find_content("corpora", "code") == content_dir("corpora") / "code.toml"
    for name in ("nothing", "../workflows/coding-q3_k_s", tmp_path / "no.toml"):
        with pytest.raises(ConfigError, match="built-in"):
            find_content("corpora", name)


def test_the_package_uses_no_catch_all():
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ExceptHandler):
                caught = node.type.id if isinstance(node.type, ast.Name) else None
                bare = node.type is None or caught == "Exception"
                assert not bare, f"{path}:{node.lineno} catches everything"
