"""`lookonce.save_run`: the adapter of another program goes through the commands; one that does not fit is refused."""

from __future__ import annotations

import contextlib
import json
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.rows import run as lookonce
from support.sample import stock_answer
from transformers import AutoModelForImageTextToText

from lookonce import Answerer, load_without_tower, save_run
from lookonce.adapter.merge import merge
from lookonce.cache.store.reader import VisionCache
from lookonce.datasets.sample.model import write_model
from lookonce.errors import FolderInUse, LookonceError, ModelError, RunFolderError, UsageError
from lookonce.eval.run import evaluate_run
from lookonce.families.lookup import FAMILIES
from lookonce.run.config import RunFile
from lookonce.run.folder import RunClaim, RunFolder, TrainedElsewhere
from lookonce.status import find_state
from lookonce.workflow import train

pytestmark = [
    pytest.mark.usefixtures("no_fsync"),
    pytest.mark.filterwarnings("ignore:.*[Tt]ied"),
    pytest.mark.filterwarnings("ignore:'pin_memory'"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
]
NUM_ASKED, NUM_TOKENS = 6, 6
WEIGHTS = "adapter_model.safetensors"
LORA = {"rank": 3, "alpha": 5, "targets": ["q_proj"]}
"""Another section `lora` than that of any adapter here."""


@pytest.fixture(scope="module")
def adapter(root: Path, sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter that an example trains in a few steps, as strong as after many."""
    folder = tmp_path_factory.mktemp("example")
    (folder / "images").symlink_to(sample / "images")
    lines = (sample / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(lines[:48]))
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(folder):
        patch.setattr(sys, "argv", ["trainer.py", str(sample / "model"), "few.jsonl", "adapter"])
        runpy.run_path(str(root / "examples" / "trainer.py"), run_name="__main__")
    tensors = load_file(folder / "adapter" / WEIGHTS)
    stronger = {name: one * 200 if "lora_B" in name else one for name, one in tensors.items()}
    save_file(stronger, folder / "adapter" / WEIGHTS, {"format": "pt"})
    return folder / "adapter"


@pytest.fixture(scope="module")
def run(
    adapter: Path, built: VisionCache, make_run_in: Callable[..., RunFile], tmp_path_factory: pytest.TempPathFactory
) -> RunFile:
    """The run file whose run folder the adapter has become; tests must not change it."""
    made = make_run_in(
        tmp_path_factory.mktemp("own"),
        cache={"dir": str(built.folder.parent)},
        lora=LORA,
        eval={"max_new_tokens": NUM_TOKENS, "split": "val"},
    )
    assert save_run(adapter, made) == made.output
    evaluate_run(made.output, "val")
    return made


@pytest.mark.guarantee(
    "A run made from an adapter of another program answers with the tokens that PEFT gives on the stock "
    "model, in float32."
)
@pytest.mark.guarantee("Stock transformers gives the answers of a merged model without PEFT.")
def test_evaluation_predict_and_merge_give_the_answers_of_peft_on_the_stock_model(
    run, adapter, sample, stock_processor, tmp_path
):
    stock = AutoModelForImageTextToText.from_pretrained(sample / "model", dtype=torch.float32)
    model, processor = PeftModel.from_pretrained(stock, str(adapter)).eval(), stock_processor(sample / "model")
    lines = [json.loads(line) for line in (run.output / "predictions" / "val.jsonl").read_text().splitlines()]
    answers = [stock_answer(model, processor, line, NUM_TOKENS) for line in lines[:NUM_ASKED]]
    with model.disable_adapter():
        assert answers != [stock_answer(model, processor, line, NUM_TOKENS) for line in lines[:NUM_ASKED]]
    assert [line["predicted"] for line in lines[:NUM_ASKED]] == answers
    answerer = Answerer.open(run.output)
    asked = [answerer.answer([Path(*line["images"])], line["question"]) for line in lines[:NUM_ASKED]]
    assert [one.text for [one] in asked] == answers
    done = lookonce("adapter", "merge", run.output, tmp_path / "merged", "--dtype", "fp32")
    assert done.exit_code == 0 and "in fp32" in done.stdout and "0.00% of what the adapter changes" in done.stdout
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert [stock_answer(merged, processor, line, NUM_TOKENS) for line in lines[:NUM_ASKED]] == answers


def test_the_record_has_the_adapters_options_and_nothing_of_the_training(run, adapter):
    folder = RunFolder(run.output)
    trained = folder.read_trained()
    assert isinstance(trained, TrainedElsewhere) and json.loads(folder.trained.read_text()).keys() == {
        "adapter",
        "elsewhere",
    }
    assert trained.adapter[WEIGHTS] and (folder.adapter / WEIGHTS).read_bytes() == (adapter / WEIGHTS).read_bytes()
    lora = folder.read_run().lora
    assert (lora.rank, lora.alpha, len(lora.targets), lora.modules_to_save) == (16, 32, 7, [])
    assert not (run.output / "environment.json").exists()


def test_status_check_pages_and_card_say_that_it_was_trained_elsewhere(run, tmp_path):
    state = find_state(run)
    assert (state.missing(), state.training.text()) == ([], "trained elsewhere")
    run_file = tmp_path / "run.yaml"
    run_file.write_text(run.to_yaml())
    assert "holds an adapter that another program trained" in " ".join(lookonce("check", run_file).output.split())
    done = lookonce("report", run.output, "--json", "-o", tmp_path / "page.html")
    report = json.loads(done.stdout)
    [facts], [cost] = report["provenance"]["facts"].values(), report["cost"].values()
    assert facts["trained"] == "by another program, saved with lookonce.save_run"
    assert facts["device"] == "not recorded" and "lookonce train" not in facts["commands"]
    assert any("its steps, its time and its settings" in line for line in report["provenance"]["limits"])
    assert {cost[name] for name in ("num_steps", "num_samples", "training_seconds", "gpu_hours", "num_gpus")} == {None}
    pushed = lookonce("adapter", "push", run.output, "a/b", "--base-model", "c/d", "--dry-run", "--json")
    card = json.loads(pushed.stdout)["card"]
    assert "- Training: by another program than `lookonce train`" in card and "cached" not in card
    assert not re.search(r"Training took|GPU hours|Versions|samples, seed|Trained with", card)
    assert "LoRA: rank 16, alpha 32, in down_proj" in card and "fine-tuned to answer" in card


def test_the_section_lora_and_the_length_of_a_run_file_do_not_count(run, tmp_path):
    run_file = tmp_path / "run.yaml"
    run_file.write_text(run.to_yaml())
    done = lookonce("eval", run_file, "--set", "train.steps=99", "--set", "lora.rank=8", "--json")
    assert done.exit_code == 0, done.output
    done = lookonce("eval", run_file, "--set", "train.precision=bf16")
    assert "holds another run, which differs in" in done.stderr and "train.precision" in done.stderr


def test_training_there_is_refused(run):
    before = sorted(path.name for path in run.output.iterdir())
    with pytest.raises(RunFolderError, match=r"another program trained, .* evaluate it with: lookonce eval"):
        train(run, resume=True, notify=lambda note: None)
    assert sorted(path.name for path in run.output.iterdir()) == before


def test_a_training_starts_with_it(run, make_run_in, built, tmp_path):
    lora = {"rank": 16, "alpha": 32, "targets": RunFolder(run.output).read_run().lora.targets}
    later = make_run_in(
        tmp_path,
        cache={"dir": str(built.folder.parent)},
        data={"test": []},
        lora=lora,
        train={"start_from": str(run.output), "epochs": 0, "steps": None},
    )
    train(later, notify=lambda note: None)
    mine, theirs = (load_file(one.output / "adapter" / WEIGHTS) for one in (later, run))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_two_such_runs_are_no_seeds_of_each_other(run, adapter, tmp_path):
    copy = run.model_copy(update={"output": tmp_path / "other", "train": run.train.model_copy(update={"seed": 1})})
    save_run(adapter, copy)
    shutil.copytree(run.output / "predictions", copy.output / "predictions")
    done = lookonce("compare", run.output, copy.output, "--json")
    assert done.exit_code == 0, done.output
    assert [one["seeds"] for one in json.loads(done.stdout)["candidates"]] == [[], []]


# What is refused, on adapters that were not trained.


@pytest.fixture(scope="module")
def make_adapter(sample: Path) -> Callable[..., Path]:
    """Makes an adapter on the sample's model, without its tower or with it."""

    def make(folder: Path, config: Any = None, *, has_tower: bool = False, **options: Any) -> Path:
        model = (
            AutoModelForImageTextToText.from_pretrained(sample / "model", dtype=torch.float32)
            if has_tower
            else load_without_tower(sample / "model", dtype=torch.float32, device="cpu")
        )
        own = config or LoraConfig(**({"r": 4, "target_modules": ["q_proj", "v_proj"]} | options))
        get_peft_model(model, own).save_pretrained(str(folder))
        return folder

    return make


def changed(adapter: Path, **options: Any) -> Path:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))
    return adapter


@pytest.mark.guarantee(
    "An adapter with weights in the tower, of another model or shape, or with options that a run cannot have "
    "is refused before anything is written."
)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"use_dora": True},
            r"cannot become a run: a run file cannot express use_dora=True\. A run has .* r, lora_alpha,",
        ),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"rank_pattern": {"q_proj": 2}}, r"rank_pattern=\{'q_proj': 2\}"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"lora_alpha": 0.5}, r"section `lora` of a run file, is wrong:\n.*alpha"),
        ({"target_modules": "all-linear", "has_tower": True}, r"reaches into the vision tower"),
        ({"target_modules": ["q_proj", "qkv"]}, "reaches into the vision tower"),
        ({"config": IA3Config(target_modules=["q_proj"], feedforward_modules=[])}, "it is of the type .*IA3"),
    ],
)
def test_an_adapter_that_a_run_cannot_have_is_refused(make_adapter, make_run, tmp_path, options, said):
    adapter, run = make_adapter(tmp_path / "adapter", **options), make_run()
    with pytest.raises((UsageError, ModelError), match=said):
        save_run(adapter, run)
    assert not run.output.exists()


def test_modules_trained_as_a_whole_and_a_regular_expression_are_taken(make_adapter, make_run, tmp_path):
    expression = r".*language_model.*\.(q_proj|v_proj)"
    options = {"modules_to_save": ["lm_head"], "use_rslora": True, "lora_dropout": 0.1, "init_lora_weights": "gaussian"}
    run = make_run(eval={"split": "val"})
    save_run(make_adapter(tmp_path / "adapter", target_modules=expression, **options), run)
    lora = RunFolder(run.output).read_run().lora
    assert (lora.targets, lora.modules_to_save, lora.rslora, lora.dropout) == (expression, ["lm_head"], True, 0.1)
    assert merge(run.output, tmp_path / "merged").num_changed == 9


@pytest.mark.guarantee(
    "An adapter with weights in the tower, of another model or shape, or with options that a run cannot have "
    "is refused before anything is written."
)
def test_an_adapter_of_another_model_is_refused(make_adapter, make_run, sample, tmp_path):
    other = shutil.copytree(sample / "model", tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    name = next(name for name in tensors if "q_proj" in name)
    save_file(tensors | {name: tensors[name] + 1}, other / "model.safetensors", {"format": "pt"})
    adapter, run = make_adapter(tmp_path / "adapter"), make_run()
    with pytest.raises(UsageError, match=r"whose weights differ from those of `model.path`, "):
        save_run(changed(adapter, base_model_name_or_path=str(other)), run)
    with pytest.raises(UsageError, match=r"trained on owner/name, which is not on this machine, .*base_model_name"):
        save_run(changed(adapter, base_model_name_or_path="owner/name"), run)
    assert not run.output.exists()
    copy = shutil.copytree(sample / "model", tmp_path / "copy")
    save_run(changed(adapter, base_model_name_or_path=str(copy)), run)


def test_a_command_that_is_given_the_adapter_names_save_run(make_adapter, tmp_path):
    done = lookonce("eval", make_adapter(tmp_path / "adapter"))
    assert "adapter holds an adapter and no run; make a run of it with: lookonce.save_run(" in done.stderr


def test_what_is_not_an_adapter_is_named(make_adapter, make_run, tmp_path):
    run = make_run()
    with pytest.raises(UsageError, match=r"has no adapter_model.safetensors, as `model.save_pretrained"):
        save_run(tmp_path, run)
    adapter = make_adapter(tmp_path / "adapter")
    tensors = load_file(adapter / WEIGHTS)
    fewer = {name: one for name, one in tensors.items() if "layers.1." not in name}
    more = tensors | {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}
    narrower = {name: one[:, :2].contiguous() if "lora_B" in name else one for name, one in tensors.items()}
    for others, said in (
        (fewer, r"none in the adapter, \[4, \d+\] on this model"),
        (more, r"\[4, 64\] in the adapter, none on"),
        (narrower, r"\[\d+, 2\] in the adapter, \[\d+, 4\] on"),
    ):
        save_file(others, adapter / WEIGHTS)
        with pytest.raises(UsageError, match=rf"\d+ tensors? would have another shape on .*, the first being .*{said}"):
            save_run(adapter, run)
    save_file(tensors, adapter / WEIGHTS)
    for options, said in (
        ({"target_modules": 5}, r"is wrong:\n.*targets"),
        ({"r": "four"}, r"is wrong:\n.*rank"),
        ({"exclude_modules": [1, "a"]}, r"exclude_modules="),
        ({"base_model_name_or_path": 5}, r"trained on 5, which is not on this machine"),
    ):
        shutil.copytree(adapter, tmp_path / "changed", dirs_exist_ok=True)
        with pytest.raises(LookonceError, match=said):
            save_run(changed(tmp_path / "changed", **options), run)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(LookonceError, match=r"adapter_config.json cannot be read"):
        save_run(adapter, run)
    assert not run.output.exists()


def test_a_folder_that_holds_a_run_is_left_alone_and_an_interrupted_save_is_done_again(
    make_adapter, make_run, tmp_path, monkeypatch
):
    adapter, run = make_adapter(tmp_path / "adapter"), make_run()
    with RunClaim(run.output, "lookonce eval") as owner:
        owner.take()
        with pytest.raises(FolderInUse):
            save_run(adapter, run)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("lookonce.adapter.save.flush_files", Mock(side_effect=KeyboardInterrupt))
        save_run(adapter, run)
    assert not RunFolder(run.output).trained.exists()
    save_run(str(adapter), run)
    RunFolder(run.output).check_adapter()
    with pytest.raises(RunFolderError, match="holds a run already; choose another `output`"):
        save_run(adapter, run)
    weights = run.output / "adapter" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(RunFolderError, match="into another `output` with lookonce.save_run"):
        RunFolder(run.output).check_adapter()


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_targets_of_each_family_are_those_of_the_language_model(family, make_run, tmp_path):
    """Also where modules of the tower have the same names."""
    write_model(tmp_path / "model", family=family)
    model = load_without_tower(tmp_path / "model", dtype=torch.float32, device="cpu")
    options = {"target_parameters": [*family.experts]} if family.experts else {}
    get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", **options)).save_pretrained(tmp_path / "adapter")
    run = make_run(model={"path": str(tmp_path / "model")})
    save_run(tmp_path / "adapter", run)
    stock = AutoModelForImageTextToText.from_pretrained(tmp_path / "model")
    names = PeftModel.from_pretrained(stock, str(run.output / "adapter")).state_dict()
    assert not [name for name in names if f".{family.tower}." in name and "lora" in name]
    assert merge(run.output, tmp_path / "merged").num_changed
