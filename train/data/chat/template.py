"""Render a chat template around texts that it cannot see: what it writes around them, it writes around any texts.

Design: a `Text` stands for some text. It can be written and joined to other text; every other operation raises. So a
template that renders `Text`s has asked nothing of them, and what it writes depends on their number and order alone. A
template that strips, compares or measures texts is refused, and has to render each conversation. Filters, tests and
functions of templates are refused too, but for a few that are known to ask nothing. The rest of the environment is that
of transformers.

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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.nativetypes import NativeCodeGenerator
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lookonce.text import first_line

Pieces = tuple[str | int, ...]
"""What a template writes: strings of its own, with the numbers of the texts between them."""
FILTERS = ("length", "count", "default", "d")
TESTS = ("defined", "undefined", "none", "mapping", "true", "false")
FUNCTIONS = ("namespace", "range")


MAX_SECONDS, MAX_WAIT_S, MAX_BYTES, MAX_CHARACTERS = 5, 60, 1 << 30, 1 << 20
"""What rendering a few words may take: CPU time, time, memory and characters."""


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


class _TextSeen(BaseException):
    """A template does more with a text than to write it; filters and tests of Jinja catch every `Exception`."""


def _refuse(*args: Any, **options: Any) -> NoReturn:
    raise _TextSeen


class Text:
    """A text that a template may write and not see."""

    def __add__(self, other: Any) -> Text:
        return _Written((self, other))

    def __radd__(self, other: Any) -> Text:
        return _Written((other, self))

    __bool__ = __contains__ = __eq__ = __float__ = __format__ = __getattr__ = __getitem__ = _refuse
    __hash__ = __index__ = __int__ = __iter__ = __len__ = __repr__ = __str__ = _refuse


class _Written(Text):
    """`Text`s and strings in a row, with no two strings beside each other and no empty one."""

    def __init__(self, values: Iterable[Any]) -> None:
        self.pieces: list[str | Text] = []
        for value in values:
            for piece in value.pieces if isinstance(value, _Written) else (value,):
                self._append(piece)

    def _append(self, piece: Any) -> None:
        if not isinstance(piece, str):
            self.pieces.append(piece if isinstance(piece, Text) else _refuse())
        elif self.pieces and isinstance(self.pieces[-1], str):
            self.pieces[-1] += piece
        elif piece:
            self.pieces.append(piece)


class _Environment(ImmutableSandboxedEnvironment):
    """Joins what a template writes to `_Written`; Jinja's own environments apply `str` to all of it."""

    code_generator_class = NativeCodeGenerator

    @staticmethod
    def concat(values: Iterable[Any]) -> Any:
        """What a template, or a macro in it, has written; a string if there is no `Text` in it."""
        written = _Written(value if isinstance(value, Text) else str(value) for value in values)
        has_texts = any(isinstance(piece, Text) for piece in written.pieces)
        return written if has_texts else "".join(map(str, written.pieces))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, Text):
            _refuse()  # Jinja would take it for an unknown key
        return super().getitem(obj, argument)


def write_around(template: str, texts: Sequence[Text], **variables: Any) -> Pieces | None:
    """What a template writes around the texts that are in its variables; None if it does more with them than that."""
    try:
        written = _Written([_compiled(template).render(variables)])
    except (_TextSeen, Exception):  # an error is said by the rendering of a conversation
        return None
    number_of = {id(text): number for number, text in enumerate(texts)}
    return tuple(piece if isinstance(piece, str) else number_of[id(piece)] for piece in written.pieces)


@functools.cache
def _compiled(template: str) -> Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    for table, kept in ((environment.filters, FILTERS), (environment.tests, TESTS), (environment.globals, FUNCTIONS)):
        table.update({name: _refuse for name in table if name not in kept})
    environment.filters["tojson"] = _refuse
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _refuse}
    environment.tests["string"] = lambda value: isinstance(value, str | Text)
    return environment.from_string(template)
