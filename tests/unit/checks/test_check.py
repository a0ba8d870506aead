"""A check says everything that would stop a run, or surprise, and all of it at once."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import lookonce.checks.check as module
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.checks.report import CheckReport, Result
from lookonce.claim_file import Process
from lookonce.errors import ModelError
from lookonce.files import write_json
from lookonce.run.folder import CLAIM, RunFolder
from lookonce.run.open import TO_BUILD, open_run
from lookonce.text import duration

pytestmark = pytest.mark.usefixtures("one_model_check")


@pytest.fixture
def own(sample, tmp_path) -> Path:
    """A copy of the sample's records and images, to break."""
    shutil.copytree(sample, tmp_path / "own", ignore=shutil.ignore_patterns("model"))
    return tmp_path / "own"


def on(own: Path) -> dict[str, str]:
    return {split: str(own / f"{split}.jsonl") for split in ("train", "val", "test")}


def change_line(path: Path, number: int, line: str) -> None:
    lines = path.read_text().splitlines()
    lines[number - 1] = line
    path.write_text("\n".join(lines) + "\n")


def test_before_the_cache_is_built_the_only_thing_to_do_is_to_build_it(checked):
    found = checked()
    assert found.levels() == {"error": 0, "warning": 1} and found.report.is_ok
    assert found.one("cache").do == "lookonce cache build RUN.yaml"
    assert found.one("cache").value.startswith("64 images to encode; no cache yet in")


def test_with_a_built_cache_nothing_is_to_be_done(checked, built):
    found = checked(cache={"dir": str(built.folder.parent)})
    assert found.problems() == []
    assert f"64 images in {built.folder}" in [one.value for one in found.report.results]


@pytest.mark.parametrize(("pixels", "tokens"), [(600, "1 token"), (16 * 32 * 32 - 1, "15 tokens"), (16 * 32 * 32, "")])
def test_a_limit_of_pixels_that_leaves_hardly_any_tokens_is_a_warning(checked, sample, pixels, tokens):
    found = checked("cache.min_pixels=300", f"cache.max_pixels={pixels}", most=5).problems("images")
    limit = f"its limit is {pixels:,} pixels in all, not the length of an edge"
    assert [one.value for one in found] == ([f"at most {tokens} an image: {limit}"] if tokens else [])
    most = ImageProcessor(sample / "model", "pil", 300, pixels).num_tokens(512, 512)  # as the stock processor resizes
    assert most <= int((tokens or "16 tokens").split()[0])


def test_layers_that_packs_cannot_have_are_an_error_of_training_and_of_shared_answers(checked, monkeypatch):
    def refuse(family, config):
        raise ModelError("layers of sliding_attention")

    monkeypatch.setattr("lookonce.train.model.compile.check_layers", refuse)
    kept_apart = {"most": 5, "train": {"seed": 7}}  # no other test checks such a model
    rows, generate = {"mode": "separate"}, {"engine": "generate"}
    for sections in ({"eval": generate}, {"batch": rows}):
        assert checked(**sections, **kept_apart).one("adapter").value == "layers of sliding_attention"
    assert checked(batch=rows, eval=generate, **kept_apart).problems("adapter") == []


def test_what_a_selection_leaves_out_is_counted_over_all_records(checked, root):
    stage_map = str(root / "datasets" / "kvasir-vqa.stages" / "reasoning.yaml")
    found = checked(data={"stage_map": stage_map, "where": {"stage": [1, 2]}}, most=5)
    [note] = [one.value for one in found.report.results if "`data.where` leaves out" in one.value]
    assert "train records: stage 3 (" in note and found.report.is_complete and found.report.num_records > 15
    wrong = checked(data={"stage_map": stage_map, "where": {"stage": 4}}, most=5).one("records")
    assert (wrong.value, wrong.do) == ("`data.where`: no record has stage 4", "values are 1, 2, 3")


def test_contexts_are_checked_and_lengthen_the_records(checked, built, root, tmp_path):
    def found(**context):
        data = {"stage_map": str(root / "datasets" / "kvasir-vqa.stages" / "reasoning.yaml")}
        data |= {"context": {"by": "stage", "order": [1, 2, 3]} | context} if context else {}
        return checked(data=data, cache={"dir": str(built.folder.parent)}, most=5)

    def lengths(found):
        return [one.value for one in found.report.results if one.what == "lengths"]

    plain, with_context = found(), found(form="summary")
    assert "train records have answers to earlier questions" in str(with_context.report.results)
    assert lengths(plain) != lengths(with_context)
    assert found(order=[1, 4]).one("records").value == "`data.context`: no record has stage 4"
    assert "no predictions at" in found(answers=str(tmp_path / "none.jsonl")).one("records").value


@pytest.mark.guarantee("`lookonce check` reports every planted mistake of a run at once.")
def test_all_problems_are_reported_at_once(checked, own, monkeypatch):
    monkeypatch.delenv("UNSET", raising=False)
    change_line(own / "train.jsonl", 3, "{broken")
    change_line(own / "train.jsonl", 5, '{"images": [], "turns": [{"question": "q", "answer": 3}]}')
    change_line(own / "val.jsonl", 2, '{"images": ["images/gone.jpg"], "turns": [{"question": "q", "answer": "a"}]}')
    change_line(own / "val.jsonl", 4, '{"images": [], "turns": [{"question": "<|im_end|>", "answer": "a"}]}')
    (own.parent / "thesis").mkdir()
    (own.parent / "thesis" / "thesis.tex").touch()
    wrong = ("train.epoch=3", "lora.rank=0", "data.test=$UNSET/test.jsonl", "train.scheduler=coine")
    wrong += ("train.optimizer=schedule_free_adamw", "batch.max_tokens=45", "lora.targets=[nothing_proj]")
    found = checked(*wrong, data=on(own), output=str(own.parent / "thesis"))
    keys = [one.value for one in found.problems("run file")]
    assert [value.partition(":")[0] for value in keys] == ["data.test[0]", "lora.rank", "train.epoch"]
    assert "the environment variable UNSET is not set" in keys[0] and "did you mean `epochs`" in keys[2]
    train, val, test = found.problems("records")
    assert f"1 record cannot be read: {own}/val.jsonl:4: `question` contains <|im_end|>, a special token" in val.value
    assert f"2 records cannot be read: {own}/train.jsonl:3: not JSON" in train.value and "train.jsonl:5" in train.value
    assert "no records file at" in test.value and "$UNSET/test.jsonl is relative to the working directory" in test.value
    assert "scheduler` 'coine' is unknown; allowed: linear" in found.one("training").value
    said = "train.optimizer: schedule_free_adamw: You need to install `schedulefree` in order to use schedulefree"
    assert said in found.one("packages").value
    assert "lora.targets ['nothing_proj']" in found.one("adapter").value
    assert f"1 image of 1 record cannot be used: cannot read image {own}/images/gone.jpg" in found.one("images").value
    assert f"used by {own}/val.jsonl:2" in found.one("images").value
    long, *_ = found.problems("lengths")
    assert "left out, longer than 45 tokens (batch.max_tokens)" in long.value and long.level == "warning"
    assert long.do.startswith("raise `batch.max_tokens` to 50")
    assert "is not empty and does not hold a run" in found.one("output").value
    assert found.levels()["error"] == 11 and not found.report.is_ok


def test_the_number_of_records_that_are_left_out_is_said_with_the_key_to_change(checked):
    found = checked("batch.tokens_per_pack=40")
    train, val = found.problems("lengths")
    assert "of 439 records left out, longer than 40 tokens (batch.tokens_per_pack): " in train.value
    assert train.do == "raise `batch.tokens_per_pack` to 50, or lower `cache.max_pixels`"
    assert val.value.startswith("val: ")
    both = checked("batch.tokens_per_pack=40", "batch.max_tokens=41").problems("lengths")[0]
    assert both.do.startswith("raise `batch.max_tokens` and `batch.tokens_per_pack` to 50")


def test_only_the_first_records_are_read_unless_all_are_asked_for(checked):
    found = checked(most=20).report
    assert found.num_records == 60 and not found.is_complete and "--all reads the rest" in found.text()
    assert any(one.value.startswith("at least ") for one in found.results if one.what == "disk")
    everything = checked(most=None).report
    assert everything.num_records == 595 and everything.is_complete and "--all" not in everything.text()


@pytest.mark.parametrize(
    ("every", "split", "expected"),
    [
        ("epoch", "val", [("error", "val")]),
        (None, "val", [("warning", "val")]),
        ("epoch", "test", [("error", "val"), ("warning", "test")]),
    ],
)
def test_a_metric_that_applies_to_no_question_is_found(checked, every, split, expected):
    found = checked(eval={"metric": "point_inside", "every": every, "split": split}).problems("evaluation")
    text = "eval.metric: point_inside applies to none of the questions of "
    assert [(one.level, one.value.removeprefix(text)) for one in found] == expected


def test_a_function_of_ones_own_is_tried_on_a_reference(checked, tmp_path, monkeypatch):
    (tmp_path / "graded.py").write_text("def by(question, answer, reference, record):\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    [error] = checked("eval.metric=graded:by").problems("evaluation")
    assert error.level == "error" and "graded:by failed on" in error.value and "ZeroDivisionError" in error.value


def test_all_records_are_compared_with_the_recipe_of_variants(checked, own):
    lines = (own / "train.jsonl").read_text().splitlines()
    record = json.loads(lines[0])
    record["turns"][0]["answer"] = "(3, 4)"
    (own / "train.jsonl").write_text("\n".join([*lines, json.dumps(record)]) + "\n")
    [error] = checked("cache.augment.rotate=5", data=on(own), most=9).problems("variants")
    assert error.level == "error" and f"{own / 'train.jsonl'}:{len(lines) + 1}" in error.value


def test_an_image_in_the_cache_need_not_exist(checked, copy_built, own, tmp_path):
    """Training needs its features only; the plan knows the file by its name."""
    copy_built(tmp_path / "caches", own)
    shutil.rmtree(own / "images")
    assert checked(data=on(own)).problems() == []


def test_quarantined_images_are_errors_with_their_reason(checked, make_run, copy_built, own, tmp_path):
    """Also those whose header is right."""
    copy_built(tmp_path / "caches", own)
    image = min((own / "images").iterdir())
    image.write_bytes(image.read_bytes()[:-100])
    open_run(make_run(data=on(own)), TO_BUILD).build()
    found = checked(data=on(own)).one("images")
    assert found.level == "error" and f"{image} is quarantined: " in found.value
    assert "which this lists: lookonce data audit RECORDS --decode" in found.do


def test_another_model_or_other_pixels_have_no_cache_and_what_differs_is_named(checked, built):
    found = checked("cache.max_pixels=20000", cache={"dir": str(built.folder.parent)})
    differs = f"cache {built.folder.name} differs in image_processor.max_pixels: this run 20000"
    assert differs in found.one("cache").value


def test_a_full_disk_is_named_with_what_is_missing(checked, monkeypatch):
    monkeypatch.setattr(module, "free_bytes", lambda folder: 1_000_000)
    value = checked().one("disk").value
    assert "only 1.0 MB free" in value and "features in" in value and "checkpoints in" in value


def test_a_model_that_is_not_here_does_not_hide_the_rest(checked, tmp_path):
    found = checked("model.path=nowhere", data={"val": str(tmp_path / "none.jsonl")})
    assert "no model folder at" in found.one("model").value and "no records file" in found.one("records").value


def test_weights_that_are_missing_are_named_without_reading_any(checked, sample, tmp_path):
    shutil.copytree(sample / "model", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    index = {"weight_map": {"model.visual.blocks.0.x": "a.safetensors", "lm_head.weight": "b.safetensors"}}
    weights.rename(weights.with_name("a.safetensors"))
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks b.safetensors of its weights" in checked(model={"path": str(tmp_path / "model")}).one("model").value


@pytest.mark.parametrize(
    ("state", "level", "message"),
    [
        ("another run", "error", "holds another run, which differs in"),
        *((state, "warning", f"holds this run, {state}") for state in ("unfinished", "finished")),
        ("read-only", "error", "is not writable"),
    ],
)
def test_the_run_folder_must_be_free(checked, make_run, monkeypatch, state, level, message):
    run = make_run(lora={"rank": 5}) if state == "another run" else make_run()
    folder = RunFolder(run.output)
    folder.claim(run, {})
    folder.log.touch()
    if state == "unfinished":
        folder.trained.touch()
    if state == "finished":
        (run.output / "summary.json").touch()
    if state == "read-only":  # tests may run as root, who may write everywhere
        monkeypatch.setattr("os.access", lambda path, mode: Path(path) != run.output)
    found = checked().one("output")
    assert found.level == level and message in found.value


def test_a_run_folder_in_use_is_an_error_until_the_claim_ends(checked, make_run, backdate):
    claim, elsewhere = make_run().output / CLAIM, replace(Process.this(), machine="elsewhere")
    write_json(claim, {"worker": asdict(elsewhere), "command": "lookonce train", "started": 0.0})
    backdate(claim, 60)
    assert "is in use by `lookonce train`" in checked().one("output").value
    assert checked(cache={"claim_s": 30}).problems("output") == []


AT_24 = "4480 with train.gradient_checkpointing=true or batch.tokens_per_pack=3200 with train.frozen=nf4"
ADVICE = [
    *((None, "ok", ""), (80, "ok", ""), (24, "error", f"batch.tokens_per_pack={AT_24}")),
    (50, "warning", "batch.tokens_per_pack=7168 or train.gradient_checkpointing=selective"),
    (10, "error", "a smaller model, a larger GPU or train.fsdp on several"),
]


@pytest.mark.parametrize(("gpu_gb", "level", "advice"), ADVICE)
def test_gpu_memory_is_compared_with_the_measurements(checked, monkeypatch, gpu_gb, level, advice):
    monkeypatch.setattr("lookonce.checks.check.measured_name", lambda path, config: "Qwen3-VL-8B")
    [found] = [one for one in checked(gpu_gb=gpu_gb).report.results if one.what == "GPU memory"]
    assert found.level == level and "packs of 8,192 tokens: about 49 GB" in found.value
    assert found.do == (f"{advice} (docs/training.md#memory)" if advice else "")


def test_gpu_memory_of_quantised_weights_is_computed(checked, monkeypatch):
    monkeypatch.setattr("lookonce.checks.check.measured_name", lambda path, config: "Qwen3-VL-8B")
    results = checked("train.frozen=nf4", gpu_gb=80).report.results
    assert "about 40 GB of 80 GB, computed for nf4 weights and not measured" in str(results)


def test_a_training_by_rewards_needs_memory_and_time_for_its_answers(checked, monkeypatch):
    monkeypatch.setattr("lookonce.checks.check.measured_name", lambda path, config: "Qwen3-VL-8B")
    options = ("train.objective=grpo", "train.steps=7", "grpo.samples=4", "grpo.max_new_tokens=16")
    result = checked(*options, "batch.samples_per_step=32", gpu_gb=40)
    [memory] = [one for one in result.report.results if one.what == "GPU memory"]
    logits = f"at most {32 * 4 * 16 * 151_936 * 12 / 1e9:.0f} GB of it are logits of drawn answers; drawing"
    assert memory.level == "warning" and "about 53 GB of 40 GB" in memory.value and logits in memory.value
    assert memory.do.startswith("lower batch.tokens_per_pack, grpo.samples or grpo.max_new_tokens")
    [drawing] = [one for one in result.report.results if one.what == "drawing"]
    assert drawing.value.startswith(
        "7 steps; a step draws 4 answers to each of 32 questions, at most 2,048 tokens, and"
    )
    assert "its time was not measured for this model; a trial prints questions/s" in drawing.value
    assert "--set train.objective=grpo" in drawing.do and "--set train.steps=10 --set output=" in drawing.do
    assert not any(one.what == "drawing" for one in checked().report.results)
    monkeypatch.setattr("lookonce.checks.inputs.measured_name", lambda path, config: "Qwen3-VL-8B")
    milliseconds = 2.2 + (16 - 8) * (10.49 - 2.2) / (64 - 8)
    [drawing] = [one for one in checked(*options, "train.steps=3000").report.results if one.what == "drawing"]
    answers = 3000 * int(re.search(r"each of (\d+) questions", drawing.value)[1]) * 4
    assert f"about {duration(answers * milliseconds / 1000)} on one H100 if all answers are that long" in drawing.value
    assert "(measured with 9 questions an image, 8 answers to each, and answers of 8 and 64 tokens)" in drawing.value
    [drawing] = [one for one in checked(*options, "grpo.iterations=2").report.results if one.what == "drawing"]
    assert "its time was not measured with grpo.iterations" in drawing.value
    some = ("train.objective=grpo", "train.epochs=1", "train.steps=null")
    [drawing] = [one for one in checked(*some, most=3).report.results if one.what == "drawing"]
    assert "depends on the number of records: --all reads them" in drawing.value


@pytest.mark.parametrize(
    ("reward", "most", "expected"),
    [
        ("exact_match", None, []),
        (
            "point_inside",
            None,
            [("error", "point_inside is 0 for all answers to train, because no reference is a box")],
        ),
        (
            "{exact_match: 1, point_distance: 1, count: 1}",
            None,
            [("warning", "point_distance is 0 for all answers to train, because no reference is a point or a box")],
        ),
        (
            "point_inside",
            3,
            [("warning", "point_inside is 0 for all answers to the first 3 records of train, because")],
        ),
    ],
)
def test_rewards_that_are_the_same_for_all_answers_are_named(checked, reward, most, expected):
    options = ("train.objective=grpo", "train.steps=7", f"grpo.reward={reward}")
    results = [one for one in checked(*options, most=most).report.results if one.what == "rewards"]
    assert [(one.level, one.value[: len(text)]) for one, (_, text) in zip(results, expected, strict=True)] == expected


RESULTS = [
    Result("ok", "records", "train: 439 records"),
    Result("warning", "cache", "none", "lookonce cache build run.yaml"),
    Result("error", "images", "cannot read " + "/a/very/long/path" * 12, "repair it " * 12),
]


def test_a_result_is_a_line_and_what_to_do_another_and_the_last_line_counts():
    report = CheckReport(Path("run.yaml"), 439, True, 1.25, RESULTS)
    lines = report.text().splitlines()
    assert len(lines) == 7 and lines[0] == "ok       records      train: 439 records"
    assert lines[2] == " " * 22 + "-> lookonce cache build run.yaml"
    assert lines[5:] == ["", "1 error, 1 warning; 439 records; 1.2 s"]
    value = json.loads(json.dumps(report.to_json(), default=str))
    assert value["num_errors"] == 1 and value["results"][1]["do"] == "lookonce cache build run.yaml"


@pytest.mark.parametrize("thinks", [None, True])
def test_a_check_names_the_key_once_and_counts_tokens_as_with_it(checked, thinking_model, thinks):
    found = checked(model={"path": str(thinking_model)}, data={"enable_thinking": thinks})
    wrong = found.one("template")
    assert wrong.value == "training refuses every record: the chat template lets the model think before it answers"
    assert wrong.do == "set `data.enable_thinking: false`; docs/models.md#thinking"
    assert found.levels()["error"] == 1 and found.problems("lengths") == []
    mended = checked(model={"path": str(thinking_model)}, data={"enable_thinking": False})
    assert mended.levels()["error"] == 0
    lengths = [[one.value for one in each.report.results if one.what == "lengths"] for each in (found, mended)]
    assert lengths[0] == lengths[1] and len(lengths[0]) == 2


@pytest.mark.parametrize("knows", [False, True])
def test_a_template_that_no_key_mends_is_an_error_of_the_template_and_not_of_records(checked, sample, tmp_path, knows):
    """It puts no end token after answers."""
    path = shutil.copytree(sample / "model", tmp_path / "endless") / "chat_template.jinja"
    whole, end = path.read_text(), "'<|im_end|>\\n'"
    assert end in whole
    path.write_text("{%- if enable_thinking is false %}{%- endif %}" * knows + whole.replace(end, "'\\n'"))
    found = checked(model={"path": str(path.parent)})
    wrong = found.one("template")
    assert wrong.value.startswith("training refuses every record: the chat template puts no end token <|im_end|> after")
    assert wrong.do == "use the model's own chat template" and found.levels()["error"] == 1
