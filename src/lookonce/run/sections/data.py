"""The section `data` of the run file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from lookonce.datasets.curriculum import Fold, Selection
from lookonce.datasets.formats.registry import FormatName
from lookonce.run.sections.context import ContextSection
from lookonce.run.sections.paths import Paths, UserPath
from lookonce.settings import ByContent, Same, Section


class DataSection(Section):
    """The records and images of the run."""

    train: ByContent[Annotated[Paths, Field(min_length=1)]]
    """Records files to train on: one path or a list, in any record format (see `format`)."""
    val: ByContent[Paths] = []
    """Records files for the validation loss, the exact match while training (`eval.every`), and the evaluation at the
    end of training if `eval.split` is val."""
    test: ByContent[Paths] = []
    """Records files for a final evaluation (`lookonce eval --split test`); nothing is learned or chosen from them."""
    image_root: ByContent[UserPath | None] = None
    """Folder that image paths in records are relative to, and must not lead out of. By default each records file's own
    folder, and absolute image paths are allowed."""
    format: ByContent[FormatName | None] = None
    """Record format of all records files: canonical, flat, llava, sharegpt, alpaca, messages, parts or openai. By
    default each file's format is recognised by its first record."""
    coerce_answers: Same[bool] = False
    """Read answers that are numbers or booleans as text, as JSON writes them (`3`, `true`). By default they are an
    error."""
    skip_unusable: Same[bool] = False
    """Leave out the records of images that are missing or could not be encoded, in training and in evaluation. By
    default such an image is an error, because a score without its records is of other questions."""
    stage_map: ByContent[UserPath | None] = None
    """A stage map: a YAML file with the stage and category of each question text, such as
    datasets/kvasir-vqa.stages/reasoning.yaml. They become metadata of the records of all splits, in place of the
    records' own. A question that the map lacks is an error, unless the map has a `default`."""
    where: Same[Selection | None] = None
    """Which training records are used: those whose metadata has one of the given values in each of the given fields,
    such as {stage: [1, 2]}. With {share: 0.384}, alone or beside fields, it is that share of these records, drawn by
    `train.seed`; a larger share has all records of a smaller one. Other training records are as if they did not exist;
    they are counted and named. Validation and test records stay all."""
    replay: Same[Selection | None] = None
    """Which of the training records that `where` leaves out are used as well, in the same form: with
    {stage: 1, share: 0.1} a tenth of the records of stage 1. By default none."""
    held_out: Same[Fold | None] = None
    """Leave the training records about a part of the images out: with {fold: 1, of: 2} those about the first of two
    halves, drawn by `train.seed`. They are a split of their own, `held_out`, about images that the model never saw.
    Training ends with the answers to their questions and to those of `val`, which another run can name in
    `data.context.answers`. By default none."""
    context: ContextSection | None = None
    """Put the answers to questions of earlier stages into the prompts of later questions about the same images, as in
    {by: stage, order: [1, 2, 3]}; the keys are below. By default a prompt has no other answers than its record."""

    enable_thinking: Same[bool | None] = None
    """Handed to the chat template, in training and for all answers. With `false` the template of Qwen3.5 writes an
    empty block `<think></think>` before each answer, which belongs to the prompt; without it, training refuses this
    template, as its prompts end within the block. By default the template decides. One that does not know the variable
    is an error."""

    @model_validator(mode="after")
    def _replays_what_is_left_out(self) -> DataSection:
        if self.replay and not self.where:
            raise ValueError("`replay` selects from the records that `where` leaves out, and needs `where`")
        return self
