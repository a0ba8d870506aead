"""`lookonce data`: what is trained on. What the commands do is in `datasets`.

`convert` is in commands.records, `audit` and `pack` in commands.audit.
"""

from __future__ import annotations

import click


@click.group()
def data() -> None:
    """Make records, look into them, change their form."""
