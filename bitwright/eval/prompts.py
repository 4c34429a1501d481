"""Text to prompts: the model's own tokenizer and chat template, without its weights."""

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bitwright.corpora.chat_template import ChatTemplate, Failure, Job
from bitwright.corpora.conversation import Message, Tools, forms
from bitwright.corpora.encoding import choose_template
from bitwright.engine.model_file import ModelFile
from bitwright.engine.tokenizer import Tokenizer
from bitwright.errors import InputError

Tokens = NDArray[np.int32]


class Prompts:
    """A tokenizer and a chat template; to be closed.

    ``remember``: keep every text's ids and every rendering, for files of one model that are asked
    the same questions.
    """

    def __init__(self, model: ModelFile, *, remember: bool = False) -> None:
        self.model = model
        self.remember = remember
        self._ids: dict[str, Tokens] = {}
        self._texts: dict[str, str] = {}
        self.tokenizer = Tokenizer(model)
        self.template_source, self.template_style = choose_template(self.tokenizer)
        self._template: ChatTemplate | None = None

    def encode(self, text: str) -> Tokens:
        """Token ids, special tokens parsed, with exactly one BOS if the model or the text wants it.

        A tokenizer that adds EOS after a text does so for training text; a prompt has none.
        """
        if not self.remember:
            return self._encoded(text)
        if text not in self._ids:
            self._ids[text] = self._encoded(text)
        return self._ids[text]

    def _encoded(self, text: str) -> Tokens:
        bos = self.tokenizer.bos_id
        ids = self.tokenizer.encode(text, parse_special=True)
        if bos is None:
            return ids
        n_leading = 0
        while n_leading < len(ids) and ids[n_leading] == bos:
            n_leading += 1
        if not (self.tokenizer.adds_bos or n_leading):
            return ids
        return np.concatenate([np.array([bos], np.int32), ids[n_leading:]])

    def encode_pair(self, context: str, continuation: str) -> tuple[Tokens, Tokens]:
        """Ids of a context and of what follows it, as the two are tokenized together.

        White space at the end of the context goes with the continuation, where tokenizers put it.
        A token across the border counts as the continuation's.
        """
        kept = context.rstrip() if context.strip() else context
        whole = self.encode(context + continuation)
        head = self.encode(kept)
        n = min(len(head), len(whole))
        different = np.flatnonzero(head[:n] != whole[:n])
        border = int(different[0]) if len(different) else n
        return whole[:border], whole[border:]

    def prompt_text(self, messages: Sequence[Message], tools: Tools | None = None) -> str:
        """A conversation up to the header of the assistant's turn, in the model's own template.

        Forms for less able templates are tried in turn (tools as text, no system message).

        Raises:
            InputError: no form of it can be rendered.
        """
        if not self.remember:
            return self._rendered(messages, tools)
        key = json.dumps([list(messages), list(tools or ())])
        if key not in self._texts:
            self._texts[key] = self._rendered(messages, tools)
        return self._texts[key]

    def _rendered(self, messages: Sequence[Message], tools: Tools | None) -> str:
        if self._template is None:
            self._template = ChatTemplate(
                self.template_source,
                bos_text=self.tokenizer.bos_text,
                eos_text=self.tokenizer.eos_text,
            )
        failure = Failure("it has no messages")
        for form_messages, form_tools in forms(tuple(messages), tools):
            rendered = self._template.render([Job(form_messages, form_tools, generate=True)])[0]
            if isinstance(rendered, Failure):
                failure = rendered
            elif not tools or all(_tool_name(tool) in rendered for tool in tools):
                return rendered
        raise InputError(
            f"the chat template of {self.model.name} cannot render a prompt: {failure.message}"
        )

    def close(self) -> None:
        """Free the tokenizer and the template's process; a second call does nothing."""
        self.tokenizer.close()
        if self._template is not None:
            self._template.close()
            self._template = None


def _tool_name(tool: object) -> str:
    assert isinstance(tool, dict)
    return str(tool.get("function", tool)["name"])
