"""A template that thinks unless `data.enable_thinking` is false, as Qwen3.5's: training, evaluation and all answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from peft import PeftModel
from support.chat_tokenizers import let_think
from support.sample import stock_answer

from lookonce.cli import main
from lookonce.datasets.context import NOT_ANSWERED
from lookonce.datasets.records import Record, Turn
from lookonce.errors import LookonceError, RunFolderError
from lookonce.eval.answerer import Answerer
from lookonce.families.qwen3_5 import QWEN3_5
from lookonce.run.config import RunFile
from lookonce.run.open import TO_BUILD, Needs, open_run
from lookonce.workflow import train

QUIET = {"notify": lambda note: None}
pytestmark = pytest.mark.parametrize("site", [QWEN3_5], ids=lambda family: family.model_type, indirect=True)


@pytest.fixture(scope="module")
def make_thinking(site, sample) -> Any:
    """Run files on a model whose template thinks."""
    let_think(site.model)
    data = site.few(sample, 16)

    def make(name: str, thinks: bool | None) -> RunFile:
        return site.make_run(data=data | {"enable_thinking": thinks}, output=str(site.folder / name))

    open_run(make("any", None), TO_BUILD).build()
    return make


@pytest.fixture(scope="module")
def trained(make_thinking) -> RunFile:
    run = make_thinking("trained", False)
    train(run, **QUIET)
    return run


class Processor:
    """The stock processor, told not to let the model think."""

    def __init__(self, stock: Any) -> None:
        self.stock, self.tokenizer = stock, stock.tokenizer

    def __call__(self, **inputs: Any) -> Any:
        return self.stock(**inputs)

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return self.stock.apply_chat_template(messages, enable_thinking=False, **options)


def test_answers_are_those_of_the_stock_model_whose_template_does_not_think(trained, site, stock_processor):
    stock = transformers.AutoModelForImageTextToText.from_pretrained(site.model, dtype=torch.float32)
    model, processor = PeftModel.from_pretrained(stock, str(trained.output / "adapter")), stock_processor(site.model)
    lines = [json.loads(line) for line in (trained.output / "predictions" / "val.jsonl").read_text().splitlines()]
    answerer = Answerer.open(trained.output)
    for line in lines[::5]:
        expected = stock_answer(model.eval(), Processor(processor), line, trained.eval.max_new_tokens)
        [answer] = answerer.answer(line["images"], line["question"])
        assert line["predicted"] == answer.text == expected


def test_an_audit_counts_the_tokens_of_such_a_template_if_it_is_told_not_to_think(make_thinking, site, sample):
    audit = ["data", "audit", str(sample / "test.jsonl"), "--tokenizer", str(site.model), "--json"]
    plain, told = (CliRunner().invoke(main, [*audit, *more]) for more in ([], ["--enable-thinking", "false"]))
    refused, found = json.loads(plain.stdout), json.loads(told.stdout)
    assert [one["level"] for one in refused["findings"] if "training refuses" in one["says"]] == ["error"]
    assert not [one for one in found["findings"] if one["level"] == "error"]
    assert found["tokens"]["files"][0]["num_separate"] > 0


def test_thinking_is_part_of_what_a_training_and_its_answers_are(trained, make_thinking):
    other = make_thinking("trained", None)
    with pytest.raises(RunFolderError, match=r"data\.enable_thinking: this run None, that one False"):
        train(other, **QUIET)
    answerers = [
        Answerer(open_run(make_thinking("any", value), Needs("tests", model="open")), None)
        for value in (None, True, False)
    ]
    assert len({answerer.identity() for answerer in answerers}) == 3


def test_a_training_that_thinks_and_a_second_question_are_refused(trained, make_thinking):
    """The template takes the block away from an answer as soon as another question follows."""
    with pytest.raises(LookonceError, match="set `data.enable_thinking: false`"):
        train(make_thinking("thinks", None), **QUIET)
    answerer = Answerer.open(trained.output)
    twice = Record((), tuple(Turn(text, NOT_ANSWERED) for text in ("Is there text?", "Where?")))
    with pytest.raises(LookonceError, match="the chat template changes earlier turns when others follow"):
        answerer.answer_records([twice])
