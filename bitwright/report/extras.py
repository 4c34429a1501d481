"""What a report shows beside result.json: plain records that the caller loads from a run folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd


@dataclass(frozen=True, slots=True)
class Prediction:
    """KLD that the damage map predicted for a layout, and what was measured, in nats."""

    label: str
    category: str
    predicted_nats: float
    measured_nats: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportExtras:
    """Everything optional; a part that is not there is left out of the report.

    damage_map: columns tensor, role, layer (None outside the blocks), type, category, span
        ("scored" or "overall"), kld_nats, se.
    tensors: columns tensor, role, layer, n_elements: the quantizable tensors.
    layouts: label → tensor → type. names: label → the honest name and why.
    corpora: category → split → statistics (documents, tokens, chunks, …).
    noise_nats: category → KLD of the reference against itself (None: not measured).
    recipe: what a rerun needs (hashes, seed, versions). Nothing in it may be a path.
    """

    damage_map: pd.DataFrame | None = None
    tensors: pd.DataFrame | None = None
    layouts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    predictions: Sequence[Prediction] = ()
    corpora: Mapping[str, Mapping[str, Mapping[str, object]]] = field(default_factory=dict)
    noise_nats: Mapping[str, float | None] = field(default_factory=dict)
    recipe: Mapping[str, object] = field(default_factory=dict)
    notes: Sequence[str] = ()
    base_model: str = ""
    license: str = ""
    command: str = ""
