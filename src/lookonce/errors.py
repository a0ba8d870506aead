"""What can go wrong through no fault of the program.

    LookonceError               anything a user can mend; the command line prints it without a traceback, exit code 1
    |- UsageError               the command line or the run file asks for something impossible, exit code 2
    |- RecordsError             a records file is broken; names file and line
    |- SourceError              a data set can not be had, or is not where it was said to be
    |- ImageError               an image is missing or can not be read
    |  `- BadImage              its bytes are there and are no image that can be used
    |- ModelError               a checkpoint folder lacks what is needed, or an option does not fit the model
    |- CacheError               a cache can not be used
    |  |- CacheMismatch         it was made with another model or other pixels; names the fields
    |  |- FeaturesMissing       it lacks the features of an image
    |  |- CacheCorrupt          its bytes are not what was written
    |  `- DiskFull              there is no room for it; names the bytes that are missing
    |- TrainingError            a training has left the numbers in which it can go on
    `- RunFolderError           the output folder holds something else
    Stopped                     a signal asked to stop; exit code 75: run the same command again

A message says what is wrong, the value, what is allowed, and the command to run next. Broken invariants of our own
are plain `assert`s.
"""

from __future__ import annotations


class LookonceError(Exception):
    """Anything a user can mend."""

    exit_code = 1


class UsageError(LookonceError, ValueError):
    """The command line or the run file asks for something impossible."""

    exit_code = 2


class RecordsError(LookonceError, ValueError):
    """A records file is broken."""


class SourceError(LookonceError):
    """A data set can not be had, or is not where it was said to be."""


class ImageError(LookonceError):
    """An image is missing or can not be read."""


class BadImage(ImageError):
    """The bytes of a file are no image that can be used."""


class ModelError(LookonceError):
    """A checkpoint folder lacks what is needed, or an option does not fit the model."""


class CacheError(LookonceError):
    """A cache can not be used."""


class CacheMismatch(CacheError):
    """A cache was made with another model or other pixels."""


class FeaturesMissing(CacheError, KeyError):
    """A cache lacks the features of an image."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0])


class CacheCorrupt(CacheError):
    """The bytes of a cache are not what was written."""


class DiskFull(CacheError):
    """There is no room for a cache."""


class Stopped(BaseException):
    """A signal asked to stop before all was done.

    Not an Exception, as KeyboardInterrupt is none: it comes wherever the program is, and a library that catches its own
    errors there, a compiler above all, would take it for one.
    """

    exit_code = 75


class TrainingError(LookonceError):
    """A training has left the numbers in which it can go on."""


class RunFolderError(LookonceError):
    """The output folder holds something else."""
