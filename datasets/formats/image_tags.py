"""Image tags (`<image>`) and the image marks of other programs in texts: where they may be, and removing them.

    <img>a.jpg</img>   ![](a.jpg)   <img src="a.jpg">   [img]a.jpg[/img]      name their file
    <|image_1|>   <image_1>   <image_placeholder>   <ImageHere>   ...         stand for an image of the record

Design: the images of a record come before its first question, so that all questions about an image can share its
tokens. A tag at the beginning of the first question means exactly that. A tag at its end is moved to the beginning, as
LLaVA itself does. Anywhere else its position has a meaning that would be lost, and the record is refused.

The marks of other programs are read in every record format, by the same rule: those that name files give the record its
images, others must be as many as its images. A record is never trained without the image that its text speaks of.
`<image>` itself is a tag in formats that define it, and a word in the others. HTML and Markdown are texts where a model
may learn to read or write them: in answers and system texts, and beside images with other names.

Removing a tag also removes one line break beside it, or spaces, so a question that itself begins with a line break can
be written and read back.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from lookonce.datasets.formats.checks import may_have_marks, shown, text
from lookonce.datasets.formats.record import Record, Turn
from lookonce.errors import RecordsError
from lookonce.families.family import IMAGE_IN_PROMPT
from lookonce.text import count

TAG = "<image>"
NAMING_TAG = "</image>"
"""The end of a mark that is no tag: `<image>a.jpg</image>`."""
LEADING = re.compile(r"\s*(?:<image>\s*)*<image>[ \t]*(?:\r?\n)?")
MOVE_IMAGES = "lookonce shows images before the first question; move it there"
MARKUP = r"<img\s[^<>]*>|!\[[^\[\]]*\]\((?P<markdown>[^()\n]*)\)"
"""Images in HTML and in Markdown."""
OPENS = (
    r"<\|?(?:(?:begin|start)_of_(?:image|img)|(?:image|img|media)_(?:start|begin)|start_img|boi)\|?>|<im_start>|<img>"
)
CLOSES = r"<\|?(?:end_of_(?:image|img)|(?:image|img|media)_end|end_img|eoi)\|?>|<im_end>|</img>"
FILLS = (
    r"<im_patch>|<\|?(?:image|img|media)[ _@]?(?:placeholder|token|here|pad|patch|soft_token|context|content)\|?>"
    r"|<\| ?(?:img|image) ?\|>|\[(?:image|img)_break\]"
)
"""Tokens around the tokens of one image, and such tokens, of which programs write any number for an image."""
MARK = re.compile(
    rf"{MARKUP}|<img>(?P<img>[^<>]*)</img>|\(<image>\./</image>\)|<image>(?P<image>[^<>]*)</image>"
    rf"|(?:{OPENS})(?:image)?(?:<image>|{FILLS})*(?:{CLOSES})|<fake_token_around_image><image><fake_token_around_image>"
    r"|\[img\](?P<bbcode>[^\[\]]*)\[/img\]|(?<!\[img\])(?<!\[img_break\])\[img\](?:\[img(?:_break)?\])*\[img_end\]"
    rf"|{IMAGE_IN_PROMPT}|{OPENS}|{CLOSES}|{FILLS}|<fake_token_around_image>"
    r"|(?!(?-i:<image>))< ?image ?>|< ?img ?>|<(?:img|image) ?/>|\[ ?(?:img|image) ?\]"
    r"|(?:(?P<bar><\|?)|\[)(?:img|image)[ _#:-]?(?P<number>\d+)(?(bar)\|?>|\])",
    re.IGNORECASE,
)
"""The image marks of other programs. No part can begin within itself, so a search takes linear time."""
SOURCE = re.compile(r"""\bsrc\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""", re.IGNORECASE)
URL = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
BEFORE_MARK = re.compile(r"\s*(?:Picture \d+:[ \t]*)?")
"""What may stand between two marks: spaces, and the label that Qwen-VL writes before each of its own."""
LABEL_AT_END = re.compile(r"Picture \d{1,9}:[ \t]*\Z")
MAX_LABEL = 24
"""The longest such label."""


def remove_tags(question: str, origin: str) -> tuple[str, int]:
    """Return the first question without the tags at its two ends, and how many tags there were.

    Raises:
        RecordsError: there is a tag between its words.
    """
    rest = question[match.end() :] if (match := LEADING.match(question)) else question
    rest = _without_last_tags(rest)
    if TAG in rest:
        raise RecordsError(f"{origin}: {TAG} in the middle of the first question; {MOVE_IMAGES}")
    return rest, question.count(TAG)


def _without_last_tags(text: str) -> str:
    """A text without the tags at its end; a regular expression would take the square of their number."""
    end, first = len(text), None
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        if not text.endswith(TAG, 0, end):
            return text if first is None else _without_line_end(text[:first])
        end = first = end - len(TAG)


def _without_line_end(text: str) -> str:
    """What stands before a tag or a mark, without the spaces or the line break between the two."""
    text = text.rstrip(" \t")
    return text[:-1].removesuffix("\r") if text.endswith("\n") else text


def check_num_tags(num_tags: int, num_images: int, origin: str) -> None:
    """Check that there is one tag for each image, or none.

    Raises:
        RecordsError: there are more tags or fewer.
    """
    if num_tags not in (0, num_images):
        tags, images = count(num_tags, f"{TAG} tag"), count(num_images, "image")
        raise RecordsError(f"{origin}: {tags} and {images}; expected one tag for each image, or no tags")


def add_tags(question: str, num_images: int, between: str = "") -> str:
    """Return a question with a tag for each image before it, each followed by `between`."""
    needs_line_break = num_images and not between and question[:1].isspace()
    return (TAG + between) * num_images + ("\n" if needs_line_break else "") + question


def read_marks(record: Record, find: Callable[[str], Path]) -> Record:
    """The record without image marks, and with the images that they name; `find` gives the path of a name.

    Raises:
        RecordsError: a mark is not at an end of the first question, or the marks are not those of the record's images.
    """
    if not may_have_marks(record):
        return record
    for where, one in _other_texts(record):
        for mark in _marks(one):
            if not (_is_markup(mark) and (record.images or not where.startswith("question"))):
                raise RecordsError(f"{record.origin}: the image mark {shown(mark[0])} in {where}; {MOVE_IMAGES}")
    if not (marks := _marks(record.turns[0].question)):
        return record
    try:
        return _with_marks_read(record, marks, find)
    except RecordsError:
        if record.images and all(map(_is_markup, marks)):
            return record
        raise


def _with_marks_read(record: Record, marks: Sequence[re.Match[str]], find: Callable[[str], Path]) -> Record:
    first, *others = record.turns
    question = text(_without_marks(first.question, marks, record.origin), "question", record.origin)
    return replace(record, images=_images_of(marks, record, find), turns=(Turn(question, first.answer), *others))


def _is_markup(mark: re.Match[str]) -> bool:
    return re.fullmatch(MARKUP, mark[0], re.IGNORECASE) is not None


def _marks(one: str) -> list[re.Match[str]]:
    return list(MARK.finditer(one)) if "<" in one or "[" in one else []


def _other_texts(record: Record) -> Iterator[tuple[str, str]]:
    """Each text but the first question, and what it is."""
    if record.system:
        yield "the system text", record.system
    for number, turn in enumerate(record.turns, start=1):
        if number > 1:
            yield f"question {number}", turn.question
        yield f"answer {number}", turn.answer
    for one in record.references:
        yield "references", one


def _without_marks(question: str, marks: Sequence[re.Match[str]], origin: str) -> str:
    """The question without the marks at its two ends."""
    start, end, waiting = 0, len(question), [*marks]
    while waiting and BEFORE_MARK.fullmatch(question, start, waiting[0].start()):
        start = waiting.pop(0).end()
    while waiting and not question[waiting[-1].end() : end].strip():
        end = waiting.pop().start()
        if label := LABEL_AT_END.search(question, max(end - MAX_LABEL, start), end):
            end = label.start()
    if waiting:
        mark = shown(waiting[0][0])
        raise RecordsError(f"{origin}: the image mark {mark} in the middle of the first question; {MOVE_IMAGES}")
    rest = question[start:end]
    if start:
        rest = re.sub(r"\A[ \t]*(?:\r?\n)?", "", rest)
    if end < len(question):
        rest = _without_line_end(rest)
    return rest


def _images_of(marks: Sequence[re.Match[str]], record: Record, find: Callable[[str], Path]) -> tuple[Path, ...]:
    """The images of a record whose first question has these marks."""
    names, images = list(map(_name, marks)), record.images
    numbers = [int(mark["number"]) for mark in marks if mark["number"]]
    first = f"{record.origin}: the image mark {shown(marks[0][0])}"
    if all(names):
        named = tuple(map(find, names))
        if not images:
            return named
        for mark, image, other in zip(marks, images, named, strict=False):
            if image.name != other.name:
                what = f"the image mark {shown(mark[0])} names another image than the record"
                raise RecordsError(f"{record.origin}: {what}, which has {shown(image.name)}; keep one of the two")
    elif any(names):
        raise RecordsError(f"{first} and another one, of which only one names a file; name the files of all images")
    if len(marks) != len(images):
        num_marks, num_images = count(len(marks), "image mark"), count(len(images), "image")
        raise RecordsError(
            f"{first}: {num_marks} and {num_images}; expected one mark for each image: name the images of the record, "
            "or remove the marks"
        )
    if numbers and numbers not in (list(range(len(images))), list(range(1, len(images) + 1))):
        raise RecordsError(f"{first}: expected the numbers of the marks in the order of the images, got {numbers}")
    return images


def _name(mark: re.Match[str]) -> str:
    """The name of the file that a mark names; empty if it only stands for an image."""
    if mark["markdown"] is not None:
        name = mark["markdown"].strip()
        name = name[1:].partition(">")[0] if name.startswith("<") else re.split(r"\s+[\"']", name, maxsplit=1)[0]
        return name if URL.match(name) else unquote(name)
    if source := SOURCE.search(mark[0]):
        name = html.unescape(next(filter(None, source.groups()), ""))
        return name if URL.match(name) else unquote(name)
    name = (mark["img"] or mark["image"] or mark["bbcode"] or "").strip()
    return "" if name in (".", "./") else name
