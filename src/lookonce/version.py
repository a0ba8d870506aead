"""The version, alone, so that all parts can name it without importing the package's front."""

__version__ = "0.1.0"
