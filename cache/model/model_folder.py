"""A model folder: its path, its configuration, and its tensors, read or described by name.

Design: tensors are read straight from the safetensors files, so the cache phase never loads the language model and
training can hash the tower without building it.

transformers joins the tensors of a layer's experts as it loads them. If some are missing or have other shapes, it fails
without their names, or names the joined tensor alone. So names and shapes are compared here, from the headers of the
files. A layer without any tensor of its experts is left to transformers, which names what it lacks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, PreTrainedConfig

from lookonce.errors import ModelError, explain_os_error
from lookonce.families.family import Family
from lookonce.families.lookup import family_in
from lookonce.hub import locate
from lookonce.text import first_line

Shape = tuple[int, ...]
ONE_EACH = re.compile(r"(.+\.mlp\.experts)\.\d+\.(gate_proj|up_proj|down_proj)\.weight")
"""The name of a tensor of one expert."""
JOINED = re.compile(r".+\.mlp\.experts\.(gate_up_proj|down_proj)")
"""The name of a tensor of all experts of a layer."""


@dataclass(frozen=True)
class ModelFolder:
    """A model folder with a vision tower; open one with `ModelFolder.open`."""

    folder: Path
    family: Family
    config: PreTrainedConfig
    _file_of: dict[str, Path]
    """The file of each tensor of the tower, by the tensor's name in the model folder."""

    @classmethod
    def open(cls, name: str, revision: str | None = None, *, is_local: bool = False) -> ModelFolder:
        """Open the folder `name`, or the Hub model `name` at `revision`, which is downloaded unless `is_local`.

        Raises:
            ModelError: there is no such folder or model, or it has no vision tower that is supported.
        """
        folder = locate(name, revision, is_local=is_local)
        family = family_in(folder)
        config = _read_config(folder, family)
        files = _tensor_files(folder)
        names = {tensor: file for tensor, file in files.items() if tensor.startswith(family.tower_prefixes)}
        if not names:
            raise ModelError(
                f"{folder} has no vision tower (model type {family.model_type!r}, no tensor named "
                f"{family.tower_prefixes[0]}*); copy or download the model again"
            )
        return cls(folder, family, config, names)

    @property
    def vision_config(self) -> PreTrainedConfig:
        config: PreTrainedConfig = self.config.vision_config
        return config

    def absent_files(self) -> list[str]:
        """The names of missing files that should hold tensors."""
        return [file.name for file in weight_files(self.folder) if not file.is_file()]

    @property
    def num_weight_bytes(self) -> int:
        """The size of all files that hold tensors."""
        return sum(file.stat().st_size for file in weight_files(self.folder))

    def read_ahead(self) -> None:
        """Have the system read all weights into memory in the background, to be loaded soon; does not wait."""
        files = weight_files(self.folder)

        def read() -> None:
            for file in files:
                with contextlib.suppress(OSError), file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

        threading.Thread(target=read, name="read weights ahead", daemon=True).start()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, the language model's too; raises ModelError if a file is missing or broken."""
        shapes: dict[str, tuple[int, ...]] = {}
        for path in weight_files(self.folder):
            with open_tensors(path) as file:
                shapes |= {name: (*file.get_slice(name).get_shape(),) for name in file.keys()}  # noqa: SIM118
        return shapes

    def tower_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tower's tensors, sorted by their names in it ("blocks.0..."); raises ModelError."""
        with contextlib.ExitStack() as stack:
            files = {path: stack.enter_context(open_tensors(path)) for path in set(self._file_of.values())}
            for name in sorted(self._file_of, key=self._tower_name):
                yield self._tower_name(name), files[self._file_of[name]].get_tensor(name)

    def _tower_name(self, name: str) -> str:
        prefix = next(prefix for prefix in self.family.tower_prefixes if name.startswith(prefix))
        return name.removeprefix(prefix)


def open_tensors(path: Path) -> Any:
    """A file of safetensors, as a context manager; raises ModelError if it cannot be read."""
    try:
        with path.open("rb"):  # safe_open calls a file "No such file" that it may not read
            return safe_open(path, framework="pt")
    except PermissionError as error:
        raise ModelError(explain_os_error(error)) from None
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read {path}: {error}; copy or download it again") from None


def _read_config(folder: Path, family: Family) -> PreTrainedConfig:
    if family.model_type not in CONFIG_MAPPING:
        raise family.missing(f"models of type {family.model_type}")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder)
    except PermissionError as error:
        raise ModelError(explain_os_error(error)) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} is not a model folder: {first_line(error)}") from None
    return config


def empty_model(config: Any) -> Any:
    """transformers' stock model of a configuration, on the meta device: names and shapes without values."""
    stock_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    with torch.device("meta"):
        return stock_class(config)


def weight_files(folder: Path) -> list[Path]:
    """The files of a model that should hold tensors; raises ModelError if its index is broken."""
    return sorted({*_tensor_files(folder).values()})


def _tensor_files(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor of the model."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        try:
            return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is broken ({error!r}); copy or download it again") from None
    if not single.exists():
        raise ModelError(f"{folder} holds neither {index.name} nor {single.name}; lookonce reads safetensors weights")
    with open_tensors(single) as file:
        return dict.fromkeys(file.keys(), single)


def missing_expert_tensors(model_folder: ModelFolder, shapes: dict[str, Shape]) -> list[str]:
    """The names of tensors that only some experts of a layer have; `shapes` are those of all tensors of the folder."""
    return sorted(_expert_shapes(model_folder, shapes).keys() - shapes.keys())


def misshapen_expert_tensors(model_folder: ModelFolder, shapes: dict[str, Shape]) -> list[tuple[str, Shape, Shape]]:
    """Name, shape and needed shape of the experts' tensors whose shapes do not follow from the configuration."""
    return [
        (name, shapes[name], allowed[0])
        for name, allowed in sorted(_expert_shapes(model_folder, shapes).items())
        if name in shapes and shapes[name] not in allowed
    ]


def _expert_shapes(model_folder: ModelFolder, shapes: dict[str, Shape]) -> dict[str, tuple[Shape, ...]]:
    """The shapes that tensors of experts may have: all that there are, and all of layers in which one expert has some.

    Matrices of a tensor of all experts may be transposed, as they are in published files of Qwen3-VL.
    """
    text, allowed = model_folder.config.text_config, dict[str, tuple[Shape, ...]]()
    for place, named in {match.groups() for name in shapes if (match := ONE_EACH.fullmatch(name))}:
        size, hidden = text.moe_intermediate_size, text.hidden_size
        joined = {"gate_proj": (size, hidden), "up_proj": (size, hidden)}
        parts = {"down_proj": (hidden, size)} if named == "down_proj" else joined
        for expert in range(text.num_experts):
            allowed |= {f"{place}.{expert}.{part}.weight": (shape,) for part, shape in parts.items()}
    for name in shapes:
        if match := JOINED.fullmatch(name):
            size, hidden, number = text.moe_intermediate_size, text.hidden_size, text.num_experts
            rows, columns = (hidden, size) if match[1] == "down_proj" else (2 * size, hidden)
            allowed[name] = ((number, rows, columns), (number, columns, rows))
    return allowed
