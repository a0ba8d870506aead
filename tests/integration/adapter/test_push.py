"""`lookonce adapter push` with huggingface_hub itself and a local Hub: what is uploaded works, and is not private."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from click.testing import Result
from huggingface_hub import ModelCard, snapshot_download
from support.rows import run
from transformers import AutoImageProcessor, AutoProcessor

from lookonce.cache.store.reader import VisionCache
from lookonce.errors import ModelError, UsageError
from lookonce.fetch import fetch
from lookonce.files import hash_file, write_json
from lookonce.run.config import RunFile, read_run_file
from lookonce.run.folder import RunFolder
from lookonce.workflow import train

NAME, BASE = "owner/adapter", "base-owner/base-model"
TOKEN = "hf_secret"
ADAPTER = ["README.md", "adapter_config.json", "adapter_model.safetensors", "metrics/val.json"]
RECORD = ["run.json", "run.yaml", "trained.json"]


@pytest.fixture
def hub(make_hub: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty Hub, and a token that may write to it."""
    hub = make_hub(NAME, "models", {}, [])
    hub.exists, hub.token = False, TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


@pytest.fixture(scope="module")
def trained(make_run_in: Callable[..., RunFile], built: VisionCache, tmp_path_factory) -> RunFolder:
    """A trained run with scores; tests must not change it."""
    folder = tmp_path_factory.mktemp("push")
    options = {"cache": {"dir": str(built.folder.parent)}, "eval": {"split": "val"}}
    run = make_run_in(folder, **options, train={"steps": 3, "learning_rate": 0.01})
    train(run, notify=lambda note: None)
    return RunFolder(run.output)


def push(folder: RunFolder, *words: str | Path) -> Result:
    return run("adapter", "push", folder.folder, NAME, "--base-model", BASE, *words)


@pytest.mark.guarantee("An uploaded adapter has no record, prediction or image.")
def test_an_upload_is_private_and_has_nothing_but_the_adapter_its_record_and_its_scores(hub, trained):
    result = push(trained, "--json")
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    assert sorted(hub.files) == sorted(value["files"]) == ADAPTER + RECORD
    assert hub.is_private and value["is_private"] and value["commit"] == hub.second
    assert value["start_from"] == f"hf://{NAME}@{hub.second}"
    assert {name: len(content) for name, content in hub.files.items()} == value["files"]
    weights = trained.adapter / "adapter_model.safetensors"
    assert hub.files["adapter_model.safetensors"] == weights.read_bytes()
    assert "licence of the dataset is not known" in result.stderr


@pytest.mark.guarantee("An uploaded adapter names no folder of the machine it comes from.")
def test_nothing_that_is_uploaded_names_a_folder_of_this_machine(hub, trained, sample):
    push(trained)
    private = [str(trained.folder), str(sample), str(Path.home()) + "/", str(Path.cwd()), TOKEN]
    for name, content in hub.files.items():
        assert not [one for one in private if one.encode() in content], name
    texts = [value for name in ("run.yaml", "adapter_config.json", "run.json") for value in leaves(hub.files[name])]
    assert len(texts) > 50 and not [text for text in texts if text.startswith(("/", "~"))]
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == BASE


def leaves(content: bytes) -> list[str]:
    """All texts in a YAML or JSON file."""

    def walk(value: Any) -> list[str]:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return [str(value)] if not isinstance(value, dict | list) else [text for one in inner for text in walk(one)]

    return walk(yaml.safe_load(content))


def test_the_card_has_what_the_hub_reads_and_the_run_file_can_be_read(hub, trained, tmp_path):
    push(trained, "--dataset", "kvasir-vqa")
    (tmp_path / "README.md").write_bytes(hub.files["README.md"])
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.base_model, card.data.library_name) == (BASE, "peft")
    assert card.data.datasets == ["SimulaMet-HOST/Kvasir-VQA"] and "CC BY-NC 4.0" in card.text
    written = json.loads(trained.metrics("val").read_text())
    mine, majority = card.data.eval_results
    assert mine.metric_value == written["overall"]["exact_match"] and mine.dataset_split == "val"
    assert mine.metric_args["confidence_interval_95"] == written["exact_match_interval"]
    assert majority.metric_value == written["baselines"]["majority"]["exact_match"]
    (tmp_path / "run.yaml").write_bytes(hub.files["run.yaml"])
    assert read_run_file(tmp_path / "run.yaml").lora == trained.read_run().lora
    assert "by_question" not in json.loads(hub.files["metrics/val.json"])


def test_the_code_on_the_card_answers_as_the_run_did(hub, trained, sample, stock_processor, monkeypatch, tmp_path):
    push(trained)
    line = json.loads(trained.predictions("val").read_text().splitlines()[0])
    [code] = re.findall(r"```python\n(.*?)```", hub.files["README.md"].decode(), re.S)
    downloaded = snapshot_download(NAME)  # PEFT would ask the real Hub, whose address it keeps since its import
    code = code.replace(BASE, str(sample / "model")).replace(NAME, downloaded).replace("image.jpg", line["images"][0])
    code = code.replace('"QUESTION"', json.dumps(line["question"])).replace('device_map="auto"', 'device_map="cpu"')
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda name: stock_processor(Path(name)))
    try:
        AutoImageProcessor.from_pretrained(sample / "model", backend="pil")
    except ImportError:  # some versions of transformers have it only where torchvision is installed
        image_processor = stock_processor(sample / "model").image_processor
        stand_in = SimpleNamespace(from_pretrained=lambda name, backend: image_processor)
        monkeypatch.setattr("transformers.AutoImageProcessor", stand_in)
    printed: list[str] = []
    exec(code, {"print": printed.append})
    assert printed == [line["predicted"]]


@pytest.mark.guarantee(
    "A training that starts from an uploaded adapter is bit-identical to one that starts from the run."
)
def test_a_training_starts_from_an_uploaded_adapter_as_from_the_run_itself(hub, trained, make_cached_run, tmp_path):
    push(trained)
    start = {"steps": 2, "seed": 5}
    local = make_cached_run(train=start | {"start_from": str(trained.folder)}, output=str(tmp_path / "local"))
    run_file = make_cached_run(train=start | {"start_from": f"hf://{NAME}"}, output=str(tmp_path / "second"))
    path = tmp_path / "run.yaml"
    path.write_text(run_file.to_yaml())
    with pytest.raises(UsageError, match=f"hf://{NAME} may change, .*lookonce fetch RUN.yaml --pin"):
        train(read_run_file(path), notify=lambda note: None)

    said = run("fetch", path)
    assert said.exit_code == 0 and f'write in section `train`: start_from: "hf://{NAME}@{hub.second}"' in said.stderr
    pinned = run("fetch", path, "--pin")
    assert f"train.start_from: hf://{NAME}@{hub.second}" in pinned.stderr
    assert run("fetch", path, "--pin").exit_code == 0 and run("fetch", path).stderr == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        second = read_run_file(path)
        train(second, notify=lambda note: None)
    train(local, notify=lambda note: None)
    weights = "adapter/adapter_model.safetensors"
    assert (second.output / weights).read_bytes() == (local.output / weights).read_bytes()
    recorded = [RunFolder(one.output).recorded_inputs()["start"] for one in (second, local)]
    assert recorded == [hash_file(trained.adapter / "adapter_model.safetensors")] * 2


def test_an_adapter_of_another_shape_or_without_a_record_is_refused_by_fetch(hub, trained, make_run):
    push(trained)
    start = {"start_from": f"hf://{NAME}"}
    with pytest.raises(UsageError, match=r"has another shape, which differs in\n  lora.rank: this run 9, that one 4"):
        fetch(make_run(train=start, lora={"rank": 9}))
    del hub.files["trained.json"]
    hub.second = "5" * 40
    with pytest.raises(Exception, match=rf"hf://{NAME}@5{{40}} has no record of a run"):
        fetch(make_run(train=start))
    with pytest.raises(ModelError, match="the Hub has no adapter 'owner/none' that you may access"):
        fetch(make_run(train={"start_from": "hf://owner/none"}))


@pytest.fixture
def merged(sample: Path, trained: RunFolder, tmp_path: Path) -> Path:
    """A model folder that says that it was made from the run's adapter."""
    folder = Path(shutil.copytree(sample / "model", tmp_path / "merged"))
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", config | {"_name_or_path": str(sample / "model")})
    adapter = hash_file(trained.adapter / "adapter_model.safetensors")
    write_json(folder / "lookonce-merge.json", {"made_from": {"adapter": adapter, "run": "a"}})
    return folder


def test_a_merged_model_is_fetched_and_opened_like_any_model(hub, trained, merged, make_run, sample):
    for name in ("predictions_1.json", "records.json", "notes.txt"):
        write_json(merged / name, {"question": "of a patient"})
    result = push(trained, "--merged", merged)
    assert result.exit_code == 0, result.stderr
    assert not {"predictions_1.json", "records.json", "notes.txt"} & {*hub.files}
    assert "library_name: transformers" in hub.files["README.md"].decode()
    assert json.loads(hub.files["config.json"])["_name_or_path"] == BASE
    assert not [name for name, content in hub.files.items() if str(sample).encode() in content]
    report = fetch(make_run(model={"path": NAME, "revision": hub.second}))
    assert report.is_pinned and report.problems == []
    kept = "model.safetensors"
    assert (report.folder / kept).read_bytes() == (merged / kept).read_bytes()


def test_a_merged_folder_of_another_adapter_or_an_incomplete_one_is_refused(hub, trained, merged):
    weights = merged / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    assert f"{weights} is damaged" in push(trained, "--merged", merged).stderr
    weights.write_bytes(content)
    write_json(merged / "lookonce-merge.json", {"made_from": {"adapter": "other"}})
    assert "was merged from another adapter" in push(trained, "--merged", merged).stderr
    (merged / "lookonce-merge.json").unlink()
    assert "was not made by `lookonce adapter merge`" in push(trained, "--merged", merged).stderr
    (merged / "model.safetensors").unlink()
    assert "it lacks model.safetensors" in push(trained, "--merged", merged).stderr
    assert hub.asked == []


def test_a_dry_run_asks_no_other_machine(hub, trained, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    result = push(trained, "--dry-run")
    assert result.exit_code == 0 and hub.asked == []
    assert all(name in result.stdout for name in ADAPTER + RECORD) and "private, branch main" in result.stdout


def test_an_interrupted_upload_commits_nothing_and_is_repeated(hub, trained):
    hub.num_breaks = 1
    first = push(trained)
    assert first.exit_code == 1 and "the same command again" in first.stderr and hub.messages == []
    assert push(trained).exit_code == 0 and sorted(hub.files) == ADAPTER + RECORD


def test_a_public_repository_is_written_to_only_if_the_user_says_so(hub, trained):
    hub.exists = True
    refused = push(trained)
    assert refused.exit_code == 1 and "owner/adapter exists and is public; add --public" in refused.stderr
    assert hub.files == {}
    done = push(trained, "--public", "--dataset", "kvasir-vqa")
    assert done.exit_code == 0 and hub.messages == ["Upload an adapter with lookonce"]
    assert "the dataset's licence, CC BY-NC 4.0, may bind the model" in done.stderr


def test_a_branch_gets_the_commit(hub, trained):
    before = hub.second
    assert push(trained, "--revision", "v1").exit_code == 0
    assert hub.second == before and hub.branches["v1"] != before
    assert 'revision="v1"' in hub.files["README.md"].decode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda hub, patch: patch.delenv("HF_TOKEN"), "no access token of the Hub; make one that may write at https"),
        (lambda hub, patch: setattr(hub, "name", "other/name"), "the access token may not write to owner/adapter"),
        (lambda hub, patch: setattr(hub, "refuses", (401, "")), "the access token may not write to owner/adapter"),
        (
            lambda hub, patch: patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True),
            "HF_HUB_OFFLINE is set, so nothing can be uploaded",
        ),
        (
            lambda hub, patch: patch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9"),
            "the Hub cannot be reached",
        ),
    ],
    ids=["no token", "other owner", "bad token", "offline", "no internet"],
)
def test_what_stops_an_upload_is_said_with_what_to_do(hub, trained, monkeypatch, change, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nonexistent")
    change(hub, monkeypatch)
    result = push(trained)
    assert result.exit_code == 1 and message in result.stderr and "Traceback" not in result.stderr
    assert hub.files == {}


def test_names_and_runs_that_cannot_be_uploaded_are_named(hub, trained, make_run: Callable[..., RunFile], tmp_path):
    folder = trained.folder
    malformed = run("adapter", "push", folder, "adapter")
    assert malformed.exit_code == 2 and "'adapter' is not the name of a repository on the Hub" in malformed.stderr
    unknown = run("adapter", "push", folder, NAME)
    assert "its name on the Hub is not known; name it: --base-model OWNER/NAME" in unknown.stderr
    untrained = RunFolder(tmp_path / "untrained")
    untrained.claim(make_run(), {})
    assert "holds no trained adapter; finish the training with: lookonce train" in push(untrained).stderr
    nothing = run("adapter", "push", tmp_path / "none", NAME)
    assert nothing.exit_code == 1 and "is not a run folder" in nothing.stderr
    assert hub.asked == []
