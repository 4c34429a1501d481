"""Chat templates are untrusted code: what they may do, and how they are stopped."""

import time
from pathlib import Path

import pytest

from bitwright.corpora.chat_template import ChatTemplate, Failure, Job
from bitwright.errors import InputError

HELLO = [Job([{"role": "user", "content": "hi"}])]


def refusal(source: str, timeout_s: float = 2.0) -> str:
    with pytest.raises(InputError) as caught, ChatTemplate(source, timeout_s=timeout_s) as template:
        template.render(HELLO)
    return str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('touch pwned') }}",
        "{{ messages.append(1) }}",
    ],
)
def test_unsafe_access_is_refused(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "chat template refused: unsafe access" in refusal(source)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**12) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
        "{{ 'a' * 10**12 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_limits_stop_loops_and_huge_texts(source: str) -> None:
    assert "chat template refused: beyond its limits" in refusal(source)


def test_endless_loop_is_stopped_by_the_clock() -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    start = time.monotonic()
    assert "took longer than 0.5 s" in refusal(loop, timeout_s=0.5)
    assert time.monotonic() - start < 5


def test_syntax_errors_name_the_line() -> None:
    assert "line 2" in refusal("fine\n{% if %}")
    assert "syntax error" in refusal("{% break %}")
    assert "more than 1 MiB" in refusal("x" * (5 << 20))


def test_a_stopped_template_stays_refused() -> None:
    template = ChatTemplate("x")
    template.close()
    template.close()
    with pytest.raises(InputError, match="has ended"):
        template.render(HELLO)


def test_the_templates_own_complaint_is_a_failure_not_an_error() -> None:
    source = "{{ raise_exception('roles must alternate') }}"
    with ChatTemplate(source) as template:
        assert template.render(HELLO) == [Failure("roles must alternate")]


def test_the_dialect_of_published_templates() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% generation %}[{{ m.content | trim }}]{% endgeneration %}\n"
        "    {% if loop.first %}{% continue %}{% endif %}\n"
        "{% endfor %}{{ {'b': 'é<', 'a': [1]} | tojson }} {{ strftime_now('%d %b %Y') }}"
        "{{ eos_token }}{{ '+' if add_generation_prompt }}"
    )
    with ChatTemplate(source, bos_text="<s>", eos_text="</s>") as template:
        job = Job([{"role": "user", "content": " hi "}], generate=True)
        (text,) = template.render([job])
    assert text == '<s>[hi]{"b": "é<", "a": [1]} 01 Jan 2025</s>+'
