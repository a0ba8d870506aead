"""`lookonce data convert`: records from one form into another."""

from __future__ import annotations

from lookonce.commands.data import data  # noqa: F401
