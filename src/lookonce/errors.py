"""Errors that a user can fix; the program itself is not at fault.

    LookonceError               base class; the command line prints it without a traceback, exit code 1
    |- UsageError               the command line or the run file asks for something impossible, exit code 2
    |- RecordsError             a records file is broken; names file and line
    |- SourceError              a dataset cannot be downloaded or read
    |- ImageError               an image is missing or cannot be read
    |  `- BadImage              it was read, and its bytes are not a usable image
    |- ModelError               a model folder is incomplete, or an option does not fit the model
    |- CacheError               a cache cannot be used
    |  |- CacheMismatch         it was built from another model or with other settings; names the fields
    |  |- FeaturesMissing       it lacks the features of an image
    |  |- CacheCorrupt          its bytes differ from what was written
    |  `- DiskFull              the disk has no room for it; names the missing bytes
    |- TrainingError            training diverged, ran out of memory, or a CUDA graph could not be captured
    `- RunFolderError           the output folder holds another run or other files
    Stopped                     a signal asked the process to stop; exit code 75: run the same command again

A message says what is wrong, the value, what is allowed, and the command to run next. Our own invariants are
plain `assert`s.
"""

from __future__ import annotations


class LookonceError(Exception):
    """An error that a user can fix."""

    exit_code = 1


class UsageError(LookonceError, ValueError):
    """The command line or the run file asks for something impossible."""

    exit_code = 2


class RecordsError(LookonceError, ValueError):
    """A records file is broken."""


class SourceError(LookonceError):
    """A dataset cannot be downloaded or read."""


class ImageError(LookonceError):
    """An image is missing or cannot be read."""


class BadImage(ImageError):
    """An image file was read, and its bytes are not a usable image."""


class ModelError(LookonceError):
    """A model folder is incomplete, or an option does not fit the model."""


class CacheError(LookonceError):
    """A cache cannot be used."""


class CacheMismatch(CacheError):
    """A cache was built from another model or with other settings."""


class FeaturesMissing(CacheError, KeyError):
    """A cache lacks the features of an image."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0])


class CacheCorrupt(CacheError):
    """The bytes of a cache differ from what was written."""


class DiskFull(CacheError):
    """The disk has no room for a cache."""


class Stopped(BaseException):
    """A signal asked the process to stop before its work was finished.

    Like KeyboardInterrupt it is not an `Exception`: it is raised wherever the program is, and a library that catches
    exceptions there (torch.compile does) must not swallow it.
    """

    exit_code = 75


class TrainingError(LookonceError):
    """Training diverged, ran out of memory, or a CUDA graph could not be captured."""


class RunFolderError(LookonceError):
    """The output folder holds another run or other files."""
