"""Each stage alone, on files that may come from another tool."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bitwright.allocator.layout import read_layout
from bitwright.allocator.names import nominal_ftype
from bitwright.corpora.build import build_corpus
from bitwright.corpora.recipe import load_recipe
from bitwright.corpora.records import Corpus
from bitwright.corpora.store import load_corpus, save_corpus
from bitwright.engine.atomic import check_folder
from bitwright.engine.ggml_types import fits_row, tensor_type
from bitwright.engine.imatrix import Imatrix
from bitwright.engine.imatrix_collect import collect_imatrix
from bitwright.engine.imatrix_coverage import coverage_notes, require_covered
from bitwright.engine.imatrix_file import check_imatrix, read_imatrix, write_imatrix
from bitwright.engine.imatrix_merge import merge_imatrices
from bitwright.engine.model_file import ModelFile, open_model
from bitwright.engine.packing import Packer
from bitwright.engine.quantized_file import Provenance, predict_size, write_quantized
from bitwright.engine.session import Session, SessionOptions, check_loadable, resolve_threads
from bitwright.engine.tensors import is_quantizable
from bitwright.engine.tokenizer import Tokenizer
from bitwright.engine.upstream import FTYPES, default_type, ftype_name, upstream_layout
from bitwright.errors import ConfigError, InputError, StorageError
from bitwright.report.wording import SYNTHETIC
from bitwright.workflows.output import Output, bytes_text
from bitwright.workflows.run_folder import RunFolder

# What llama-imatrix leaves out unless asked, so that files of one model may differ in it.
MAY_BE_MISSING = {"token_embd.weight", "output.weight"}


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """The model and how to compute with it, as the command line says."""

    spec: str
    allow_requantize: bool = False
    revision: str | None = None
    options: SessionOptions = field(default_factory=SessionOptions)

    def open(self) -> ModelFile:
        """The opened model, which llama.cpp can run."""
        model = open_model(
            self.spec, allow_requantize=self.allow_requantize, revision=self.revision
        )
        check_loadable(model)
        return model


def corpus(
    recipes: Sequence[str], choice: ModelChoice, out: Path, seed: int, output: Output
) -> None:
    """Recipes → chunks of the model's tokens, in a folder."""
    loaded = [load_recipe(recipe) for recipe in recipes]
    model = choice.open()
    folder = RunFolder.open(out).path
    reporter = output.reporter()
    reporter.stage("corpus", ", ".join(recipe.category for recipe in loaded))
    try:
        with Tokenizer(model) as tokenizer:
            built = [
                build_corpus(recipe, tokenizer, n_ctx=choice.options.n_ctx, seed=seed)
                for recipe in loaded
            ]
        save_corpus(built, folder)
    finally:
        reporter.close()
    statistics = {c.category: dict(c.statistics) for c in built}
    lines = [_corpus_line(c) for c in built]
    output.result({"path": str(out), "corpora": statistics}, "\n".join([*lines, f"in {out}"]))


def _corpus_line(built: Corpus) -> str:
    parts = []
    for split in ("calibrate", "probe", "select", "report"):
        chunks = built.split(split)
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        parts.append(f"{split} {tokens:,} tokens in {len(chunks)} chunks")
    return f"{built.category}: " + ", ".join(parts)


def imatrix(
    choice: ModelChoice,
    corpus_folder: Path,
    mix: str,
    out: Path,
    output: Output,
    *,
    overwrite: bool = False,
) -> None:
    """A corpus → an imatrix of a mix of its categories, in llama.cpp's format."""
    model = choice.open()
    check_output(out, [shard.path for shard in model.shards], overwrite=overwrite)
    corpora = matching_corpora(corpus_folder, model)
    shares = parse_mix(mix, tuple(corpora))
    reporter = output.reporter()
    reporter.stage("imatrix", mix)
    parts = []
    try:
        with Session(model, fitting(choice.options, corpora)) as session:
            for category, share in shares.items():
                chunks = corpora[category].split("calibrate")
                batches = [(chunk.tokens, chunk.starts) for chunk in chunks]
                total = len(batches)

                def step(done: int, *, total: int = total, label: str = category) -> None:
                    reporter.step(done, total, label)

                found = collect_imatrix(session, batches, dataset=category, progress=step)
                parts.append((found, share))
    finally:
        reporter.close()
    _save_imatrix(merge_imatrices(parts), out, output)


def merge(
    sources: Sequence[str],
    out: Path,
    chunk_size: int | None,
    output: Output,
    *,
    overwrite: bool = False,
) -> None:
    """Several imatrix files → one, by shares (FILE=SHARE), whatever their token counts."""
    parts, paths = [], []
    for source in sources:
        path, _, share = source.rpartition("=")
        if not path:
            path, share = source, "1"
        paths.append(Path(path))
        parts.append((read_imatrix(Path(path), chunk_size), _share(share, source)))
    check_output(out, paths, overwrite=overwrite)
    merged = merge_imatrices(parts)
    _check_same_tensors(parts, paths)
    _save_imatrix(merged, out, output)


def _check_same_tensors(parts: Sequence[tuple[Imatrix, float]], paths: Sequence[Path]) -> None:
    """Files of one model name the same tensors, but for the embedding and the output.

    Raises:
        InputError: names a tensor that only one of two files has.
    """
    first = set(parts[0][0].entries) - MAY_BE_MISSING
    for (found, _), path in zip(parts[1:], paths[1:], strict=True):
        if differing := sorted(first ^ (set(found.entries) - MAY_BE_MISSING)):
            raise InputError(
                f"{paths[0].name} and {path.name} are of different models: only one of them has "
                f"{differing[0]} ({len(differing)} such tensors); merge files of one model"
            )


def _save_imatrix(found: Imatrix, out: Path, output: Output) -> None:
    write_imatrix(found, out, format="dat" if out.suffix == ".dat" else "gguf")
    notes = coverage_notes(found)
    facts = {
        "path": str(out),
        "entries": len(found.entries),
        "chunks": found.chunk_count,
        "sha256": found.sha256(),
        "notes": list(notes),
    }
    text = f"{out}: {len(found.entries)} tensors, {found.chunk_count} chunks"
    output.result(facts, "\n".join([text, *notes]))


def parse_mix(text: str, known: Sequence[str]) -> dict[str, float]:
    """``code=0.7,general=0.3`` → shares; an empty text means all categories alike.

    Raises:
        ConfigError: an unknown category, or a share that is no positive number.
    """
    if not text:
        return {category: 1.0 / len(known) for category in known}
    shares = {}
    for part in text.split(","):
        category, _, share = part.strip().partition("=")
        if category not in known:
            raise ConfigError(
                f"the mix names {category!r}, but the corpus has {', '.join(known)}: "
                "build the corpus with that recipe, or correct the mix"
            )
        shares[category] = _share(share or "1", part)
    return shares


def _share(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"{where.strip()}: the share must be a positive number, as in code=0.7")
    return value


def quantize(
    choice: ModelChoice,
    layout: str,
    imatrix_path: Path | None,
    out: Path,
    *,
    overwrite: bool,
    keep_split: bool,
    output: Output,
) -> None:
    """A layout file, or the name of a stock type → the GGUF."""
    model = choice.open()
    found = load_checked_imatrix(imatrix_path, model)
    types, ftype, notes = resolve_layout(layout, model, has_imatrix=found is not None)
    require_covered(types, found, q2_k_s=ftype == "Q2_K_S")
    reporter = output.reporter()
    reporter.stage("quantize", out.name)
    for note in notes:
        reporter.note(note)
    try:
        paths = write_quantized(
            model,
            types,
            out,
            packer=make_packer(model, found, choice, None),
            ftype=FTYPES[ftype],
            provenance=synthetic_mark(model),
            keep_split=keep_split,
            overwrite=overwrite,
            protect=[p for p in (imatrix_path, Path(layout)) if p is not None and p.exists()],
            progress=reporter.step,
        )
    finally:
        reporter.close()
    size = sum(path.stat().st_size for path in paths)
    facts = {
        "paths": [str(p) for p in paths],
        "size_bytes": size,
        "file_type": ftype,
        "notes": list(notes),
    }
    tell(output, model, facts, "\n".join(f"{p}" for p in paths) + f"\n{bytes_text(size)}")


def resolve_layout(
    layout: str, model: ModelFile, *, has_imatrix: bool
) -> tuple[dict[str, str], str, tuple[str, ...]]:
    """A layout file or the name of a stock type → (tensor → type, stock type to show, notes).

    Raises:
        ConfigError: neither a file nor a stock type.
        InputError: a rule of the file cannot be used.
    """
    path = Path(layout)
    if path.is_file():
        read = read_layout(path, model)
        return dict(read.types), nominal_ftype(read, model), read.notes
    try:
        ftype = ftype_name(layout)
    except ConfigError:
        raise ConfigError(
            f"--layout {layout} is neither a layout file nor a stock type: give the path of a "
            f"file, or one of {', '.join(sorted(FTYPES))}"
        ) from None
    types = upstream_layout(model, ftype, has_imatrix=has_imatrix)
    return types, ftype, substitution_notes(model, types, default_type(ftype))


def substitution_notes(model: ModelFile, types: Mapping[str, str], wanted: str) -> tuple[str, ...]:
    """One line per tensor whose rows do not take the stock type, with what upstream uses."""
    misfits = [
        info
        for info in model.tensors
        if is_quantizable(info, model.arch) and not fits_row(wanted, info.n_per_row)
    ]
    return tuple(
        f"{info.name}: rows of {info.n_per_row} do not take {wanted}; {types[info.name]} is used"
        f" ({tensor_type(types[info.name]).bpw:.4g} instead of {tensor_type(wanted).bpw:.4g} bpw)"
        for info in misfits
    )


def synthetic_mark(model: ModelFile) -> Provenance | None:
    """What a file made from an already quantized one says of itself; None from a full one.

    Without it the file equals the one that llama-quantize writes, byte for byte.
    """
    if not model.synthetic_reference:
        return None
    text = f"{model.reference_type} (already quantized: synthetic)"
    return Provenance((("bitwright.reference", text),))


def matching_corpora(folder: Path, model: ModelFile) -> dict[str, Corpus]:
    """The corpora of a folder, which hold this model's own tokens.

    Raises:
        InputError: no corpus, or one of another tokenizer.
    """
    corpora = load_corpus(folder)
    with Tokenizer(model) as tokenizer:
        own = tokenizer.fingerprint()
    if any(corpus.tokenizer_sha256 != own for corpus in corpora.values()):
        raise InputError(
            f"the corpus in {folder} was made with another tokenizer than {model.name} has: build "
            "it again with bitwright corpus and this model"
        )
    return corpora


def fitting(options: SessionOptions, corpora: Mapping[str, Corpus]) -> SessionOptions:
    """The options, with the context that the corpora were cut for."""
    return replace(options, n_ctx=max(corpus.n_ctx for corpus in corpora.values()))


def check_output(out: Path, inputs: Sequence[Path], *, overwrite: bool) -> None:
    """Refuse to write over an input, or without leave over any file.

    Raises:
        StorageError: with the reason.
    """
    check_folder(out)
    if not out.exists():
        return
    for given in inputs:
        if given.exists() and out.samefile(given):
            raise StorageError(
                f"the output {out} is the same file as the input {given}: choose another name"
            )
    if not overwrite:
        raise StorageError(f"{out} exists already: choose another name, or pass --overwrite")


def tell(output: Output, model: ModelFile, facts: Mapping[str, object], text: str) -> None:
    """Print a verb's result, and that its reference is synthetic where that is so."""
    synthetic = model.synthetic_reference
    shown = f"{SYNTHETIC}\n{text}" if synthetic else text
    output.result({**facts, "synthetic_reference": synthetic}, shown)


def load_checked_imatrix(path: Path | None, model: ModelFile) -> Imatrix | None:
    """An imatrix that belongs to the model, or None."""
    if path is None:
        return None
    found = read_imatrix(path)
    check_imatrix(found, model)
    return found


def make_packer(
    model: ModelFile, found: Imatrix | None, choice: ModelChoice, cache: Path | None
) -> Packer:
    """A packer with the command line's threads."""
    if cache is not None:
        cache.mkdir(parents=True, exist_ok=True)
    return Packer(model, found, cache_dir=cache, threads=resolve_threads(choice.options.threads))


def stock_size(model: ModelFile) -> Callable[[str], int]:
    """Whole-file bytes of upstream's own file of a stock type."""

    def size_bytes(ftype: str) -> int:
        return predict_size(model, upstream_layout(model, ftype, has_imatrix=True), None)

    return size_bytes
