"""A model's tokenizer, loaded without its weights."""

import ctypes
import hashlib
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bitwright.engine.lib import llama
from bitwright.engine.loaded_model import LoadedModel
from bitwright.engine.model_file import ModelFile
from bitwright.errors import EngineError, InputError


class Tokenizer:
    """Text to token ids and back, exactly as llama.cpp does it for this model.

    `bos_id`, `eos_id`, `eot_id` are None where the model has none. `adds_bos`, `adds_eos`: what
    `encode(add_special=True)` puts around a text.
    """

    def __init__(self, model: ModelFile) -> None:
        self.model = model
        self._loaded = LoadedModel(model, vocab_only=True)
        vocab = self._vocab = self._loaded.vocab
        self.n_vocab = self._loaded.n_vocab
        if llama.llama_vocab_type(vocab) == llama.LLAMA_VOCAB_TYPE_NONE or self.n_vocab == 0:
            self.close()
            raise InputError(
                f"{model.path.name} holds no tokenizer, so no text can be given to it; convert the "
                "model again with its tokenizer files beside it"
            )
        self.bos_id = _known(llama.llama_vocab_bos(vocab))
        self.eos_id = _known(llama.llama_vocab_eos(vocab))
        self.eot_id = _known(llama.llama_vocab_eot(vocab))
        self.adds_bos = bool(llama.llama_vocab_get_add_bos(vocab))
        self.adds_eos = bool(llama.llama_vocab_get_add_eos(vocab))

    @property
    def chat_template(self) -> str | None:
        """The Jinja source stored in the model file, None when there is none."""
        template = self.model.meta("tokenizer.chat_template")
        return template if isinstance(template, str) and template else None

    @property
    def bos_text(self) -> str:
        """The text of BOS, '' without one."""
        return "" if self.bos_id is None else self.piece(self.bos_id)

    @property
    def eos_text(self) -> str:
        """The text of EOS, '' without one."""
        return "" if self.eos_id is None else self.piece(self.eos_id)

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> NDArray[np.int32]:
        """Token ids (n,). `parse_special`: '<|im_start|>' in the text becomes its control token."""
        data = text.encode("utf-8", errors="replace")
        ids = np.empty(len(data) + 8, np.int32)
        for _ in range(2):
            buffer = ids.ctypes.data_as(ctypes.POINTER(llama.llama_token))
            n = llama.llama_tokenize(
                self._vocab, data, len(data), buffer, len(ids), add_special, parse_special
            )
            if n >= 0:
                return ids[:n].copy()
            ids = np.empty(-n, np.int32)
        raise EngineError(f"llama.cpp could not tokenize a text of {len(data)} bytes")

    def decode(self, ids: NDArray[np.int32]) -> str:
        """The text, special tokens included; bytes that are no UTF-8 become U+FFFD."""
        tokens = np.ascontiguousarray(ids, np.int32)
        pointer = tokens.ctypes.data_as(ctypes.POINTER(llama.llama_token))
        size = 16 * len(tokens) + 64
        for _ in range(2):
            buffer = ctypes.create_string_buffer(size)
            n = llama.llama_detokenize(self._vocab, pointer, len(tokens), buffer, size, False, True)
            if n >= 0:
                return buffer.raw[:n].decode("utf-8", errors="replace")
            size = -n
        raise EngineError(f"llama.cpp could not turn {len(tokens)} tokens into text")

    def piece(self, token_id: int) -> str:
        """The text of one token; part of a character becomes U+FFFD."""
        if not 0 <= token_id < self.n_vocab:
            raise InputError(f"token id {token_id} is outside 0…{self.n_vocab - 1}")
        size = 64
        for _ in range(2):
            buffer = ctypes.create_string_buffer(size)
            n = llama.llama_token_to_piece(self._vocab, token_id, buffer, size, 0, True)
            if n >= 0:
                return buffer.raw[:n].decode("utf-8", errors="replace")
            size = -n
        raise EngineError(f"llama.cpp could not give the text of token {token_id}")

    def fingerprint(self) -> str:
        """SHA-256 of every tokenizer.* entry of the file: same text, template and tokens."""
        digest = hashlib.sha256()
        entries = self.model.shards[0].kv
        for key in sorted(key for key in entries if key.startswith("tokenizer.")):
            digest.update(key.encode() + b"\0" + hashlib.sha256(entries[key].raw).digest())
        return digest.hexdigest()

    def close(self) -> None:
        """Free the vocabulary; a second call does nothing."""
        self._loaded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def _known(token_id: int) -> int | None:
    return int(token_id) if token_id >= 0 else None
