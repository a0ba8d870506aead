"""The family of a configuration, a model folder or a tower, by transformers' `model_type`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lookonce.errors import ModelError, explain_os_error
from lookonce.families.family import Family
from lookonce.families.qwen2_5_vl import QWEN2_5_VL, QWEN2_VL
from lookonce.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from lookonce.families.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE

DEFAULT = QWEN3_VL
"""The family of the sample, and of a folder that has a tokenizer and no model."""
FAMILIES = {family.model_type: family for family in (DEFAULT, QWEN3_VL_MOE, QWEN2_5_VL, QWEN2_VL, QWEN3_5, QWEN3_5_MOE)}
TOWER_SUFFIX = "_vision"
"""What newer versions of transformers append to the family's type in the tower's configuration."""


def family_of(config: Any) -> Family:
    """The family of a model with this configuration; raises ModelError if it is not known."""
    return _named(config.model_type, "the model")


def family_of_tower(config: Mapping[str, Any]) -> Family:
    """The family of a tower, by the values of its configuration; the default one if these do not name any.

    Raises:
        ModelError: the family is not known.
    """
    return _named(config.get("model_type", DEFAULT.model_type).removesuffix(TOWER_SUFFIX), "the tower")


def family_in(folder: Path) -> Family:
    """The family of the model in a folder.

    Raises:
        ModelError: the folder has no configuration of a model, or the family is not known.
    """
    path = folder / "config.json"
    try:
        model_type = json.loads(path.read_text())["model_type"]
    except PermissionError as error:
        raise ModelError(explain_os_error(error)) from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ModelError(f"{folder} is not a model folder: cannot read model_type in {path.name}: {error!r}") from None
    return _named(model_type, f"the model in {folder}")


def _named(model_type: Any, which: str) -> Family:
    if isinstance(model_type, str) and (family := FAMILIES.get(model_type)):
        return family
    known = ", ".join(f"{family.model_type} ({family.name})" for family in FAMILIES.values())
    raise ModelError(
        f"{which} is of type {model_type!r}, which lookonce does not support; supported: {known}; set `model.path` to "
        "a model of such a type"
    )
