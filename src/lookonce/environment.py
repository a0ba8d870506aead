"""What a result was made with, for whoever reads it later."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from lookonce.version import __version__

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "tokenizers", "safetensors", "numpy", "pillow")


def library_versions() -> dict[str, str | None]:
    """Versions by name; None for what is not installed."""
    return {"lookonce": __version__} | {name: _version(name) for name in LIBRARIES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
