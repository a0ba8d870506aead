"""Types of numbers in a run file; each has a lowest and a highest value, which the code behind it can take."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from lookonce.settings import MAX_COUNT

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
"""How many of something, such as steps."""
NumTokens = Annotated[int, Field(ge=1, le=1_000_000)]
"""Tokens that are in memory together; the models that are trained take at most 262,144."""
NumRows = Annotated[int, Field(ge=1, le=100_000)]
"""Rows that are in memory together."""
NumPixels = Annotated[int, Field(ge=1, le=100_000_000)]
"""Pixels of an image; the models' own limit is a sixth of it or less."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
