"""The run with whose adapter a training starts: what fits, and how it is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from support.answers import look_trained

from lookonce.checks.check import check_start
from lookonce.errors import ModelError, UsageError
from lookonce.run.folder import RunFolder
from lookonce.run.sections import HubAdapter, LoraSection, hub_adapter
from lookonce.run.start_adapter import adapter_hash, check_same_model, find_start, shape_differences, start_identity

COMMIT = "a1" * 20


@pytest.fixture
def trained(make_run, tmp_path) -> RunFolder:
    """A run that looks trained."""
    folder = RunFolder(tmp_path / "first")
    folder.claim(make_run(output=str(folder.folder)), {"language_model": "m1"})
    folder.adapter.mkdir()
    (folder.adapter / "adapter_model.safetensors").write_text("weights")
    look_trained(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"dropout": 0.1}, []),
        ({"targets": ["v_proj", "q_proj"]}, []),
        ({"targets": "all-linear"}, ["lora.targets"]),
        ({"rank": 8, "alpha": 16}, ["lora.rank", "lora.alpha"]),
        ({"rslora": True, "modules_to_save": ["embed_tokens"]}, ["lora.rslora", "lora.modules_to_save"]),
    ],
    ids=str,
)
def test_adapters_of_one_shape_may_differ_in_dropout_and_order_alone(change, names):
    theirs = LoraSection(targets=["q_proj", "v_proj"])
    mine = LoraSection.model_validate(theirs.model_dump() | change)
    assert [key for key, _, _ in shape_differences(mine, theirs)] == names


def test_a_run_is_found_by_its_folder_and_by_its_run_file(make_run, trained):
    for path in (trained.folder, trained.folder / "run.yaml"):
        run = make_run(train={"start_from": str(path)})
        assert find_start(run).folder == trained.folder
        assert start_identity(run, {}) == {"start": adapter_hash(trained)}
    assert find_start(make_run()) is None and start_identity(make_run(), {"start": "x"}) == {"start": None}


def test_an_adapter_of_another_model_or_of_the_run_itself_is_refused(make_run, trained, tmp_path):
    with pytest.raises(ValidationError, match="start_from is the run's own output"):
        make_run(train={"start_from": str(tmp_path / "run")})
    check_same_model(trained, {"language_model": "m1"})
    with pytest.raises(UsageError, match="was trained on another model, .*fits only the weights"):
        check_same_model(trained, {"language_model": "m2"})


@pytest.fixture
def pushed(trained, monkeypatch, tmp_path):
    """The same run as an upload on this machine, at a commit; `here` says whether it is."""
    folder = tmp_path / COMMIT
    folder.mkdir()
    for path in (trained.folder / "run.json", trained.trained, *trained.adapter.iterdir()):
        (folder / path.name).write_bytes(path.read_bytes())

    def find(name, revision, *, is_local=False):
        if (name, revision) != ("owner/name", COMMIT) or not (folder / "run.json").exists():
            raise ModelError(f"adapter {name} is not on this machine")
        return folder

    monkeypatch.setattr("lookonce.hub.find_adapter", find)
    return folder


def test_an_upload_is_like_the_run_that_it_was(make_run, trained, pushed):
    run = make_run(train={"start_from": f"hf://owner/name@{COMMIT}"})
    assert find_start(run).adapter == pushed and find_start(run).read_run() == trained.read_run()
    assert start_identity(run, {}) == {"start": adapter_hash(trained)}
    check_same_model(find_start(run), {"language_model": "m1"})
    with pytest.raises(UsageError, match="was trained on another model"):
        check_same_model(find_start(run), {"language_model": "m2"})
    with pytest.raises(UsageError, match="has another shape"):
        find_start(run.model_copy(update={"lora": LoraSection(rank=9)}))


def test_an_upload_that_is_not_here_counts_as_it_was_recorded(make_run, pushed):
    (pushed / "run.json").unlink()
    run = make_run(train={"start_from": f"hf://owner/name@{COMMIT}"})
    assert start_identity(run, {"start": "recorded"}) == {"start": "recorded"}
    [found] = check_start(run)
    assert found.level == "error" and "not on this machine" in found.value


@pytest.mark.parametrize("revision", ["", "@main", f"@{COMMIT[:7]}"])
def test_an_upload_without_a_commit_is_refused(make_run, pushed, revision):
    with pytest.raises(UsageError, match=r"may change, because it names no commit; write hf://owner/name@COMMIT"):
        find_start(make_run(train={"start_from": f"hf://owner/name{revision}"}))


def test_a_check_says_what_would_stop_the_start_and_a_recorded_one_counts_when_the_other_run_is_gone(
    make_run, trained, tmp_path
):
    [found] = check_start(make_run(train={"start_from": str(trained.folder)}))
    assert (found.level, found.value) == ("ok", f"from the adapter of {trained.folder}")
    gone = make_run(train={"start_from": str(tmp_path / "gone")})
    [found] = check_start(gone)
    assert found.level == "error" and "is not a run folder" in found.value
    assert start_identity(gone, {"start": "recorded"}) == {"start": "recorded"}
    assert list(check_start(make_run())) == []
    RunFolder(gone.output).folder.mkdir(parents=True, exist_ok=True)
    RunFolder(gone.output).log.touch()  # it has begun
    assert list(check_start(gone)) == []
    options = {"start_from": str(tmp_path / "gone"), "objective": "grpo"}
    [found] = check_start(make_run(train=options, grpo={"kl": 0.1}))
    assert found.level == "error", "its reference are the weights of the start"


@pytest.mark.parametrize(
    ("text", "adapter"),
    [
        (f"hf://owner/name@{COMMIT}", HubAdapter("owner/name", COMMIT)),
        ("hf://owner/name", HubAdapter("owner/name", None)),
        ("hf://o.w-n/na.me_2@v1/beta", HubAdapter("o.w-n/na.me_2", "v1/beta")),
    ],
)
def test_an_adapter_on_the_hub_stays_text_and_is_written_as_it_was(make_run, text, adapter):
    run = make_run(train={"start_from": text})
    assert run.train.start_from == text and hub_adapter(text) == adapter and str(adapter) == text
    assert f"start_from: {text}" in run.to_yaml()


@pytest.mark.parametrize("text", ["hf://owner", "hf://", "hf://owner/name@", "hf://owner/name@a@b", "hf://a/b/c"])
def test_a_malformed_one_is_refused(make_run, text):
    with pytest.raises(ValidationError, match="an adapter on the Hub is hf://OWNER/NAME@COMMIT"):
        make_run(train={"start_from": text})


def test_all_others_are_paths(make_run, monkeypatch):
    monkeypatch.setenv("PLACE", "/data")
    for text, path in (("owner/name", "owner/name"), ("$PLACE/first", "/data/first")):
        assert make_run(train={"start_from": text}).train.start_from == Path(path)
    assert hub_adapter(Path("hf:/owner/name")) is None and hub_adapter(None) is None
    with pytest.raises(ValidationError, match="the environment variable NONE is not set"):
        make_run(train={"start_from": "$NONE/first"})
