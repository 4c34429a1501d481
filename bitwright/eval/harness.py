"""Our engine as a model of lm-evaluation-harness: `lm_eval --model bitwright --model_args path=…`.

Arguments: path (required), n_ctx, threads, slots, gpu_layers, max_gen_toks, seed, too_long
('cut' as lm-eval's own models do, or 'refuse'). What was cut is counted and said in the log.
"""

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

# The harness fills an empty registry only, so its own models come first.
import lm_eval.models  # type: ignore[import-untyped]  # noqa: F401
import numpy as np
from lm_eval.api.instance import Instance  # type: ignore[import-untyped]
from lm_eval.api.model import TemplateLM  # type: ignore[import-untyped]
from lm_eval.api.registry import register_model  # type: ignore[import-untyped]
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text  # type: ignore[import-untyped]

from bitwright.engine.decoder import DecoderOptions
from bitwright.engine.model_file import open_model
from bitwright.errors import ConfigError, InputError
from bitwright.eval.generation import Prompt, Sampling
from bitwright.eval.scorer import Scorer

_log = logging.getLogger("bitwright.lm_eval")


@register_model("bitwright")
class BitwrightLM(TemplateLM):  # type: ignore[misc]
    """A GGUF in this process; tokenizer and chat template come from the file."""

    def __init__(
        self,
        path: str = "",
        *,
        n_ctx: int = 0,
        threads: int = 0,
        slots: int = 8,
        gpu_layers: int = 0,
        max_gen_toks: int = 256,
        seed: int = 0,
        too_long: str = "cut",
        scorer: Scorer | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__()
        unknown = set(ignored) - {"batch_size", "max_batch_size", "device"}
        if unknown:
            raise ConfigError(f"--model_args: bitwright knows no {', '.join(sorted(unknown))}")
        if too_long not in ("cut", "refuse"):
            raise ConfigError(f"too_long={too_long}: give 'cut' or 'refuse'")
        if scorer is None:
            if not path:
                raise ConfigError("--model_args: give path=MODEL.gguf")
            options = DecoderOptions(int(threads), int(n_ctx), int(slots), int(gpu_layers))
            scorer = Scorer(open_model(path, allow_requantize=True), options)
        self.scorer = scorer
        self.max_length = scorer.decoder.n_ctx
        self.max_gen_toks = int(max_gen_toks)
        self.batch_size = 1
        self.seed = int(seed)
        self.too_long = too_long
        self.n_cut = 0
        self.truncated: set[str] = set()  # prompts whose answers had to stop early

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        tokenizer = self.scorer.tokenizer
        return tokenizer.eos_id if tokenizer.eos_id is not None else tokenizer.eot_id or 0

    @property
    def prefix_token_id(self) -> int:
        """BOS, or the end token where the model has none."""
        bos = self.scorer.tokenizer.bos_id
        return bos if bos is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer and template in the harness's request cache."""
        return f"bitwright-{self.scorer.tokenizer.fingerprint()[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The Jinja source that `apply_chat_template` uses."""
        return self.scorer.template_source if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text; BOS in it is not doubled later.

        Without the generation prompt the last message is an answer to be continued.
        """
        if add_generation_prompt:
            return self.scorer.prompt_text(chat_history)
        *before, last = chat_history
        return self.scorer.prompt_text(before) + last["content"]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Ids with one BOS where the model wants it; False for none."""
        if add_special_tokens is False:
            return [int(i) for i in self.scorer.tokenizer.encode(string, parse_special=True)]
        return [int(i) for i in self.scorer.encode(string)]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        head, tail = self.scorer.encode_pair(context, continuation)
        return head.tolist(), tail.tolist()

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        **_: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [self._fitting(context, continuation) for _, context, continuation in requests]
        scores = self.scorer.score(pairs)
        out = [(score.logprob, score.greedy) for score in scores]
        for request, result in zip(requests, out, strict=True):
            if (key := request[0]) is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        self._tell()
        return out

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """log p of whole texts, in windows of the context length."""
        out = []
        for request in requests:
            ids = self.scorer.tokenizer.encode(request.args[0], parse_special=True)
            if len(ids) and ids[0] == self.prefix_token_id:
                ids = ids[1:]
            value, _ = self.scorer.rolling(ids, self.prefix_token_id)
            out.append(value)
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return out

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers up to a stop string, the end of the turn or the token limit."""
        prompts, stops = [], []
        repeats: dict[str, int] = {}
        for request in requests:
            context, given = request.args
            kwargs: dict[str, Any] = dict(normalize_gen_kwargs(given, self.max_gen_toks))
            until = [str(stop) for stop in kwargs["until"] or () if stop]
            number = repeats.get(context, 0)
            repeats[context] = number + 1
            room = int(kwargs["max_gen_toks"])
            prompts.append(
                Prompt(
                    self._prompt_ids(context, room),
                    room,
                    tuple(until),
                    _sampling(kwargs, self.seed, context, number),
                    special=False,
                )
            )
            stops.append(until)
        out = []
        found = self.scorer.generate(prompts)
        for request, answer, until in zip(requests, found, stops, strict=True):
            text = postprocess_generated_text(answer.text, until, None)
            out.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        cut = sum(answer.truncated for answer in found)
        self.truncated.update(
            request.args[0]
            for request, answer in zip(requests, found, strict=True)
            if answer.truncated
        )
        if cut:
            _log.warning("%d of %d answers were cut by the token limit", cut, len(found))
        self._tell()
        return out

    def _prompt_ids(self, context: str, room: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The whole prompt where it fits; the answer then has what is left of the context.

        Otherwise its end, with room for the answer, but never less than half of the context.
        """
        ids = self.scorer.encode(context)
        if len(ids) < self.max_length:
            return ids
        self._count(len(ids) + room)
        most = self.max_length - min(room, self.max_length // 2)
        # BOS stays in front: a model that wants it answers nonsense without it.
        bos = self.scorer.tokenizer.bos_id
        head = ids[:1] if len(ids) and ids[0] == bos and most > 1 else ids[:0]
        return np.concatenate([head, ids[len(ids) - (most - len(head)) :]])

    def _fitting(self, context: list[int], continuation: list[int]) -> tuple[Any, Any]:
        """As ids, the context cut from the left where both do not fit."""
        head, tail = np.array(context, np.int32), np.array(continuation, np.int32)
        over = len(head) + len(tail) - (self.max_length + 1)
        if over <= 0:
            return head, tail
        self._count(len(head) + len(tail))
        if over >= len(head):
            raise InputError(
                f"a continuation of {len(tail)} tokens does not fit a context of {self.max_length}"
            )
        bos = self.scorer.tokenizer.bos_id
        keep = 1 if len(head) - over > 1 and head[0] == bos else 0
        return np.concatenate([head[:keep], head[over + keep :]]), tail

    def _count(self, length: int) -> None:
        if self.too_long == "refuse":
            raise InputError(
                f"a request has {length} tokens and the context takes {self.max_length}; give a "
                "larger n_ctx, or too_long=cut"
            )
        self.n_cut += 1

    def _tell(self) -> None:
        if self.n_cut:
            _log.warning(
                "%d requests did not fit %d tokens and were cut from the left",
                self.n_cut,
                self.max_length,
            )


def _sampling(kwargs: dict[str, Any], seed: int, context: str, number: int) -> Sampling | None:
    """None for greedy; else a seed for this prompt and repeat, whatever runs beside it."""
    if not kwargs.get("do_sample") or not kwargs.get("temperature"):
        return None
    own = hashlib.sha256(f"{seed}|{number}|{context}".encode()).digest()
    return Sampling(
        float(kwargs["temperature"]),
        float(kwargs.get("top_p", 1.0)),
        int(kwargs.get("top_k", 0) or 0),
        int.from_bytes(own[:8], "big"),
    )
