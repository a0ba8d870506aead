"""A model folder from elsewhere: no code in it is run, whatever its files ask for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lookonce.cache.model.model_folder import ModelFolder
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.model.tower import Tower
from lookonce.errors import LookonceError, ModelError
from lookonce.files import read_json, write_json
from lookonce.train.data.tokenize import _load_tokenizer
from lookonce.train.model.load import load_without_tower

CLASSES = ("AutoConfig", "AutoModel", "AutoModelForImageTextToText", "AutoProcessor", "AutoImageProcessor")
OTHER_CLASS = {"tokenizer_class": "OtherTokenizer", "image_processor_type": "Other", "processor_class": "Other"}


@pytest.fixture
def harm(tmp_path: Path) -> Path:
    """The folder that the code in the model folder would make."""
    return tmp_path / "harm"


@pytest.fixture
def hostile(sample: Path, tmp_path: Path, harm: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sample's model, whose files ask for classes in `harmful.py` there."""

    def ask(*_: Any) -> str:
        raise AssertionError("asked whether the code may be run")

    monkeypatch.setattr("builtins.input", ask)
    folder = tmp_path / "model"
    shutil.copytree(sample / "model", folder)
    code = f"import os\nos.makedirs({str(harm)!r}, exist_ok=True)\n"
    (folder / "harmful.py").write_text(code + "class Harm: pass\nclass HarmFast: pass\n")
    auto_map = {name: "harmful.Harm" for name in CLASSES} | {"AutoTokenizer": ["harmful.Harm", "harmful.HarmFast"]}
    for path in folder.glob("*config.json"):
        write_json(path, read_json(path) | {"auto_map": auto_map})
    return folder


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


def test_a_model_of_another_type_is_refused_before_its_code_is_looked_at(hostile, harm):
    write_json(hostile / "config.json", read_json(hostile / "config.json") | {"model_type": "other"})
    with pytest.raises(ModelError):
        ModelFolder.open(str(hostile))
    assert not harm.exists()


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
