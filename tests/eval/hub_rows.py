"""A few rows of our own in the columns of the hub's data sets, as the local files of the suites."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

HUMANEVAL = [
    {
        "task_id": f"HumanEval/{i}",
        "prompt": f'def add_{i}(a: int, b: int) -> int:\n    """ Sum of a, b and {i}.\n    """\n',
        "entry_point": f"add_{i}",
        "canonical_solution": f"    return a + b + {i}\n",
        "test": "METADATA = {}\n\n\ndef check(candidate):\n"
        f"    assert candidate(2, 3) == {5 + i}\n    assert candidate(-1, 1) == {i}\n",
    }
    for i in range(3)
]
# The sanitized set's columns, then the full set's.
MBPP = [
    {
        "source_file": "ours",
        "task_id": 11,
        "prompt": "Write a function to double a number.",
        "code": "def double(n):\n    return 2 * n",
        "test_imports": ["import math"],
        "test_list": ["assert double(3) == 6", "assert double(0) == math.floor(0.5)"],
    },
    {
        "task_id": 12,
        "text": "Write a function to reverse a list.",
        "code": "def turn(xs):\n    return xs[::-1]",
        "test_list": ["assert turn([1, 2]) == [2, 1]"],
        "test_setup_code": "",
        "challenge_test_list": [],
    },
]
GSM8K = [
    {
        "question": f"Ann has {i} pens and buys {i + 2} more. How many pens has she?",
        "answer": f"She has {i} + {i + 2} = <<{i}+{i + 2}={2 * i + 2}>>{2 * i + 2}.\n"
        f"#### {2 * i + 2}",
    }
    for i in range(1, 9)
]
IFEVAL = [
    {
        "key": 1,
        "prompt": "Greet me. Do not use any commas.",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}],
    },
    {
        "key": 2,
        "prompt": "Say the word river, in English and in lower case.",
        "instruction_id_list": ["keywords:existence", "change_case:english_lowercase"],
        "kwargs": [{"keywords": ["river"]}, {}],
    },
]
IFEVAL_SENTENCES = [
    {
        "key": 3,
        "prompt": "Describe a fox in at least two sentences.",
        "instruction_id_list": ["length_constraints:number_sentences"],
        "kwargs": [{"relation": "at least", "num_sentences": 2}],
    }
]
ARC = [
    {
        "id": f"ours_{i}",
        "question": f"Which of these is {colour}?",
        "choices": {"text": list(things), "label": list("ABCD")},
        "answerKey": "B",
    }
    for i, (colour, things) in enumerate(
        [
            ("blue", ("grass", "the clear sky", "a ripe tomato", "snow")),
            ("white", ("coal", "fresh snow", "a raven", "the night")),
        ]
    )
]
HELLASWAG = [
    {
        "ind": i,
        "activity_label": "Making tea",
        "ctx_a": "A man fills a kettle with water.",
        "ctx_b": "he",
        "ctx": "A man fills a kettle with water. he",
        "endings": [
            "puts it on the stove and waits.",
            "[title] eats the kettle.",
            "paints a fence.",
            "flies away.",
        ],
        "source_id": f"ours~{i}",
        "split": "val",
        "split_type": "indomain",
        "label": "0",
    }
    for i in range(2)
]


WEATHER, PLACE = (
    {
        "name": name,
        "description": f"Gets the {what}.",
        "parameters": {
            "type": "dict",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    }
    for name, what in (("weather.get", "weather"), ("find_place", "map"))
)
_CALL = {"weather.get": {"city": ["Oslo", "oslo"], "days": ["", 3]}}
_OTHER = {"find_place": {"city": ["Bergen"], "days": [""]}}
# BFCL's category → (functions offered, accepted calls; None: no function fits)
BFCL = {
    "simple_python": ([WEATHER], [_CALL]),
    "multiple": ([WEATHER, PLACE], [_CALL]),
    "parallel": ([WEATHER], [_CALL, _CALL]),
    "parallel_multiple": ([WEATHER, PLACE], [_CALL, _OTHER]),
    "irrelevance": ([PLACE], None),
    "live_simple": ([WEATHER], [_CALL]),
    "live_multiple": ([PLACE, WEATHER], [_CALL]),
    "live_irrelevance": ([PLACE], None),
}


def write_bfcl(folder: Path) -> Path:
    """BFCL v4's files for every category of the suite, two rows each."""
    (folder / "possible_answer").mkdir(parents=True)
    for category, (functions, calls) in BFCL.items():
        name = f"BFCL_v4_{category}.json"
        question = [[{"role": "user", "content": "How will the weather be in Oslo?"}]]
        ids = [f"{category}_{i}" for i in range(2)]
        rows = [{"id": i, "question": question, "function": functions} for i in ids]
        write_lines(folder / name, rows)
        if calls is not None:
            answers = [{"id": i, "ground_truth": calls} for i in ids]
            write_lines(folder / "possible_answer" / name, answers)
    return folder


def write_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """Rows as JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_hub_rows(folder: Path) -> Path:
    """The files of the suites code, math and chat."""
    write_lines(folder / "HumanEval.jsonl", HUMANEVAL)
    write_lines(folder / "mbpp.jsonl", MBPP)
    write_lines(folder / "gsm8k.jsonl", GSM8K[:2])
    write_lines(folder / "gsm8k.train.jsonl", GSM8K[2:])
    write_lines(folder / "ifeval.jsonl", IFEVAL)
    write_lines(folder / "arc_easy.jsonl", ARC)
    write_lines(folder / "arc_challenge.jsonl", ARC)
    write_lines(folder / "hellaswag.jsonl", HELLASWAG)
    return folder
