"""Layouts: the tokens around the texts of a conversation, and the templates that have none."""

from __future__ import annotations

import numpy as np
import pytest

from lookonce.train.data.conversations import Shape, cutting_tokens, layout_of

TEXT = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}"
)
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def template(text=TEXT, end="<|im_end|>", prompt=PROMPT, before=""):
    """A template for conversations without images."""
    return f"{before}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{text}{end}\n{{% endfor %}}{prompt}"


def laid_out(chat_tokenizer, shape):
    return layout_of(shape, chat_tokenizer, cutting_tokens(chat_tokenizer.tokenizer))


def test_a_layout_has_texts_answers_with_their_end_tokens_and_what_is_around_them(chat_tokenizer):
    layout = laid_out(chat_tokenizer, Shape(2, 1, True))
    decode = chat_tokenizer.tokenizer.decode
    parts = [part if isinstance(part, int) else decode(np.frombuffer(part, np.int32)) for part in layout.parts]
    between, end = "\n<|im_start|>assistant\n", "<|im_end|>"
    assert list(zip(parts, layout.supervised, strict=True)) == [
        ("<|im_start|>system\n", False),
        (4, False),
        (f"{end}\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>", False),
        (0, False),
        (f"{end}{between}", False),
        (1, True),
        (end, True),
        ("\n<|im_start|>user\n", False),
        (2, False),
        (f"{end}{between}", False),
        (3, True),
        (end, True),
        ("\n", False),
    ]


def test_a_template_of_the_usual_form_has_a_layout(own_chat_tokenizer):
    own_chat_tokenizer.tokenizer.chat_template = template()
    assert laid_out(own_chat_tokenizer, Shape(2, 0, True))


@pytest.mark.parametrize(
    "changed",
    [
        template(text="{{ m.content }}"),
        template(text="{{ m.content if m.content is string else m.content[0].text | trim }}"),
        template(text=TEXT + "{{ m.nothing | default('.') }}"),
        template(text=f"{TEXT}{TEXT}"),
        template(text=f": {TEXT}"),
        template(end="<|endoftext|>"),
        template(end=""),
        template(prompt=""),
        template(prompt="{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"),
        template(before="{{ raise_exception('no') }}"),
        template(before="<|image_pad|>"),
        "{{ messages",
    ],
)
def test_another_template_has_none(own_chat_tokenizer, changed):
    own_chat_tokenizer.tokenizer.chat_template = changed
    assert laid_out(own_chat_tokenizer, Shape(1, 0, False)) is None


def test_there_is_none_where_transformers_renders_something_else(own_chat_tokenizer, monkeypatch):
    assert laid_out(own_chat_tokenizer, Shape(1, 1, False))
    monkeypatch.setattr(own_chat_tokenizer, "render", lambda messages, generation_prompt=False: "else")
    assert laid_out(own_chat_tokenizer, Shape(1, 1, False)) is None


def test_there_is_none_without_cutting_tokens(own_chat_tokenizer):
    assert layout_of(Shape(1, 1, False), own_chat_tokenizer, ()) is None


def test_a_layout_has_what_the_template_writes_about_thinking(own_chat_tokenizer):
    block = "{% if m.role == 'assistant' and enable_thinking is false %}<think></think>\n{% endif %}"
    prompt = PROMPT.replace("{% endif %}", "{% if enable_thinking is false %}<think></think>\n{% endif %}{% endif %}")
    own_chat_tokenizer.tokenizer.chat_template = template(text=block + TEXT, prompt=prompt)
    decode = own_chat_tokenizer.tokenizer.decode

    def before_answer() -> str:
        return decode(np.frombuffer(laid_out(own_chat_tokenizer, Shape(1, 0, False)).parts[2], np.int32))

    assert before_answer().endswith("assistant\n")
    own_chat_tokenizer.template_options = {"enable_thinking": False}
    assert before_answer().endswith("assistant\n<think></think>\n")
