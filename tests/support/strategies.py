"""What several tests draw with hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

CHARACTERS = st.characters(exclude_categories=["Cs"])
"""All that UTF-8 can encode. `codec="utf-8"`, the default, is the same and takes a second to find it."""
TEXT = st.text(CHARACTERS)
