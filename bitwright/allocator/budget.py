"""Budgets: how large the whole file may be, as people write it.

Decimal units (GB) and binary ones (GiB) are both taken and never mixed; what is given without a
unit is bytes. All arithmetic is exact; fractions of a byte are cut off.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from bitwright.engine.model_file import ModelFile
from bitwright.engine.upstream import ftype_name
from bitwright.errors import ConfigError

UNIT_BYTES = {
    **{"b": 1, "byte": 1, "bytes": 1},
    **{"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40},
}
FORMS = (
    "write it as '861222144 bytes', '5.7 GiB' (binary), '6.1 GB' (decimal), '3.5 bpw',"
    " 'Q3_K_S', 'Q3_K_S + 0.12 %', 'Q3_K_S - 1 %' or 'Q3_K_S + 10 MB'"
)
MAX_LENGTH = 100  # of the text

_AMOUNT = re.compile(r"(?P<number>\d[\d_]*(?:\.\d+)?)\s*(?P<unit>%|[a-z]+)?", re.ASCII | re.I)
_STOCK = re.compile(
    r"(?P<stock>[a-z]\w*)(?:\s*(?P<sign>[+\-−])\s*(?P<amount>\d.*))?", re.ASCII | re.I
)


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget before it is applied to a model.

    Attributes:
        text: as given.
        stock: the stock type whose file size it starts from, or None.
        amount: signed; what is added to the stock size, or the size itself.
        unit: of the amount: 'bytes', 'bpw' (bits per weight of the model) or '%' (of the stock).
    """

    text: str
    stock: str | None
    amount: Fraction
    unit: str


def parse_budget(text: str | int) -> Budget:
    """Read a budget; see FORMS.

    Raises:
        ConfigError: anything else, an unknown stock type, or nothing at all.
    """
    if isinstance(text, bool) or not isinstance(text, str | int):
        raise ConfigError(f"the budget {text!r} is neither a number of bytes nor text: {FORMS}")
    given = str(text).strip()
    if len(given) > MAX_LENGTH:
        raise ConfigError(f"the budget has {len(given)} characters: {FORMS}")
    if _AMOUNT.fullmatch(given):
        amount, unit = _amount(given, given)
        if unit == "%":
            raise ConfigError(f"the budget {given!r} does not say of what: {FORMS}")
        if amount <= 0:
            raise ConfigError(f"the budget {given!r} is not above zero: {FORMS}")
        return Budget(given, None, amount, unit)
    found = _STOCK.fullmatch(given)
    if found is None:
        raise ConfigError(f"the budget {given!r} cannot be read: {FORMS}")
    stock = _stock_name(found["stock"], given)
    if found["amount"] is None:
        return Budget(given, stock, Fraction(0), "bytes")
    amount, unit = _amount(found["amount"].strip(), given)
    if unit == "bpw":
        raise ConfigError(f"the budget {given!r} adds bits per weight to a stock type: {FORMS}")
    return Budget(given, stock, amount if found["sign"] == "+" else -amount, unit)


def _stock_name(name: str, given: str) -> str:
    try:
        return ftype_name(name)
    except ConfigError as error:
        raise ConfigError(f"the budget {given!r}: {error}; or {FORMS}") from None


def _amount(text: str, given: str) -> tuple[Fraction, str]:
    found = _AMOUNT.fullmatch(text)
    if found is None:
        raise ConfigError(f"the budget {given!r} cannot be read at {text!r}: {FORMS}")
    number, unit = Fraction(found["number"].replace("_", "")), (found["unit"] or "bytes").lower()
    if unit in {"%", "bpw"}:
        return number, unit
    if unit not in UNIT_BYTES:
        raise ConfigError(f"the budget {given!r} has the unknown unit {found['unit']!r}: {FORMS}")
    size = number * UNIT_BYTES[unit]
    if UNIT_BYTES[unit] == 1 and size.denominator != 1:
        raise ConfigError(f"the budget {given!r} is no whole number of bytes: {FORMS}")
    return size, "bytes"


def resolve_budget(budget: Budget, model: ModelFile, stock_bytes: Callable[[str], int]) -> int:
    """Whole-file bytes of the budget for that model.

    Args:
        stock_bytes: bytes of upstream's own file of a stock type; called only when needed.

    Raises:
        ConfigError: nothing is left of it, for example 'Q3_K_S - 100 %'.
    """
    base = stock_bytes(budget.stock) if budget.stock else 0
    if budget.unit == "bpw":
        size = budget.amount * sum(t.n_elements for t in model.tensors) / 8
    elif budget.unit == "%":
        size = base * (1 + budget.amount / 100)
    else:
        size = base + budget.amount
    if size < 1:
        raise ConfigError(
            f"the budget {budget.text!r} leaves {int(size):,} bytes for {model.name}"
            f" ({budget.stock} takes {base:,}): ask for more"
        )
    return int(size)
