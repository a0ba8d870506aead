"""`lookonce ask`: a conversation in the terminal. The work is done in `eval.answerer`."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lookonce.commands.options import PATH, check_launch, notify, only_results_on_stdout, remember_run_file, say
from lookonce.errors import LookonceError, UsageError
from lookonce.text import json_text

if TYPE_CHECKING:
    from lookonce.eval.answerer import Conversation

COMMANDS = "/image PATH ..., /reset, /save FILE, /quit"


@click.command()
@click.argument("run_dir", metavar="RUN", type=PATH)
@click.argument("images", metavar="[IMAGE]...", nargs=-1, type=PATH)
@click.option("--system", help="System text before the first question.")
@click.option("--untuned", is_flag=True, help="Answer without the adapter; RUN may then also be a model.")
@click.option("--json", "as_json", is_flag=True, help="Print each answer as a line of JSON.")
def ask(run_dir: Path, images: tuple[Path, ...], system: str | None, untuned: bool, as_json: bool) -> None:
    """Ask about images in a conversation, a question a line.

    The model sees its own earlier answers, and answers appear word by word.
    Lines that begin with a slash are commands: /image PATH ... begins again
    about other images, /reset begins again about the same ones, /save FILE
    writes the conversation as a record, and /quit ends it, as does the end of
    the input.

    \b
    Examples:
      lookonce ask runs/sample data/sample/images/frame-0026.jpg
      lookonce ask runs/pairs before.jpg after.jpg
      lookonce ask Qwen/Qwen3-VL-2B-Instruct a.jpg --untuned
    """
    check_launch()
    with only_results_on_stdout():
        from lookonce.eval.answerer import Answerer, Conversation

    remember_run_file(run_dir)
    conversation = Conversation(Answerer.open(run_dir, untuned=untuned), images, system)
    notify(f"ask a question a line, or: {COMMANDS}")
    while (line := _next_line()) not in (None, "/quit"):
        try:
            _answer(conversation, line or "", as_json)
        except LookonceError as error:
            notify(str(error))


def _next_line() -> str | None:
    """The next line of the input without spaces around it; None at its end, or after Ctrl-C."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _answer(conversation: Conversation, line: str, as_json: bool) -> None:
    """Answer a question, or do what a command says."""
    name, _, rest = line.partition(" ")
    if name == "/image":
        conversation.show([Path(word).expanduser() for word in _words(rest)])
    elif name == "/reset" and not rest:
        conversation.reset()
    elif name == "/save" and len(words := _words(rest)) == 1:
        conversation.save(Path(words[0]).expanduser())
        notify(f"wrote {words[0]}")
    elif name.startswith("/"):
        raise UsageError(f"{line} is not a command; there are: {COMMANDS}")
    elif line:
        streams = sys.stdout.isatty() and not as_json
        answer = conversation.ask(line, partial(say, nl=False) if streams else lambda text: None)
        how = {"logprob": answer.logprob, "num_tokens": answer.num_tokens, "ended": answer.ended}
        row = {"question": line, "answer": answer.text} | how
        say("" if streams else json_text(row) if as_json else answer.text)


def _words(text: str) -> list[str]:
    """The words of a command, with quotes as in a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{text}: {error}; close the quotes") from None
