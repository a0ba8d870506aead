"""`lookonce completion bash|zsh|fish`: the script with which a shell completes commands. It is click's own.

https://click.palletsprojects.com/en/stable/shell-completion/
"""

from __future__ import annotations

import click
from click.shell_completion import ShellComplete, get_completion_class

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_LOOKONCE_COMPLETE"
"""The variable in which the shell's script asks for completions; click derives it from the name of the program."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script with which a shell completes commands, options and files.

    \b
    bash: append to ~/.bashrc; needs bash 4.4 or later
      lookonce completion bash > ~/.lookonce-completion.bash
      echo '. ~/.lookonce-completion.bash' >> ~/.bashrc
    zsh: append to ~/.zshrc, after compinit
      lookonce completion zsh > ~/.lookonce-completion.zsh
      echo '. ~/.lookonce-completion.zsh' >> ~/.zshrc
    fish:
      lookonce completion fish > ~/.config/fish/completions/lookonce.fish

    Run it again after an update of lookonce that changes click, and start a new shell.

    \b
    Examples:
      lookonce completion bash
      lookonce completion zsh
      lookonce completion fish
    """
    click.echo(script(shell, click.get_current_context().find_root().command))


def script(shell: str, program: click.Command) -> str:
    """The script for a shell."""
    kind = get_completion_class(shell)
    assert kind is not None, shell
    return ShellComplete.source(kind(program, {}, "lookonce", VARIABLE))  # bash's own asks bash for its version
