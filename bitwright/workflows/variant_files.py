"""The three builds as files, each with its layout beside it and an honest name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bitwright.allocator.layout import Layout, layout_sha256, write_layout
from bitwright.allocator.names import file_stem, honest_name, nominal_ftype
from bitwright.corpora.records import Corpus
from bitwright.corpora.store import corpus_sha256
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.quantized_file import predict_size
from bitwright.workflows.context import RunContext
from bitwright.workflows.pipeline import first_chunk
from bitwright.workflows.run_folder import key_of
from bitwright.workflows.stage_items import SizedLayout
from bitwright.workflows.stage_quantize import provenance, write_model


@dataclass(frozen=True, slots=True)
class VariantFile:
    """A build's files, its layout file, its size and why it is called what it is."""

    paths: tuple[Path, ...]
    layout: Path
    size_bytes: int
    sha256: str
    honest_name: str
    reason: str


def write_variants(
    ctx: RunContext,
    layouts: Sequence[SizedLayout],
    imatrix: Imatrix,
    corpora: Mapping[str, Corpus],
) -> dict[str, VariantFile]:
    """Every build, verified against its layout as any other file of ours."""
    return {layout.label: _write(ctx, layout, imatrix, corpora) for layout in layouts}


def _write(
    ctx: RunContext, layout: SizedLayout, imatrix: Imatrix, corpora: Mapping[str, Corpus]
) -> VariantFile:
    text = {name: corpus_sha256(corpus) for name, corpus in corpora.items()}
    spec = ctx.spec.model_dump(mode="json", exclude={"corpora", "description"})
    recipe = key_of(spec, text, ctx.model.sha256(), imatrix.sha256())
    types = Layout(layout.types)
    origin = provenance(ctx, layout.size_bytes, recipe=recipe, layout=layout_sha256(types))
    size = predict_size(ctx.model, layout.types, origin, keep_split=ctx.keep_split)
    named = honest_name(layout.types, ctx.model, target=layout.label, size_bytes=size)
    stem = file_stem(ctx.model.name, layout.label, named.name)
    written = write_model(
        ctx,
        layout.types,
        imatrix,
        origin,
        stem,
        first_chunk(corpora[ctx.spec.target]),
        ftype=nominal_ftype(layout.types, ctx.model),
        keep_split=ctx.keep_split,
        predicted_bytes=size,
        stage=f"quantize-{layout.label}",
    )
    path = ctx.folder.file(f"{layout.label}.layout.txt")
    write_layout(types, path)
    return VariantFile(
        written.paths, path, written.size_bytes, written.sha256, named.name, named.reason
    )
