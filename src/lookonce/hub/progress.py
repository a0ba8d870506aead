"""A progress bar for downloads and what follows them."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

PROGRESS_DELAY_S = 1.0


class Progress(tqdm):  # type: ignore[type-arg]
    """A bar on a terminal, also where the libraries' own bars are switched off; shown after a moment."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"delay": PROGRESS_DELAY_S, **options, "disable": options.get("disable") or None})
