"""All commands of the command line."""

from __future__ import annotations

from collections.abc import Iterator

import click

from lookonce.cli import main


def all_commands(
    command: click.Command = main, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command and group by the words that call it; `lookonce` itself is called by none of them."""
    yield words, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from all_commands(child, (*words, name))
