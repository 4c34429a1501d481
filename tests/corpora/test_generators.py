"""The built-in generators: pinned outputs, hold-out sides, and the two ways to render."""

import hashlib

import numpy as np
import pytest

from bitwright.corpora.chat_template import ChatTemplate, Job
from bitwright.corpora.generators.arithmetic import math_sample
from bitwright.corpora.generators.chatml import CALL, CHAT_TEMPLATE, render
from bitwright.corpora.generators.dialogue import chat_sample
from bitwright.corpora.generators.draw import is_heldout
from bitwright.corpora.generators.stdlib_code import code_paths, code_text, prose_topics
from bitwright.corpora.generators.tools import heldout_phrasing, tool_sample, tool_table
from bitwright.corpora.sources.builtin import openai_form

GENERATORS = {"chat": chat_sample, "math": math_sample, "tool": tool_sample}

# sha256 of the first 300 rendered conversations from default_rng(1), training then held-out side:
# the demo model was trained on exactly these draws.
GOLDEN = {
    "chat": (
        "07b2edc31f1260c8abcc34e0c0d55dd99b7e85ce3cf4d227b0fbd0092e481bb6",
        "9300ed84765686376e9c4e0a93820177fc9ce0895844d46ce484a004a9d15bba",
    ),
    "math": (
        "e41ab859751c2fb421f5e9c750546047693eaf8230f98d231307a243136b56a7",
        "f35153b232106fa374df0c8a1864c464133eefebd3ff38c0105fe159c7a08b74",
    ),
    "tool": (
        "45d2c57d04c06f31938f46e1dff91d0ece90d2cb3d07e1d44bab59ac2b2730fd",
        "a707a47ead411e69e44dc32159e06aea510825a1a80ad233b733160fc3a526cb",
    ),
}


def digest(name: str, heldout: bool) -> str:
    rng = np.random.default_rng(1)
    sha = hashlib.sha256()
    for _ in range(300):
        sample = GENERATORS[name](rng, heldout)
        sha.update(render(sample.messages, sample.tools).encode())
        sha.update(repr(sample.expected).encode())
    return sha.hexdigest()


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("heldout", [False, True])
def test_outputs_are_pinned(name: str, heldout: bool) -> None:
    assert digest(name, heldout) == GOLDEN[name][heldout]


def test_first_math_sample_is_readable() -> None:
    sample = math_sample(np.random.default_rng(1), heldout=True)
    assert sample.messages[1]["content"].endswith(f"#### {sample.expected}")


@pytest.mark.parametrize("make", [math_sample, chat_sample])
def test_held_out_questions_never_appear_on_the_other_side(make) -> None:
    rng = np.random.default_rng(2)
    ours = {m["content"] for _ in range(300) for m in make(rng).messages if m["role"] == "user"}
    theirs = [make(rng, heldout=True).messages[0]["content"] for _ in range(100)]
    questions = [q for q in theirs if is_heldout(q)]
    assert questions
    assert not ours & set(questions)


def test_training_side_never_uses_the_held_out_phrasing() -> None:
    index = 0
    held = tool_table()[index].phrasings[heldout_phrasing(index)].split("{")[0].lower()
    rng = np.random.default_rng(3)
    for _ in range(2000):
        sample = tool_sample(rng)
        assert not any(held in m["content"].lower() for m in sample.messages if m["role"] == "user")


def test_openai_form_renders_the_same_through_the_template() -> None:
    rng = np.random.default_rng(4)
    samples = [make(rng) for make in GENERATORS.values() for _ in range(40)]
    with ChatTemplate(CHAT_TEMPLATE) as template:
        for sample in samples:
            messages, tools = openai_form(sample)
            assert template.render([Job(messages, tools)]) == [
                render(sample.messages, sample.tools)
            ]
    assert any(CALL in m["content"] for sample in samples for m in sample.messages)


def test_library_files_and_topics_have_two_disjoint_sides() -> None:
    ours, theirs = code_paths(), code_paths(heldout=True)
    assert len(ours) > 10 * len(theirs) > 0
    assert not set(ours) & set(theirs)
    assert "def dumps" in (code_text("json/__init__.py") or "")
    assert code_text("antigravity.py") is None or len(code_text("antigravity.py") or "") >= 400
    assert not {t for t, _ in prose_topics()} & {t for t, _ in prose_topics(heldout=True)}
