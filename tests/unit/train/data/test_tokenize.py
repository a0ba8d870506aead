"""Tokenizing records: equal to the stock processor, with only the answers supervised."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoConfig, AutoTokenizer

from lookonce.cache.model.pixels import ImageProcessor
from lookonce.datasets.records import Record, Turn
from lookonce.errors import ModelError, RecordsError
from lookonce.train.data.tokenize import ChatTokenizer, to_messages

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


def supervised_text(chat_tokenizer: ChatTokenizer, example) -> list[str]:
    """The supervised spans, decoded."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.supervised.astype(int), [0]])))
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [chat_tokenizer.tokenizer.decode(example.token_ids[start:end]) for start, end in pairs]


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


def test_answers_and_their_end_tokens_are_supervised_and_nothing_else(chat_tokenizer):
    for name, record in CONVERSATIONS.items():
        keys = [path.name for path in record.images]
        example = chat_tokenizer.example(record, keys, [(1, 4, 6)] * len(keys))
        assert supervised_text(chat_tokenizer, example) == [turn.answer + "<|im_end|>" for turn in record.turns], name


def test_a_question_is_the_conversation_up_to_its_answer(chat_tokenizer):
    for name, record in CONVERSATIONS.items():
        keys, grids = [path.name for path in record.images], [(1, 4, 6)] * len(record.images)
        whole = chat_tokenizer.example(record, keys, grids)
        for turn in range(len(record.turns)):
            question = chat_tokenizer.question(record, turn, keys, grids)
            assert not question.supervised.any()
            num_tokens = len(question.token_ids)
            assert question.token_ids.tolist() == whole.token_ids[:num_tokens].tolist(), name
            assert whole.supervised[num_tokens] and not whole.supervised[num_tokens - 1], name


def test_placeholders_expand_to_one_token_per_image_token(chat_tokenizer):
    example = chat_tokenizer.example(CONVERSATIONS["two images"], ["a", "b"], [(1, 4, 6), (1, 8, 2)])
    token_ids, supervised = example.expanded(chat_tokenizer.image_token_id)
    assert (token_ids == chat_tokenizer.image_token_id).sum() == 6 + 4
    assert not supervised[token_ids == chat_tokenizer.image_token_id].any()
    assert len(token_ids) == len(supervised) == example.num_tokens


@pytest.mark.parametrize("place", ["question", "answer"])
@pytest.mark.parametrize("token", ["<|image_pad|>", "<|im_end|>", "<|video_pad|>", "<|vision_start|>"])
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


def test_a_template_without_end_tokens_is_refused(own_chat_tokenizer):
    own_chat_tokenizer.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content if m.role == 'assistant' else 'Q: ' }}{% endfor %}"
    )
    with pytest.raises(RecordsError, match=r"puts no end token <\|im_end\|> after answers"):
        own_chat_tokenizer.example(Record((), YES_NO[:1]), [], [])


def test_a_template_that_changes_answers_is_refused(own_chat_tokenizer):
    own_chat_tokenizer.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}"
    )
    with pytest.raises(RecordsError, match="does not render answer 'yes'"):
        own_chat_tokenizer.example(Record((), YES_NO[:1]), [], [])


def test_a_tokenizer_of_another_model_is_refused(sample, tmp_path):
    config = AutoConfig.from_pretrained(sample / "model")
    config.image_token_id += 1
    with pytest.raises(ModelError, match=r"has <\|image_pad\|> as \d+, the model expects \d+"):
        ChatTokenizer(sample / "model", config)


def test_a_tokenizer_without_image_tokens_or_template_is_refused(sample, tmp_path):
    config = AutoConfig.from_pretrained(sample / "model")
    tokenizer = AutoTokenizer.from_pretrained(sample / "model")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no chat template"):
        ChatTokenizer(tmp_path, config)
    with pytest.raises(ModelError, match="no tokenizer"):
        ChatTokenizer(tmp_path / "nothing", config)
