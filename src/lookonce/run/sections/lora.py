"""The section `lora` of the run file."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from lookonce.run.sections.numbers import Fraction
from lookonce.settings import Same, Section

NAME = re.compile(r"[\w.]+")
SEVERAL_NAMES = re.compile(rf"{NAME.pattern}(\s*[\s,;]\s*{NAME.pattern})+")


def _is_one_name(value: Any) -> Any:
    if isinstance(value, str) and SEVERAL_NAMES.fullmatch(value.strip()):
        raise ValueError(f"several names are a list: [{', '.join(NAME.findall(value))}]")
    return value


def _name_as_list(value: Any) -> Any:
    """The name of a module as a list; PEFT takes a text for an expression, which matches no module if it is a name."""
    return [value] if isinstance(value, str) and NAME.fullmatch(value) else _is_one_name(value)


class LoraSection(Section):
    """The LoRA adapter."""

    rank: Same[Annotated[int, Field(ge=1, le=8192)]] = 16
    """Rank of the LoRA matrices. A higher rank can learn more and has proportionally more weights to train."""
    alpha: Same[Annotated[int, Field(ge=1, le=1_000_000)]] = 32
    """LoRA scale: the adapter's output is multiplied by alpha / rank."""
    dropout: Same[Fraction] = 0.0
    """Fraction of the adapter's inputs that are randomly set to zero in training; 0 disables dropout."""
    rslora: Same[bool] = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank (https://arxiv.org/abs/2312.03732)."""
    targets: Same[Annotated[list[str] | str, BeforeValidator(_name_as_list)]] = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    """Modules that get LoRA weights: a name, a list of names, or one regular expression for whole names, as in PEFT.
    Only modules of the language model are allowed."""
    experts: Same[bool] = False
    """Give LoRA weights to the experts of a mixture of experts too, other ones to each. Needs `dropout: 0`. Training
    then keeps a second copy of all experts' weights, the sum of these and the adapter."""
    modules_to_save: Same[list[Annotated[str, BeforeValidator(_is_one_name)]]] = []
    """Modules that are trained in full and saved with the adapter, for example embed_tokens."""

    @model_validator(mode="after")
    def _experts_have_no_dropout(self) -> LoraSection:
        if self.experts and self.dropout:
            raise ValueError(f"experts: true needs dropout: 0, not {self.dropout}; set one of them")
        return self
