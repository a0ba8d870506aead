"""A model folder from elsewhere: no code in it is run, whatever its files ask for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.cli import main
from lookonce.errors import LookonceError, ModelError
from lookonce.files import read_json, write_json
from lookonce.train.data.tokenize import _load_tokenizer
from lookonce.train.model.load import load_without_tower

pytestmark = pytest.mark.guarantee(
    "A damaged or hostile file is read, or refused with an error message, in bounded time and memory."
)

CLASSES = ("AutoConfig", "AutoModel", "AutoModelForImageTextToText", "AutoProcessor", "AutoImageProcessor")
OTHER_CLASS = {"tokenizer_class": "OtherTokenizer", "image_processor_type": "Other", "processor_class": "Other"}


@pytest.fixture
def harm(tmp_path: Path) -> Path:
    """The folder that the code in the model folder would make."""
    return tmp_path / "harm"


@pytest.fixture
def hostile(model: Path, harm: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sample's model, whose files ask for classes in `harmful.py` there."""

    def ask(*_: Any) -> str:
        raise AssertionError("asked whether the code may be run")

    monkeypatch.setattr("builtins.input", ask)
    code = f"import os\nos.makedirs({str(harm)!r}, exist_ok=True)\n"
    (model / "harmful.py").write_text(code + "class Harm: pass\nclass HarmFast: pass\n")
    auto_map = {name: "harmful.Harm" for name in CLASSES} | {"AutoTokenizer": ["harmful.Harm", "harmful.HarmFast"]}
    for path in model.glob("*config.json"):
        write_json(path, read_json(path) | {"auto_map": auto_map})
    return model


def open_all(folder: Path) -> None:
    model = ModelFolder.open(str(folder))
    _load_tokenizer(folder)
    ImageProcessor(folder)
    Tower(model, torch.float32)
    load_without_tower(model, torch.float32)


def test_code_in_a_model_folder_is_not_run(hostile, harm):
    open_all(hostile)
    assert not harm.exists()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "preprocessor_config.json"])
def test_classes_that_only_the_folder_has_are_not_run(hostile, harm, name):
    write_json(hostile / name, read_json(hostile / name) | OTHER_CLASS)
    try:
        open_all(hostile)
    except LookonceError:
        pass
    assert not harm.exists()


@pytest.mark.guarantee("Unpickling a file gives numbers only and runs no code.")
def test_weights_that_are_pickled_are_not_read(hostile):
    (hostile / "model.safetensors").rename(hostile / "pytorch_model.bin")
    with pytest.raises(ModelError, match="lookonce reads safetensors weights"):
        ModelFolder.open(str(hostile))


def test_a_chat_template_cannot_reach_python(hostile, harm):
    """Templates are rendered in Jinja's sandbox."""
    for reach in ("''.__class__.__mro__[1].__subclasses__()", "cycler.__init__.__globals__.os.mkdir('x')"):
        (hostile / "chat_template.jinja").write_text("{{ " + reach + " }}")
        tokenizer = _load_tokenizer(hostile)
        with pytest.raises(Exception, match="unsafe|undefined"):
            tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


GROWS = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES = {
    "a range that the sandbox refuses": (
        "{% for i in range(10**9) %}x{% endfor %}",
        "is refused by Jinja's sandbox: Range",
    ),
    "loops for several turns": ("{% if messages|length > 3 %}" + LOOPS + "{% endif %}", "does not end, or takes more"),
    "a text that grows": (GROWS, ("takes too much memory for a few words", "does not end, or takes more than 1 s")),
    "a long text": ("{{ 'a' * 5000000 }}", "writes more than 1,048,576 characters for a few words"),
    "an error of its own": ("{{ raise_exception('only texts') }}", "cannot be rendered: only texts"),
    "endless recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "cannot be rendered: RecursionError"),
}
COMMANDS = (
    "check RUN",
    "train RUN",
    "eval RUN --untuned",
    "predict RUN --untuned --question q",
    "data audit TRAIN --tokenizer MODEL",
    "fetch RUN",
)


@pytest.fixture
def templated(model: Path, tmp_path: Path, make_cached_run: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sample's model, in `model`, and a run of it, run.yaml; rendering has a second."""
    (tmp_path / "run.yaml").write_text(make_cached_run(model={"path": str(model)}).to_yaml())
    monkeypatch.setattr("lookonce.train.data.tokenize.MAX_SECONDS", 1)
    return tmp_path


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_that_fails_is_named_by_every_command(templated, sample, name):
    template, said = TEMPLATES[name]
    ends = (said,) if isinstance(said, str) else said  # which limit is met first depends on the machine
    (templated / "model" / "chat_template.jinja").write_text(template)
    places = {"RUN": templated / "run.yaml", "TRAIN": sample / "train.jsonl", "MODEL": templated / "model"}
    for command in COMMANDS if name == "a range that the sandbox refuses" else COMMANDS[:1]:
        result = CliRunner().invoke(main, [str(places.get(word, word)) for word in command.split()])
        text = "".join(result.output.split())  # a check breaks its lines
        named = f"the chat template of the model in {templated / 'model'}"
        wholes = ["".join(f"{named} {end}".split()) for end in ends]
        assert result.exit_code == 1 and any(whole in text for whole in wholes), result.output
        assert "unexpected" not in text and "Traceback" not in text


def test_a_template_that_fails_for_some_records_names_them(templated, sample):
    path = templated / "model" / "chat_template.jinja"
    refusing = "{% if 'text' in messages[0].content[-1].text %}{{ raise_exception('no texts') }}{% endif %}"
    path.write_text(refusing + path.read_text())
    result = CliRunner().invoke(main, ["check", str(templated / "run.yaml")])
    text = "".join(result.output.split())
    assert "train.jsonl:18:thechattemplateofthemodelin" in text and "cannotberendered:notexts" in text, result.output
    trained = CliRunner().invoke(main, ["train", str(templated / "run.yaml")])
    assert trained.exit_code == 1 and re.search(r"train.jsonl:\d+: the chat template .* no texts", trained.stderr)
