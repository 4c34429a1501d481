"""Verbs that make something: a whole run, or one stage of it."""

from pathlib import Path
from typing import Annotated

import typer

from bitwright.cli.app import app, prior_app
from bitwright.cli.options import (
    Context,
    Debug,
    DryRun,
    GpuLayers,
    ImatrixFile,
    Json,
    Model,
    Overwrite,
    PriceList,
    Quiet,
    Requantize,
    Threads,
    Working,
    model_choice,
    pairs,
    prices,
)
from bitwright.workflows.output import Output


@app.command()
def run(
    workflow: Annotated[str, typer.Argument(help="A built-in workflow, or a .toml file")],
    model: Model,
    out: Annotated[
        Path | None, typer.Option(help="Run folder (default: runs/WORKFLOW-MODEL)")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Instead of the workflow's, e.g. '5.7 GiB'")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of the workflow's", min=0)] = None,
    price: PriceList = None,
    revision: Annotated[str | None, typer.Option(help="Of an hf: model")] = None,
    allow_requantize: Requantize = False,
    keep_split: Annotated[
        bool, typer.Option("--keep-split", help="Write shards as the input has them")
    ] = False,
    threads: Threads = 0,
    gpu_layers: GpuLayers = 0,
    ctx: Context = None,
    working_type: Working = None,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Damages from a shipped prior, labelled so")
    ] = False,
    dry_run: DryRun = False,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """The whole path: corpora, imatrix, damage map, layout, GGUF, scores, report."""
    from bitwright.workflows import verbs

    verbs.run(
        workflow,
        model,
        verbs.RunChoices(
            out=out,
            budget=budget,
            seed=seed,
            prices=prices(price),
            revision=revision,
            allow_requantize=allow_requantize,
            keep_split=keep_split,
            threads=threads,
            gpu_layers=gpu_layers,
            n_ctx=ctx,
            working_type=working_type,
            no_measure=no_measure,
        ),
        dry_run=dry_run,
        output=Output(json=json_, quiet=quiet),
    )


@app.command()
def corpus(
    recipes: Annotated[list[str], typer.Argument(help="Built-in recipes or .toml files")],
    model: Model,
    out: Annotated[Path, typer.Option(help="Folder for the chunks")],
    seed: Annotated[int, typer.Option(min=0)] = 0,
    allow_requantize: Requantize = False,
    ctx: Context = None,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Recipes → documents → the model's own tokens, in four disjoint splits."""
    from bitwright.workflows import single

    choice = model_choice(model, allow_requantize=allow_requantize, ctx=ctx)
    single.corpus(recipes, choice, out, seed, Output(json=json_, quiet=quiet))


@app.command()
def imatrix(
    out: Annotated[Path, typer.Option(help="Imatrix to write (.gguf, or .dat for the old format)")],
    model: Annotated[str, typer.Option("--model", "-m", help="The model, to collect one")] = "",
    corpus: Annotated[Path | None, typer.Option(help="Folder of `bitwright corpus`")] = None,
    mix: Annotated[str, typer.Option(help="Shares by tokens, e.g. code=0.7,general=0.3")] = "",
    merge: Annotated[
        list[str] | None, typer.Option(help="Instead: FILE=SHARE of an imatrix; repeat it")
    ] = None,
    chunk_size: Annotated[
        int | None, typer.Option(help="Tokens per chunk of a merged old-format file", min=1)
    ] = None,
    overwrite: Overwrite = False,
    allow_requantize: Requantize = False,
    threads: Threads = 0,
    gpu_layers: GpuLayers = 0,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Collect an importance matrix from a corpus, or merge several by shares.

    With the token embedding and the output, which llama-imatrix leaves out.
    """
    from bitwright.workflows import single

    output = Output(json=json_, quiet=quiet)
    if merge:
        single.merge(merge, out, chunk_size, output, overwrite=overwrite)
        return
    if not model or corpus is None:
        raise typer.BadParameter("give --model and --corpus to collect, or --merge FILE=SHARE")
    choice = model_choice(
        model, allow_requantize=allow_requantize, threads=threads, gpu_layers=gpu_layers
    )
    single.imatrix(choice, corpus, mix, out, output, overwrite=overwrite)


@app.command()
def damage(
    model: Model,
    corpus: Annotated[Path, typer.Option(help="Folder of `bitwright corpus`")],
    out: Annotated[Path, typer.Option(help="Folder for the map; a second run goes on in it")],
    imatrix: ImatrixFile = None,
    probe_type: Annotated[str, typer.Option(help="Degrade each tensor to this type")] = "Q2_K",
    minutes: Annotated[float | None, typer.Option(help="Spend no more minutes", min=0)] = None,
    tokens: Annotated[int | None, typer.Option(help="Decode no more tokens", min=1)] = None,
    budget: Annotated[
        str | None, typer.Option(help="Race to the layout of this size, as in `allocate`")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Category that the race is for (the corpus's first)")
    ] = None,
    ladder: Annotated[str, typer.Option(help="Types that the race decides between")] = "K",
    tolerance: Annotated[
        float, typer.Option(help="Part of the damage that open decisions may cost", min=0, max=1)
    ] = 0.02,
    stride: Annotated[int, typer.Option(help="Score every n-th row", min=1, max=64)] = 1,
    way: Annotated[str, typer.Option(help="single, groups or upgrades")] = "single",
    experts: Annotated[
        str | None, typer.Option(help="Measure this tensor's experts one at a time")
    ] = None,
    export: Annotated[Path | None, typer.Option(help="Tidy table, .csv or .parquet")] = None,
    allow_requantize: Requantize = False,
    threads: Threads = 0,
    gpu_layers: GpuLayers = 0,
    working_type: Working = None,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """What each tensor costs on each category, in nats of KLD, with standard errors."""
    from bitwright.workflows import single_damage

    choice = model_choice(
        model,
        allow_requantize=allow_requantize,
        threads=threads,
        gpu_layers=gpu_layers,
        working_type=working_type,
    )
    request = single_damage.DamageRequest(
        probe_type=probe_type,
        stride=stride,
        minutes=minutes,
        tokens=tokens,
        tolerance=tolerance,
        budget=budget,
        target=target,
        ladder=ladder,
        way=way,
        expert_tensor=experts,
        export=export,
    )
    output = Output(json=json_, quiet=quiet)
    single_damage.damage(choice, corpus, imatrix, request, out, output)


@app.command()
def allocate(
    model: Model,
    budget: Annotated[str, typer.Option(help="'5.7 GiB', '3.5 bpw', 'Q3_K_S + 0.12 %', bytes")],
    target: Annotated[str, typer.Option(help="Category to be best at")],
    out: Annotated[Path, typer.Option(help="Layout file to write")],
    damage: Annotated[Path | None, typer.Option(help="Folder of `bitwright damage`")] = None,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Without a damage map: from a prior, labelled so")
    ] = False,
    prior: Annotated[
        Path | None, typer.Option(help="With --no-measure: a prior's file, not the shipped one")
    ] = None,
    imatrix: ImatrixFile = None,
    ladder: Annotated[str, typer.Option(help="Types to choose from: K or IQ")] = "K",
    pin: Annotated[
        list[str] | None, typer.Option(help="NAME_OR_GLOB=TYPE, decided by hand; repeat it")
    ] = None,
    baseline: Annotated[str, typer.Option(help="Stock type that prices are relative to")] = "",
    price: PriceList = None,
    side_budget: Annotated[
        list[str] | None, typer.Option(help="GLOB=SIZE for the tensors it matches; repeat it")
    ] = None,
    coherent: Annotated[
        list[str] | None,
        typer.Option(help="ROLE,ROLE that share a type in each layer; repeat it"),
    ] = None,
    honest_name: Annotated[
        str, typer.Option(help="The best layout that may carry this stock name")
    ] = "",
    allow_requantize: Requantize = False,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """The layout of least predicted damage inside a size, for `quantize` or llama-quantize."""
    from bitwright.workflows import single_allocate

    if (damage is None) != no_measure:
        raise typer.BadParameter("give either --damage FOLDER, or --no-measure")
    request = single_allocate.Request(
        damage=damage,
        budget=budget,
        target=target,
        ladder=ladder,
        pins=pairs(pin, "--pin", "NAME_OR_GLOB=TYPE"),
        baseline=baseline,
        prices=prices(price),
        budgets=pairs(side_budget, "--side-budget", "GLOB=SIZE"),
        coherent=tuple(tuple(one.split(",")) for one in coherent or []),
        honest=honest_name,
        prior=prior,
    )
    choice = model_choice(model, allow_requantize=allow_requantize)
    single_allocate.allocate(choice, request, imatrix, out, Output(json=json_, quiet=quiet))


@prior_app.command("build")
def prior_build(
    runs: Annotated[list[Path], typer.Argument(help="Folders of `bitwright run`")],
    model: Annotated[
        list[str], typer.Option("--model", "-m", help="The runs' models, in the same order")
    ],
    out: Annotated[Path, typer.Option(help="JSON file to write")],
    allow_requantize: Requantize = False,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Freeze what runs measured into a prior for models of the same architecture class."""
    from bitwright.workflows import single_prior

    models = [model_choice(one, allow_requantize=allow_requantize) for one in model]
    single_prior.build(runs, models, out, Output(json=json_))


@prior_app.command("compare")
def prior_compare(
    run: Annotated[Path, typer.Argument(help="Folder of `bitwright run`")],
    model: Model,
    prior: Annotated[Path | None, typer.Option(help="Instead of the shipped one")] = None,
    allow_requantize: Requantize = False,
    json_: Json = False,
    debug: Debug = False,
) -> None:
    """Rank correlation of a run's damage map with a prior; refused across architecture classes."""
    from bitwright.workflows import single_prior

    choice = model_choice(model, allow_requantize=allow_requantize)
    single_prior.compare(run, choice, prior, Output(json=json_))


@app.command()
def canary(
    model: Annotated[str, typer.Argument(help="As --model of `run`")],
    workflow: Annotated[
        str, typer.Option(help="Its corpora, imatrix and target")
    ] = "coding-q3_k_s",
    out: Annotated[
        Path | None, typer.Option(help="Run folder (default: runs/canary-MODEL)")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure despite a kept verdict")] = False,
    allow_requantize: Requantize = False,
    threads: Threads = 0,
    gpu_layers: GpuLayers = 0,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Whether our layouts help a model of this shape: six files against upstream's curve."""
    from bitwright.workflows import single_canary

    choice = model_choice(
        model, allow_requantize=allow_requantize, threads=threads, gpu_layers=gpu_layers
    )
    single_canary.canary(workflow, choice, out, again=again, output=Output(json=json_, quiet=quiet))


@app.command()
def quantize(
    model: Model,
    layout: Annotated[str, typer.Option(help="Layout file, or a stock type such as Q4_K_M")],
    out: Annotated[Path, typer.Option(help="GGUF to write")],
    imatrix: ImatrixFile = None,
    overwrite: Overwrite = False,
    keep_split: Annotated[
        bool, typer.Option("--keep-split", help="Write shards as the input has them")
    ] = False,
    allow_requantize: Requantize = False,
    threads: Threads = 0,
    json_: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write the GGUF of a layout, re-read it and compare each tensor's type with the plan."""
    from bitwright.workflows import single

    single.quantize(
        model_choice(model, allow_requantize=allow_requantize, threads=threads),
        layout,
        imatrix,
        out,
        overwrite=overwrite,
        keep_split=keep_split,
        output=Output(json=json_, quiet=quiet),
    )
