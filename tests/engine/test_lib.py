"""The door to llama.cpp: guards, log, and that nothing else imports the package."""

import ast
from pathlib import Path

import pytest

import bitwright
from bitwright.engine import lib
from bitwright.errors import EngineError


def test_structs_of_the_installed_build_pass():
    lib.check_parameter_structs()
    lib.check_tensor_struct()


def test_a_shifted_parameter_struct_is_refused(monkeypatch):
    real = lib.llama.llama_context_default_params

    def drifted():
        params = real()
        params.offload_kqv = False  # what an unknown field before it would do
        return params

    monkeypatch.setattr(lib.llama, "llama_context_default_params", drifted)
    with pytest.raises(EngineError, match=r"llama_context_params.*pinned"):
        lib.check_parameter_structs()


def test_a_shifted_tensor_struct_is_refused(monkeypatch):
    class Drifted(lib.ctypes.Structure):
        _fields_ = (("new_field", lib.ctypes.c_int64), *lib.Tensor._fields_)

    monkeypatch.setattr(lib, "Tensor", Drifted)
    with pytest.raises(EngineError, match="ggml_tensor"):
        lib.check_tensor_struct()


def test_missing_function_says_what_to_do():
    with pytest.raises(EngineError, match="no function ggml_no_such_thing; install"):
        lib._prototype("ggml_no_such_thing", None)


def test_log_is_captured_only_inside_a_block():
    say = lib._on_log
    say(lib.LOG_ERROR, b"before\n", None)
    with lib.capture_log() as log:
        say(2, b"loading ", None)
        say(lib.LOG_ERROR, b"error: ", None)
        say(lib.LOG_CONTINUES, b"bad file\n", None)
        say(2, b"done\n", None)
    say(lib.LOG_ERROR, b"after\n", None)
    assert log.text == "loading error: bad file\ndone\n"
    assert log.last_error() == "error: bad file"


def test_version_names_package_and_library():
    assert lib.backend_version().startswith("llama-cpp-python 0.")


def test_only_lib_imports_llama_cpp():
    importers = []
    for path in Path(bitwright.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            importers += [path.name for name in names if name.split(".")[0] == "llama_cpp"]
    assert importers == ["lib.py"]
