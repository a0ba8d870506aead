"""The chat template of a model: whether training refuses it, whatever the texts of the records.

Design: a conversation of two words is rendered as training renders records. What is refused there is the template's
fault and not a record's, so it is said once and not for each record. Whether a template thinks is decided by rendering
it again with `enable_thinking: false`, not by the model's name: published templates of one family differ.
"""

from __future__ import annotations

from pathlib import Path

from lookonce.datasets.records import Record, Turn
from lookonce.errors import ModelError, RecordsError
from lookonce.train.data.token_stats import TokenCounter

ANY = Record((Path("image"),), (Turn("question", "answer"),), origin="every record")


def refusal(counter: TokenCounter) -> str | None:
    """Why training refuses all records with the chat template of a model; None if it does not."""
    try:
        counter.example(ANY, [""], [0])
    except RecordsError as error:
        return str(error)
    return None


def without_thinking(folder: Path, counter: TokenCounter) -> TokenCounter | None:
    """A counter of the model in `folder` with `enable_thinking: false`, if training refuses the template without it.

    None if the template of `counter` is not refused, or is refused with `enable_thinking: false` too.
    """
    if refusal(counter) is None:
        return None
    try:
        told = TokenCounter(folder, enable_thinking=False)
    except ModelError:  # the template does not know the variable
        return None
    return None if refusal(told) else told
