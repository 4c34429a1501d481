"""The damage map: what each tensor costs at its probe type, per category, with error bars.

On disk: a tidy table (Parquet) and a JSON manifest that says how it was measured.
"""

import hashlib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bitwright.damage.ledger import SPANS, Sums
from bitwright.engine.atomic import write_atomic
from bitwright.engine.tensors import layer, role
from bitwright.errors import InputError

SCHEMA_VERSION = 1  # 2026-11-29: first form
TABLE, MANIFEST = "damage_map.parquet", "damage_map.json"
# Fewer chunks than this say too little about the spread between chunks.
MIN_CLUSTERS = 4

COLUMNS = {
    **{"tensor": "string", "role": "string", "layer": "Int64", "type": "string"},
    **{"category": "string", "span": "string", "kld_nats": "float64", "se": "float64"},
    **{"n_tokens": "int64", "flips": "int64"},
}


@dataclass(frozen=True, slots=True)
class DamageMap:
    """A measured map.

    rows: one row per (tensor, type, category, span), columns as in `COLUMNS`. kld_nats: mean KLD
    per token; se: its standard error; both NaN where there were no tokens (or, for se, one).
    span: 'scored' (the tokens that matter) or 'overall'. layer: missing outside blocks.
    noise_floor: mean |KLD| of the reference decoded again, nats, by category.
    se_method: 'chunks' or 'tokens', by category. n_chunks: probed chunks, by category.
    failed: tensors without values, since a probe of theirs gave logits that are not finite.
    floors: setting → mean |KLD| of the reference under it, nats. curve: what a fit of the type
    curve said (exponent, r2, n_pairs, spread), empty where none was made.
    """

    rows: pd.DataFrame
    key: str
    probe_type: str
    noise_floor: Mapping[str, float]
    se_method: Mapping[str, str]
    n_chunks: Mapping[str, int]
    notes: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    floors: Mapping[str, float] = field(default_factory=dict)
    curve: Mapping[str, object] = field(default_factory=dict)

    @property
    def probe_rows(self) -> pd.DataFrame:
        """The rows without second probes: each tensor at the first of its types."""
        first = {tensor: types[0] for tensor, types in self.types().items()}
        return self.rows[self.rows["type"] == self.rows["tensor"].map(first)]

    @property
    def tensors(self) -> tuple[str, ...]:
        """Measured tensors, in graph order."""
        return tuple(dict.fromkeys(self.rows["tensor"]))

    @property
    def categories(self) -> tuple[str, ...]:
        """Categories in the order they were given."""
        return tuple(self.n_chunks)

    def types(self) -> dict[str, tuple[str, ...]]:
        """The types each tensor was measured at."""
        found: dict[str, dict[str, None]] = {}
        for tensor, type_name in zip(self.rows["tensor"], self.rows["type"], strict=True):
            found.setdefault(tensor, {})[type_name] = None
        return {tensor: tuple(types) for tensor, types in found.items()}


def map_row(
    tensor: str, type_name: str, category: str, span: str, chunks: Sequence[Sums]
) -> dict[str, object]:
    """One row of the table, from the sums of a category's chunks."""
    return {
        "tensor": tensor,
        "role": role(tensor),
        "layer": layer(tensor),
        "type": type_name,
        "category": category,
        "span": span,
        "kld_nats": mean_kld(chunks),
        "se": standard_error(chunks),
        "n_tokens": sum(s.n for s in chunks),
        "flips": sum(s.flips for s in chunks),
    }


def tidy(rows: Sequence[Mapping[str, object]]) -> pd.DataFrame:
    """Rows as a table with the columns and types of `COLUMNS`."""
    return pd.DataFrame(list(rows), columns=list(COLUMNS)).astype(COLUMNS)


def mean_kld(chunks: Sequence[Sums]) -> float:
    """Mean KLD per token in nats; NaN without tokens."""
    n = sum(s.n for s in chunks)
    return math.fsum(s.sum_kld for s in chunks) / n if n else math.nan


def se_method(n_chunks: int) -> str:
    """'chunks' where there are enough of them, else 'tokens'."""
    return "chunks" if n_chunks >= MIN_CLUSTERS else "tokens"


def standard_error(chunks: Sequence[Sums]) -> float:
    """Standard error of the mean KLD, nats.

    With at least `MIN_CLUSTERS` chunks: the linearised error of a ratio with chunks as clusters
    (Cochran, "Sampling Techniques", 1977, §2.11). Else: tokens taken as independent, which is too
    small where they resemble each other. NaN when it cannot be known.
    """
    filled = [s for s in chunks if s.n]
    n = sum(s.n for s in filled)
    if n < 2:
        return math.nan
    mean = mean_kld(filled)
    if se_method(len(filled)) == "chunks":
        residuals = np.array([s.sum_kld - mean * s.n for s in filled])
        count = len(filled)
        return math.sqrt(count / (count - 1) * float(residuals @ residuals)) / n
    variance = math.fsum(s.sum_kld2 for s in filled) / n - mean * mean
    return math.sqrt(max(0.0, variance) / (n - 1))


def save_damage_map(damage_map: DamageMap, folder: Path) -> tuple[Path, Path]:
    """Write the table and its manifest into `folder`, which must exist; returns both paths."""
    buffer = io.BytesIO()
    damage_map.rows.to_parquet(buffer, index=False)
    table = buffer.getvalue()
    manifest = {
        "schema": SCHEMA_VERSION,
        "key": damage_map.key,
        "probe_type": damage_map.probe_type,
        "noise_floor_nats": dict(damage_map.noise_floor),
        "standard_error_over": dict(damage_map.se_method),
        "n_chunks": dict(damage_map.n_chunks),
        "notes": list(damage_map.notes),
        "failed": list(damage_map.failed),
        "floors_nats": dict(damage_map.floors),
        "curve": dict(damage_map.curve),
        "spans": list(SPANS),
        "table_sha256": hashlib.sha256(table).hexdigest(),
    }
    write_atomic(folder / TABLE, table)
    text = json.dumps(manifest, indent=1, allow_nan=False, ensure_ascii=False)
    write_atomic(folder / MANIFEST, text.encode())
    return folder / TABLE, folder / MANIFEST


def load_damage_map(folder: Path) -> DamageMap:
    """Read a map back.

    Raises:
        InputError: missing, damaged, of another version, or table and manifest do not belong
            together.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        table = (folder / TABLE).read_bytes()
        schema = manifest["schema"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(
            f"{folder} holds no damage map that can be read: measure it with `bitwright damage` or"
            " `bitwright run`"
        ) from None
    if schema != SCHEMA_VERSION:
        raise InputError(
            f"the damage map in {folder} is of version {schema}, this is version "
            f"{SCHEMA_VERSION}: measure it again"
        )
    if hashlib.sha256(table).hexdigest() != manifest.get("table_sha256"):
        raise InputError(
            f"{folder / TABLE} is not the table that {MANIFEST} describes: measure it again"
        )
    return DamageMap(
        rows=pd.read_parquet(io.BytesIO(table)).astype(COLUMNS),
        key=manifest["key"],
        probe_type=manifest["probe_type"],
        noise_floor=manifest["noise_floor_nats"],
        se_method=manifest["standard_error_over"],
        n_chunks=manifest["n_chunks"],
        notes=tuple(manifest["notes"]),
        failed=tuple(manifest.get("failed", ())),
        floors=manifest.get("floors_nats", {}),
        curve=manifest.get("curve", {}),
    )
