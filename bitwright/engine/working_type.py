"""The float type that a session computes the reference in, and what each tensor becomes in it."""

from bitwright.engine import lib
from bitwright.engine.gguf_file import TensorInfo
from bitwright.engine.tensors import is_quantizable
from bitwright.errors import ConfigError

FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def resolve_working_type(wanted: str, reference_type: str, gpu_layers: int) -> str:
    """The type that the body's weights are computed in.

    'auto' without offloaded layers is BF16 where the CPU multiplies it natively, and F16 for a BF16
    file where it does not (emulated BF16 takes several times longer); else the reference's own
    type. An already quantized reference stays as it is. Raises ConfigError when the type is
    unknown, or wider than the reference's.
    """
    name = wanted.upper()
    if name not in {"AUTO", "FILE", *FLOAT_BYTES}:
        raise ConfigError(f"working type {wanted!r} is not one of auto, file, F32, F16, BF16")
    if name == "FILE" or (name == "AUTO" and reference_type not in FLOAT_BYTES):
        return reference_type
    if name == "AUTO":
        if gpu_layers:
            return reference_type
        if lib.has_bf16():
            return "BF16"
        return "F16" if reference_type == "BF16" else reference_type
    if FLOAT_BYTES[name] > FLOAT_BYTES.get(reference_type, 1):
        raise ConfigError(
            f"working type {name} is wider than the model's own {reference_type}: weights are "
            "converted in the place they were loaded to, so they cannot grow; use 'file' or a "
            "type that is not wider"
        )
    return name


def own_type(info: TensorInfo, arch: str, working_type: str) -> str:
    """The type a tensor has in memory while it is not swapped.

    The working type for float tensors that may be quantized and are at least as wide; else its own.
    """
    if info.type not in FLOAT_BYTES or working_type not in FLOAT_BYTES:
        return info.type
    wider = FLOAT_BYTES[working_type] > FLOAT_BYTES[info.type]
    return info.type if wider or not is_quantizable(info, arch) else working_type
