"""The group `lookonce cache`."""

from __future__ import annotations

import click


@click.group()
def cache() -> None:
    """Phase 1: build the cache of a run, and verify, repair or copy it.

    \b
    Examples:
      lookonce cache plan data/sample/run.yaml
      lookonce cache build data/sample/run.yaml
      lookonce cache verify data/sample/run.yaml
    """
