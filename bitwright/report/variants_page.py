"""Three finished builds as a page: what each is good for, beside each other and beside stock."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from bitwright.report.blocks import Page, Sentences, Table
from bitwright.report.size_blocks import file_figure, scores, size_table, warning_lines
from bitwright.report.wording import NO_DATA, SYNTHETIC, number_text, ratio_text, size_text

STATES = {"under": "shown under", "over": "shown over", "undecided": "not decided"}

READING = (
    "Bedrock: for use where nothing may be lost. Gambit: every group of weights one type lower, "
    "for use where the size matters most; its losses stand in the table. Tightrope: the best "
    "layout between the two.",
    "Unharmed: the score is shown to have lost less than the share named above, on the same items "
    "as the original (95 % interval). Harmed: it is shown to be lower (paired test, corrected over "
    "the files). All else is not decided by these items.",
)


def variants_page(result: Mapping[str, Any]) -> Page:
    """The page of the builds' result.json."""
    builds = [{**one, "label": one["name"]} for one in result["variants"]]
    stock = list({one["label"]: one for one in result["nearest_stock"].values()}.values())
    reference = [] if result.get("reference") is None else [result["reference"]]
    names = {one["label"]: one["honest_name"] for one in builds}
    title = f"{result['model']}: {result['workflow']}"
    return Page(
        title,
        " ".join(build_sentence(one) for one in builds),
        (SYNTHETIC,) if result["synthetic_reference"] else (),
        (
            size_table(
                "The three builds, and the stock files nearest in size",
                [*reference, *builds, *stock],
                result["max_loss"],
                names,
            ),
            file_figure([*builds, *stock]),
            comparison_table(result["comparisons"]),
            harm_table(result),
            group_table(result),
            Sentences("How they were found", tuple(found_lines(result))),
            Sentences("Warnings of single tasks", warning_lines(result.get("flags", ()))),
            Sentences("Files", tuple(file_lines(result))),
            Sentences("How to read this", READING),
        ),
    )


def build_sentence(build: Mapping[str, Any]) -> str:
    """``Bedrock (2.1 MB, 3.77 bpw): shown unharmed on math; not decided on chat.``"""
    found: dict[str, list[str]] = {"harmed": [], "undecided": [], "unharmed": []}
    for category, entry in build["scores"].items():
        if entry.get("state") in found:
            lost = entry["against_reference"]["value"] / abs(entry["reference"] or 1.0)
            share = f" ({-lost:+.0%})" if entry["state"] == "harmed" else ""
            found[entry["state"]].append(category + share)
    words = {
        "harmed": "shown harmed on",
        "undecided": "not decided on",
        "unharmed": "shown unharmed on",
    }
    parts = [f"{words[state]} {', '.join(names)}" for state, names in found.items() if names]
    size = f"{size_text(build['size_bytes'])}, {build['bpw']:.2f} bpw"
    return f"{build['name']} ({size}): {'; '.join(parts) or 'no task was scored'}."


def comparison_table(comparisons: Sequence[Mapping[str, Any]]) -> Table:
    """Each pair on each category, with intervals."""
    rows = []
    for one in comparisons:
        difference = one.get("score_difference")
        rows.append(
            (
                f"{one['a']} / {one['b']}",
                one["category"],
                ratio_text(one["kld_ratio"]),
                ratio_words(one["kld_ratio"]),
                NO_DATA if difference is None else difference_text(difference),
                "" if difference is None else difference_words(difference),
            )
        )
    head = ("pair", "category", "KLD ratio", "", "score difference", "")
    note = "of the first to the second, on the same text and items; 95 % intervals"
    return Table(
        "Against each other and against stock", head, tuple(rows), note, words=(0, 1, 3, 5)
    )


def ratio_words(ratio: Mapping[str, Any]) -> str:
    """What a KLD ratio shows; less is better."""
    low, high = ratio.get("low"), ratio.get("high")
    if low is None or high is None:
        return ""
    return "closer" if high < 1.0 else "farther" if low > 1.0 else "no difference shown"


def difference_text(one: Mapping[str, Any]) -> str:
    """``+0.010 [-0.021, +0.041]``."""
    return f"{one['value']:+.3f} [{one['low']:+.3f}, {one['high']:+.3f}]"


def difference_words(one: Mapping[str, Any]) -> str:
    """What a difference of scores shows; more is better."""
    return "better" if one["low"] > 0 else "worse" if one["high"] < 0 else "no difference shown"


def harm_table(result: Mapping[str, Any]) -> Table:
    """What KLD counts as harm in each category, and where each build stands."""
    builds = result["variants"]
    rows = []
    for category, one in result["thresholds_nats"].items():
        interval = f" [{one['low']:.3g}, {one['high']:.3g}]" if "low" in one else ""
        stands = [
            STATES.get(scores(build, category).get("against_threshold", ""), NO_DATA)
            for build in builds
        ]
        rows.append((category, f"{one['kld_nats']:.3g}{interval}", one["how"], *stands))
    head = ("category", "KLD that counts as harm, nats", "how it was had")
    note = "learnt on other text and items than those of the tables above"
    return Table(
        "What counts as harm",
        (*head, *(build["name"] for build in builds)),
        tuple(rows),
        note,
        words=tuple(range(3 + len(builds))),
    )


def group_table(result: Mapping[str, Any]) -> Table:
    """Each group's safe types by category, and its type in each build."""
    groups = result["groups"]
    categories = list(dict.fromkeys(c for one in groups for c in one["categories"]))
    builds = [one["name"] for one in result["variants"]]
    rows = tuple(
        (
            one["group"],
            str(one["tensors"]),
            *(group_cell(one["categories"][c]) for c in categories),
            *(one["steps"][name] for name in builds),
        )
        for one in groups
    )
    head = ("group", "tensors", *categories, *builds)
    note = (
        "for each category the lowest type shown safe alone, the types not decided, and the first "
        "shown over the threshold; then the type in each build"
    )
    return Table("Groups of weights", head, rows, note, words=(0, *range(2, len(head))), long=True)


def group_cell(one: Mapping[str, Any]) -> str:
    """``IQ2_S ✓, IQ2_XS ?, IQ1_M ✗`` and the cliff, if there is one."""
    parts = [f"{one['lowest_safe']} ✓" if one["lowest_safe"] else "none ✓"]
    parts += [f"{kind} ?" for kind in one["undecided"]]
    parts += [f"{one['first_over']} ✗"] if one["first_over"] else []
    if one.get("cliff_bpw") is not None:
        parts.append(f"cliff at {one['cliff_bpw']:.2f} bpw")
    return ", ".join(parts)


def found_lines(result: Mapping[str, Any]) -> list[str]:
    """How each build was found."""
    rounds = result["back_off"]
    kept = next(one for one in rounds if one["kept"])
    lines = [f"Tightrope: {result['tightrope']['how']}."]
    if kept is rounds[0]:
        lines.append("Bedrock: every group at its lowest safe type; together they are safe too.")
    else:
        lines.append(
            "Bedrock: groups that are safe alone were not shown safe together; "
            f"{len(kept['raised'])} of {len(result['groups'])} were raised "
            f"({len(rounds)} whole layouts measured)."
        )
    left = kept["not_shown_safe"]
    if left:
        lines.append(
            f"Bedrock is not shown under the threshold on {', '.join(left)} (select text): more "
            "select chunks would narrow it."
        )
    first = rounds[0]
    for category, nats in first["predicted_nats"].items():
        measured = first["measured_nats"][category][0]
        lines.append(
            f"{category}, all groups at their lowest safe type: {number_text(nats, 3)} nats "
            f"predicted by the sum, {number_text(measured, 3)} measured."
        )
    return lines


def file_lines(result: Mapping[str, Any]) -> list[str]:
    """Names, layouts and why each name is honest."""
    return [
        f"{one['name']}: {PurePath(one['path']).name}, layout {PurePath(one['layout']).name}, "
        f"{one['honest_name']} ({one['reason']})"
        for one in result["variants"]
    ]
