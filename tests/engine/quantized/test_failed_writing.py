import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bitwright.engine import file_plan, quantized_file
from bitwright.engine.ggml_types import TYPES
from bitwright.engine.model_file import open_model
from bitwright.errors import EngineError, StorageError
from tests.engine.quantized.writing import ZeroPacker, uniform, write
from tests.tiny import tiny_gguf


@pytest.mark.parametrize(
    ("fault", "raised", "message"),
    [
        (OSError(errno.ENOSPC, "x"), StorageError, "the disk is full"),
        (OSError(errno.EROFS, "x"), StorageError, "read-only"),
        (OSError(errno.EIO, "Input/output error"), StorageError, "Input/output error"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (EngineError("broken"), EngineError, "broken"),
    ],
)
@pytest.mark.parametrize("old", [None, b"old"])
def test_a_failure_leaves_what_was_there(model, tmp_path, fault, raised, message, old):
    out = tmp_path / "o.gguf"
    if old:
        out.write_bytes(old)
    packer = ZeroPacker(model, fail=fault)
    with pytest.raises(raised, match=message):
        write(model, uniform(model, "Q4_K"), out, packer=packer, overwrite=True)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == ([old] if old else [])


@pytest.mark.parametrize(
    ("kind", "fill"),
    [
        *((t, 0x7C00) for t in ("Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "IQ4_NL")),
        *((t, 0xFE01) for t in ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")),
        *(("IQ4_XS", 0xFC00), ("BF16", 0x7F80), ("TQ2_0", 0)),
    ],
)
def test_broken_scales_are_found(model, tmp_path, kind, fill):
    layout = {"blk.0.ffn_up.weight": kind}
    packer = ZeroPacker(model, fill=fill)
    if not fill:
        write(model, layout, tmp_path / "o.gguf", packer=packer)
        return
    with pytest.raises(EngineError, match=rf"blk.0.ffn_up.weight \({kind}\) .* in block 0"):
        write(model, layout, tmp_path / "o.gguf", packer=packer)
    assert not list(tmp_path.iterdir())


def test_a_type_that_differs_from_the_plan_is_found(model, tmp_path, monkeypatch):
    """As if the header said another type of the same size than was planned."""
    plan = quantized_file.plan_quantized

    def tampered(*args, **kwargs):
        (planned,) = plan(*args, **kwargs)
        q3, iq3 = (bytes([TYPES[n].id, 0, 0, 0]) for n in ("Q3_K", "IQ3_S"))
        name = b"blk.0.ffn_up.weight"
        at = planned.header.index(q3, planned.header.index(name) + len(name) + 4)
        header = planned.header[:at] + iq3 + planned.header[at + 4 :]
        return (
            file_plan.PlannedFile(header, planned.tensors, planned.alignment, planned.size_bytes),
        )

    monkeypatch.setattr(quantized_file, "plan_quantized", tampered)
    with pytest.raises(EngineError, match=r"ffn_up.weight was written as IQ3_S, .*=Q3_K"):
        write(model, {"blk.0.ffn_up.weight": "Q3_K"}, tmp_path / "o.gguf")
    assert not list(tmp_path.iterdir())


def test_a_packer_that_gives_too_little_is_found(model, tmp_path):
    class Short(ZeroPacker):
        def pack_slices(self, name, type_name):
            yield np.zeros(5, np.uint8)

    with pytest.raises(EngineError, match="gave 5 bytes instead of"):
        write(model, uniform(model, "Q4_K"), tmp_path / "o.gguf", packer=Short(model))


KILLED = """
import sys, time
from pathlib import Path
from bitwright.engine.model_file import open_model
from bitwright.engine.quantized_file import write_quantized

class Slow:
    def pack_slices(self, name, type_name):
        print("half way", flush=True)
        time.sleep(60)
        yield

model = open_model(sys.argv[1])
write_quantized(model, {"blk.0.attn_q.weight": "Q4_K"}, Path(sys.argv[2]), packer=Slow(), ftype=0,
                provenance=None, overwrite=True)
"""


def test_killed_half_way_and_run_again(model, source, tmp_path):
    out = tmp_path / "o.gguf"
    out.write_bytes(b"old")
    run = subprocess.Popen([sys.executable, "-c", KILLED, source, out], stdout=subprocess.PIPE)
    assert run.stdout.readline() == b"half way\n"
    mine = tmp_path / f".o.gguf.{run.pid}.tmp"
    assert mine.exists()
    alive = tmp_path / f".o.gguf.{os.getppid()}.tmp"
    others = [alive, tmp_path / ".p.gguf.999999999.tmp", tmp_path / ".o.gguf.x.tmp"]
    for other in others:
        other.write_bytes(b"not mine")
    write(model, {}, tmp_path / "o2.gguf")
    assert mine.exists(), "another run's file was taken away"
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    assert out.read_bytes() == b"old"
    write(model, {}, out, overwrite=True)
    assert not mine.exists()
    assert all(other.exists() for other in others)
    assert open_model(out).name == "o"


@pytest.mark.parametrize(
    "name", ["Моя (v1).gguf", "模型.gguf", "it's a b", "-rf", "$(id);x", "x" * 250]
)
def test_odd_output_names(model, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (out,) = write(model, {}, Path(name))
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert len(open_model(out.resolve()).tensors) == len(model.tensors)


def test_memory_is_bounded(tmp_path):
    """A tensor of 160 MiB in F32 is never held as a whole."""
    extra = {"blk.0.large.weight": (np.zeros((81_920, 512), np.float16), "F16")}
    path = tiny_gguf(tmp_path / "large.gguf", n_layer=1, extra_tensors=extra)
    code = """
import resource, sys
from pathlib import Path
from bitwright.engine.model_file import open_model
from bitwright.engine.packing import Packer
from bitwright.engine.quantized_file import write_quantized
model = open_model(sys.argv[1])
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(l for l in lines if l.startswith("RssAnon")).split()[1]) // 1024
before, peak = anonymous(), 0
def look(*_):
    global peak
    peak = max(peak, anonymous())
class Watched(Packer):
    def pack_slices(self, name, type_name):
        for part in super().pack_slices(name, type_name):
            look()
            yield part
write_quantized(model, {"blk.0.large.weight": "Q8_0"}, Path(sys.argv[2]), ftype=7, provenance=None,
                packer=Watched(model, None), progress=look)
print(peak - before)
"""
    arguments = [sys.executable, "-c", code, str(path), str(tmp_path / "o.gguf")]
    ran = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert int(ran.stdout) < 140
