"""Tokenizing records: equal to the stock processor, with only the answers supervised."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.chat_tokenizers import ROLE
from transformers import AutoConfig, AutoTokenizer

from lookonce.cache.model.pixels import ImageProcessor
from lookonce.datasets.records import Context, Record, Turn
from lookonce.errors import ModelError, RecordsError
from lookonce.train.data.tokenize import ChatTokenizer, Example, to_messages

YES_NO = (Turn("Is there text?", "yes"), Turn("How many polyps are in the image?", "2"))
CONVERSATIONS = {
    "one turn": Record((Path("a"),), YES_NO[:1]),
    "two turns": Record((Path("a"),), YES_NO),
    "system text": Record((Path("a"),), YES_NO, system="Answer in one word."),
    "two images": Record((Path("a"), Path("b")), YES_NO),
    "no image": Record((), YES_NO),
    "words unknown to the tokenizer": Record((Path("a"),), (Turn("Où est l'ulcère? 你好", "ilöum; 38 °C\nétage 2"),)),
    "answer that repeats the question": Record((Path("a"),), (Turn("yes", "yes"), Turn("yes", "yes"))),
    "answer with inner line ends": Record((Path("a"),), (Turn("List them.", "one\n\ntwo\n"),)),
}
SIZES = {"a": (97, 181), "b": (240, 130)}
ASSISTANT = "<|im_start|>assistant\n"
NO_THOUGHTS = "<think>\n\n</think>\n\n"
THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    f"{{% if m.role == 'assistant' and loop.last %}}{NO_THOUGHTS}{{% endif %}}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    f"{{% if add_generation_prompt %}}{ASSISTANT}"
    f"{{% if enable_thinking is defined and enable_thinking is false %}}{NO_THOUGHTS}{{% else %}}<think>\n{{% endif %}}"
    "{% endif %}"
)
"""As Qwen3.5's, a template with thoughts in the last answer alone, whose prompts let the model think by default."""


def supervised_text(chat_tokenizer: ChatTokenizer, example) -> list[str]:
    """The supervised spans, decoded."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.supervised.astype(int), [0]])))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [chat_tokenizer.tokenizer.decode(example.token_ids[start:end]) for start, end in pairs]


@pytest.mark.guarantee("Tokens equal those of the stock processor, with the sample's tokenizer and the published one.")
def test_tokens_equal_those_of_the_stock_processor(model_folder, chat_tokenizer, stock_processor):
    stock = stock_processor(model_folder)
    images = {name: Image.new("RGB", size, "red") for name, size in SIZES.items()}
    for name, record in CONVERSATIONS.items():
        shown = [images[path.name] for path in record.images]
        grids = [ImageProcessor(model_folder)(image)[1] for image in shown]
        example = chat_tokenizer.example(record, [path.name for path in record.images], grids)
        text = stock.apply_chat_template(to_messages(record), tokenize=False)
        expected = stock(text=[text], images=shown or None, return_tensors="np")
        assert example.expanded(chat_tokenizer.image_token_id)[0].tolist() == expected["input_ids"][0].tolist(), name
        assert example.num_tokens == expected["input_ids"].shape[1], name


def test_answers_and_their_end_tokens_are_supervised_and_a_question_is_what_comes_before_its_answer(chat_tokenizer):
    for name, record in CONVERSATIONS.items():
        keys, grids = [path.name for path in record.images], [(1, 4, 6)] * len(record.images)
        whole = chat_tokenizer.example(record, keys, grids)
        assert supervised_text(chat_tokenizer, whole) == [turn.answer + "<|im_end|>" for turn in record.turns], name
        for turn in range(len(record.turns)):
            question = chat_tokenizer.question(record, turn, keys, grids)
            assert not question.supervised.any()
            num_tokens = len(question.token_ids)
            assert question.token_ids.tolist() == whole.token_ids[:num_tokens].tolist(), name
            assert whole.supervised[num_tokens] and not whole.supervised[num_tokens - 1], name


@pytest.mark.parametrize("place", ["question", "answer"])
@pytest.mark.parametrize("token", ["<|image_pad|>", "<|im_end|>"])
def test_a_special_token_in_the_text_is_refused(own_chat_tokenizer, place, token):
    texts = {"question": "What?", "answer": "That."} | {place: f"a {token} b"}
    record = Record((Path("a"),), (Turn(**texts),), origin="train.jsonl:7")
    with pytest.raises(RecordsError, match=f"train.jsonl:7: .* contains {re.escape(token)}"):
        own_chat_tokenizer.example(record, ["a"], [(1, 4, 6)])


@pytest.mark.parametrize("model_folder", ["published tokenizer"], indirect=True)
def test_an_answer_that_would_change_the_prompts_tokens_is_refused(chat_tokenizer):
    record = Record((Path("a"),), (Turn("What?", "\n\nyes"),), origin="train.jsonl:7")
    with pytest.raises(RecordsError, match="train.jsonl:7: no token begins where answer"):
        chat_tokenizer.example(record, ["a"], [(1, 4, 6)])


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{{ m.content if m.role == 'assistant' else 'Q: ' }}", r"puts no end token <\|im_end\|> after answers"),
        ("{{ m.role }}: {{ m.content | upper }}\n", "does not render answer 'yes'"),
    ],
    ids=["no end token", "changed answers"],
)
def test_a_template_that_no_training_can_use_is_refused(own_chat_tokenizer, written, message):
    own_chat_tokenizer.tokenizer.chat_template = f"{{% for m in messages %}}{written}{{% endfor %}}"
    with pytest.raises(RecordsError, match=message):
        own_chat_tokenizer.example(Record((), YES_NO[:1]), [], [])


@pytest.mark.parametrize("rendered", ["{{ m.content | trim }}", ""], ids=["trimmed", "left out"])
def test_a_template_that_leaves_the_system_text_out_is_refused(own_chat_tokenizer, rendered):
    own_chat_tokenizer.tokenizer.chat_template = (
        f"{{% for m in messages %}}{{% if m.role == 'system' %}}{rendered}"
        "{% elif m.role == 'user' %}{{ m.content[-1].text }}:{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    for make in (own_chat_tokenizer.tokens, lambda record: own_chat_tokenizer.prompt(record, 0)):
        make(Record((), YES_NO[:1]))
        with nullcontext() if rendered else pytest.raises(RecordsError, match="a:1: .* leaves the system text out"):
            make(Record((), YES_NO[:1], " Be brief.\n", origin="a:1"))


def test_a_tokenizer_of_another_model_without_a_template_or_with_one_that_does_not_know_thinking_is_refused(
    sample, tmp_path
):
    config = AutoConfig.from_pretrained(sample / "model")
    tokenizer = AutoTokenizer.from_pretrained(sample / "model")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no chat template"):
        ChatTokenizer(tmp_path, config)
    with pytest.raises(ModelError, match="no tokenizer"):
        ChatTokenizer(tmp_path / "nothing", config)
    with pytest.raises(ModelError, match="data.enable_thinking is false, which the chat template in .* does not know"):
        ChatTokenizer(sample / "model", config, enable_thinking=False)
    config.image_token_id += 1
    with pytest.raises(ModelError, match=r"has <\|image_pad\|> as \d+, the model expects \d+"):
        ChatTokenizer(sample / "model", config)


@pytest.fixture
def thinking(sample, tmp_path):
    """A tokenizer of a template that knows thinking, by the value of `enable_thinking`."""
    tokenizer = AutoTokenizer.from_pretrained(sample / "model")
    tokenizer.chat_template = THINKING_TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(sample / "model")
    return lambda value: ChatTokenizer(tmp_path, config, enable_thinking=value)


def test_without_thinking_the_empty_block_belongs_to_the_prompt_and_the_answer_is_the_target(thinking):
    chat, record = thinking(False), Record((), YES_NO[:1])
    example, prompt = chat.example(record, [], []), chat.question(record, 0, [], [])
    assert supervised_text(chat, example) == ["yes<|im_end|>"]
    assert chat.tokenizer.decode(prompt.token_ids).endswith(f"<|im_end|>\n{ASSISTANT}{NO_THOUGHTS}")
    assert example.token_ids[: len(prompt.token_ids)].tolist() == prompt.token_ids.tolist()


@pytest.mark.parametrize("value", [None, True])
def test_with_thinking_prompts_end_in_the_block_and_training_names_the_key(thinking, value):
    chat, record = thinking(value), Record((), YES_NO[:1])
    assert chat.tokenizer.decode(chat.prompt(record, 0)[0]).endswith(f"{ASSISTANT}<think>\n")
    assert chat.template_options == ({} if value is None else {"enable_thinking": True})
    with pytest.raises(RecordsError, match="set `data.enable_thinking: false`"):
        chat.example(record, [], [])


def test_thoughts_that_earlier_answers_lack_are_no_form_for_several_turns(thinking):
    message = "renders answer 'yes' in another way when a question follows, .*: docs/models.md#several-turns"
    with pytest.raises(RecordsError, match=message):
        thinking(False).example(Record((), YES_NO), [], [])


def test_answers_of_a_context_may_lack_them_as_they_are_not_trained(thinking):
    """The row is what the template makes of the whole conversation, and begins with the prompt."""
    chat, record = thinking(False), Record((), YES_NO[1:], context=Context(YES_NO[:1]))
    (ids, flags), prompt = chat.tokens(record), chat.question(record, 0, [], [])
    assert chat.tokenizer.decode(ids) == chat.render(to_messages(Record((), YES_NO)))
    assert supervised_text(chat, Example(ids, flags, (), (), "")) == ["2<|im_end|>"]
    assert ids[: len(prompt.token_ids)].tolist() == prompt.token_ids.tolist()


def test_several_turns_are_trained_with_a_template_that_keeps_the_block(thinking):
    """The answer to each question begins where the prompt of its turn ends."""
    chat, record = thinking(False), Record((), YES_NO)
    chat.tokenizer.chat_template = THINKING_TEMPLATE.replace(" and loop.last", "")
    example = chat.example(record, [], [])
    assert supervised_text(chat, example) == ["yes<|im_end|>", "2<|im_end|>"]
    starts = np.flatnonzero(np.diff(example.supervised, prepend=False) & example.supervised)
    for turn, start in enumerate(starts):
        assert example.token_ids[:start].tolist() == chat.question(record, turn, [], []).token_ids.tolist()


@pytest.mark.guarantee("A prompt with a context has the tokens of the same record written by hand.")
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_context_has_the_tokens_of_a_record_written_by_hand_and_only_own_answers_are_supervised(
    chat_tokenizer, system
):
    image, known, own = (Path("a"),), (Turn("Is there text?", "no"), Turn("How many?", "2")), (Turn("Where?", "left"),)
    text = "Known so far: Is there text? no; How many? 2\nWhere?"
    summary = Record(image, own, system, context=Context(known, text))
    turns = Record(image, own, system, context=Context(known))
    by_hand = [Record(image, (Turn(text, "left"),), system), Record(image, (*known, *own), system)]
    for record, written, turn in ((summary, by_hand[0], 0), (turns, by_hand[1], 2)):
        ids, supervised = chat_tokenizer.tokens(record)
        assert ids.tolist() == chat_tokenizer.tokens(written)[0].tolist()
        assert chat_tokenizer.tokenizer.decode(ids[supervised]) == "left<|im_end|>"
        prompt, expected = chat_tokenizer.prompt(record, 0), chat_tokenizer.prompt(written, turn)
        assert prompt[0].tolist() == expected[0].tolist() and not prompt[1].any()


@pytest.mark.parametrize("rendered", [None, 20])
def test_a_conversation_of_many_turns_takes_linear_time_and_has_the_targets_of_all_prompts(
    chat_tokenizer, monkeypatch, rendered
):
    """The prompts of the turns between the first and the last are not rendered, unless a question hides its place."""
    render, num_rendered = chat_tokenizer.render, []
    monkeypatch.setattr(
        chat_tokenizer, "render", lambda *args, **named: num_rendered.append(1) or render(*args, **named)
    )
    turns = [Turn(f"Is it {number}?", f"no {number}") for number in range(200)]
    if rendered:
        turns[rendered] = Turn("user", "yes")
    example = chat_tokenizer.example(Record((), tuple(turns)), [], [])
    assert len(num_rendered) <= 20
    assert supervised_text(chat_tokenizer, example) == [f"{turn.answer}<|im_end|>" for turn in turns]


def test_a_middle_turn_that_is_written_otherwise_is_rendered_and_refused(own_chat_tokenizer):
    template = own_chat_tokenizer.tokenizer.chat_template
    own_chat_tokenizer.tokenizer.chat_template = template.replace(
        ROLE, f"{ROLE} + ('Hm. ' if loop.index == 42 else '')"
    )
    record = Record((), tuple(Turn(f"Is it {number}?", f"no {number}") for number in range(40)))
    with pytest.raises(RecordsError, match="does not render answer 'no 20' unchanged after its prompt"):
        own_chat_tokenizer.example(record, [], [])
