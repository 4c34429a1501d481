"""Which tensors an importance matrix covers, and which types may therefore be used on them."""

from collections.abc import Mapping
from dataclasses import dataclass

from bitwright.engine.imatrix import Imatrix
from bitwright.engine.tensors import needs_imatrix
from bitwright.errors import ConfigError

MIN_COVERAGE = 0.95  # of a tensor's experts, below which very low-bit types are refused
SHOWN_EXPERTS = 12


@dataclass(frozen=True, slots=True)
class Uncovered:
    """A tensor whose planned type needs importance that is not there; coverage 0 to 1."""

    tensor: str
    type: str
    coverage: float


def uncovered(
    layout: Mapping[str, str],
    imatrix: Imatrix | None,
    *,
    min_coverage: float = MIN_COVERAGE,
    q2_k_s: bool = False,
) -> tuple[Uncovered, ...]:
    """Every tensor of a layout whose type needs importance it does not have.

    Token embeddings and output are exempt, as in llama.cpp.

    Args:
        q2_k_s: the layout is a Q2_K_S mix, where Q2_K needs importance too.
    """
    lacking = []
    for name, type_name in layout.items():
        if needs_imatrix(name, type_name, q2_k_s=q2_k_s):
            coverage = imatrix.coverage(name) if imatrix else 0.0
            if coverage < min_coverage or coverage == 0.0:
                lacking.append(Uncovered(name, type_name, coverage))
    return tuple(lacking)


def require_covered(
    layout: Mapping[str, str],
    imatrix: Imatrix | None,
    *,
    min_coverage: float = MIN_COVERAGE,
    q2_k_s: bool = False,
) -> None:
    """Refuse a layout that needs importance it does not have, for all tensors at once.

    Raises:
        ConfigError: with every tensor, its type and its coverage.
    """
    lacking = uncovered(layout, imatrix, min_coverage=min_coverage, q2_k_s=q2_k_s)
    if not lacking:
        return
    if imatrix is None:
        listed = ", ".join(f"{u.tensor}={u.type}" for u in lacking)
        raise ConfigError(
            f"{len(lacking)} tensor(s) would get a type that needs an imatrix, and none was given:"
            f" {listed}. Give one with --imatrix, or choose other types"
        )
    listed = ", ".join(f"{u.tensor}={u.type} ({u.coverage:.0%} covered)" for u in lacking)
    raise ConfigError(
        f"{len(lacking)} tensor(s) would get a type that needs an imatrix covering at least"
        f" {min_coverage:.0%} of their experts: {listed}. Give an imatrix made from more text,"
        " or choose other types"
    )


def coverage_notes(imatrix: Imatrix) -> tuple[str, ...]:
    """One line for each tensor that some expert's data is missing from."""
    notes = []
    for name in sorted(imatrix.entries):
        unseen = imatrix.unseen(name)
        if unseen:
            shown = ", ".join(map(str, unseen[:SHOWN_EXPERTS]))
            more = ", …" if len(unseen) > SHOWN_EXPERTS else ""
            notes.append(
                f"{name}: {imatrix.coverage(name):.1%} of its matrices have data; without data,"
                f" and weighted neutrally: {shown}{more}"
            )
    return tuple(notes)
