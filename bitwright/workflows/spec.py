"""A workflow file: one TOML, checked once, at load; every path resolved against it."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from bitwright.content import content_dir, find_content, read_content
from bitwright.errors import ConfigError
from bitwright.workflows.sizes_spec import ItemSettings, SweepSettings, VariantSettings

SCHEMA_VERSION = 1

MIN_CTX, MAX_CTX = 32, 1 << 20  # tokens per chunk

Share = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Mix = dict[str, Share]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ImatrixMixes(_Strict):
    """Shares by tokens of each category, for the two imatrices that are compared.

    ``candidates``: other mixes to measure in place of ``task``; the best is taken (see stage_mix).
    """

    general: Mix = {"general": 1.0}
    task: Mix
    candidates: tuple[Mix, ...] = ()

    def named(self) -> list[tuple[str, Mix]]:
        """Every mix, with the key that names it in the file."""
        others = [(f"imatrix.candidates.{i}", mix) for i, mix in enumerate(self.candidates)]
        return [("imatrix.general", self.general), ("imatrix.task", self.task), *others]


class DamageSettings(_Strict):
    """How each tensor's damage is probed; ``row_stride`` scores every n-th row of a chunk.

    ``mode``: 'fixed' probes every tensor on all probe text; 'race' spends text on tensors whose
    type is still open at the budget, until open decisions may cost less than ``tolerance`` of the
    layout's damage. ``tokens`` (decoded, of all probes) and ``minutes`` end either early.
    'prior' measures nothing: the shipped prior of the model's class stands in, and is named.
    ``second_probes`` measures some tensors at further types, for the type curve.
    """

    probe_type: str = "Q2_K"
    row_stride: Annotated[int, Field(ge=1, le=64)] = 1
    mode: Literal["fixed", "race", "prior"] = "fixed"
    tokens: Annotated[int, Field(gt=0)] | None = None
    minutes: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.02
    second_probes: bool = True


class SearchSettings(_Strict):
    """After the first candidates: proposals from a table corrected by what was measured, and swaps.

    ``rounds``: most corrections of the table, each solved and measured once; ``swaps``: most
    exchanges of two tensors measured on the best layout. 0 leaves a part out.
    """

    rounds: Annotated[int, Field(ge=0, le=100)] = 0
    swaps: Annotated[int, Field(ge=0, le=100_000)] = 0


class StudySettings(_Strict):
    """The Optuna study: ends after ``trials`` or ``minutes``; none of both: no study.

    ``storage``: empty for a journal file in the run folder, or an Optuna RDB URL. ``pareto``: look
    for the front of target KLD, worst off-target ratio and bytes; it proposes no layout of its own.
    ``imatrix_shares``: shares of the target in the imatrix to try beside the declared mix; each is
    packed anew. Empty: the mix stays as declared.
    """

    trials: Annotated[int, Field(ge=0, le=100_000)] = 0
    minutes: Annotated[float, Field(ge=0, le=100_000, allow_inf_nan=False)] = 0.0
    storage: str = ""
    pareto: bool = False
    imatrix_shares: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.25, 0.5, 0.75, 1.0)


class AllocateSettings(_Strict):
    """Further rules for layouts.

    ``coherent``: sets of roles that take one type in each layer, for backends that fuse them;
    ``budgets``: glob → bytes (as in ``budget``), for the tensors that it matches.
    """

    coherent: tuple[tuple[str, ...], ...] = ()
    budgets: dict[str, str | int] = {}


Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class EngineSettings(_Strict):
    """What is computed in; both belong to the result's key."""

    n_ctx: Annotated[int, Field(ge=MIN_CTX, le=MAX_CTX)] = 512
    working_type: Literal["auto", "file", "F32", "F16", "BF16"] = "auto"


class WorkflowSpec(_Strict):
    """The whole workflow, as read.

    ``chunks`` overrides how many chunks of ``n_ctx`` tokens each split of each category gets;
    the recipes' own numbers hold otherwise. ``price``: off-target category → how much
    more than the baseline's damage is allowed there, as a part; 'default' for those not named.
    """

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    description: str = ""
    kind: Literal["build", "sweep", "variants"] = "build"
    target: str
    budget: str | int = ""
    ladder: str = "K"
    baseline: str = ""
    rivals: tuple[str, ...] = ()
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    corpora: dict[str, str]
    imatrix: ImatrixMixes
    damage: DamageSettings = DamageSettings()
    chunks: dict[str, Annotated[int, Field(gt=0)]] = {}
    pins: dict[str, str] = {}
    price: dict[str, Price] = {}
    allocate: AllocateSettings = AllocateSettings()
    search: SearchSettings = SearchSettings()
    study: StudySettings = StudySettings()
    scores: ItemSettings = ItemSettings()
    sweep: SweepSettings = SweepSettings()
    variants: VariantSettings = VariantSettings()
    engine: EngineSettings = EngineSettings()

    @field_validator("chunks")
    @classmethod
    def _known_splits(cls, value: dict[str, int]) -> dict[str, int]:
        unknown = sorted(set(value) - {"calibrate", "probe", "select", "report"})
        if unknown:
            raise ValueError(f"unknown split {unknown[0]!r}: calibrate, probe, select or report")
        return value

    @model_validator(mode="after")
    def _build_is_complete(self) -> "WorkflowSpec":
        if self.kind == "build":
            for name in ("budget", "baseline"):
                if not getattr(self, name):
                    raise ValueError(f"{name} is missing: a workflow of kind 'build' needs it")
        return self

    @model_validator(mode="after")
    def _categories_exist(self) -> "WorkflowSpec":
        needed = {self.target: "target"}
        for name, mix in self.imatrix.named():
            needed.update(dict.fromkeys(mix, name))
        for category, where in needed.items():
            if category not in self.corpora:
                raise ValueError(
                    f"{where} names the category {category!r}, which [corpora] does not define"
                )
        for category in self.price:
            if category != "default" and (category not in self.corpora or category == self.target):
                raise ValueError(
                    f"[price] names {category!r}: give off-target categories of [corpora],"
                    " or 'default'"
                )
        return self


def load_workflow(name: str | Path) -> tuple[WorkflowSpec, str]:
    """The checked spec and the workflow's name.

    Paths of recipes, suites and data are made absolute (against the workflow's folder); built-in
    names stay names.

    Raises:
        ConfigError: no such workflow, not TOML, or a key or value that is not allowed.
    """
    path = find_content("workflows", name)
    spec = read_content(path, WorkflowSpec)
    corpora = {c: _resolve(recipe, path.parent) for c, recipe in spec.corpora.items()}
    suites = tuple(_resolve(suite, path.parent) for suite in spec.scores.suites)
    data = str((path.parent / spec.scores.data).resolve()) if spec.scores.data else ""
    scores = spec.scores.model_copy(update={"suites": suites, "data": data})
    return spec.model_copy(update={"corpora": corpora, "scores": scores}), path.stem


def _resolve(recipe: str, folder: Path) -> str:
    return str((folder / recipe).resolve()) if recipe.endswith(".toml") else recipe


def list_workflows() -> list[tuple[str, str]]:
    """(name, description) of each built-in workflow."""
    found = []
    for path in sorted(content_dir("workflows").glob("*.toml")):
        found.append((path.stem, load_workflow(path)[0].description))
    return found


def copy_workflow(name: str, destination: Path) -> Path:
    """Copy a built-in workflow to edit it; an existing file is left alone.

    Raises:
        ConfigError: no such workflow, or the destination exists.
    """
    source = find_content("workflows", name)
    target = destination / source.name if destination.is_dir() else destination
    if target.suffix != ".toml":
        raise ConfigError(f"{target} must end in .toml, so that bitwright run takes it")
    if target.exists():
        raise ConfigError(f"{target} exists already: remove it or choose another name")
    if not target.parent.is_dir():
        raise ConfigError(f"the folder {target.parent} does not exist: make it first")
    target.write_bytes(source.read_bytes())
    return target
