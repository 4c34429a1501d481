"""Scored spans through templates of every temper, and from characters to tokens."""

import pytest

from bitwright.corpora.chat_template import ChatTemplate, Failure
from bitwright.corpora.conversation import PLAIN, Rendering, render_conversation
from bitwright.corpora.encoding import choose_template, open_encoder
from bitwright.corpora.generators.chatml import CHAT_TEMPLATE
from bitwright.corpora.records import SPAN_KINDS, Document
from tests.corpora.fake_tokenizer import FakeTokenizer

TOOLS = (
    {
        "type": "function",
        "function": {"name": "find", "parameters": {"properties": {"q": {"type": "string"}}}},
    },
)
CALL = {"type": "function", "function": {"name": "find", "arguments": {"q": "tea"}}}
TALK = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2? Not 5."},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 4 + 1?"},
    {"role": "assistant", "content": "5"},
)
CALLED = (
    {"role": "user", "content": "find tea"},
    {"role": "assistant", "content": "Sure.", "tool_calls": [CALL]},
)
# Drops the text before </think> from all but the last turn, as reasoning models' templates do.
UNSTABLE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}</{{ m.role }}>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TEXT_ARGUMENTS = (
    "{% for t in tools %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}@{{ c.function.name + c.function.arguments }}{% endfor %}"
    "[end]{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def spans(source: str, messages, tools=None) -> list[tuple[str, str]]:
    with ChatTemplate(source) as template:
        rendering = render_conversation(template, messages, tools)
    assert isinstance(rendering, Rendering), rendering
    return [(SPAN_KINDS[s.kind], rendering.text[s.start : s.end]) for s in rendering.spans]


def test_spans_are_what_the_assistant_says_with_its_end_token() -> None:
    assert spans(CHAT_TEMPLATE, TALK) == [
        ("assistant", "4<|im_end|>"),
        ("assistant", "5<|im_end|>"),
    ]


def test_content_and_calls_of_one_turn_are_told_apart() -> None:
    call = '<tool_call>\n{"name": "find", "arguments": {"q": "tea"}}\n</tool_call><|im_end|>'
    assert spans(CHAT_TEMPLATE, CALLED, TOOLS) == [("assistant", "Sure."), ("tool_call", call)]


def test_template_without_stable_prefixes() -> None:
    messages = (
        {"role": "user", "content": "say yes"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "<think>hm</think>yes"},
    )
    found = spans(UNSTABLE, messages)
    assert [text for _, text in found] == ["yes", "<think>hm</think>yes"]


def test_answer_is_not_taken_from_the_question() -> None:
    messages = (
        {"role": "user", "content": "yes or no?"},
        {"role": "assistant", "content": "yes"},
    )
    always_longer = (
        "{% for m in messages %}{{ messages|length }}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    )
    with ChatTemplate(always_longer) as template:
        rendering = render_conversation(template, messages, None)
    assert isinstance(rendering, Rendering)
    assert rendering.spans[0].start > rendering.text.index("or no?")


def test_system_message_is_merged_where_the_template_refuses_it() -> None:
    with ChatTemplate(NO_SYSTEM) as template:
        rendering = render_conversation(template, TALK, None)
    assert isinstance(rendering, Rendering)
    assert rendering.text.startswith("[user]Be brief.\n\nWhat is 2 + 2?")


def test_arguments_as_text_where_the_template_wants_text() -> None:
    assert spans(TEXT_ARGUMENTS, CALLED, TOOLS)[1] == ("tool_call", '@find{"q": "tea"}[end]')


def test_tools_are_spelled_out_where_the_template_knows_none() -> None:
    with ChatTemplate(PLAIN) as template:
        rendering = render_conversation(template, CALLED, TOOLS)
    assert isinstance(rendering, Rendering)
    assert '"name": "find"' in rendering.text.split("user:")[0]
    kinds = [SPAN_KINDS[span.kind] for span in rendering.spans]
    assert kinds == ["assistant", "tool_call"]


def test_a_template_that_takes_nothing_is_a_failure() -> None:
    with ChatTemplate("{{ raise_exception('never') }}") as template:
        assert render_conversation(template, TALK, None) == Failure("never")


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("emits", [0, 1, 2])
def test_bos_once_whoever_adds_it(adds_bos: bool, emits: int) -> None:
    template = "{{ bos_token }}" * emits + CHAT_TEMPLATE
    tokenizer = FakeTokenizer(template, adds_bos=adds_bos)
    document = Document("d", "chat", "s", messages=TALK)
    with open_encoder(tokenizer, n_ctx=256, context=4, seed=0) as encoder:
        (piece,) = encoder.pieces(document, parse_special=True)
    count = int((piece.tokens == tokenizer.bos_id).sum())
    assert count == (1 if adds_bos or emits else 0)
    assert (piece.kinds == 0).sum() == count
    ids = tokenizer.encode("<|im_start|><|im_end|>")
    assert len(ids) == 2
    assert set(ids) <= set(piece.tokens.tolist())


def test_kinds_of_tokens_follow_the_characters() -> None:
    tokenizer = FakeTokenizer(CHAT_TEMPLATE)
    messages = (
        {"role": "user", "content": "Größe? 漢"},
        {"role": "assistant", "content": "Ä漢 gut"},
    )
    with open_encoder(tokenizer, n_ctx=256, context=4, seed=0) as encoder:
        (piece,) = encoder.pieces(Document("d", "c", "s", messages=messages), parse_special=True)
    assert tokenizer.decode(piece.tokens[piece.kinds == 3]) == "Ä漢 gut<|im_end|>"
    assert len(piece.kinds) == len(piece.tokens)


def test_text_windows_score_all_but_their_first_tokens() -> None:
    tokenizer = FakeTokenizer()
    text = " word" * 100
    with open_encoder(tokenizer, n_ctx=41, context=8, seed=0) as encoder:
        pieces = encoder.pieces(Document("d", "c", "s", text=text), parse_special=True)
    assert sorted(len(piece.tokens) for piece in pieces) == [21, 41, 41]
    for piece in pieces:
        assert piece.tokens[0] == tokenizer.bos_id
        assert piece.kinds[0] == 0
        assert (piece.kinds[1:9] == 1).all()
        assert (piece.kinds[9:] == 2).all()


def test_long_conversation_is_cut_or_left_out() -> None:
    long = ({"role": "user", "content": "so " * 100}, {"role": "assistant", "content": "no " * 100})
    with open_encoder(FakeTokenizer(CHAT_TEMPLATE), n_ctx=150, context=4, seed=0) as encoder:
        (piece,) = encoder.pieces(Document("d", "c", "s", messages=long), parse_special=True)
        assert len(piece.tokens) == 150
    with open_encoder(FakeTokenizer(CHAT_TEMPLATE), n_ctx=64, context=4, seed=0) as encoder:
        assert encoder.pieces(Document("d", "c", "s", messages=long), parse_special=True) == (
            "the answer starts beyond n_ctx"
        )


def test_fallback_templates() -> None:
    assert choose_template(FakeTokenizer(CHAT_TEMPLATE))[1] == "model"
    assert choose_template(FakeTokenizer())[1] == "chatml"
    assert choose_template(FakeTokenizer(special=("<bos>",)))[1] == "plain"


def test_tokens_that_do_not_spell_the_text_are_noticed() -> None:
    class Lowering(FakeTokenizer):
        def encode(self, text, *, add_special=False, parse_special=True):
            return super().encode(text.lower(), parse_special=parse_special)

    with open_encoder(Lowering(CHAT_TEMPLATE), n_ctx=99, context=4, seed=0) as encoder:
        assert encoder.pieces(Document("d", "c", "s", messages=TALK), parse_special=True) == (
            "tokens do not spell the text"
        )
