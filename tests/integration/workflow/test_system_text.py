"""`data.system`: one system text in training, evaluation and all answers, which a record's own replaces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from peft import PeftModel
from PIL import Image

from lookonce.adapter.card import system_texts
from lookonce.cli import main
from lookonce.datasets.records import Record, Turn, read_records, write_records
from lookonce.errors import RunFolderError
from lookonce.eval.answerer import Answerer
from lookonce.eval.scores.prediction import read_predictions
from lookonce.run.config import RunFile
from lookonce.run.open import FROM_CACHE, TO_LOOK, open_run
from lookonce.train.data.tokenize import to_messages
from lookonce.workflow import train

SYSTEM, OWN = "You read endoscopy.\nAnswer with {one} word.", "Be brief."
QUIET = {"notify": lambda note: None}


@pytest.fixture(scope="module")
def records(sample, tmp_path_factory) -> dict[str, str]:
    """Some of the sample's records, every third with a system text of its own."""
    folder = tmp_path_factory.mktemp("records")
    for split, number in (("train", 24), ("val", 6)):
        chosen = read_records(sample / f"{split}.jsonl")[:number]
        mixed = [replace(record, system=OWN if n % 3 == 0 else None) for n, record in enumerate(chosen)]
        write_records(folder / f"{split}.jsonl", mixed, absolute=True)
    return {"train": str(folder / "train.jsonl"), "val": str(folder / "val.jsonl"), "test": []}


@pytest.fixture(scope="module")
def trained(make_run_in, built, records, tmp_path_factory) -> RunFile:
    run = make_run_in(
        tmp_path_factory.mktemp("run"),
        data=records | {"system": SYSTEM},
        cache={"dir": str(built.folder.parent)},
        train={"learning_rate": 0.01},
        lora={"modules_to_save": ["embed_tokens"]},
    )
    train(run, **QUIET)
    return run


def stock_inputs(processor, record: Record, *, prompt: bool):
    """The stock processor's inputs for a record, whose system text is that of its prompt."""
    messages = [{"role": "system", "content": [{"type": "text", "text": record.system}]}, *to_messages(record)[1:]]
    text = processor.apply_chat_template(messages[:-1] if prompt else messages, add_generation_prompt=prompt)
    with Image.open(*record.images) as image:
        return processor(text=[text], images=[image.convert("RGB")], return_tensors="pt")


@pytest.mark.guarantee(
    "With `data.system`, prompts have the tokens of the stock processor for a conversation that begins with this "
    "system message; a record's own system text stays."
)
def test_tokens_are_those_of_the_stock_processor(trained, records, sample, stock_processor):
    processor = stock_processor(sample / "model")
    with open_run(trained, FROM_CACHE) as opened:
        for split in ("train", "val"):
            examples, _ = opened.examples(split)
            for n, (record, example) in enumerate(zip(read_records(Path(records[split])), examples, strict=True)):
                expected = stock_inputs(processor, record.with_system(SYSTEM), prompt=False)["input_ids"][0]
                assert example.expanded(opened.chat_tokenizer.image_token_id)[0].tolist() == expected.tolist()
                text = processor.tokenizer.decode(expected)
                assert (SYSTEM in text, OWN in text) == (n % 3 != 0, n % 3 == 0)


def test_all_answers_are_those_of_the_stock_model_after_the_system_message(trained, records, sample, stock_processor):
    processor = stock_processor(sample / "model")
    stock = transformers.AutoModelForImageTextToText.from_pretrained(sample / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(stock, str(trained.output / "adapter")).eval()

    def stock_answer(record: Record) -> str:
        inputs = stock_inputs(processor, record, prompt=True)
        output = model.generate(**inputs, do_sample=False, max_new_tokens=trained.eval.max_new_tokens)
        return processor.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    answerer, val = Answerer.open(trained.output), read_records(Path(records["val"]))
    rows = read_predictions(trained.output / "predictions" / "val.jsonl")
    answers = answerer.answer_records(val)
    for n, (record, row, answer) in enumerate(zip(val, rows, answers, strict=True)):
        shown = record.with_system(SYSTEM)
        assert row.system == shown.system == (SYSTEM if n % 3 else OWN)
        assert row.predicted == answer.text == stock_answer(shown)
    image, question = val[0].images[0], val[0].turns[0].question
    bare = Record((image,), (Turn(question, "x"),))
    [default], [given] = (answerer.answer(image, question, system) for system in (None, OWN))
    assert (default.text, given.text) == tuple(stock_answer(bare.with_system(system)) for system in (SYSTEM, OWN))

    def printed(*words: str, lines: str = "") -> str:
        done = CliRunner().invoke(main, [*words, "--json"], input=lines)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout.splitlines()[-1] if lines else done.stdout)

    run, asked = str(trained.output), ["--question", question]
    several = printed("predict", run, "--images", str(image), *asked)["predictions"][0]
    assert (several["predicted"], several["system"]) == (default.text, SYSTEM)
    assert printed("ask", run, str(image), lines=question)["answer"] == default.text
    assert printed("ask", run, str(image), "--system", OWN, lines=question)["answer"] == given.text


def test_it_is_part_of_what_a_training_is_and_on_its_card(trained):
    other = trained.model_copy(update={"data": trained.data.model_copy(update={"system": "Another."})})
    with pytest.raises(RunFolderError, match=r"data\.system: this run 'Another\.', that one 'You read"):
        train(other, **QUIET)
    found = [open_run(run, TO_LOOK).records_identity()["records"] for run in (trained, other)]
    assert found[0]["train"] != found[1]["train"] and found[0]["val"] != found[1]["val"]
    assert system_texts(trained) == [OWN, SYSTEM]
