"""Run files: resolved, strict, and helpful about mistakes; their paths hold in every working directory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from lookonce.errors import CacheError, ModelError, RecordsError, RunFolderError, UsageError
from lookonce.run.config import REMOVED, RunFile, read_run_file, with_absolute_paths
from lookonce.run.folder import RunFolder
from lookonce.run.open import TO_BUILD, open_run, source_of
from lookonce.run.records import read_splits
from lookonce.run.sections import RECORDED

MINIMAL = "model: {path: m}\ndata: {train: a.jsonl}\noutput: runs/a\n"
REWARDED = MINIMAL + "train: {objective: grpo}\n"
VALIDATED = MINIMAL.replace("a.jsonl", "a.jsonl, val: b.jsonl")


def read(tmp_path: Path, text: str, *assignments: str) -> RunFile:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return read_run_file(path, assignments)


def test_a_record_is_never_longer_than_a_pack_and_the_key_that_limits_it_is_known(tmp_path):
    def longest(*assignments: str) -> tuple[int, str]:
        batch = read(tmp_path, MINIMAL, "batch.max_tokens=900", *assignments).batch
        return batch.longest_record, batch.limiting_key

    assert longest() == (900, "batch.max_tokens")
    assert longest("batch.tokens_per_pack=500") == (500, "batch.tokens_per_pack")
    assert longest("batch.tokens_per_pack=500", "batch.mode=separate") == (900, "batch.max_tokens")


def test_one_reward_is_a_weight_of_one_and_functions_have_weights_too(tmp_path):
    assert read(tmp_path, REWARDED, "grpo.reward=count").grpo.reward == {"count": 1}
    weights = {"my.rewards:short": -0.5, "exact_match": 1}
    run = read(tmp_path, REWARDED, "grpo.reward={my.rewards:short: -0.5, exact_match: 1}")
    assert run.grpo.reward == weights and read(tmp_path, run.to_yaml()) == run


def test_a_resolved_run_file_reads_as_the_same_run_and_compiled_code_is_beside_the_caches(tmp_path):
    run = read(tmp_path, MINIMAL, "train.epochs=5", "lora.targets=[q_proj]", "cache.dir=/shared/caches")
    assert read(tmp_path, run.to_yaml()) == run and run.compile_cache == Path("/shared/caches/compiler")


def test_all_run_files_of_the_project_are_valid(root):
    files = sorted((root / "experiments").glob("*.yaml"))
    paths = [path for path in files if "\nvariants:" not in path.read_text()]  # the others are study files
    assert paths
    for path in paths:
        read_run_file(path)


@pytest.mark.parametrize(
    ("assignment", "section", "key", "value"),
    [
        ("train.epochs=5", "train", "epochs", 5),
        ("train.learning_rate=1.0e-3", "train", "learning_rate", 1e-3),
        ("data.train=[a.jsonl, b.jsonl]", "data", "train", [Path("a.jsonl"), Path("b.jsonl")]),
        ("model.revision=null", "model", "revision", None),
        ("model.path=a=b", "model", "path", "a=b"),
        ("lora.targets='.*q_proj'", "lora", "targets", ".*q_proj"),
    ],
)
def test_set_replaces_a_key(tmp_path, assignment, section, key, value):
    assert getattr(getattr(read(tmp_path, MINIMAL, assignment), section), key) == value


@pytest.mark.parametrize(
    ("text", "assignments", "message"),
    [
        (MINIMAL + "train: {epoch: 3}\n", (), r"train.epoch: unknown key; did you mean `epochs`\?"),
        (MINIMAL + "trian: {}\n", (), r"trian: unknown key; did you mean `train`\?"),
        (MINIMAL + "lora: {zzz: 1}\n", (), "lora.zzz: unknown key; known keys: rank, alpha, dropout"),
        (MINIMAL + "lora: {rnk: 1}\ntrain: {epoch: 3}\n", (), r"(?s)lora.rnk.*train.epoch"),
        ("data: {train: a}\noutput: b\n", (), "model: is missing"),
        ("model: {path: m}\ndata:\n  train:\noutput: b\n", (), "data.train: is missing"),
        (MINIMAL + "lora: {rank: 0}\n", (), r"lora.rank: .* \(got 0\)"),
        (MINIMAL + "train: {precision: fp8}\n", (), r"train.precision: .*'bf16', 'fp16' or 'fp32' \(got 'fp8'\)"),
        (VALIDATED + "train: {best: loss, eval_steps: 3}\n", (), "save_steps to be a multiple of train.eval_steps"),
        (MINIMAL + "train: {best: loss}\n", (), "train.best: loss .* needs data.val"),
        (MINIMAL + "eval: {every: epoch}\n", (), "eval.every .* needs data.val"),
        (VALIDATED + "train: {best: exact_match}\n", (), "train.best: `exact_match` is now called `metric`"),
        (VALIDATED + "train: {patience: 3}\n", (), "train.patience needs train.best, .*: loss or metric"),
        (
            VALIDATED + "eval: {metric: bleu4}\n",
            (),
            r"eval.metric: a metric is one of exact_match, .*bleu, .*module:fun",
        ),
        (VALIDATED + "eval: {metric: 'a b:c'}\n", (), r"eval.metric: .* \(got 'a b:c'\)"),
        (VALIDATED + "train: {best: metric}\n", (), "train.best: metric .* needs eval.every"),
        (VALIDATED + "train: {best: metric}\neval: {every: 3}\n", (), r"checkpoint wherever .*got 3, .*=None\)"),
        (VALIDATED + "train: {best: metric, save_steps: 6}\neval: {every: epoch}\n", (), "checkpoint wherever"),
        (VALIDATED, ("eval.every=steps",), r"eval.every.*'epoch'"),
        (MINIMAL + "train: {fsdp: true, frozen: nf4}\n", (), r"train: fsdp cannot shard .*\(got frozen=nf4\)"),
        (MINIMAL, ("train.track=[comet]",), "'tensorboard', 'wandb' or 'mlflow'"),
        (MINIMAL, ("train.steps=true",), r"train.steps: Input should be a number \(got True\)"),
        (MINIMAL, ("data.held_out={fold: true, of: 2}",), "data.held_out.fold: Input should be a number"),
        (MINIMAL, ('output="a\\0b"',), "output: Input should have no NUL character"),
        ("model: {path: m}\ndata: {train: []}\noutput: b\n", (), "data.train: .*at least 1 item"),
        ("model: {path: ''}\ndata: {train: a}\noutput: b\n", (), "model.path: .*at least 1 character"),
        ("- a\n- b\n", (), "mapping"),
        ("model: [unclosed\n", (), "run.yaml"),
        (MINIMAL, ("epochs",), "section.key=value"),
        (MINIMAL, ("output.a=3",), "output is not a section"),
        (MINIMAL, ("train.epochs=[",), "is not a YAML value"),
        (MINIMAL, ("train.epochs=0",), "nothing is trained, so `start_from` must"),
        (
            REWARDED,
            ("grpo.reward=f1",),
            r"grpo.reward.f1.*a reward is one of exact_match, .*module:function \(got 'f1'\)",
        ),
        (REWARDED, ("grpo.reward={exact_match: true}",), r"grpo.reward.exact_match: .*valid number \(got True\)"),
        (REWARDED, ("grpo.reward={exact_match: .nan}",), r"grpo.reward.exact_match: .* \(got nan\)"),
        (REWARDED, ("grpo.reward={}",), "grpo.reward: .*at least 1 item"),
        (REWARDED, ("grpo.clip=[0.2]",), "grpo.clip: .*at least 2 items"),
        (REWARDED, ("lora.dropout=0.1",), r"train.objective: grpo needs lora.dropout: 0 \(got 0.1\)"),
        (REWARDED, ("train.fsdp=true",), "train.objective: grpo needs train.fsdp: false"),
        (REWARDED, ("batch.mode=packed",), r"train.objective: grpo needs batch.mode: shared \(got packed\)"),
        (REWARDED, ("batch.loss=sample",), r"needs batch.loss: token \(got sample\); grpo.loss says"),
        (REWARDED, ("batch.balance=answer",), r"needs batch.balance: null \(got answer\)"),
        (REWARDED, ("batch.order=as_given",), r"needs batch.order: random \(got as_given\)"),
    ],
)
def test_all_mistakes_are_refused_at_once_and_the_message_says_what_is_allowed(tmp_path, text, assignments, message):
    with pytest.raises(UsageError, match=message):
        read(tmp_path, text, *assignments)


def test_an_empty_section_has_its_defaults_and_a_learning_rate_that_yaml_reads_as_text_is_a_number(tmp_path):
    run = read(tmp_path, MINIMAL + "train:\n# epochs: 3\nlora:\n", "lora.rank=4")
    assert run.train.epochs == 3 and run.lora.rank == 4
    assert yaml.safe_load("1e-4") == "1e-4"
    assert read(tmp_path, MINIMAL + "train: {learning_rate: 1e-4}\n").train.learning_rate == 1e-4


def test_a_blank_key_has_its_default_or_is_null_where_it_may_be(tmp_path):
    sections = (
        "data:\n  train: a.jsonl\n  val:\n  test:\ntrain:\n  scheduler_args:\n  track:\n  seed:\n  steps:\nlora:\n"
    )
    blank = read(tmp_path, f"model: {{path: m}}\noutput: runs/a\n{sections}")
    assert blank == read(tmp_path, "model: {path: m}\noutput: runs/a\ndata: {train: a.jsonl}\n")
    assert blank.data.val == blank.train.track == [] and blank.train.steps is None


@pytest.mark.parametrize("name", REMOVED)
def test_a_key_that_was_removed_is_refused_with_what_to_write_instead(tmp_path, name):
    with pytest.raises(UsageError, match=re.escape(f"{name}: this key was removed; {REMOVED[name]}")):
        read(tmp_path, MINIMAL, f"{name}=null")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("eval.turns=own", "eval.turns: .*`own` is now called `predicted`"),
        ("eval.staged=true", "eval.staged: .*`true` is now called `reference`"),
        ("data.context={by: stage, order: [1, 2], answers: true}", "answers.*`true` is now called `reference`"),
    ],
)
def test_former_names_of_answers_are_refused_with_the_new_one_and_read_in_a_recorded_run(
    tmp_path, make_run, assignment, message
):
    with pytest.raises(UsageError, match=message):
        read(tmp_path, MINIMAL, assignment)
    values = make_run().model_dump(mode="json")
    values["eval"] |= {"turns": "true", "staged": "own"}
    values["data"]["context"] = {"by": "stage", "order": [1, 2], "answers": "true"}
    run = RunFile.model_validate(values, context=RECORDED)
    assert (run.eval.turns, run.eval.staged, run.data.context.answers) == ("reference", "predicted", "reference")


def test_a_recorded_run_may_have_removed_keys_that_say_what_is_still_done(make_run):
    values = make_run().model_dump(mode="json")
    values["train"] |= {"prefetch": 3, "tf32": True}
    values["data"]["skip_unusable"] = False
    assert RunFile.model_validate(values, context=RECORDED) == make_run()
    values["data"]["skip_unusable"] = True
    with pytest.raises(ValidationError, match=r"data\.skip_unusable"):
        RunFile.model_validate(values, context=RECORDED)


@pytest.fixture
def read_here(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("MODELS", "/models")
    monkeypatch.delenv("UNSET", raising=False)

    return lambda *assignments: read(tmp_path, MINIMAL, *assignments)


def test_a_tilde_is_the_home_folder_and_that_of_an_unknown_user_is_refused(read_here):
    run = read_here("output=~/runs", "data.train=~/a.jsonl", "model.path=~/m")
    assert run.output == Path("/home/someone/runs") and run.data.train == [Path("/home/someone/a.jsonl")]
    assert run.model.path == "/home/someone/m"
    with pytest.raises(UsageError, match="output: there is no home folder of ~no-such-user"):
        read_here("output=~no-such-user/runs")


@pytest.mark.parametrize("path", ["$MODELS/x", "${MODELS}/x"])
def test_environment_variables_are_expanded(read_here, path):
    run = read_here(f"model.path={path}", f"cache.dir={path}", f"data.val={path}")
    assert run.model.path == "/models/x"
    assert run.cache.dir == Path("/models/x") and run.data.val == [Path("/models/x")]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-VL-8B-Instruct", "./owner/name"])
def test_the_name_of_a_model_stays_as_it_is(read_here, name):
    """Without its ./ a folder would have the form of a Hub name."""
    assert read_here(f"model.path={name}").model.path == name


@pytest.mark.parametrize("key", ["model.path", "data.image_root", "cache.dir", "output", "data.train"])
@pytest.mark.parametrize("path", ["$UNSET/x", "${UNSET}/x"])
def test_a_variable_that_is_not_set_is_refused(read_here, key, path):
    message = rf"  {key}.*: the environment variable UNSET is not set; set it, or write the path .*\(got .*UNSET.*/x'\)"
    with pytest.raises(UsageError, match=message):
        read_here(f"{key}={path}")


@pytest.mark.parametrize("key", ["model.path", "output"])
def test_an_empty_variable_is_refused(read_here, monkeypatch, key):
    """With an empty SCRATCH, $SCRATCH/caches would be /caches."""
    monkeypatch.setenv("EMPTY", "")
    with pytest.raises(UsageError, match=f"  {key}: the environment variable EMPTY is empty; set it, or write"):
        read_here(f"{key}=$EMPTY/x")
    assert read_here("cache.stage=${EMPTY}/x").cache.stage == Path("${EMPTY}/x")


def test_in_cache_stage_a_variable_need_not_be_set(read_here):
    """SLURM_TMPDIR is set within jobs only, and the run file is also read elsewhere. The folder is never made."""
    assert read_here("cache.stage=$UNSET/caches").cache.stage == Path("$UNSET/caches")
    assert read_here("cache.stage=$MODELS/caches").cache.stage == Path("/models/caches")


# What is recorded with a run is found from every working directory.


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """The working directory, with a model folder in it."""
    home = tmp_path / "home"
    (home / "models" / "m").mkdir(parents=True)
    monkeypatch.chdir(home)
    return home


@pytest.fixture
def run(home, monkeypatch) -> RunFile:
    monkeypatch.delenv("UNSET", raising=False)
    Path("run.yaml").write_text(
        "model: {path: models/m}\n"
        "data: {train: [a.jsonl, ../b.jsonl], val: c.jsonl, image_root: images}\n"
        "cache: {stage: $UNSET/caches}\n"
        "output: runs/a\n"
    )
    return read_run_file(Path("run.yaml"))


def test_all_paths_of_a_run_become_absolute(run, home):
    recorded = with_absolute_paths(run)
    assert recorded.model.path == str(home / "models" / "m")
    assert recorded.data.train == [home / "a.jsonl", home / "../b.jsonl"] and recorded.data.val == [home / "c.jsonl"]
    assert recorded.data.image_root == home / "images" and recorded.data.test == []
    assert recorded.cache.dir == home / "caches" and recorded.output == home / "runs" / "a"
    assert (recorded.lora, recorded.batch, recorded.train) == (run.lora, run.batch, run.train)
    named = run.model_copy(update={"model": run.model.model_copy(update={"path": "Qwen/Qwen3-VL-2B-Instruct"})})
    recorded = with_absolute_paths(named)
    assert recorded.model.path == "Qwen/Qwen3-VL-2B-Instruct" and recorded.cache.stage == Path("$UNSET/caches")


def test_a_run_is_the_same_run_from_another_working_directory(run, home, monkeypatch):
    folder = RunFolder(home / "runs" / "a")
    folder.claim(run, {"cache": "c1"})
    folder.log.touch()
    monkeypatch.chdir("/")
    folder.check(run, {"cache": "c1"})
    folder.check(read_run_file(home / "runs" / "a" / "run.yaml"), {"cache": "c1"})


def test_what_is_not_found_is_named_in_full_with_what_it_is_relative_to(run, make_run, home, monkeypatch):
    relative = "is relative to the working directory"
    with pytest.raises(RecordsError, match=f"no records file at {home}/a.jsonl .a.jsonl {relative}"):
        read_splits(run)
    absent = run.model_copy(update={"model": run.model.model_copy(update={"path": "absent"})})
    with pytest.raises(ModelError, match=f"no model folder at {home}/absent .absent {relative}"):
        source_of(absent)
    with pytest.raises(RunFolderError, match=f"{home}/runs/a .runs/a {relative}. is not a run folder"):
        RunFolder(run.output).read_run()
    with pytest.raises(CacheError, match=f"no cache in {home}/caches .caches {relative}.; build it with"):
        open_run(make_run(cache={"dir": "caches"}), TO_BUILD).open_cache()
