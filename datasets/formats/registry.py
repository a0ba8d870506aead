"""All forms by name, and which one a record has.

Design: a form is known by the keys of a file's first record, and all others must be of its kind; so a file that changes
its mind in the middle is found out, and reading needs no guess a record. Forms that differ in writing only are read as
one kind: LLaVA and ShareGPT, the three forms of messages, and the project's own two, which may stand in one file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lookonce.datasets.formats.alpaca import read_alpaca, write_alpaca
from lookonce.datasets.formats.checks import Row, kind
from lookonce.datasets.formats.image_refs import Finder
from lookonce.datasets.formats.llava import read_conversations, write_llava, write_sharegpt
from lookonce.datasets.formats.messages import read_messages, write_messages, write_openai, write_parts
from lookonce.datasets.formats.native import read_canonical, read_flat, write_canonical, write_flat
from lookonce.datasets.formats.record import Record
from lookonce.errors import RecordsError

FormName = Literal["canonical", "flat", "llava", "sharegpt", "alpaca", "messages", "parts", "openai"]
FORM_NAMES: tuple[FormName, ...] = get_args(FormName)
Read = Callable[[Row, Finder, str], Record]
Write = Callable[[Record, list[str]], Row]
KNOWN_BY = (
    "the key `turns` (canonical form) or `question` (flat form), got {keys}; other forms have `conversations` (LLaVA, "
    "ShareGPT), `messages`, or `instruction` and `output` (Alpaca)"
)


@dataclass(frozen=True)
class Form:
    """How a record is read from an object, and made one."""

    name: FormName
    kind: str
    """Forms of one kind are read alike, and may stand in one file."""
    read: Read
    write: Write
    """Given the record and the names of its images; raises what the form can not hold."""


FORMS: dict[FormName, Form] = {
    form.name: form
    for form in (
        Form("canonical", "own", read_canonical, write_canonical),
        Form("flat", "own", read_flat, write_flat),
        Form("llava", "conversations", read_conversations, write_llava),
        Form("sharegpt", "conversations", read_conversations, write_sharegpt),
        Form("alpaca", "alpaca", read_alpaca, write_alpaca),
        Form("messages", "messages", read_messages, write_messages),
        Form("parts", "messages", read_messages, write_parts),
        Form("openai", "messages", read_messages, write_openai),
    )
}


def form_of(row: Row) -> FormName | None:
    """The form of a record, by its keys; None if it has those of no form."""
    if "turns" in row:
        return "canonical"
    if "question" in row and "image_filename" in row:
        return "flat"
    if "conversations" in row:
        return "sharegpt" if "images" in row else "llava"
    if "messages" in row:
        return _form_of_messages(row)
    if "instruction" in row and "output" in row:
        return "alpaca"
    return "flat" if "question" in row else None


def _form_of_messages(row: Row) -> FormName:
    messages = row["messages"] if isinstance(row["messages"], list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    if any(isinstance(part, dict) and part.get("type") == "image_url" for part in parts):
        return "openai"
    if any(isinstance(content, list) for content in contents):
        return "parts"
    return "messages" if "images" in row else "openai"


class Reader:
    """Reads the records of one file, all of one form."""

    def __init__(self, finder: Finder, form: FormName | None = None) -> None:
        """Without a form it is that of the first record."""
        self.finder = finder
        self.form: FormName | None = form
        """Known after the first record."""
        self._read = FORMS[form].read if form else None

    def read(self, value: Any, origin: str) -> Record:
        """A record of what stands in the file.

        Raises:
            RecordsError: it is not of the form; says what was expected.
        """
        if not isinstance(value, dict):
            raise RecordsError(f"{origin}: expected a JSON object, got {kind(value)}")
        if self._read is not None:
            return self._read(value, self.finder, origin)
        found = form_of(value)
        self.form = self.form or found
        if found is None or self.form is None:
            raise RecordsError(f"{origin}: expected {self._expected(value)}")
        if FORMS[found].kind != FORMS[self.form].kind:
            raise RecordsError(
                f"{origin}: expected a record of the form {self.form}, as the first one is, and it is of the form "
                f"{found}; keep them in two files"
            )
        return FORMS[found].read(value, self.finder, origin)

    def _expected(self, value: Row) -> str:
        if self.form is None or FORMS[self.form].kind == "own":
            return KNOWN_BY.format(keys=sorted(value))
        return f"a record of the form {self.form}, as the first one is, got {kind(value)}"
