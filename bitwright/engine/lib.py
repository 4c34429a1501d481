"""The one door to llama.cpp: importing this module is the only import of llama_cpp.

It loads the library that llama-cpp-python built, adds the ggml prototypes that the package does
not declare, silences the log, and refuses to go on when a struct does not look as it should.
A drifted struct does not crash: it reads another field and computes something else, so every
struct that is passed or read is checked here against values that are known beforehand.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

# OpenMP workers that spin while they wait make shared cores many times slower. It has to be set
# before the library is loaded, which is why this import has an effect and sits above the rest.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import llama_cpp

from bitwright.errors import EngineError

llama: Any = llama_cpp.llama_cpp  # the package's own ctypes prototypes and structs
P = ctypes.c_void_p
MAX_NAME = 64
LOG_ERROR = 4
LOG_CONTINUES = 5
MAX_SEQUENCES = 256


class Tensor(ctypes.Structure):
    """ggml_tensor of the pinned build (ggml.h), checked by `check_tensor_struct`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", P),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", P * 10),
        ("view_src", P),
        ("view_offs", ctypes.c_size_t),
        ("data", P),
        ("name", ctypes.c_char * MAX_NAME),
        ("extra", P),
        ("padding", ctypes.c_char * 8),
    )


class TypeTraits(ctypes.Structure):
    """ggml_type_traits of the pinned build; `to_float(src, dst, n)` is null for F32."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block_size", ctypes.c_int64),
        ("block_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", P),
        ("from_float_ref", P),
    )


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", P), ("no_alloc", ctypes.c_bool))


TO_FLOAT = ctypes.CFUNCTYPE(None, P, P, ctypes.c_int64)
EVAL_CALLBACK = llama.ggml_backend_sched_eval_callback


def _prototype(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
    """A ggml function through llama.cpp's handle: dlsym reaches the libraries it depends on."""
    try:
        function = getattr(llama._lib, name)
    except AttributeError:
        raise EngineError(
            f"the installed llama.cpp has no function {name}; install llama-cpp-python as pinned "
            "in pyproject.toml"
        ) from None
    function.restype = result
    function.argtypes = list(arguments)
    return function  # type: ignore[no-any-return]


_SIZE, _INT, _I64 = ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
tensor_get = _prototype("ggml_backend_tensor_get", None, P, P, _SIZE, _SIZE)
tensor_set = _prototype("ggml_backend_tensor_set", None, P, P, _SIZE, _SIZE)
tensor_nbytes = _prototype("ggml_nbytes", _SIZE, P)
buffer_is_host = _prototype("ggml_backend_buffer_is_host", ctypes.c_bool, P)
buffer_name = _prototype("ggml_backend_buffer_name", ctypes.c_char_p, P)
row_size = _prototype("ggml_row_size", _SIZE, _INT, _I64)
type_size = _prototype("ggml_type_size", _SIZE, _INT)
quantize_chunk = _prototype("ggml_quantize_chunk", _SIZE, _INT, P, P, _I64, _I64, _I64, P)
quantize_requires_imatrix = _prototype("ggml_quantize_requires_imatrix", ctypes.c_bool, _INT)
validate_row_data = _prototype("ggml_validate_row_data", ctypes.c_bool, _INT, P, _SIZE)
type_traits = _prototype("ggml_get_type_traits", ctypes.POINTER(TypeTraits), _INT)
_op_name = _prototype("ggml_op_name", ctypes.c_char_p, _INT)
_cpu_has_avx512_bf16 = _prototype("ggml_cpu_has_avx512_bf16", _INT)


@cache
def op_name(op: int) -> str:
    """ggml's name of a graph operation, such as MUL_MAT_ID."""
    return str(_op_name(op).decode())


@cache
def dequantizer(type_id: int) -> Callable[..., None] | None:
    """`f(source address, float32 address, n)`, or None where the type has no conversion."""
    address = type_traits(type_id).contents.to_float
    return TO_FLOAT(address) if address else None


@dataclass(slots=True)
class LogCapture:
    """What llama.cpp said inside a `capture_log` block."""

    records: list[tuple[int, str]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Every level, in order, as one text."""
        return "".join(text for _, text in self.records)

    def last_error(self) -> str:
        """The last error line without its newline; '' when there was none."""
        said = "".join(text for level, text in self.records if level == LOG_ERROR)
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        return lines[-1] if lines else ""


_captures: list[LogCapture] = []  # the log is one per process in llama.cpp, so this is too


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes | None, _user_data: Any) -> None:
    if not _captures or text is None:
        return
    decoded = text.decode("utf-8", errors="replace")
    for capture in _captures:
        before = capture.records[-1][0] if capture.records else level
        capture.records.append((before if level == LOG_CONTINUES else level, decoded))


@contextmanager
def capture_log() -> Iterator[LogCapture]:
    """Collect llama.cpp's log inside the block; outside of such blocks it is dropped."""
    capture = LogCapture()
    _captures.append(capture)
    try:
        yield capture
    finally:
        _captures.remove(capture)


def backend_version() -> str:
    """Package and library, for messages and provenance: 'llama-cpp-python 0.3.36 (llama.cpp …)'."""
    version = _prototype("llama_version", ctypes.c_char_p)().decode()
    return f"llama-cpp-python {llama_cpp.__version__} (llama.cpp {version})"


def has_bf16() -> bool:
    """Whether this build multiplies BF16 natively on this CPU (else F16 is the faster type)."""
    return bool(_cpu_has_avx512_bf16())


def _expect(what: str, found: object, known: object) -> None:
    if found != known:
        raise EngineError(
            f"the installed llama.cpp lays out {what} as {found}, expected {known}: its structs "
            "are not those of the pinned build; install llama-cpp-python as pinned in "
            "pyproject.toml"
        )


def check_parameter_structs() -> None:
    """Compare the defaults that the library fills in with those of the pinned build.

    A field that was added or moved shifts what follows, so each struct is read at its end too.
    """
    model = llama.llama_model_default_params()
    _expect(
        "llama_model_params",
        [model.n_gpu_layers, model.split_mode, model.load_mode, model.lazy_mode, model.main_gpu],
        [-1, 1, -1, 1, 0],
    )
    _expect(
        "the end of llama_model_params",
        [model.vocab_only, model.use_extra_bufts, model.no_host, model.no_alloc, model.load_mtp],
        [False, True, False, False, False],
    )
    context = llama.llama_context_default_params()
    _expect(
        "llama_context_params",
        [context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max],
        [512, 2048, 512, 1],
    )
    _expect(
        "the middle of llama_context_params",
        [context.flash_attn_type, context.defrag_thold, context.type_k, context.type_v],
        [-1, -1.0, 1, 1],
    )
    _expect(
        "the end of llama_context_params",
        [context.embeddings, context.offload_kqv, context.no_perf, context.kv_unified],
        [False, True, True, False],
    )
    quantize = llama.llama_model_quantize_default_params()
    _expect(
        "llama_model_quantize_params",
        [quantize.nthread, quantize.ftype, quantize.quantize_output_tensor, quantize.dry_run],
        [0, 7, True, False],
    )
    _expect("the end of llama_model_quantize_params", quantize.max_buf_size, 8 << 30)
    traits = type_traits(12).contents
    _expect(
        "ggml_type_traits",
        [traits.type_name, traits.block_size, traits.type_size, traits.is_quantized],
        [b"q4_K", 256, 144, True],
    )


def check_tensor_struct() -> None:
    """Let ggml build three tensors and read them through `Tensor`."""
    init = _prototype("ggml_init", P, _InitParams)
    free = _prototype("ggml_free", None, P)
    new_2d = _prototype("ggml_new_tensor_2d", P, P, _INT, _I64, _I64)
    set_name = _prototype("ggml_set_name", P, P, ctypes.c_char_p)
    view_1d = _prototype("ggml_view_1d", P, P, P, _I64, _SIZE)
    mul_mat = _prototype("ggml_mul_mat", P, P, P, P)
    context = init(_InitParams(1 << 16, None, True))
    try:
        weight, x = new_2d(context, 1, 32, 5), new_2d(context, 0, 32, 3)
        set_name(weight, b"layout")
        view, product = view_1d(context, weight, 8, 64), mul_mat(context, weight, x)
        w, v, y = (Tensor.from_address(address) for address in (weight, view, product))
        _expect("ggml_tensor", [w.type, w.name, w.view_src], [1, b"layout", None])
        _expect("ggml_tensor", [*w.ne, *w.nb], [32, 5, 1, 1, 2, 64, 320, 320])
        _expect("ggml_tensor of a view", [v.view_src, v.view_offs], [weight, 64])
        _expect(
            "ggml_tensor of an operation",
            [op_name(y.op), *y.src[:3], *y.ne],
            ["MUL_MAT", weight, x, None, 5, 3, 1, 1],
        )
    finally:
        free(context)


llama.llama_log_set(_on_log, P(0))
llama.llama_backend_init()
check_parameter_structs()
check_tensor_struct()
