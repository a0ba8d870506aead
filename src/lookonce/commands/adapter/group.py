"""The group `lookonce adapter`: what a trained adapter is used for."""

from __future__ import annotations

import click


@click.group()
def adapter() -> None:
    """Merge a trained adapter into its model, check it for other programs, and upload it to the Hub.

    \b
    Examples:
      lookonce adapter merge runs/kvasir models/kvasir-merged
      lookonce adapter check runs/kvasir --for vllm
      lookonce adapter push runs/kvasir your-name/kvasir-adapter --dry-run
    """
