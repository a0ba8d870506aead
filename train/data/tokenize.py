"""Turn records into tokens with the model's own chat template, and mark which tokens are supervised.

The whole conversation is rendered and tokenized once, as the stock processor does it. An answer is what follows the
rendering of the messages before it with a generation prompt, found by character offsets, so no template has to be known
in advance. Only answers and the end token after each are supervised. An `Example` keeps one placeholder token per
image, which keeps tens of thousands of examples small. One conversation takes 0.2 ms, and one that occurs again, as
most do in visual question answering, is tokenized once. To render the prompt of every turn takes the square of their
number. So of a long conversation those of the first and last turns are rendered; a turn between is found if it is
written around its texts as the one before it.

A template comes from elsewhere. Jinja's sandbox keeps it away from Python, but not from loops without an end or texts
without a limit. So it is tried once in a forked process that may use little time and memory, which takes milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import select
import signal
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedConfig

from lookonce.cache.format import Grid
from lookonce.datasets.balance import By, record_weights
from lookonce.datasets.curriculum import StageOrder
from lookonce.datasets.records import Record, Turn
from lookonce.environment import without_garbage_collection
from lookonce.errors import ModelError, RecordsError, explain_os_error
from lookonce.families.lookup import family_of
from lookonce.text import first_line

MAX_SECONDS, MAX_WAIT_S, MAX_BYTES, MAX_CHARACTERS = 5, 60, 1 << 30, 1 << 20
"""What rendering a few words may take: CPU time, time, memory and characters."""
THINKING = "enable_thinking"
"""The variable by which chat templates of Qwen know whether the model should think before it answers."""
EDGE = 8
"""How many turns at each end of a conversation have their prompts rendered."""
Tokens = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""Token ids of a conversation with one placeholder per image, and whether each of them is supervised."""
TURN = Turn("question", "answer")
TRIED = (Record((Path(),), (TURN,)), Record((), (TURN,)), Record((Path(), Path()), (TURN, TURN), "system"))
"""Conversations with which a chat template is tried; it must render the first one."""


def failure_of(render: Callable[[], str]) -> str:
    """Why a rendering of a few words fails, in a process of its own; empty if it does not fail."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child only renders, whatever other threads hold
        child = os.fork()
    if not child:
        _try(render, writer)
    os.close(writer)
    try:
        has_ended = bool(select.select([reader], [], [], MAX_WAIT_S)[0])
        said = os.read(reader, 4096).decode(errors="replace") if has_ended else ""
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return said.removeprefix("ok") if said else f"does not end, or takes more than {MAX_SECONDS} s for a few words"


def _try(render: Callable[[], str], writer: int) -> NoReturn:
    """In the child: write "ok" or a reason to the pipe, and end. It is killed if it takes too much CPU time."""
    reason = "takes too much memory for a few words"
    with contextlib.suppress(BaseException):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS + 1))
        pages = [int(number) for number in Path("/proc/self/statm").read_text().split()]
        for kind, number in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
            resource.setrlimit(kind, (number * resource.getpagesize() + MAX_BYTES,) * 2)
    try:
        is_short = len(render()) <= MAX_CHARACTERS
        reason = "ok" if is_short else f"writes more than {MAX_CHARACTERS:,} characters for a few words"
    except MemoryError:
        pass
    except BaseException as error:
        with contextlib.suppress(BaseException):
            reason = explained(error)
    with contextlib.suppress(BaseException):
        os.write(writer, reason.encode()[:4096])
    os._exit(0)


def explained(error: BaseException) -> str:
    """What a template has done that raised an error, for a message that begins with it."""
    if isinstance(error, SecurityError | OverflowError):
        return f"is refused by Jinja's sandbox: {first_line(error)}"
    kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
    return f"cannot be rendered: {kind}{first_line(error)}"


@dataclass(frozen=True)
class Example:
    """One conversation as tokens, with one placeholder per image."""

    token_ids: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    """Whether each token is a target."""
    image_keys: tuple[str, ...]
    num_image_tokens: tuple[int, ...]
    origin: str
    stage: int = 0
    """In which stage of an epoch it is, if `batch.order` has several."""
    weight: float = 1.0
    """What it weighs in the loss beside others (`batch.balance`)."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens with the placeholders expanded."""
        return len(self.token_ids) - len(self.image_keys) + sum(self.num_image_tokens)

    @property
    def num_targets(self) -> int:
        """Number of supervised tokens."""
        return int(self.supervised.sum())

    def expanded(self, image_token_id: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Token ids and supervision flags, each placeholder repeated once per image token."""
        repeats = np.ones(len(self.token_ids), dtype=np.int64)
        repeats[self.token_ids == image_token_id] = self.num_image_tokens
        return np.repeat(self.token_ids, repeats), np.repeat(self.supervised, repeats)


class ChatTokenizer:
    """Makes examples of records for one model, with its tokenizer, chat template and image token."""

    def __init__(self, folder: Path, config: PreTrainedConfig, enable_thinking: bool | None = None) -> None:
        """Load the tokenizer of a model folder.

        `enable_thinking` is handed to the chat template; None leaves its own default.

        Raises:
            ModelError: the tokenizer is missing, has no chat template, or lacks the image token that the model expects;
                or the template does not know `enable_thinking`, or fails.
        """
        self.image_token = family_of(config).image_token
        self.tokenizer = _load_tokenizer(folder)
        self.image_token_id: int = config.image_token_id
        added = self.tokenizer.added_tokens_decoder.items()
        special: dict[int, str] = {number: token.content for number, token in added if token.special}
        self.special_token_ids, self.special_tokens = [*special], [*special.values()]
        self.merge_size: int = config.vision_config.spatial_merge_size
        self.template_options = _template_options(self.tokenizer, folder, enable_thinking)
        """What the chat template is given beside messages."""
        self._folder = folder
        self._shared: dict[object, Tokens] = {}
        if reason := failure_of(self._try_template):
            raise self._template_error(reason)
        token_id = self.tokenizer.get_vocab().get(self.image_token)
        if token_id != self.image_token_id:
            raise ModelError(
                f"the tokenizer in {folder} has {self.image_token} as {token_id}, the model expects "
                f"{self.image_token_id}; use the tokenizer that was published with the model"
            )

    def example(self, record: Record, image_keys: Sequence[str], grids: Sequence[Grid]) -> Example:
        """The example of a whole conversation, with its answers supervised.

        Raises:
            RecordsError: the chat template does not render each answer after its prompt, or a text contains special
                tokens.
        """
        return self.with_images(self.tokens(record), record, image_keys, grids)

    def question(self, record: Record, turn: int, image_keys: Sequence[str], grids: Sequence[Grid]) -> Example:
        """The prompt of a turn: the conversation up to where its answer begins, with the true earlier answers."""
        return self.with_images(self.prompt(record, turn), record, image_keys, grids)

    def prompt(self, record: Record, turn: int) -> Tokens:
        """The tokens of the prompt of a turn, the same arrays for all with these texts and as many images.

        Raises RecordsError if a text contains special tokens.
        """
        asked = record.turns[:turn], record.turns[turn].question
        texts = (*asked, record.system, record.context, len(record.images))
        if texts not in self._shared:
            turn, record = turn + record.num_given, record.shown
            self._check_texts(record)
            messages = to_messages(record)
            text = self.render(messages[: answer_ends(messages)[turn] - 1], True, record.origin)
            self._shared[texts] = self._tokenize(text, [], record)
        return self._shared[texts]

    def tokens(self, record: Record) -> Tokens:
        """The tokens of a whole conversation, which depend on its texts and the number of its images.

        Answers of a context are not supervised. Raises RecordsError as `example` does.
        """
        num_given, record = record.num_given, record.shown
        self._check_texts(record)
        messages = to_messages(record)
        text = self.render(messages, origin=record.origin)
        return self._tokenize(text, self._answer_spans(messages, text, record, num_given), record)

    def shared_tokens(self, record: Record) -> Tokens:
        """The same as `tokens`, the same arrays for all records that differ in their images alone."""
        texts = (record.turns, record.system, record.context, len(record.images))
        if texts not in self._shared:
            self._shared[texts] = self.tokens(record)
        return self._shared[texts]

    def with_images(self, tokens: Tokens, record: Record, image_keys: Sequence[str], grids: Sequence[Grid]) -> Example:
        return Example(*tokens, tuple(image_keys), tuple(map(self.num_image_tokens, grids)), record.origin)

    def num_image_tokens(self, grid: Grid) -> int:
        t, h, w = grid
        return t * h * w // self.merge_size**2

    def _check_texts(self, record: Record) -> None:
        """Refuse special tokens inside texts: they could end an answer early, or stand for an image."""
        texts = [text for turn in record.turns for text in (turn.question, turn.answer)] + [record.system or ""]
        for token in self.special_tokens:
            for text in texts:
                if token in text:
                    raise RecordsError(f"{record.origin}: {text!r} contains {token}, a special token of the model")

    def render(self, messages: list[dict[str, Any]], generation_prompt: bool = False, origin: str | None = None) -> str:
        """What the chat template writes for these messages, which are of the record from `origin`.

        Raises:
            RecordsError: the template fails; without `origin` it is a ModelError.
        """
        try:
            return self._render(messages, generation_prompt)
        except MemoryError:
            raise
        except Exception as error:  # whatever a template does wrong
            failed = self._template_error(explained(error))
            raise failed if origin is None else RecordsError(f"{origin}: {failed}") from None

    def _render(self, messages: list[dict[str, Any]], generation_prompt: bool = False) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt, **self.template_options
        )
        return text

    def _try_template(self) -> str:
        """The longest text that the chat template writes for conversations of a few words."""
        texts = [self._render(to_messages(TRIED[0]), is_prompt) for is_prompt in (False, True)]
        for record in TRIED[1:]:  # which not all templates take
            try:
                texts.append(self._render(to_messages(record)))
            except (SecurityError, OverflowError, MemoryError):
                raise
            except Exception:
                continue
        return max(texts, key=len)

    def _template_error(self, reason: str) -> ModelError:
        return ModelError(
            f"the chat template of the model in {self._folder} {reason}; use the tokenizer files that were published "
            "with the model"
        )

    def _answer_spans(
        self, messages: list[dict[str, Any]], text: str, record: Record, num_given: int
    ) -> list[tuple[int, int]]:
        """Character offsets in `text` of each answer that is not given, and its end token."""
        ends, turns, eos = answer_ends(messages), record.turns, self.tokenizer.eos_token
        spans: list[tuple[int, int]] = []
        for number in range(num_given, len(ends)):
            if num_given + EDGE <= number < len(ends) - EDGE:
                before = text[spans[-2][1] : spans[-1][0]].replace(turns[number - 1].question, turns[number].question)
                start, answer = spans[-1][1] + len(before), turns[number].answer + eos
                if text.startswith(before + answer, spans[-1][1]):
                    spans.append((start, start + len(answer)))
                    continue
            spans.append(self._answer_span(messages[: ends[number]], text, record))
        return spans

    def _answer_span(self, messages: list[dict[str, Any]], text: str, record: Record) -> tuple[int, int]:
        """Character offsets in `text` of the last of `messages`, an answer, and its end token."""
        prompt, answer = self.render(messages[:-1], True, record.origin), messages[-1]["content"]
        start, end = len(prompt), len(prompt) + len(answer)
        if not text.startswith(prompt) or text[start:end] != answer:
            if self.render(messages, origin=record.origin).startswith(prompt + answer):
                raise RecordsError(
                    f"{record.origin}: the chat template renders answer {answer!r} in another way when a question "
                    "follows, so this record has no row with the prompts of all turns; train on records of one turn, "
                    "or keep the reasoning block in the template: docs/models.md#several-turns"
                )
            raise RecordsError(
                f"{record.origin}: the chat template does not render answer {answer!r} unchanged after its prompt; "
                "if it writes a reasoning block, set `data.enable_thinking: false` or use a template without one; "
                "answers must have no spaces around them"
            )
        if not text.startswith(self.tokenizer.eos_token, end):
            raise RecordsError(
                f"{record.origin}: the chat template puts no end token {self.tokenizer.eos_token} after answers, so a "
                "model cannot learn to stop; use the model's own template"
            )
        return start, end + len(self.tokenizer.eos_token)

    def _tokenize(self, text: str, spans: list[tuple[int, int]], record: Record) -> Tokens:
        if (record.system or "").strip() not in text:
            raise RecordsError(
                f"{record.origin}: the chat template leaves the system text out of the prompt; write it into the "
                "questions, or remove it from the records or `data.system`"
            )
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        token_ids = np.array(encoding["input_ids"], dtype=np.int32)
        num_placeholders = int((token_ids == self.image_token_id).sum())
        if num_placeholders != len(record.images):
            raise RecordsError(
                f"{record.origin}: the chat template makes {num_placeholders} image tokens for {len(record.images)} "
                "images; use the model's own template"
            )
        starts, ends = zip(*encoding["offset_mapping"], strict=True) if len(token_ids) else ((), ())
        supervised = np.zeros(len(token_ids), dtype=np.bool_)
        for start, end in spans:
            first = bisect_left(starts, start)
            if starts[first : first + 1] != (start,):
                raise RecordsError(
                    f"{record.origin}: no token begins where answer {text[start:end]!r} does; answers must not begin "
                    "with spaces or line breaks, which belong to the prompt's last token"
                )
            supervised[first : bisect_right(ends, end)] = True
        return token_ids, supervised


def to_messages(record: Record) -> list[dict[str, Any]]:
    """A record as chat messages: the system text if there is one, and images before the first question."""
    messages: list[dict[str, Any]] = []
    if record.system is not None:
        messages.append({"role": "system", "content": record.system})
    for number, turn in enumerate(record.turns):
        images = [{"type": "image"} for _ in record.images] if number == 0 else []
        messages.append({"role": "user", "content": [*images, {"type": "text", "text": turn.question}]})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages


def answer_ends(messages: list[dict[str, Any]]) -> list[int]:
    """For each answer, the number of messages up to and including it."""
    return [number + 1 for number, message in enumerate(messages) if message["role"] == "assistant"]


def _load_tokenizer(folder: Path) -> Any:
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    except PermissionError as error:
        raise ModelError(explain_os_error(error)) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} has no tokenizer that can be loaded: {first_line(error)}") from None
    if not tokenizer.chat_template:
        raise ModelError(f"the tokenizer in {folder} has no chat template; copy the model's chat_template.jinja there")
    if not tokenizer.is_fast or tokenizer.eos_token is None:
        raise ModelError(f"the tokenizer in {folder} must be a fast one with an end token; use the model's own files")
    return tokenizer


def _template_options(tokenizer: Any, folder: Path, enable_thinking: bool | None) -> dict[str, Any]:
    if enable_thinking is None:
        return {}
    if THINKING not in str(tokenizer.chat_template):  # there may be several
        raise ModelError(
            f"data.enable_thinking is {str(enable_thinking).lower()}, which the chat template in {folder} does not "
            "know; leave the key out"
        )
    return {THINKING: enable_thinking}


def make_examples(
    chat_tokenizer: ChatTokenizer,
    records: Iterable[Record],
    key_of: Callable[[Path], str],
    grid_of: Callable[[str], Grid],
    max_tokens: int,
    split: str = "train",
    limiting_key: str = "batch.max_tokens",
    order: StageOrder | None = None,
    balance: By | None = None,
) -> tuple[list[Example], int]:
    """Examples of the records of at most `max_tokens` tokens, and how many longer records were left out.

    `limiting_key` is the key of the run file that sets `max_tokens`. With an `order`, they have its stages; with
    `balance`, their weights.

    Raises:
        RecordsError: no supervised token is left, so there is nothing to learn.
    """
    with without_garbage_collection():
        records = list(records)
        everything = list(_each_example(chat_tokenizer, records, key_of, grid_of, order))
    fits = [example.num_tokens <= max_tokens for example in everything]
    examples = list(compress(everything, fits))
    if balance and examples:
        weights = record_weights(list(compress(records, fits)), balance)
        examples = [replace(example, weight=weight) for example, weight in zip(examples, weights, strict=True)]
    num_too_long = len(everything) - len(examples)
    if not any(example.supervised.any() for example in examples):
        raise RecordsError(
            f"no supervised token in the {split} data: {len(examples)} records kept, {num_too_long} longer than "
            f"`{limiting_key}` {max_tokens} left out; raise `{limiting_key}` or lower `cache.max_pixels`"
        )
    return examples, num_too_long


def _each_example(
    chat_tokenizer: ChatTokenizer,
    records: Iterable[Record],
    key_of: Callable[[Path], str],
    grid_of: Callable[[str], Grid],
    order: StageOrder | None,
) -> Iterator[Example]:
    @functools.cache
    def shown(images: tuple[Path, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        keys = tuple(key_of(path) for path in images)
        return keys, tuple(chat_tokenizer.num_image_tokens(grid_of(key)) for key in keys)

    for record in records:
        stage = order.stage_of(record) if order else 0
        yield Example(*chat_tokenizer.shared_tokens(record), *shown(record.images), record.origin, stage)
