"""Run files and other YAML: each is read, or refused in our words."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from support.fuzzing import cases, mutations
from transformers import TrainerState, TrainingArguments

from lookonce.errors import UsageError
from lookonce.files import read_json
from lookonce.run.config import read_run_file
from lookonce.run.folder import STATE
from lookonce.settings import MAX_DEPTH, MAX_YAML_BYTES, load_values
from lookonce.train.loop.checkpoints import read_state

STEP = 8
SPECIAL = (
    *("!!python/object/apply:os.system [id]", "!!python/name:os.system", "!!bool maybe", '!!int ""', "!!float x"),
    *("!!null x", "!!binary x", "!!set {a, b}", "!!omap [a: 1]", "!!timestamp x", "!!pairs x", "!!str {a: b}"),
    *("2001-99-99", "2001-01-01T99:99:99Z", "0x" + "f" * 5000, "9" * 5000, "1:" * 300 + "1"),
    *("&a [*a]", "*unknown", "<<: 1", "{<<: [{a: 1}, 2]}", "? [a]\n: b", "=", "- - - - a", "{[1]: 2}"),
    *("%YAML 9.9\n---\na", "a\n---\nb", "\t", "!<tag:x> a", "'\x85'", '"\\uD800"'),
)


@pytest.fixture(scope="module")
def values(make_run_in: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(make_run_in(tmp_path_factory.mktemp("run")).to_yaml())
    return found


def test_damaged_run_files_are_read_or_refused(values, tmp_path):
    def make(random: Random) -> bytes:
        changed = mutations.several(values, random, most=2)
        try:
            text = yaml.dump(changed, allow_unicode=True).encode("utf-8", "surrogatepass")
        except RecursionError:  # of PyYAML's writer; JSON is YAML too
            text = mutations.as_json(changed, random)
        if random.random() < 0.4:
            lines = text.split(b"\n")
            place = random.randrange(len(lines))
            name = lines[place].partition(b":")[0]
            lines[place] = name + b": " + random.choice(SPECIAL).encode("utf-8", "surrogatepass")
            text = b"\n".join(lines)
        return mutations.damaged(text, random) if random.random() < 0.4 else text

    assert cases.fuzz("run file", make, read_run_file, tmp_path / "run.yaml").holds


def test_damaged_states_of_trainer_are_read_or_refused(tmp_path):
    """What is read must be enough for Trainer, which reads the file again."""
    (checkpoint := tmp_path / f"checkpoint-{STEP}").mkdir()
    path, log = checkpoint / STATE, [{"loss": 1.5, "learning_rate": 1e-4, "step": 1}]
    TrainerState(epoch=0.5, global_step=STEP, max_steps=24, log_history=log).save_to_json(str(path))
    written = read_json(path)

    def make(random: Random) -> bytes:
        return mutations.as_json(mutations.several(written, random, most=2), random)

    def read(path: Path) -> None:
        read_state(checkpoint)
        state = TrainerState.load_from_json(str(path))
        state.compute_steps(TrainingArguments(output_dir=str(tmp_path)), state.max_steps)
        round(state.global_step / state.epoch)

    assert cases.fuzz("Trainer's state", make, read, path).holds


def refused(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        load_values(path, f"run file {path}", "try another", "a mapping")
    return str(error.value)


def test_aliases_cannot_stand_for_more_values_than_a_file_may_have(tmp_path):
    """Billion laughs: nine lines of which each has the one before nine times."""
    lines = ["a0: &a0 [lol]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))]
    assert "values, each alias counted" in refused(tmp_path / "a.yaml", "\n".join(lines))
    merged = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 10))]
    assert "values, each alias counted" in refused(tmp_path / "b.yaml", "\n".join(merged))
    assert "values, each alias counted" in refused(tmp_path / "c.yaml", "a: &a [*a]")


def test_few_aliases_are_read(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: &a [1, 2]\nb: *a\nc: [*a, *a]\n")
    assert load_values(path, "x", "y", "z") == {"a": [1, 2], "b": [1, 2], "c": [[1, 2], [1, 2]]}


@pytest.mark.parametrize("text", ["[" * 200_000, "- " * 200_000 + "a", "{a: " * 200_000, "a:\n" + "? " * 200_000])
def test_deep_nesting_ends_neither_the_process_nor_in_a_traceback(tmp_path, text):
    """libyaml itself overflows the stack, which no exception reports."""
    assert f"nested more than {MAX_DEPTH} deep" in refused(tmp_path / "a.yaml", text)


def test_a_large_file_is_not_read_as_yaml(tmp_path):
    with (path := tmp_path / "a.yaml").open("wb") as file:
        file.truncate(10**12)  # takes no place on the disk
    with pytest.raises(UsageError, match=f"more than {MAX_YAML_BYTES:,} bytes"):
        load_values(path, f"run file {path}", "try another", "a mapping")
