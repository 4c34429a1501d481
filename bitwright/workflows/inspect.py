"""`bitwright inspect FILE`: what a GGUF, an imatrix, a layout or a run folder holds."""

from collections import Counter
from pathlib import Path
from typing import Any

from bitwright.engine.ggml_types import tensor_type
from bitwright.engine.gguf_file import GgufFile, read_gguf
from bitwright.engine.gguf_values import kv_value
from bitwright.engine.imatrix_coverage import coverage_notes
from bitwright.engine.imatrix_file import read_imatrix
from bitwright.engine.locate import locate
from bitwright.engine.shards import read_shards
from bitwright.engine.tensors import is_body, is_quantizable
from bitwright.errors import InputError
from bitwright.workflows.output import Output, bytes_text
from bitwright.workflows.run_folder import RunFolder
from bitwright.workflows.stage_report import load_result

MAGIC = b"GGUF"
HEAD_BYTES = 4096
SHOWN_KEYS = ("general.name", "general.type", "general.license", "general.file_type")


def inspect(spec: str, output: Output) -> None:
    """Say what the file is, by its content.

    Raises:
        InputError: it is nothing that bitwright knows.
    """
    path = Path(spec)
    if path.is_dir() and (path / "result.json").is_file():
        facts = run_facts(path)
    elif path.is_dir() and (stages := stages_of(path)):
        facts = {"kind": "unfinished run", "folder": path.name, "stages": stages}
    else:
        facts = file_facts(locate(spec))
    output.result(facts, _text(facts))


def file_facts(path: Path) -> dict[str, Any]:
    """Facts of one file, by its first bytes."""
    if not path.is_file():
        raise InputError(f"{path} is not there: give a GGUF, an imatrix, a layout or a run folder")
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(MAGIC):
        parsed = read_gguf(path)
        kind = parsed.kv["general.type"].value if "general.type" in parsed.kv else "model"
        return imatrix_facts(path) if kind == "imatrix" else gguf_facts(path)
    if is_layout(head):
        return layout_facts(path)
    try:
        return imatrix_facts(path)
    except InputError as error:
        raise InputError(
            f"{path} is no GGUF, no layout (lines of pattern=type) and no imatrix of the old"
            f" format ({error}): bitwright knows no other files"
        ) from None


def gguf_facts(path: Path) -> dict[str, Any]:
    """Types, bytes and bpw of a GGUF; also of an architecture that llama.cpp does not know."""
    shards = read_shards(path)
    tensors = [info for shard in shards for info in shard.tensors]
    arch = _text_value(shards[0], "general.architecture")
    n_weights = sum(info.n_elements for info in tensors)
    data_bytes = sum(info.size_bytes for info in tensors)
    body = [i for i in tensors if is_quantizable(i, arch) and is_body(i.name)]
    outer = {"token_embd.weight", "output.weight", "per_layer_token_embd.weight"}
    inner = [i for i in tensors if i.name not in outer]
    inner_weights = sum(i.n_elements for i in inner)
    size_bytes = sum(shard.size_bytes for shard in shards)
    return {
        "kind": "gguf",
        "file": path.name,
        "architecture": arch,
        "shards": len(shards),
        "size_bytes": size_bytes,
        "weights": n_weights,
        "bpw": round(8 * data_bytes / n_weights, 4) if n_weights else None,
        "bpw_without_embeddings_and_output": (
            round(8 * sum(i.size_bytes for i in inner) / inner_weights, 4)
            if inner_weights
            else None
        ),
        "tied_embeddings": all(i.name != "output.weight" for i in tensors),
        "types": _by_type(tensors),
        "tensors": [[info.name, info.type, list(info.shape)] for info in tensors],
        "body_share_by_weights": _shares(body, by_weights=True),
        "body_share_by_tensors": _shares(body, by_weights=False),
        "metadata": {key: kv_value(shards[0].kv[key]) for key in SHOWN_KEYS if key in shards[0].kv},
        "provenance": {
            key: kv_value(entry)
            for key, entry in shards[0].kv.items()
            if key.startswith("bitwright.")
        },
    }


def _text_value(file: GgufFile, key: str) -> str:
    return str(kv_value(file.kv[key])) if key in file.kv else ""


def _by_type(tensors: list[Any]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for info in tensors:
        entry = found.setdefault(info.type, {"tensors": 0, "weights": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["weights"] += info.n_elements
        entry["bytes"] += info.size_bytes
    return dict(sorted(found.items()))


def _shares(body: list[Any], *, by_weights: bool) -> dict[str, float]:
    counted: Counter[str] = Counter()
    for info in body:
        counted[info.type] += info.n_elements if by_weights else 1
    total = counted.total()
    return {name: round(count / total, 4) for name, count in counted.most_common()}


def imatrix_facts(path: Path) -> dict[str, Any]:
    """Entries, chunks, sources and coverage of an imatrix in either format."""
    found = read_imatrix(path)
    return {
        "kind": "imatrix",
        "file": path.name,
        "entries": len(found.entries),
        "chunks": found.chunk_count,
        "chunk_size": found.chunk_size,
        "datasets": [Path(name).name for name in found.datasets],
        "counts_known": found.counts_known,
        "notes": list(coverage_notes(found)),
        "sha256": found.sha256(),
    }


def is_layout(head: bytes) -> bool:
    """Whether the text looks like rules `pattern=type`."""
    if b"\0" in head:
        return False
    text = head.decode("utf-8", errors="replace")
    whole = len(head) < HEAD_BYTES
    rules = text.split() if whole else text.split()[:-1]  # the last one may be cut
    return bool(rules) and all("=" in rule for rule in rules)


def layout_facts(path: Path) -> dict[str, Any]:
    """How many rules of a layout name which type."""
    try:
        rules = path.read_text(encoding="utf-8").split()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 (byte {error.start}): no layout file") from None
    types = Counter(tensor_type(rule.rpartition("=")[2]).name for rule in rules)
    return {"kind": "layout", "file": path.name, "rules": len(rules), "types": dict(types)}


def run_facts(folder: Path) -> dict[str, Any]:
    """The verdict of a run, its files, and its stages with their times."""
    result = load_result(folder)
    return {"kind": "run", "folder": folder.name, "result": result, "stages": stages_of(folder)}


def stages_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Finished stages of a run folder, in the order in which they ended."""
    found = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime):
        manifest = RunFolder(folder, read_only=True).manifest(path.stem)
        if manifest is not None and "stage" in manifest:
            found[str(manifest["stage"])] = {
                "elapsed_s": manifest["elapsed_s"],
                "versions": manifest["versions"],
            }
    return found


def _text(facts: dict[str, Any]) -> str:
    if facts["kind"] == "run":
        result = facts["result"]
        lines = [f"run {facts['folder']}: {result['verdict']}, chosen {result['chosen']}"]
        lines += [f"  {f['label']:<24} {bytes_text(f['size_bytes'])}" for f in result["files"]]
        return "\n".join(lines + _stage_lines(facts["stages"]))
    if facts["kind"] == "unfinished run":
        lines = [f"unfinished run {facts['folder']}: the same command goes on with it"]
        return "\n".join(lines + _stage_lines(facts["stages"]))
    lines = [f"{facts['kind']} {facts['file']}"]
    for key, value in facts.items():
        if key in ("kind", "file"):
            continue
        if isinstance(value, dict):
            lines.append(f"  {key.replace('_', ' ')}:")
            lines += [f"    {name:<28} {_plain(entry)}" for name, entry in value.items()]
        elif isinstance(value, list):
            lines += [f"  {key.replace('_', ' ')}: {entry}" for entry in value]
        else:
            shown = bytes_text(value) if key == "size_bytes" else value
            lines.append(f"  {key.replace('_', ' ')}: {shown}")
    return "\n".join(lines)


def _stage_lines(stages: dict[str, dict[str, Any]]) -> list[str]:
    return [f"  stage {name:<20} {stage['elapsed_s']:.1f} s" for name, stage in stages.items()]


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{n:,} {name}" for name, n in value.items())
    return f"{value:.2%}" if isinstance(value, float) else str(value)
