"""Settings of the workflows that look at many sizes of one model: sweeps and variants."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from bitwright.engine.upstream import ftype_name
from bitwright.errors import ConfigError

Share = Annotated[float, Field(gt=0, lt=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ItemSettings(_Strict):
    """Which executed suites are run, on how many items of each task.

    ``off_target_items``: of tasks outside the target category, whose suites are there for breadth;
    0: as many as ``items``.
    ``likelihood_items``: of tasks without answers to check, whose values vary less.
    ``max_tokens``: most tokens of an answer, where a task allows more; 0 leaves it to the task.
    ``max_loss``: the share of the reference's score that counts as harm. ``tasks``: the only ones
    of the suites that are run; empty for all. ``leave_out``: tasks of the suites that are not run.
    ``data``: folder of local files instead of the hub. ``execute_code``: run programs that the
    model writes, in the sandbox. ``allow_overlap``: score items that stand in the run's own
    calibration text too.
    """

    suites: Annotated[tuple[str, ...], Field(min_length=1)] = ("builtin",)
    items: Annotated[int, Field(ge=1, le=100_000)] = 200
    off_target_items: Annotated[int, Field(ge=0, le=100_000)] = 0
    likelihood_items: Annotated[int, Field(ge=1, le=100_000)] = 50
    max_tokens: Annotated[int, Field(ge=0, le=100_000)] = 0
    max_loss: Share = 0.10
    tasks: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    data: str = ""
    execute_code: bool = False
    allow_overlap: bool = False


class SweepSettings(_Strict):
    """Whole-model sizes: stock types, one type for the whole body, and solved layouts.

    ``solved``: sizes (as ``budget``) at which the solver's layout from a damage map is added; it
    uses the workflow's ladder. ``embedding``: the type of embeddings and output in the uniform
    layouts, where the body's type is lower.
    """

    stock: tuple[str, ...] = ()
    uniform: tuple[str, ...] = ()
    solved: tuple[str | int, ...] = ()
    embedding: str = "Q2_K"
    sure: Share = 0.95

    @field_validator("stock")
    @classmethod
    def _stock_types(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(dict.fromkeys(ftype_name(name) for name in names))
        except ConfigError as error:
            raise ValueError(str(error)) from None


class VariantSettings(_Strict):
    """Group ladders and the three builds.

    ``groups``: what walks down together: 'role' (all layers), 'role-band' (``bands`` depth bands)
    or 'tensor'. ``threshold_nats``: the KLD that counts as harm, or 'calibrated' from the sweep's
    executed scores, on ``calibration_items`` of each task. ``start``: the type where each walk
    begins; it goes up only where that is not shown safe. ``first_chunks``: chunks of each category
    for every step; all others are used only where an interval holds the threshold.
    ``refine_rounds``: most layouts measured to take back bytes of a Bedrock that had to be raised.
    """

    groups: Literal["role", "role-band", "tensor"] = "role-band"
    bands: Annotated[int, Field(ge=1, le=100)] = 3
    threshold_nats: Annotated[float, Field(gt=0)] | Literal["calibrated"] = "calibrated"
    start: str = "Q4_K"
    first_chunks: Annotated[int, Field(ge=1)] = 2
    calibration_items: Annotated[int, Field(ge=1, le=100_000)] = 100
    back_off_rounds: Annotated[int, Field(ge=1, le=100)] = 12
    refine_rounds: Annotated[int, Field(ge=0, le=100)] = 4
    curve_points: Annotated[int, Field(ge=1, le=50)] = 5
