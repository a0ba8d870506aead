"""A run of an adapter that another program trained, which every command then takes: `lookonce.save_run`.

Design: the run folder is that of a training, so no command needs an option for such an adapter. What is not known of
the training is not recorded: no steps, no time, no versions.

An adapter is taken if a run file could ask for it. Its options must be those that `lora_config` makes of the section
`lora`, apart from what has no effect on a trained adapter. Its tensors must have the names and shapes that PEFT gives
them on the stock model, on the meta device: PEFT loads an adapter of another shape without an error, and leaves weights
random. The model must have the name or the content of the one that the adapter names. All this is checked before
anything is written.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, get_peft_model, get_peft_model_state_dict

from lookonce.adapter.weights import WEIGHTS, Shape, TensorFile
from lookonce.cache.model.model_folder import ModelFolder, empty_model
from lookonce.cache.store.claims import note_use
from lookonce.cache.store.fingerprint import Source
from lookonce.disk_space import full_disk_named
from lookonce.errors import ModelError, RunFolderError, UsageError
from lookonce.files import flush_files, follow_umask, write_json
from lookonce.hub import locate
from lookonce.run.config import RunFile, read_run_file
from lookonce.run.folder import ADAPTER_FILES, RunFolder, TrainedElsewhere, adapter_hashes
from lookonce.run.open import Needs, OpenRun, open_run
from lookonce.run.sections import LoraSection
from lookonce.run.start_adapter import start_identity
from lookonce.settings import checked
from lookonce.text import count, first_line, listed, shown
from lookonce.train.model.lora import (
    expert_tensors,
    lora_config,
    of_language_model,
    refuse_tower_targets,
    tower_module_names,
)

NEEDS = Needs("lookonce.save_run", writes=True, records="used", images="planned", model="open")
WITHOUT_EFFECT = {
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("megatron_core", "init_lora_weights"),
}
"""Options of PEFT that do not change what a trained adapter computes. The model is compared by itself."""
NEW_WEIGHTS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the model's own weights as they are."""


def save_run(adapter: Path | str, run: RunFile | Path | str) -> Path:
    """Save an adapter that another program trained as a run folder, which all commands accept; returns the folder.

    `adapter` is a folder written by PEFT's `model.save_pretrained`. `run` is the path of a run file, or a `RunFile`:
    its `output` is the new folder, `model.path` the adapter's model, and `data.train` the records that it was trained
    on. Answers are computed in `train.precision`, on the weights of `train.frozen`. The section `lora` and the length
    of the training are ignored. It needs no cache and loads no weights. With several processes, call it in one of them.

    Raises:
        UsageError: it is not a LoRA adapter, has weights in the vision tower or an option that a run file cannot
            express, does not fit the model, or was trained on another one.
        RunFolderError: `output` holds a run or other files, or is in use.
        LookonceError: a part of the run is missing or broken.
    """
    adapter, run = Path(adapter), run if isinstance(run, RunFile) else read_run_file(Path(run))
    config = _read_config(adapter)
    run = run.model_copy(update={"lora": _section(adapter, config)})
    tensors = TensorFile(adapter / WEIGHTS).tensors
    with open_run(run, NEEDS) as opened:
        folder, model = opened.folder, opened.model_folder
        if folder.trained.exists() or folder.log.exists() or folder.checkpoints.exists():
            raise RunFolderError(f"{folder.folder} holds a run already; choose another `output`, or move it away")
        shapes = {name: tensor.shape for name, tensor in tensors.items() if not name.endswith(".base_layer.weight")}
        saved_config = _saved_config(run.lora, model)
        _check_options(adapter, config, saved_config)
        _check_shapes(adapter, shapes, saved_config, model)
        _check_model(adapter, config, opened)
        identity = opened.identity() | start_identity(run, {})
        opened.owner.check()
        folder.claim(run, identity)
        (folder.folder / "environment.json").unlink()  # of this process, which has trained nothing
        note_use(opened.cache_folder, folder.folder)
        _write(adapter, saved_config, folder)
    return folder.folder


def _refusal(adapter: Path, why: str) -> UsageError:
    return UsageError(
        f"the adapter in {adapter} cannot become a run: {why}. A run has LoRA weights in the language model alone, "
        "with r, lora_alpha, lora_dropout, use_rslora, target_modules, modules_to_save and all experts; use any other "
        "adapter with PEFT"
    )


def _read_config(adapter: Path) -> LoraConfig:
    if absent := [name for name in ADAPTER_FILES if not (adapter / name).is_file()]:
        raise _refusal(adapter, f"it has no {absent[0]}, as `model.save_pretrained(folder)` of PEFT writes it")
    try:
        config = PeftConfig.from_pretrained(str(adapter))
    except Exception as error:  # whatever PEFT raises for a file that it has not written, or for a missing library
        raise _refusal(adapter, f"its {ADAPTER_FILES[1]} cannot be read ({first_line(error)})") from None
    if not isinstance(config, LoraConfig):
        raise _refusal(adapter, f"it is of the type {shown(str(config.peft_type))}")
    return config


def _section(adapter: Path, config: LoraConfig) -> LoraSection:
    """The section `lora` that asks for such an adapter."""
    values = {
        "rank": config.r,
        "alpha": config.lora_alpha,
        "dropout": config.lora_dropout,
        "rslora": config.use_rslora,
        "targets": _in_order(config.target_modules or []),
        "experts": bool(config.target_parameters),
        "modules_to_save": _in_order(config.modules_to_save or []),
    }
    return checked(values, LoraSection, f"the adapter in {adapter}, as the section `lora` of a run file,")


def _in_order(value: Any) -> Any:
    """A list of names, which PEFT has in no order; any other value as it is."""
    return sorted(map(str, value)) if isinstance(value, list | set | tuple) else value


def _saved_config(section: LoraSection, model: ModelFolder) -> LoraConfig:
    """The options with which `lookonce train` saves such an adapter; its targets are in the language model alone."""
    config, in_tower = lora_config(section), tower_module_names(model)
    config.target_parameters = expert_tensors(section, model.family)
    in_text = [name for name, _ in empty_model(model.config).named_modules() if name not in in_tower]
    config.target_modules = of_language_model(section.targets, in_text, in_tower)
    refuse_tower_targets(in_tower, config)
    config.base_model_name_or_path, config.inference_mode = str(model.folder.absolute()), True
    return config


def _check_options(adapter: Path, config: LoraConfig, saved_config: LoraConfig) -> None:
    # Lists have no order, and an empty value is none.
    theirs, mine = (
        {name: _in_order(value) or None for name, value in asdict(options).items()}
        for options in (config, saved_config)
    )
    theirs["target_modules"] = mine["target_modules"]  # of which a run's are made; shapes show that they are the same
    unknown = [name for name in theirs if name not in WITHOUT_EFFECT and theirs[name] != mine.get(name)]
    unknown += ["init_lora_weights"] if config.init_lora_weights not in NEW_WEIGHTS else []
    if unknown:
        named = listed([f"{name}={shown(repr(getattr(config, name, theirs[name])), 60)}" for name in unknown])
        raise _refusal(adapter, f"a run file cannot express {named}")


def _check_shapes(adapter: Path, shapes: Mapping[str, Shape], saved_config: LoraConfig, model: ModelFolder) -> None:
    model_shapes: dict[str, Shape] = {}
    with warnings.catch_warnings(), contextlib.suppress(ValueError):  # none are wanted if it has no such modules
        warnings.simplefilter("ignore")  # on tied embeddings
        wrapped = get_peft_model(empty_model(model.config), deepcopy(saved_config), low_cpu_mem_usage=True)
        weights = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
        model_shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    wrong = sorted(name for name in shapes.keys() | model_shapes.keys() if shapes.get(name) != model_shapes.get(name))
    if wrong:
        name = wrong[0]
        actual, required = ([*by_name[name]] if name in by_name else "none" for by_name in (shapes, model_shapes))
        raise _refusal(
            adapter,
            f"{count(len(wrong), 'tensor')} would have another shape on {model.folder} (`model.path`), the first being "
            f"{name}: {actual} in the adapter, {required} on this model",
        )


def _check_model(adapter: Path, config: LoraConfig, opened: OpenRun) -> None:
    """Compare the model that the adapter names, if it does, with the run's."""
    named, mine, caches = str(config.base_model_name_or_path or ""), opened.run.model.path, opened.run.cache.dir
    if not named or named == mine:
        return
    why = (
        f"it was trained on {shown(named)}, which is not on this machine, so it cannot be compared with `model.path`, "
        f"{mine}"
    )
    with contextlib.suppress(ModelError):
        folder = locate(named, config.revision, is_local=True)
        if folder.resolve() == opened.model_folder.folder.resolve():
            return
        theirs = Source.of(folder, opened.source.settings).language_model_hash(caches)
        if theirs == opened.source.language_model_hash(caches):
            return
        why = f"it was trained on {shown(named)}, whose weights differ from those of `model.path`, {mine}"
    raise _refusal(adapter, f"{why} (base_model_name_or_path in {ADAPTER_FILES[1]} names it)")


def _write(adapter: Path, saved_config: LoraConfig, folder: RunFolder) -> None:
    """Write the adapter as a training does, and then trained.json, which says that it is there."""
    weights = adapter / WEIGHTS
    room = weights.stat().st_size, str(folder.adapter)
    with full_disk_named(folder.folder, *room, lambda: "Make room, then call lookonce.save_run again"):
        saved_config.save_pretrained(str(folder.adapter))
        shutil.copyfile(weights, folder.adapter / WEIGHTS)
    follow_umask(folder.adapter)
    flush_files(folder.adapter)
    write_json(folder.trained, asdict(TrainedElsewhere(adapter_hashes(folder.adapter))))
