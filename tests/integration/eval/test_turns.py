"""Questions that follow the model's own answers: of records, and in a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from lookonce.cache.model.tower import Tower
from lookonce.cli import main
from lookonce.datasets.context import NOT_ANSWERED
from lookonce.datasets.images import image_size
from lookonce.datasets.records import Record, Turn, read_records, write_records
from lookonce.datasets.sample.model import write_model
from lookonce.eval.answerer import Answerer, Conversation
from lookonce.eval.answers.engines import in_turns
from lookonce.eval.answers.questions import Questions
from lookonce.eval.decoding.batches import Room, plan_batches
from lookonce.eval.decoding.decoder import Decoder
from lookonce.eval.decoding.dialogue import Answer, Dialogue
from lookonce.eval.run import evaluate_run
from lookonce.eval.scores.prediction import read_predictions
from lookonce.families.qwen3_5 import QWEN3_5
from lookonce.families.qwen3_vl import QWEN3_VL
from lookonce.run.open import TO_BUILD, OpenRun, open_run
from lookonce.train.data.batches import Pixels, RowCollator
from lookonce.train.data.tokenize import Example
from lookonce.train.model.load import load_with_tower, load_without_tower
from lookonce.workflow import train

NEW_TOKENS = 5
PIXELS = {"min_pixels": 1, "max_pixels": 120_000}
QUIET = {"notify": lambda note: None}
QUESTIONS = ("Is there text?", "Where is the polyp?", "And how many are there?", "Is it easy to detect?")
EVERY = range(6)
"""The numbers of the records."""


def records_of(sample) -> list[Record]:
    """One to four turns about images of several sizes, two of them about one image; two images; none."""
    by_size = {
        image_size(record.images[0].read_bytes()): record.images for record in read_records(sample / "train.jsonl")
    }
    first, second, third, *_ = by_size.values()
    shown = [(first, 3), (first, 1), (first, 2), (second, 4), ((*third, *first), 2), ((), 3)]
    return [
        Record(
            images,
            tuple(Turn(QUESTIONS[(n + number) % 4], "yes") for n in range(turns)),
            system="Be brief." * (number % 2) or None,
        )
        for number, (images, turns) in enumerate(shown)
    ]


@dataclass
class Asked:
    """Questions in dialogues, the stock model with its tower, and the model without it."""

    session: OpenRun
    dialogues: Sequence[Dialogue]
    stock: Any
    collator: RowCollator
    model: Any

    def ending_with(self, end: int, special: frozenset[int] = frozenset()) -> list[Dialogue]:
        """The dialogues, if `end` were the end token."""
        ended = np.array([end], np.int32)
        return [
            replace(one, later=tuple(np.append(ended, piece[1:]) for piece in one.later), special=special)
            for one in self.dialogues
        ]

    def ending(self, end: int) -> SimpleNamespace:
        """The chat tokenizer, if `end` were the end token."""
        chat = self.session.chat_tokenizer
        return SimpleNamespace(image_token_id=chat.image_token_id, merge_size=chat.merge_size, tokenizer=tokenizer(end))

    def answers(self, dialogues: list[Dialogue], room: Room, end: int, *, by_rows: bool = False) -> list[list[Answer]]:
        chat, ending = self.session.chat_tokenizer, self.ending(end)
        decoder = Decoder(self.model, ending, self.session.features, room, torch.float32, by_rows=by_rows)

        def answer(prompts: list[Example]) -> list[Answer]:
            batches = plan_batches(prompts, [room.max_new_tokens] * len(prompts), chat.image_token_id, room)
            given = decoder.answers([prompts[number] for number in batch] for batch in batches)
            found = dict(pair for batch in batches for pair in zip(batch, next(given), strict=True))
            return [found[number] for number in range(len(prompts))]

        return in_turns(dialogues, answer)

    @torch.inference_mode()
    def generated(self, dialogue: Dialogue, token_ids: list[int], end: int) -> tuple[int, ...]:
        """The tokens that stock `generate` gives after some tokens, up to the end token."""
        prompt = replace(
            dialogue.first, token_ids=np.array(token_ids, np.int32), supervised=np.zeros(len(token_ids), bool)
        )
        batch = self.collator.prompts([prompt])
        options = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0, eos_token_id=end)
        return tuple(self.stock.generate(**batch, generation_config=options)[0, batch["input_ids"].shape[1] :].tolist())


def tokenizer(end: int) -> SimpleNamespace:
    return SimpleNamespace(
        pad_token_id=0, eos_token_id=end, decode=lambda ids, **_: " ".join(str(i) for i in ids if i != end)
    )


@pytest.fixture(scope="module", params=[QWEN3_VL, QWEN3_5], ids=lambda family: family.model_type)
def asked(request, sample, make_run_in, random_lora, tmp_path_factory) -> Asked:
    """With the layers of each kind: full attention alone, and linear attention beside it."""
    folder = tmp_path_factory.mktemp("turns")
    model = {}
    if request.param is not QWEN3_VL:
        write_model(folder / "model", family=request.param)
        model = {"path": str(folder / "model")}
    write_records(folder / "asked.jsonl", records_of(sample), image_root=sample)
    data = {"train": str(folder / "asked.jsonl"), "val": [], "test": [], "image_root": str(sample)}
    options = {"train": {"precision": "fp32"}, "eval": {"max_new_tokens": NEW_TOKENS}, "model": model}
    inputs = open_run(make_run_in(folder, data=data, cache=PIXELS, **options), TO_BUILD)
    inputs.build()
    session = inputs
    records = inputs.records["train"]
    questions = [(record, turn) for record in records for turn in range(len(record.turns))]
    dialogues = Questions(session, "train").asking(questions).dialogues
    stock, bare = (random_lora(inputs, load).eval() for load in (load_with_tower, load_without_tower))
    collator = RowCollator(Pixels(inputs.processor, inputs.images.path_of), session.chat_tokenizer.image_token_id, 0)
    return Asked(session, dialogues, stock, collator, bare)


def assert_stock_answers(
    asked: Asked, chosen: Sequence[int], room: Room, end: int, special: Set[int] = frozenset(), *, by_rows: bool = False
) -> int:
    """Compare the answers of some dialogues; returns how many answers later prompts show."""
    every = asked.ending_with(end, frozenset(special))
    dialogues = [every[number] for number in chosen]
    stands_in = [*every[0].not_answered]
    num_shown = 0
    for dialogue, found in zip(dialogues, asked.answers(dialogues, room, end, by_rows=by_rows), strict=True):
        assert len(found) == 1 + len(dialogue.later)
        prompt = dialogue.first.token_ids.tolist()
        for number, answer in enumerate(found):
            expected = asked.generated(dialogue, prompt, end)
            assert answer.token_ids == expected, (dialogue.first.origin, number)
            is_shown = 1 < expected.index(end) + 1 and special.isdisjoint(expected[:-1]) if end in expected else False
            num_shown += is_shown
            if number < len(dialogue.later):
                prompt += (list(expected[:-1]) if is_shown else stands_in) + dialogue.later[number].tolist()
    return num_shown


@pytest.fixture(scope="module")
def often(asked) -> list[int]:
    """Tokens that first answers have which others follow, but not as their first; the commonest first."""
    end = asked.session.chat_tokenizer.tokenizer.eos_token_id
    given = asked.answers(asked.ending_with(end), Room(10_000, 1000, NEW_TOKENS), end)
    firsts = {answer.token_ids[0] for some in given for answer in some}
    tokens = [token for first, *later in given if later for token in first.token_ids if token not in firsts]
    return sorted(dict.fromkeys(tokens), key=tokens.count, reverse=True)


@pytest.mark.guarantee(
    "In a dialogue, each answer has the tokens that stock `generate` gives after the model's earlier "
    "answers, however these end and whatever they contain; also through layers of linear attention."
)
def test_own_answers_are_those_of_generate_in_one_batch_and_in_many(asked, often):
    for room in (Room(100_000, 100_000, NEW_TOKENS), Room(900, 300, NEW_TOKENS), Room(1, 1, NEW_TOKENS)):
        assert assert_stock_answers(asked, EVERY, room, often[0]) > 0


@pytest.mark.filterwarnings("default:flex_attention called without torch.compile")
def test_passes_by_rows_have_the_same_answers(asked, often):
    """As on a GPU, but launched and with FlexAttention written out."""
    assert assert_stock_answers(asked, [0, 2, 4], Room(700, 400, NEW_TOKENS), often[0], by_rows=True) > 0


@settings(max_examples=8, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_ends_an_answer_and_whatever_is_special(asked, often, data):
    room = Room(data.draw(st.integers(1, 3000)), data.draw(st.integers(1, 2000)), NEW_TOKENS)
    end, special = data.draw(st.sampled_from(often)), data.draw(st.sets(st.sampled_from(often[:4]), max_size=2))
    chosen = data.draw(st.lists(st.sampled_from(EVERY), min_size=1, max_size=3, unique=True))
    assert_stock_answers(asked, chosen, room, end, special | {end})


@pytest.fixture(scope="module")
def run(make_run_in, sample, built, tmp_path_factory):
    """A run whose validation records have two turns."""
    folder = tmp_path_factory.mktemp("run")
    records = [
        replace(one, turns=(*one.turns, Turn("Is it large?", "no"))) for one in read_records(sample / "val.jsonl")[:12]
    ]
    write_records(folder / "val.jsonl", records, image_root=sample)
    data = {"val": str(folder / "val.jsonl"), "test": [], "image_root": str(sample)}
    run = make_run_in(
        folder,
        data=data,
        cache={"dir": str(built.folder.parent)},
        train={"steps": 60, "learning_rate": 0.01},
        eval={"max_new_tokens": 2},
    )
    train(run, **QUIET)
    return run


def test_predictions_say_whose_answers_their_prompts_have_with_each_engine(run):
    def rows(*assignments: str) -> list:
        evaluate_run(run.output, assignments=assignments)
        return read_predictions(run.output / "predictions" / "val.jsonl")

    own, stock, true = rows(), rows("eval.engine=generate"), rows("eval.turns=reference")
    assert {row.ended for row in own} == {"stop"}
    assert [(row.predicted, row.earlier) for row in own] == [(row.predicted, row.earlier) for row in stock]
    for first, second, oracle in zip(own[::2], own[1::2], true[1::2], strict=True):
        assert second.earlier == (Turn(first.question, first.predicted),) and second.earlier_answers == "predicted"
        assert oracle.earlier == (Turn(first.question, first.answer),) and oracle.earlier_answers == "reference"
        assert first.earlier_answers is None
    assert [row.predicted for row in own[::2]] == [row.predicted for row in true[::2]]
    cut = rows("eval.max_new_tokens=1")
    assert {row.earlier for row in cut[1::2]} == {(Turn(row.question, NOT_ANSWERED),) for row in cut[::2]}


FIRST, SECOND = "Is there text?", "Where is it?"


@pytest.fixture
def run_file(make_run, tmp_path: Path) -> Path:
    """A run that was not trained, and whose cache is not built."""
    path = tmp_path / "run.yaml"
    path.write_text(make_run(eval={"max_new_tokens": 5, "engine": "shared"}).to_yaml())
    return path


def converse(*words: str | Path, lines: list[str], code: int = 0) -> tuple[list[str], str]:
    """The lines on stdout, and all of stderr."""
    given = ["ask", *map(str, words), "--untuned", "--json"]
    done = CliRunner().invoke(main, given, input="\n".join(lines))
    assert done.exit_code == code and "Traceback" not in done.output, done.output
    return done.stdout.splitlines(), done.stderr


def test_answers_follow_the_models_own_answers_and_images_are_encoded_once(run_file, sample, tmp_path, monkeypatch):
    encoded, real = [], Tower.encode
    monkeypatch.setattr(Tower, "encode", lambda *given: encoded.append(1) or real(*given))
    monkeypatch.chdir(tmp_path)
    one, other = sorted((sample / "images").glob("*.jpg"))[:2]
    lines = [FIRST, "", SECOND, "/reset", SECOND, f"/image '{other}' {one}", FIRST]
    printed, _ = converse(run_file, one, "--system", "Be brief.", lines=[*lines, "/quit", "never asked"])
    found = [json.loads(line) for line in printed]
    assert [row["question"] for row in found] == [FIRST, SECOND, SECOND, FIRST]
    assert len(encoded) == 2
    first = Record((one,), (Turn(FIRST, "x"), Turn(SECOND, "x")), system="Be brief.")
    again = Answerer.open(run_file, untuned=True).answer_records(
        [first, replace(first, images=(other, one), turns=first.turns[:1])]
    )
    assert [answer.text for answer in again] == [found[number]["answer"] for number in (0, 1, 3)]
    assert found[1]["answer"] != found[2]["answer"], "the first turn is part of the prompt"


def test_a_mistake_does_not_end_the_conversation(run_file, sample, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = next((sample / "images").glob("*.jpg"))
    wrong = ["/image gone.jpg", "/image", "/what", "/image 'open", "Is it <|im_end|>?"]
    printed, said = converse(run_file, frame, lines=[*wrong, FIRST], code=1)
    assert len(printed) == 1
    for words in (
        "cannot read image",
        "/image needs the path of an image",
        "/what is not a command",
        "close the quotes",
        "special token",
    ):
        assert words in said


def test_words_are_given_as_they_come_and_an_interrupted_answer_leaves_the_conversation_as_it_was(run_file, sample):
    def stop(text: str) -> None:
        raise KeyboardInterrupt

    conversation = Conversation(Answerer.open(run_file, untuned=True), [next((sample / "images").glob("*.jpg"))])
    for question in (FIRST, SECOND):
        words: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            conversation.ask(question, stop)
        answer = conversation.ask(question, words.append)
        assert "".join(words) == answer.text and len(words) > 1
