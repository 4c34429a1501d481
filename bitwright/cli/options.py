"""Options that several verbs share, and what their texts mean."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # verbs are imported when they run: --help must not load llama.cpp
    from bitwright.workflows.single import ModelChoice

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="F32, F16 or BF16 GGUF (any shard), hf:owner/repo/file.gguf[@revision], or demo",
    ),
]
Requantize = Annotated[
    bool,
    typer.Option(
        "--allow-requantize",
        help="Accept a quantized input; every output then says that it is synthetic",
    ),
]
Threads = Annotated[int, typer.Option(help="CPU threads (0: all cores)", min=0)]
GpuLayers = Annotated[int, typer.Option(help="Layers to offload, if llama.cpp was built for it")]
Context = Annotated[int | None, typer.Option("--ctx", help="Tokens per chunk", min=32)]
Working = Annotated[
    str | None, typer.Option(help="Compute probes in: auto, file, F32, F16 or BF16")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON line")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print the plan, compute nothing")
]
ImatrixFile = Annotated[
    Path | None, typer.Option(help="Importance matrix, GGUF or .dat, of any tool")
]
PriceList = Annotated[
    list[str] | None,
    typer.Option(
        "--price",
        help="CATEGORY=0.05: most KLD above the baseline's there, as a part (default 0.10); repeat",
    ),
]
KeepSplit = Annotated[bool, typer.Option("--keep-split", help="Write shards as the input has them")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file")]


def pairs(entries: list[str] | None, option: str, form: str) -> dict[str, str]:
    """NAME=VALUE options as a dictionary; the last of a name holds."""
    pairs = {}
    for entry in entries or []:
        name, _, value = entry.rpartition("=")
        if not name or not value:
            raise typer.BadParameter(f"{option} {entry}: write {form}")
        pairs[name] = value
    return pairs


def prices(entries: list[str] | None) -> dict[str, float]:
    """``--price`` entries: category → part."""
    found = {}
    for category, text in pairs(entries, "--price", "CATEGORY=0.05").items():
        try:
            found[category] = float(text)
        except ValueError:
            found[category] = -1.0
        if not 0 <= found[category] < 1000:
            raise typer.BadParameter(f"--price {category}={text}: a part such as 0.05, from 0 up")
    return found


def model_choice(
    model: str,
    *,
    allow_requantize: bool = False,
    threads: int = 0,
    gpu_layers: int = 0,
    ctx: int | None = None,
    working_type: str | None = None,
) -> "ModelChoice":
    """The model that a verb works on, and how it is computed; nothing is opened yet."""
    from bitwright.engine.session import SessionOptions
    from bitwright.workflows.single import ModelChoice

    options = SessionOptions(
        threads=threads,
        gpu_layers=gpu_layers,
        n_ctx=ctx or 512,
        working_type=working_type or "auto",
    )
    return ModelChoice(model, allow_requantize, None, options)
