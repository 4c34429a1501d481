"""A tokenizer small enough to see through: words, single bytes, and special tokens."""

import re

import numpy as np

SPECIAL = ("<bos>", "<|im_start|>", "<|im_end|>")
_WORD = re.compile(r" ?[A-Za-z]+|\d|.", re.DOTALL)


class FakeTokenizer:
    """Words get ids as they come; other characters are split into their bytes."""

    def __init__(
        self,
        chat_template: str | None = None,
        *,
        adds_bos: bool = True,
        special: tuple[str, ...] = SPECIAL,
    ) -> None:
        self.chat_template = chat_template
        self.adds_bos = adds_bos
        self.bos_id: int | None = 256
        self.bos_text, self.eos_text = "<bos>", "<|im_end|>"
        self._pieces = [bytes([i]) for i in range(256)]
        self._ids: dict[bytes, int] = {}
        for text in special:
            self._id(text.encode())
        self._special = re.compile("(" + "|".join(re.escape(text) for text in special) + ")")
        self._special_texts = set(special)

    def _id(self, piece: bytes) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self._pieces)
            self._pieces.append(piece)
        return self._ids[piece]

    def encode(self, text, *, add_special=False, parse_special=True):
        ids = []
        for part in self._special.split(text) if parse_special else [text]:
            if parse_special and part in self._special_texts:
                ids.append(self._id(part.encode()))
                continue
            for word in _WORD.findall(part):
                if len(word) > 1:
                    ids.append(self._id(word.encode()))
                else:
                    ids += list(word.encode())
        return np.array(ids, np.int32)

    def decode(self, ids):
        return b"".join(self._pieces[i] for i in ids).decode("utf-8", "replace")

    def piece(self, token_id):
        return self._pieces[token_id].decode("utf-8", "replace")

    def fingerprint(self):
        return "0" * 64
