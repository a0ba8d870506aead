"""What a template writes around texts that it cannot see, and which templates look at them."""

from __future__ import annotations

import pytest

from lookonce.train.data.tokenize import Text, write_around

WRITTEN = {
    "{{ q }}": (0,),
    "Q: {{ q }}\nA: {{ a }}.": ("Q: ", 0, "\nA: ", 1, "."),
    "{{ 'Q: ' + q + '\n' }}{{ a }}": ("Q: ", 0, "\n", 1),
    "{{ messages[0].content }}{{ messages[1]['content'] }}": (0, 1),
    "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}": ("1", 0, "2", 1),
    "{% for m in messages[::-1] %}{{ m.content }}{% if loop.last %}!{% endif %}{% endfor %}": (1, 0, "!"),
    "{% if q is string and q is not mapping and q is defined %}{{ q }}{% endif %}": (0,),
    "{% if messages | length == 2 and nothing is not defined %}{{ nothing }}{{ a }}{% endif %}": (1,),
    "{% macro say(x) %}<{{ x }}>{% endmacro %}{{ say(q) + say('b') }}": ("<", 0, "><b>"),
    "{% set both %}{{ q }}, {{ a }}{% endset %}{{ both }}": (0, ", ", 1),
    "{% set last = namespace(text=q) %}{% for m in messages %}{% set last.text = m.content %}{% endfor %}"
    "{{ last.text }}": (1,),
    "{% if q is none %}{{ q | trim }}{% endif %}none": ("none",),
    "": (),
}
FILTERS = ("trim", "upper", "length", "int", "list", "tojson", "string", "e", "replace('a', 'b')")
TESTS = ("iterable", "sequence", "number", "lower", "sameas q", "eq 'a'", "in 'a'")
CONDITIONS = ("q", "not q", "q == 'a'", "'a' == q", "q != a", "q < a", "'a' in q", "q in 'a'", "q in [a]", "q and a")
VALUES = (
    *("q.strip()", "q[0]", "q[1:]", "q.x", "messages[q]", "'abc'[q]", "{'b': 1}[q]", "messages", "messages | tojson"),
    *("q ~ a", "'%s' % q", "'{}'.format(q)", "q * 2", "q + 1", "[q, a] | join", "[q, a] | sort", "namespace(q)"),
    *("'a'.join([q])", "'a'.replace('a', q)", "dict(a=q)", "range(q)", "strftime_now('%d')", "raise_exception('no')"),
)
SEEN = [
    *(f"{{{{ q | {name} }}}}" for name in FILTERS),
    *(f"{{{{ q is {name} }}}}" for name in TESTS),
    *(f"{{% if {condition} %}}{{{{ q }}}}{{% endif %}}" for condition in CONDITIONS),
    *(f"{{{{ q }}}}{{{{ {value} }}}}" for value in VALUES),
    "{% for x in q %}{% endfor %}",
    "{% set x, y = q %}",
    "{% macro say(x) %}{{ x }}{% endmacro %}{{ say(q) | trim }}",
    "{% set both %}{{ q }}, {{ a }}{% endset %}{{ both | upper }}",
    "{% filter trim %}{{ q }}{% endfilter %}",
    "{{ q }}{% generation %}{% endgeneration %}",
    "{{ q",
]


def written(template):
    q, a = Text(), Text()
    return write_around(template, [q, a], q=q, a=a, messages=[{"content": q}, {"content": a}])


@pytest.mark.parametrize(("template", "pieces"), WRITTEN.items())
def test_a_template_that_writes_texts_unseen(template, pieces):
    assert written(template) == pieces


def test_a_template_that_does_more_with_texts_is_refused():
    assert {template: written(template) for template in SEEN} == dict.fromkeys(SEEN)


def test_the_templates_of_qwen_and_of_the_sample_write_texts_unseen(chat_tokenizer):
    q, a = Text(), Text()
    messages = [{"role": "user", "content": [{"type": "text", "text": q}]}, {"role": "assistant", "content": a}]
    pieces = write_around(chat_tokenizer.tokenizer.get_chat_template(), [q, a], messages=messages)
    assert pieces == ("<|im_start|>user\n", 0, "<|im_end|>\n<|im_start|>assistant\n", 1, "<|im_end|>\n")
