"""Stage 3: what each tensor costs at the probe type, per category, and at every other type."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwright.corpora.records import Corpus
from bitwright.damage.damage_map import DamageMap, load_damage_map, save_damage_map
from bitwright.damage.ledger import Ledger
from bitwright.damage.pricing import packing_errors
from bitwright.damage.probe import measure_damage as probe_damage
from bitwright.engine.imatrix_file import Imatrix
from bitwright.engine.packing import Packer
from bitwright.engine.session import Session
from bitwright.workflows.context import RunContext
from bitwright.workflows.run_folder import METRICS_VERSION, chunks_sha256, key_of, write_atomic

Errors = dict[tuple[str, str], float]


def task_packer(ctx: RunContext, name: str, imatrix: Imatrix) -> Packer:
    """Packs with one imatrix; packed tensors are kept in the run folder, per type."""
    cache = ctx.folder.file("cache", "packed", name).parent / name
    return Packer(ctx.model, imatrix, cache_dir=cache, threads=ctx.options.resolved_threads())
