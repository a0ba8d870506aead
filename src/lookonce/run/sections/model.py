"""The section `model` of the run file."""

from __future__ import annotations

from typing import Literal

from lookonce.run.sections.paths import ModelName
from lookonce.settings import ByContent, Same, Section


class ModelSection(Section):
    """The model that is fine-tuned."""

    path: ByContent[ModelName]
    """A model folder, or the name of a model on the Hugging Face Hub (owner/name)."""
    revision: ByContent[str | None] = None
    """Branch, tag or commit of a Hub model; by default its main branch. `lookonce fetch --pin` writes the commit
    here."""
    attention: Same[Literal["sdpa", "eager", "flash_attention_2"]] = "sdpa"
    """Attention for padded batches and for generation; packed training always uses FlexAttention on a GPU."""
