"""Stage 5: write the chosen layout, and prove that the file is what was measured."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwright import __version__
from bitwright.corpora.records import Chunk
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.model_file import open_model
from bitwright.engine.packing import Packer
from bitwright.engine.quantized_file import Provenance, write_quantized
from bitwright.engine.session import Session
from bitwright.engine.upstream import FTYPES
from bitwright.errors import EngineError
from bitwright.eval.files import verify_written
from bitwright.workflows.context import RunContext
from bitwright.workflows.run_folder import key_of
from bitwright.workflows.stage_damage import make_packer
from bitwright.workflows.stage_evaluate import report_options

EMPTY_SHA256 = "0" * 64


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A GGUF (or its shards) in the run folder, verified against its layout."""

    paths: tuple[Path, ...]
    size_bytes: int
    sha256: str


def provenance(
    ctx: RunContext, budget_bytes: int, *, recipe: str = EMPTY_SHA256, layout: str = EMPTY_SHA256
) -> Provenance:
    """What the file says of itself. Hashes have a fixed length, so the size is known before.

    Names are base names: no path of the user's machine goes into a file that may be published.
    """
    reference = ctx.model.reference_type
    if ctx.model.synthetic_reference:
        reference = f"{reference} (already quantized: synthetic)"
    return Provenance(
        (
            ("bitwright.version", __version__),
            ("bitwright.workflow", ctx.name),
            ("bitwright.target", ctx.spec.target),
            ("bitwright.reference", reference),
            ("bitwright.budget_bytes", budget_bytes),
            ("bitwright.seed", ctx.spec.seed),
            ("bitwright.recipe_sha256", recipe),
            ("bitwright.layout_sha256", layout),
        )
    )


def write_model(
    ctx: RunContext,
    layout: Mapping[str, str],
    imatrix: Imatrix,
    origin: Provenance | None,
    name: str,
    chunk: Chunk,
    *,
    ftype: str,
    keep_split: bool,
    predicted_bytes: int,
    stage: str = "quantize",
    imatrix_name: str = "task",
) -> WrittenFile:
    """The GGUF in the run folder: written, re-read, and its logits compared with the layout's.

    Raises:
        EngineError: size or logits differ from what was planned.
        StorageError: no space, no permission.
    """
    out = ctx.folder.path / f"{name}.gguf"
    inputs = {
        "model": ctx.model.sha256(),
        "imatrix": imatrix.sha256(),
        "layout": dict(layout),
        "provenance": origin.entries if origin else (),
        "name": name,
        "ftype": ftype,
        "keep_split": keep_split,
    }

    def compute() -> tuple[dict[str, Any], list[Path]]:
        packer = make_packer(ctx, imatrix_name, imatrix)
        paths = write_quantized(
            ctx.model,
            layout,
            out,
            packer=packer,
            ftype=FTYPES[ftype],
            provenance=origin,
            keep_split=keep_split,
            overwrite=True,
            progress=ctx.reporter.step,
        )
        size = sum(path.stat().st_size for path in paths)
        if size != predicted_bytes:
            raise EngineError(
                f"{out.name} has {size} bytes, {predicted_bytes} were predicted: "
                "this is a fault of bitwright, report it"
            )
        _compare_logits(ctx, layout, packer, paths[0], chunk)
        names = [path.name for path in paths]
        return {"files": names, "size_bytes": size, "sha256": _sha256(paths)}, list(paths)

    ctx.reporter.stage("quantize", out.name)
    result = ctx.folder.stage(stage, key_of("quantize", inputs), compute, inputs=inputs)
    paths = tuple(ctx.folder.path / name for name in result["files"])
    return WrittenFile(paths, int(result["size_bytes"]), str(result["sha256"]))


def _sha256(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def _compare_logits(
    ctx: RunContext, layout: Mapping[str, str], packer: Packer, written: Path, chunk: Chunk
) -> None:
    options = report_options(ctx)
    file = open_model(written, allow_requantize=True)
    with Session(ctx.model, options) as session:
        worst = verify_written(session, layout, packer, file, chunk, options=options)
        exact = session.swap_mode == "real" and options.gpu_layers == 0
    if exact and worst != 0.0:
        raise EngineError(
            f"{written.name} computes other logits than its layout did in memory (by {worst:.3g}): "
            "it was not measured as it is; report this"
        )
