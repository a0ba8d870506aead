"""The inputs of a run: its records, its model with tokenizer and chat template, its images, and the lengths of records.

Design: every missing file and every record that cannot be read is reported, not only the first. The first records of
each file are read, unless all are asked for, or the run file selects or orders them or has `cache.augment`, which can
only be judged of all.

The model is built without memory (on torch's meta device) and gets its adapter, so PEFT itself says which modules are
trained, and how many weights they have. A conversation of two words is rendered as training renders records: what is
refused there is the chat template's fault, so it is one result and not one for each record. A template thinks if
`enable_thinking: false` changes it; published templates of one family differ.

The plan and its stamps say which images the cache knows, as for training, so an image that is encoded is not opened and
need not exist. The others are read. The fingerprint is computed, which reads the tower, only if there are caches and it
was not recorded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

import torch
from tqdm import tqdm

from lookonce.cache.build.progress import index_from_plan, planned_tokens
from lookonce.cache.format import BUILD_COMMAND, REPAIR_COMMAND
from lookonce.cache.model.model_folder import ModelFolder, empty_model
from lookonce.cache.model.pixels import ImageProcessor
from lookonce.cache.store.fingerprint import Fingerprint
from lookonce.cache.store.metadata import MANIFEST, read_plan
from lookonce.cache.store.reader import VisionCache, find_cache
from lookonce.checks.report import Level, Result
from lookonce.datasets.images import ImageIndex, ImageInfo, inspect_images
from lookonce.datasets.records import Record, RecordsFile, Turn
from lookonce.errors import BadImage, ImageError, LookonceError, ModelError, RecordsError, UsageError
from lookonce.hub import locate
from lookonce.run.config import RunFile
from lookonce.run.grpo import GrpoSection
from lookonce.run.open import fingerprint_of, source_of
from lookonce.run.records import SPLITS, for_training, with_contexts, without_fold
from lookonce.run.sections import METRICS, BatchSection
from lookonce.text import Notify, count, duration, first_line, listed, located, nfc, shell, size
from lookonce.train.data.sampler import num_steps
from lookonce.train.data.token_stats import Distribution, TokenCounter
from lookonce.train.model.gpu_memory import drawn_ms, measured_name

NUM_NAMED = 3
FEW_TOKENS = 16
"""An image of fewer tokens shows hardly anything."""
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
        non_thinking = TokenCounter(folder, enable_thinking=False)
    except ModelError:  # the template does not know the variable
        return None
    return None if refusal(non_thinking) else non_thinking


@dataclass
class CheckedRecords:
    by_split: dict[str, list[Record]] = field(default_factory=lambda: {split: [] for split in SPLITS})
    is_complete: bool = True
    """Whether all records were read, and not only the first of each file."""
    readable: dict[str, list[Record]] = field(default_factory=dict)
    """The records of each split without mistakes, before some are left out."""

    def all(self) -> Iterator[Record]:
        return chain.from_iterable(self.by_split.values())

    @property
    def num_records(self) -> int:
        return sum(map(len, self.by_split.values()))

    def images(self) -> dict[Path, str]:
        """Each image with the origin of the first record that shows it."""
        origin_of: dict[Path, str] = {}
        for record in self.all():
            for path in record.images:
                origin_of.setdefault(path, record.origin)
        return origin_of


def check_records(run: RunFile, max_records: int | None) -> tuple[CheckedRecords, list[Result]]:
    """Read the records of all splits, at most `max_records` of each file; None for all."""
    records = CheckedRecords()
    results: list[Result] = []
    data, batch = run.data, run.batch
    is_selective = any((data.stage_map, data.where, data.held_out, data.context, data.system))
    is_selective |= bool(batch.stage_order or batch.balance)
    max_records = None if is_selective or run.cache.augment else max_records
    for split in SPLITS:
        problems: list[Result] = []
        for path in getattr(data, split):
            problems += _read(run, path, split, records, max_records, results)
        results += problems
        if records.by_split[split] and not problems:
            records.readable[split] = records.by_split[split]
    if is_selective and not results:
        results += _change(records, lambda notify: for_training(run, records.by_split, notify))
    return records, results


def check_context(run: RunFile, records: CheckedRecords, keys: Mapping[Path, str]) -> list[Result]:
    """Hold a fold out and give the records their contexts, as training does; `keys` are those of known images."""
    images = ImageIndex({**keys}, {})
    held_out = _change(records, lambda notify: without_fold(run, records.by_split, images, notify))
    return held_out + _change(records, lambda notify: with_contexts(run, records.by_split, images, notify))


def _change(records: CheckedRecords, change: Callable[[Notify], dict[str, list[Record]]]) -> list[Result]:
    """Change records as the run does, and say how; or why the run refuses to."""
    notes: list[str] = []
    try:
        records.by_split = change(notes.append)
    except LookonceError as error:
        value, _, do = str(error).partition("; ")
        return [Result("error", "records", value, do)]
    return [Result("ok", "records", note) for note in notes]


def check_questions(run: RunFile, records: CheckedRecords) -> Iterator[Result]:
    """Whether the metric that counts works, and applies to the questions of `eval.every` and `eval.split`."""
    from lookonce.eval.answers.questions import row_of
    from lookonce.eval.scores.metric import check_metric, working_scorer

    metric, while_training = run.eval.metric, ["val"] if run.eval.every else []
    try:
        check_metric(metric)
    except LookonceError:
        return  # an error of the settings
    for split in dict.fromkeys([*while_training, run.eval.split]) if records.is_complete else ():
        pairs = [(record, turn) for record in records.by_split[split] for turn in range(len(record.turns))]
        try:
            if pairs:
                working_scorer([row_of(*pair, ()) for pair in pairs], metric, f"the questions of {split}")
        except LookonceError as error:
            value, _, do = str(error).rpartition("; ")
            stops = split in while_training or metric not in METRICS
            yield Result("error" if stops else "warning", "evaluation", value, do)


def count_records(records: CheckedRecords, keys: Mapping[Path, str]) -> Iterator[Result]:
    """The number of records of each split without mistakes, and of images, by their `keys` where these are known."""
    for split, split_records in records.readable.items():
        num_images = len({keys.get(path, str(path)) for record in split_records for path in record.images})
        yield Result(
            "ok", "records", f"{split}: {count(len(split_records), 'record')} with {count(num_images, 'image')}"
        )


def _read(
    run: RunFile, path: Path, split: str, records: CheckedRecords, max_records: int | None, notes: list[Result]
) -> list[Result]:
    """Read a file; returns what is wrong with it, and adds what is left out to `notes`."""
    broken: list[str] = []
    file = RecordsFile(path, run.data.image_root, broken=lambda origin, error: broken.append(str(error)))
    try:
        readable = iter(file)
        records.by_split[split] += islice(readable, max_records)
        records.is_complete &= max_records is None or next(readable, None) is None
    except RecordsError as error:
        broken.append(str(error))
    notes += [Result("ok", "records", note)] if (note := file.note()) else []
    if not path.exists():
        value = f"data.{split}: no records file at {located(path)}"
        return [Result("error", "records", value, f"correct `data.{split}`, or start in the folder of the path")]
    if not broken:
        return []
    value = f"data.{split}: {count(len(broken), 'record')} cannot be read: {listed(broken, NUM_NAMED)}"
    audit = shell("lookonce", "data", "audit", path)
    return [Result("error", "records", value, f"correct them; all are listed by: {audit}")]


FETCH = "correct `model.path`, or with internet access run: lookonce fetch RUN.yaml"


@dataclass
class CheckedModel:
    """What of a model could be opened."""

    folder: Path | None = None
    model_folder: ModelFolder | None = None
    processor: ImageProcessor | None = None
    counter: TokenCounter | None = None
    num_trained: int | None = None


def check_model(run: RunFile) -> tuple[CheckedModel, list[Result]]:
    """Open the parts of the model one by one; nothing is downloaded."""
    model = CheckedModel()
    try:
        model.folder = locate(run.model.path, run.model.revision, is_local=True)
    except ModelError as error:
        return model, [Result("error", "model", str(error), FETCH)]
    results = [*_weights(run, model), *_tokenizer(run, model), *_lora(run, model)]
    return model, results


def _weights(run: RunFile, model: CheckedModel) -> Iterator[Result]:
    try:
        model.model_folder = ModelFolder.open(str(model.folder))
        absent = model.model_folder.absent_files()
    except LookonceError as error:
        yield Result("error", "model", str(error), FETCH)
        return
    if absent:
        yield Result("error", "model", f"{model.folder} lacks {listed(absent)} of its weights", FETCH)
        return
    num_bytes = sum(path.stat().st_size for path in model.model_folder.folder.glob("*.safetensors"))
    yield Result("ok", "model", f"{run.model.path}: {model.model_folder.family.model_type}, {size(num_bytes)}")


def _tokenizer(run: RunFile, model: CheckedModel) -> Iterator[Result]:
    assert model.folder
    options = run.cache
    try:
        model.processor = ImageProcessor(model.folder, options.backend, options.min_pixels, options.max_pixels)
    except LookonceError as error:
        value, _, do = str(error).partition("; ")
        yield Result("error", "images", value, do or FETCH)
    if model.processor and (few := _most_tokens(model.processor)) < FEW_TOKENS:
        most = model.processor.settings["max_pixels"]
        value = (
            f"at most {count(few, 'token')} an image: its limit is {most:,} pixels in all, not the length of an edge"
        )
        yield Result("warning", "images", value, "set `cache.max_pixels`, such as to 432000")
    try:
        model.counter = TokenCounter(model.folder, enable_thinking=run.data.enable_thinking)
    except LookonceError as error:
        yield Result("error", "tokenizer", str(error), FETCH)
        return
    if non_thinking := without_thinking(model.folder, model.counter):
        model.counter = non_thinking  # the lengths of records are those with the key that is advised
        thinks = "training refuses every record: the chat template lets the model think before it answers"
        yield Result("error", "template", thinks, "set `data.enable_thinking: false`; docs/models.md#thinking")
    elif refused := refusal(model.counter):
        model.counter = None
        yield Result("error", "template", f"training refuses {refused}", "use the model's own chat template")


def _most_tokens(processor: ImageProcessor) -> int:
    """The most tokens that an image of a usual shape can have, whatever its size."""
    factor = int(processor.stock.patch_size * processor.stock.merge_size)
    return max(1, int(processor.settings["max_pixels"]) // factor**2)


def _lora(run: RunFile, model: CheckedModel) -> Iterator[Result]:
    from lookonce.train.model.compile import check_layers
    from lookonce.train.model.load import add_lora, replace_tower, text_model
    from lookonce.train.model.lora import beyond_targets

    if model.model_folder is None:
        return
    family, config = model.model_folder.family, model.model_folder.config
    try:
        if run.batch.has_packs or run.eval.engine == "shared":
            check_layers(family, config.get_text_config())
        stock = empty_model(config)
        with torch.device("meta"):
            replace_tower(stock, stock.dtype)
            trained = add_lora(stock.requires_grad_(False), model.model_folder, run.lora, run.train.seed)
    except LookonceError as error:
        yield Result("error", "adapter", str(error), "correct the section `lora`, or `batch.mode` and `eval.engine`")
        return
    model.num_trained = sum(weight.numel() for weight in trained.parameters() if weight.requires_grad)
    without = beyond_targets(text_model(trained).layers)
    yield Result(
        "ok",
        "adapter",
        f"rank {run.lora.rank}: {model.num_trained:,} trained weights{f'; {without}' if without else ''}",
    )


@dataclass
class CheckedImages:
    fingerprint: Fingerprint | None = None
    tokens: dict[Path, int] = field(default_factory=dict)
    """The tokens of each image, unless its size is unknown."""
    keys: dict[Path, str] = field(default_factory=dict)
    """The image key of each image that is planned or was read."""
    to_encode: list[Path] = field(default_factory=list)
    """Images that the cache lacks, one path for each content; a path again for each variant of the image."""

    def distinct(self, paths: Iterable[Path]) -> list[Path]:
        """One path for each content: a parquet file may have an image in many rows."""
        path_of: dict[str, Path] = {}
        for path in paths:
            path_of.setdefault(self.keys.get(path, str(path)), path)
        return list(path_of.values())


def check_images(run: RunFile, records: CheckedRecords, model: CheckedModel) -> tuple[CheckedImages, list[Result]]:
    """Find every image of the records in the cache, or on disk."""
    images, results = CheckedImages(), list[Result]()
    origin_of, unusable = records.images(), dict[Path, str]()
    cache, state = _open_cache(run, model, images)
    if cache:
        images.keys |= index_from_plan(read_plan(cache.folder), list(origin_of), without_files=True).key_of

    def is_known(path: Path) -> bool:
        """Whether the cache has an image, or knows that it cannot be encoded; notes what it knows."""
        key = images.keys.get(path, "")
        if cache and key in cache:
            images.tokens[path] = cache.entry(key)[1].num_tokens
        elif cache and key in cache.failed and not cache.failed[key].retry:
            unusable[path] = f"{path} is quarantined: {cache.failed[key].reason}"
        return path in images.tokens or path in unusable

    rest = [path for path in origin_of if not is_known(path)]  # the cache may know them by another name
    inspected, to_encode = inspect_images(rest), []
    for path in rest:
        image = inspected[path]
        images.keys |= {path: image.key} if image.key else {}
        if image.key and is_known(path):
            continue
        if problem := image.problem or _wrong_size(model.processor, image):
            unusable[path] = problem
            continue
        to_encode.append(path)
        if model.processor and (num_tokens := planned_tokens(model.processor, image.size)):
            images.tokens[path] = num_tokens
    images.to_encode = images.distinct(to_encode)
    results += _variants(run, records, images, cache, unusable)
    if cache is None and state.level == "error":
        results.append(state)
    elif images.to_encode:
        missing = f"{count(len(images.to_encode), 'image')} to encode; {state.value}"
        results.append(Result("warning", "cache", missing, BUILD_COMMAND))
    elif origin_of:
        results.append(state)
    if unusable:
        results.append(_unusable(records, images, unusable, origin_of))
    elif origin_of:
        number = count(len(images.distinct(origin_of)), "image")
        results.append(Result("ok", "images", f"{number}: in the cache, or can be read"))
    return images, results


def _variants(
    run: RunFile,
    records: CheckedRecords,
    images: CheckedImages,
    cache: VisionCache | None,
    unusable: Collection[Path],
) -> Iterator[Result]:
    """Whether images may have variants, and how many the cache lacks, which are noted as images to encode."""
    augment, train = run.cache.augment, records.by_split["train"]
    if augment is None:
        return
    try:
        augment.check(train)
    except UsageError as error:
        value, _, do = str(error).rpartition("; ")  # the value quotes a text
        yield Result("error", "variants", value, do)
        return
    paths = images.distinct(path for record in train for path in record.images if path not in unusable)
    variants = [(path, variant) for path in paths for variant in augment.of(images.keys.get(path, str(path)))]
    lacking = [path for path, variant in variants if cache is None or variant.key not in cache]
    images.to_encode += lacking
    number = f"{count(len(variants), 'variant')} of {count(len(paths), 'training image')} (cache.augment)"
    yield Result("ok", "variants", f"{number}, {len(lacking):,} of which the cache lacks")
    if not run.train.steps and run.train.epochs < augment.variants:
        shown = f"train.epochs: {run.train.epochs:g} shows fewer than the {augment.variants} variants of an image"
        yield Result("warning", "variants", shown, "lower cache.augment.variants, which takes less space")


def _unusable(
    records: CheckedRecords, images: CheckedImages, unusable: dict[Path, str], origin_of: dict[Path, str]
) -> Result:
    paths = images.distinct(unusable)
    named = [f"{first_line(ImageError(unusable[path]))} (used by {origin_of[path]})" for path in paths]
    num_records = sum(any(path in unusable for path in record.images) for record in records.all())
    number = f"{count(len(paths), 'image')} of {count(num_records, 'record')}"
    problem = f"{number} cannot be used: {listed(named, NUM_NAMED)}"
    if len(unusable) == len(origin_of):
        set_root = "set `data.image_root`; image paths are relative to it, and without it to the records file"
        return Result("error", "images", problem, set_root)
    advice = "repair them, or remove their records, which this lists: lookonce data audit RECORDS --decode"
    return Result("error", "images", problem, advice)


def _open_cache(run: RunFile, model: CheckedModel, images: CheckedImages) -> tuple[VisionCache | None, Result]:
    """The cache of the run if there is one, and what is to be said of it; notes the fingerprint if it is known."""
    root = run.cache.dir
    if not any(root.glob(f"*/{MANIFEST}")):
        return None, Result("ok", "cache", f"no cache yet in {located(root)}")
    if model.model_folder is None or model.processor is None:
        return None, Result("ok", "cache", "not checked, because the model cannot be opened")
    try:
        images.fingerprint = fingerprint_of(source_of(run, is_local=True), root)
        cache = find_cache(root, images.fingerprint)
    except LookonceError as error:
        if images.fingerprint and not (root / images.fingerprint.folder_name / MANIFEST).exists():
            head, *differences = str(error).splitlines()  # the last line is advice
            return None, Result("ok", "cache", " ".join([head, *(line.strip() for line in differences[:-1])]))
        return None, Result("error", "cache", str(error), REPAIR_COMMAND)
    return cache, Result("ok", "cache", f"{count(len(cache), 'image')} in {cache.folder}")


def _wrong_size(processor: ImageProcessor | None, image: ImageInfo) -> str:
    """Why the processor does not take images of this size; empty if it does."""
    try:
        if processor and image.size:
            processor.check_size(image.size, image.path)
    except BadImage as error:
        return str(error)
    return ""


TRAINED = ("train", "val")
"""The splits whose records must fit a pack; the questions of an evaluation may be of any length."""


def check_tokens(run: RunFile, records: CheckedRecords, model: CheckedModel, images: CheckedImages) -> list[Result]:
    """The lengths of the records that are trained on and validated with."""
    if model.counter is None:
        return []
    results = []
    for split in TRAINED:
        if split_records := records.by_split[split]:
            results += _check_split(run, split, split_records, model.counter, images)
    return results


def _check_split(
    run: RunFile, split: str, records: list[Record], counter: TokenCounter, images: CheckedImages
) -> list[Result]:
    lengths: list[tuple[int, str]] = []
    refused: list[str] = []
    asks = split == "train" and run.train.objective == "grpo"
    for record in tqdm(records, desc=f"count tokens of {split}", unit="record", leave=False, disable=None):
        image_tokens = [images.tokens.get(path, 0) for path in record.images]
        try:
            if asks:
                lengths += [(length, record.origin) for length in answer_lengths(run, record, counter, image_tokens)]
            else:
                example = counter.example(record, [""] * len(record.images), image_tokens)
                lengths.append((example.num_tokens, record.origin))
        except RecordsError as error:
            refused.append(str(error))
    results = [_too_long(run.batch, split, lengths, asks)] if lengths else []
    if refused:
        problem = f"{split}: training stops at {count(len(refused), 'record')}: {listed(refused, NUM_NAMED)}"
        results.append(Result("error", "lengths", problem, "correct or remove these records"))
    return results


def answer_lengths(run: RunFile, record: Record, counter: TokenCounter, image_tokens: Sequence[int]) -> list[int]:
    """The tokens of each question with the longest answer that training draws; raises RecordsError if it is refused."""
    prompts = [counter.chat_tokenizer.prompt(record, turn)[0] for turn in range(len(record.turns))]
    of_images = sum(image_tokens) - len(image_tokens)  # each has a placeholder in the prompt
    return [len(prompt) + of_images + run.grpo.max_new_tokens for prompt in prompts]


def _too_long(batch: BatchSection, split: str, lengths: list[tuple[int, str]], asks: bool) -> Result:
    limit, key = batch.longest_record, batch.limiting_key
    long = [(number, origin) for number, origin in lengths if number > limit]
    distribution = Distribution.of(Counter(number for number, _ in lengths))
    with_answer = " with an answer of grpo.max_new_tokens" if asks else ""
    if not long:
        usual = f"{distribution.median:,} tokens in the median, {distribution.max:,} at most{with_answer}"
        summary = f"{split}: {usual}; the limit is {limit:,} ({key})"
        return Result("ok", "lengths", summary)
    named = [f"{origin} with {number:,}" for number, origin in long]
    problem = (
        f"{split}: {len(long):,} of {count(len(lengths), 'question' if asks else 'record')} left out, longer than "
        f"{limit:,} tokens{with_answer} ({key}): {listed(named, NUM_NAMED)}"
    )
    limits = {"batch.max_tokens": batch.max_tokens} | (
        {"batch.tokens_per_pack": batch.tokens_per_pack} if batch.has_packs else {}
    )
    raised = " and ".join(f"`{name}`" for name, value in limits.items() if value < distribution.max)
    lowered = "`cache.max_pixels` or `grpo.max_new_tokens`" if asks else "`cache.max_pixels`"
    return Result(
        "error" if len(long) == len(lengths) else "warning",
        "lengths",
        problem,
        f"raise {raised} to {distribution.max:,}, or lower {lowered}",
    )


MEASURED_WITH = "measured with 9 questions an image, 8 answers to each, and answers of 8 and 64 tokens"
"""What the time of drawn answers was measured with: others are computed from it."""


def check_drawing(
    run: RunFile, path: Path, assignments: Sequence[str], records: CheckedRecords, model: CheckedModel
) -> Iterator[Result]:
    """How much a training by rewards draws, and how long it takes; nothing for another training."""
    if run.train.objective != "grpo":
        return
    options, per_step = run.grpo, run.batch.samples_per_step
    num_questions = sum(len(record.turns) for record in records.by_split["train"])
    if records.is_complete:
        per_step = min(per_step, num_questions)
    drawn = per_step * options.samples
    value = (
        f"a step draws {options.samples} answers to each of {count(per_step, 'question')}, at most "
        f"{drawn * options.max_new_tokens:,} tokens"
        + (", and more where rewards are equal (grpo.filter)" if options.filter else "")
    )
    steps = run.train.steps
    if not steps and records.is_complete:
        steps = math.ceil(run.train.epochs * num_steps(num_questions, run.batch.samples_per_step))
    if steps:
        value = f"{count(steps, 'step')}; {value}"
    config = model.model_folder.config if model.model_folder else None
    milliseconds = drawn_ms(measured_name(run.model.path, config), options.max_new_tokens)
    if milliseconds is None or options.iterations > 1:
        time = "its time was not measured " + ("for this model" if milliseconds is None else "with grpo.iterations")
    elif steps:
        time = (
            f"about {duration(steps * drawn * milliseconds / 1000)} on one H100 if all answers are that long, not "
            f"counting replaced questions ({MEASURED_WITH})"
        )
    else:
        time = "how long it takes depends on the number of records: --all reads them"
    changes = (*assignments, "train.steps=10", f"output={run.output}-trial")
    trial = shell("lookonce", "train", path, *(word for text in changes for word in ("--set", text)))
    yield Result("ok", "drawing", f"{value}; {time}; a trial prints questions/s", trial)
    yield from _rewards_without_questions(options, records)


def _rewards_without_questions(options: GrpoSection, records: CheckedRecords) -> Iterator[Result]:
    """The rewards that are 0 for all answers to the training questions."""
    from lookonce.eval.scores.reward import APPLIES

    read = records.by_split["train"]
    questions = [tuple(map(nfc, (turn.answer, *record.references))) for record in read for turn in record.turns]
    useless = [name for name in options.reward if name in APPLIES and not any(map(APPLIES[name][1], questions))]
    of = "train" if records.is_complete else f"the first {count(len(read), 'record')} of train"
    level: Level = "error" if records.is_complete and len(useless) == len(options.reward) else "warning"
    for name in useless if questions else ():
        problem = f"{name} is 0 for all answers to {of}, because no reference is {APPLIES[name][0]}"
        yield Result(level, "rewards", problem, "choose another reward (grpo.reward), or other records")
