"""The tokenizer against facts of the demo model and of tiny models."""

import numpy as np
import pytest

from bitwright.engine.model_file import open_model
from bitwright.engine.tokenizer import Tokenizer
from bitwright.errors import InputError
from tests.tiny import tiny_gguf

TEXTS = (
    "def f(x):\n    return x + 1\n",
    "Größe — 漢字 🙂",
    "a\0b",
    "",
    "<|im_start|>user\nhi<|im_end|>",
)


@pytest.fixture(scope="module")
def tokenizer():
    with Tokenizer(open_model("demo")) as opened:
        yield opened


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_parsed_or_not(tokenizer):
    parsed = tokenizer.encode("<|im_start|>")
    assert len(parsed) == 1
    assert tokenizer.piece(int(parsed[0])) == "<|im_start|>"
    assert len(tokenizer.encode("<|im_start|>", parse_special=False)) > 1


def test_bos_once(tokenizer):
    assert tokenizer.adds_bos
    assert not tokenizer.adds_eos
    ids = tokenizer.encode("hello", add_special=True)
    assert ids[0] == tokenizer.bos_id
    assert list(ids[1:]) == list(tokenizer.encode("hello"))
    assert tokenizer.bos_text == "<|endoftext|>"
    assert tokenizer.eos_text == "<|im_end|>"


def test_long_text(tokenizer):
    text = "x = 1\n" * 5000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_unknown_id_is_refused(tokenizer):
    with pytest.raises(InputError, match="outside"):
        tokenizer.piece(tokenizer.n_vocab)


def test_fingerprint_depends_on_tokenizer_and_template_only(tmp_path, tokenizer):
    def fingerprint(name, **options):
        model = open_model(tiny_gguf(tmp_path / name, **options))
        with Tokenizer(model) as opened:
            return opened.fingerprint(), opened.chat_template

    plain, template = fingerprint("a.gguf")
    same, _ = fingerprint("b.gguf", seed=1)
    other, no_template = fingerprint("c.gguf", chat_template=None)
    assert plain == same
    assert len({plain, other, tokenizer.fingerprint()}) == 3
    assert template.startswith("{% for message")
    assert no_template is None


def test_model_without_bos(tmp_path):
    with Tokenizer(open_model(tiny_gguf(tmp_path / "t.gguf", add_bos=False))) as opened:
        assert not opened.adds_bos
        assert list(opened.encode("ab", add_special=True)) == list(opened.encode("ab"))
