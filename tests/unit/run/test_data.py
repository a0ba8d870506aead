"""The keys that select and order records, give them contexts or hold some out: records, notes and identity of a run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from support.rows import write_lines

from lookonce.checks.check import check
from lookonce.checks.inputs import check_records
from lookonce.datasets.records import Context, Record, Turn, read_records, write_records
from lookonce.errors import FeaturesMissing, RecordsError, RunFolderError, UsageError
from lookonce.run.config import read_run_file
from lookonce.run.folder import RunFolder
from lookonce.run.open import FROM_CACHE, TO_BUILD, TO_LOOK, OpenRun, open_run
from lookonce.run.records import HELD_OUT, check_paths, overlap_note, read_splits
from lookonce.status import find_state

REASONING = "datasets/kvasir-vqa.stages/reasoning.yaml"
BY_STAGE = {"order": {"by": "stage", "stages": [1, 2, 3]}}


@pytest.fixture
def staged(make_cached_run, root):
    """Makes runs on the sample with the stages of Kvasir-VQA."""

    def make(data=(), **changes):
        return make_cached_run(data={"stage_map": str(root / REASONING)} | dict(data), **changes)

    return make


def identity(run):
    return open_run(run, TO_LOOK).records_identity()


def claimed(run, inputs) -> RunFolder:
    """The run's folder as after the first step."""
    folder = RunFolder(run.output)
    folder.claim(run, inputs)
    folder.log.touch()
    return folder


def stages(records) -> Counter[int]:
    return Counter(record.metadata["stage"] for record in records)


def test_where_and_replay_select_training_records_alone(staged):
    notes = []
    everything = read_splits(staged())
    found = read_splits(staged({"where": {"stage": 2}, "replay": {"stage": 1, "share": 0.1}}), notes.append)
    whole = stages(everything["train"])
    assert stages(found["train"]) == {2: whole[2], 1: round(0.1 * whole[1])}
    assert [note.partition(":")[0] for note in notes] == [
        f"`data.where` leaves out {whole[1] + whole[3]} of {whole.total()} train records",
        f"`data.replay` trains on {round(0.1 * whole[1])} of them",
    ]
    assert (found["val"], found["test"]) == (everything["val"], everything["test"]) and whole.keys() == {1, 2, 3}


def test_a_share_follows_from_the_seed_of_the_training(staged):
    def origins(share, seed):
        run = staged({"where": {"share": share}}, train={"seed": seed})
        return {record.origin for record in read_splits(run)["train"]}

    assert origins(0.384, 1) < origins(0.694, 1) and origins(0.384, 1) != origins(0.384, 2)


def test_a_records_own_system_text_stays_and_one_that_is_in_no_prompt_is_refused(make_cached_run, tmp_path, sample):
    one, two = read_records(sample / "train.jsonl")[:2]
    notes, own = [], replace(one, system="Own.")
    for name, written in (("mixed", [own, two]), ("own", [own])):
        write_records(tmp_path / f"{name}.jsonl", written, absolute=True)
    data = {"train": str(tmp_path / "mixed.jsonl"), "val": [], "test": [], "system": "Brief."}
    assert [record.system for record in read_splits(make_cached_run(data=data), notes.append)["train"]] == [
        "Own.",
        "Brief.",
    ]
    assert notes == ["1 of 2 records have their own system text, not `data.system`"]
    refused = make_cached_run(data=data | {"train": str(tmp_path / "own.jsonl")})
    with pytest.raises(RecordsError, match="in no prompt: each of 1 record has a system text of its own"):
        read_splits(refused)
    assert any("`data.system` is in no prompt" in result.value for result in check_records(refused, None)[1])


def test_status_shows_what_is_left_out_and_in_which_order_an_epoch_goes(staged):
    run = staged({"where": {"stage": [1, 3]}}, batch=BY_STAGE)
    number = stages(read_splits(staged())["train"])
    assert find_state(run).notes[:2] == [
        f"`data.where` leaves out {number[2]} of {number.total()} train records: stage 2 ({number[2]})",
        f"each epoch trains on stage 1 ({number[1]}), then stage 2 (0), then stage 3 ({number[3]})",
    ]


def test_a_run_with_other_records_or_another_selection_is_refused(staged):
    run = staged({"where": {"stage": [1]}})
    folder = claimed(run, identity(run))
    folder.check(staged({"where": {"stage": 1}}), identity(run))
    other = staged({"where": {"stage": 1, "share": 0.5}})
    with pytest.raises(RunFolderError, match=r"(?s)inputs.records.train.*run.data.where.share"):
        folder.check(other, identity(other))


def test_stages_are_part_of_the_identity_because_a_stage_map_can_change(staged, tmp_path, root):
    """The map's content is compared and its path is not, as with records."""
    assert "stages" not in identity(staged())
    before = identity(staged(batch=BY_STAGE))
    copy = tmp_path / "map.yaml"
    copy.write_text((root / REASONING).read_text())
    balanced = staged({"stage_map": str(copy)}, batch={"balance": "category"})
    weights = identity(balanced)["weights"]
    moved = staged({"stage_map": str(copy)}, batch=BY_STAGE)
    assert identity(moved) == before
    copy.write_text(copy.read_text().replace("stage: 3", "stage: 2").replace("category: count", "category: colour"))
    assert identity(balanced)["weights"] != weights
    after = identity(moved)
    assert after["records"] == before["records"] and after["stages"] != before["stages"]
    folder = claimed(staged(batch=BY_STAGE), before)
    folder.check(moved, before)
    with pytest.raises(RunFolderError, match="inputs.stages"):
        folder.check(moved, after)


def test_a_missing_stage_map_is_found_before_anything_is_read_and_a_record_in_no_stage_when_records_are(staged):
    with pytest.raises(RecordsError, match=r"`batch.order`: \d+ of \d+ train records are not in one stage: stage 3"):
        read_splits(staged(batch={"order": {"by": "stage", "stages": [1, 2]}}))
    with pytest.raises(UsageError, match="cannot read the stage map /nowhere.yaml: .*; correct `data.stage_map`"):
        check_paths(staged({"stage_map": "/nowhere.yaml"}))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("data.replay={stage: 1}", "`replay` selects from the records that `where` leaves out, and needs `where`"),
        ("data.system=' '", "data.system: must be text that is not empty"),
        ("data.system=a<|im_end|>", "data.system: contains <|im_end|>, a special token of the model; remove it"),
        ("data.where={share: 2}", r"data.where.share: .* less than or equal to 1 \(got 2\)"),
        ("data.where={stage: {a: 1}}", r"data.where.stage\[0\]: must be a text, a number, true or false"),
        ("data.where={stage: []}", "data.where.stage: Value should have at least 1 item"),
        ("data.context={by: stage}", "data.context.order: is missing"),
        ("data.context={by: stage, order: [1, 2], each: x}", "data.context.each: .*must have {answer}"),
        ("batch={balance: answer, loss: micro_batch}", "balance: answer needs loss: token or sample; micro_batch is"),
        ("batch.order=sorted", r"batch.order.name: Input should be 'random' or 'as_given' \(got 'sorted'\)"),
        ("batch.order={by: stage}", "wrong:\n  batch.order.mapping.stages: is missing$"),
        ("batch.order={by: stage, stages: [1, '1']}", "stages: has 1 twice; write each value once"),
        ("data.held_out={fold: 3, of: 2}", r"data.held_out: the folds of 2 are 1 to 2 \(got fold 3\)"),
        ("data.held_out={fold: 1, of: 1}", r"data.held_out.of: .* greater than or equal to 2 \(got 1\)"),
    ],
)
def test_wrong_values_are_refused(tmp_path, assignment, message):
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"model": {"path": "m"}, "data": {"train": "a.jsonl"}, "output": "x"}))
    with pytest.raises(UsageError, match=message):
        read_run_file(path, [assignment])


CONTEXT = {"by": "stage", "order": [1, 2, 3]}


def test_training_and_validation_records_get_a_context_and_their_questions_stay(staged, tmp_path):
    """What a record is asked does not change."""
    plain = open_run(staged(), TO_LOOK)
    found = open_run(staged({"context": CONTEXT}), replace(TO_LOOK, records="used"))
    assert [one.turns for one in found.all_records()] == [one.turns for one in plain.all_records()]
    assert all(one.context is None for one in found.records["test"])
    num_known = sum(one.context is not None for one in found.records["train"])
    assert 0 < num_known < len(found.records["train"]) and any(one.context for one in found.records["val"])
    assert found.notes[0].startswith(f"`data.context`: {num_known} of {len(found.records['train'])} train records have")


def test_the_answers_of_a_context_are_part_of_the_identity_and_their_path_is_not(staged, tmp_path):
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for path, text in zip(paths, ("{}", "{}", "{} "), strict=True):
        path.write_text(text)
    first, copy, other = (staged({"context": CONTEXT | {"answers": str(path)}}) for path in paths)
    assert "context" not in identity(staged())
    assert identity(first) == identity(copy) != identity(other)
    folder = claimed(first, identity(first))
    folder.check(copy, identity(copy))
    for changed, named in ((other, "inputs.answers"), (staged({"context": CONTEXT}), "inputs.answers")):
        with pytest.raises(RunFolderError, match=named):
            folder.check(changed, identity(changed))
    with pytest.raises(RunFolderError, match="run.data.context.form"):
        folder.check(staged({"context": CONTEXT | {"answers": str(paths[0]), "form": "turns"}}), identity(first))
    later = staged({"context": CONTEXT | {"answers": "/nowhere.jsonl"}})
    check_paths(later)
    assert identity(later)["answers"] is None, "a cache is built, and a status shown, before another run has answered"
    with pytest.raises(RecordsError, match="no predictions at /nowhere.jsonl"):
        open_run(later, replace(TO_LOOK, records="used"))


def rows_of(opened: OpenRun, records: list[Record]) -> str:
    """Predictions of all questions of some records, as lines."""
    rows = (
        {"question": turn.question, "predicted": "own", "image_keys": opened.images.keys_of(record)}
        for record in records
        for turn in record.turns
    )
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.guarantee(
    "A run whose contexts have the answers of a predictions file names the images that the model of these "
    "answers was trained on."
)
def test_it_is_said_which_images_the_models_were_trained_on_whose_answers_contexts_have(staged, sample, tmp_path):
    """Two models that were trained on other images than they answered; and one that answered its own."""
    plain = open_run(staged(), TO_LOOK)
    folds = []
    for name, trained in (("a", "test"), ("b", "train")):
        fold = staged({"train": str(sample / f"{trained}.jsonl")}, output=str(tmp_path / name))
        RunFolder(fold.output).claim(fold, {})
        path = RunFolder(fold.output).predictions("other")
        path.parent.mkdir()
        path.write_text(rows_of(plain, plain.records["train"] if name == "a" else plain.records["val"]))
        folds.append(str(path))
    found = open_run(staged({"context": CONTEXT | {"answers": folds}}), replace(TO_LOOK, records="used"))
    assert {turn.answer for record in found.all_records() for turn in record.known} == {"own"}
    shown = {key for record in found.records["train"] if record.context for key in found.images.keys_of(record)}
    of = f"{len(shown)} images for which prompts have its answers"
    assert found.notes[-1] == f"{folds[0]}: its model was trained on none of {of}"

    RunFolder(tmp_path / "b").predictions("other").write_text(rows_of(plain, [*plain.all_records()]))
    own = open_run(staged({"context": CONTEXT | {"answers": folds[1]}}), replace(TO_LOOK, records="used"))
    assert own.notes[-1].startswith(f"{folds[1]}: its model was trained on {len(shown)} of {len(shown)} images for")
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(RunFolder(tmp_path / "b").predictions("other").read_bytes())
    moved = open_run(staged({"context": CONTEXT | {"answers": str(copy)}}), replace(TO_LOOK, records="used"))
    assert moved.notes[-1] == f"{copy} is not in a run folder, so it is unknown which images its model was trained on"


@pytest.fixture
def fold(make_cached_run):
    """Makes runs on the sample that leave out a fold of two."""

    def make(number, **changes):
        return make_cached_run(data={"held_out": {"fold": number, "of": 2}}, **changes)

    return make


def images(opened, split) -> set[str]:
    return {key for record in opened.records[split] for key in opened.images.keys_of(record)}


def test_two_folds_divide_the_training_images_and_leave_the_other_splits(fold, make_cached_run):
    plain, first, second = (open_run(run, FROM_CACHE) for run in (make_cached_run(), fold(1), fold(2)))
    assert first.records["train"] == second.records[HELD_OUT] and second.records["train"] == first.records[HELD_OUT]
    assert images(first, "train").isdisjoint(images(first, HELD_OUT))
    assert images(first, "train") | images(first, HELD_OUT) == images(plain, "train")
    assert [first.records[split] for split in ("val", "test")] == [plain.records[split] for split in ("val", "test")]
    number = len(first.records[HELD_OUT])
    assert first.notes[-1].startswith(f"`data.held_out` leaves out {number} of {len(plain.records['train'])} train rec")
    assert HELD_OUT not in plain.records


def test_paths_with_the_same_bytes_are_in_one_fold(make_run, sample, tmp_path):
    paths = sorted((sample / "images").iterdir())[:4]
    records = []
    for path, name in [(path, f"{copy}-{path.name}") for copy in "ab" for path in paths]:
        (tmp_path / name).write_bytes(path.read_bytes())
        records.append(Record((tmp_path / name,), (Turn("Is there text?", "no"),)))
    write_records(tmp_path / "twice.jsonl", records)
    data = {"train": str(tmp_path / "twice.jsonl"), "val": [], "image_root": None, "held_out": {"fold": 1, "of": 2}}
    found = open_run(make_run(data=data), replace(FROM_CACHE, images="hashed"))
    assert [len(found.records[split]) for split in ("train", HELD_OUT)] == [4, 4]
    assert images(found, "train").isdisjoint(images(found, HELD_OUT))


def test_status_check_and_the_origin_of_answers_know_what_was_trained_on(fold, tmp_path):
    run = fold(1)
    opened = open_run(run, FROM_CACHE)
    assert open_run(run, replace(TO_LOOK, records="used")).records_identity() == opened.records_identity()
    assert find_state(run).notes[0] == opened.notes[-1]
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    assert opened.notes[-1] in [result.value for result in check(tmp_path / "run.yaml").results]
    answers = tmp_path / "study" / "fold" / "predictions" / "held_out.jsonl"
    RunFolder(answers.parent.parent).claim(run, {})
    answers.parent.mkdir()
    for split in (HELD_OUT, "train"):
        rows = [json.dumps({"image_keys": opened.images.keys_of(record)}) for record in opened.records[split]]
        answers.write_text("\n".join(rows))
        with_context = [replace(record, context=Context(())) for record in opened.records[split]]
        number = len(images(opened, split))
        which = "none of" if split == HELD_OUT else f"{number} of {number} images"
        assert f"trained on {which}" in overlap_note(answers, with_context, opened.images)


def test_another_fold_is_another_run(fold):
    run, other = fold(1), fold(2)
    opened = open_run(run, FROM_CACHE)
    folder = claimed(run, opened.records_identity())
    with pytest.raises(RunFolderError, match=r"(?s)inputs.records.train.*run.data.held_out.fold: this run 2, that"):
        folder.check(other, open_run(other, FROM_CACHE).records_identity())


# Records of unusable images.

GOOD, BAD, MISSING = ("a.png", "b.png"), "text.png", "nowhere.png"


@pytest.fixture
def with_images(site, tmp_path, make_run, files_are_old):
    """Makes runs whose training records are about these images, of which one cannot be decoded."""
    for number, name in enumerate(GOOD):
        site.noise(name, number)
    (tmp_path / BAD).write_bytes(b"not an image")

    def make(*names):
        rows = [{"image_filename": name, "question": "Is it?", "answer": "yes"} for name in names]
        return make_run(data={"train": str(write_lines(tmp_path / "some.jsonl", *rows)), "val": [], "test": []})

    return make


@pytest.mark.parametrize(("name", "reason"), [(BAD, "cannot decode"), (MISSING, "No such file")])
def test_an_unusable_image_is_refused_with_the_command_that_lists_its_records_as_status_says(with_images, name, reason):
    run = with_images(*GOOD, name)
    open_run(run, TO_BUILD).build()
    advice = r"repair the file, or remove .*: lookonce data audit RECORDS --decode"
    with pytest.raises(FeaturesMissing, match=rf"{name} .*jsonl:3\).*{reason}.*; {advice}"):
        open_run(run, FROM_CACHE).open_cache()
    assert "training needs all images: repair the file, or remove" in "\n".join(find_state(run).notes)
