"""The demo model's tokenizer: byte-level BPE that llama.cpp reads as ``gpt2`` / ``gpt-2``.

Merges are learnt with a finer split than GPT-2's own, so that under GPT-2's split two things hold
which let a small model copy arguments token by token: every digit is its own token, and a space is
never merged with a following capital letter or digit (a name has the same tokens after a space as
after a quotation mark).
"""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from bitwright.corpora.generators.chatml import SPECIAL_TOKENS, Sample, render, segments
from bitwright.corpora.generators.stdlib_code import code_files, prose_topics
from tools.demo_model.generators import GENERATORS

SPLIT = r"[0-9]| ?[a-z]+|[A-Z][a-z]*| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s"
CODE_CHARS = 12_000  # of each source file, so that no file dominates the merges
SAMPLES = 2_500  # conversations of each kind

PROMPT_WEIGHT = 0.1
RESULT = re.compile(r"= (\d+)")

Encoded = tuple[list[int], list[float]]


def train_tokenizer(n_vocab: int, seed: int) -> Tokenizer:
    """Learn the merges from a balanced sample of everything the model is trained on."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_texts(np.random.default_rng(seed)), trainer)
    # In use it splits as GPT-2 does, since that is what llama.cpp will do.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer.json."""
    return Tokenizer.from_file(str(path))


def encode_conversation(tokenizer: Tokenizer, sample: Sample, result_weight: float) -> Encoded:
    """Token ids with BOS in front, and the loss weight of each.

    1 on what the assistant says, ``result_weight`` on the digits after "= " (the only hard tokens
    of a worked solution), PROMPT_WEIGHT elsewhere, 0 on BOS.
    """
    pieces = segments(sample.messages, sample.tools)
    text = "".join(piece for piece, _ in pieces)
    weights = np.full(len(text) + 1, PROMPT_WEIGHT)
    position = 0
    for piece, is_target in pieces:
        end = position + len(piece)
        if is_target:
            weights[position:end] = 1.0
            for digits in RESULT.finditer(piece):
                weights[position + digits.start(1) : position + digits.end(1)] = result_weight
        position = end
    # One encoding of the whole text: segments end at special tokens or newlines, so that the
    # character offsets tell which segment a token belongs to.
    encoding = tokenizer.encode(text)
    ids = [0, *encoding.ids]
    return ids, [0.0, *(float(weights[first]) for first, _ in encoding.offsets)]


def _texts(rng: np.random.Generator) -> Iterator[str]:
    texts = [text[:CODE_CHARS] for _, text in code_files()]
    texts += [text for _, text in prose_topics()]
    for make in GENERATORS.values():
        samples = (make(rng) for _ in range(SAMPLES))
        texts += [render(sample.messages, sample.tools) for sample in samples]
    for text in texts:
        yield _without_specials(text)


def _without_specials(text: str) -> str:
    """No merge may span a piece of a special token."""
    for special in SPECIAL_TOKENS:
        text = text.replace(special, "\n")
    return text
