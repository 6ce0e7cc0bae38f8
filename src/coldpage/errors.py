"""Every exception that coldpage raises on purpose.

ColdpageError
├── ConfigurationError (ValueError)      a setting can not work; says which and what to do
│   └── CodecError                       a codec broke its contract while being configured
├── UsageError (RuntimeError)            a call that its object's state, or a value, does not allow
│   ├── ClosedError                      the object is closed
│   ├── CodecConsumedError               the codec was already given to a manager
│   └── WrongThreadError                 a thread other than the owner touched the manager
├── OutOfPagesError (MemoryError)        can never fit the hot level, as configured
├── DeviceError (RuntimeError)           allocation, copy or launch failed at submission
│   └── SubmissionError                  a codec, copy or launch was refused, wholly or in part
├── StorageError (OSError)               the disk tier's file can not be used
│   └── SnapshotError                    a saved session can not be written, read or used here
└── ModelError (ValueError)              a model can not be loaded or served

A bug is an ``AssertionError``. Expected outcomes ("does not fit now") are return values.
"""

from __future__ import annotations

__all__ = [
    "ClosedError",
    "CodecConsumedError",
    "CodecError",
    "ColdpageError",
    "ConfigurationError",
    "DeviceError",
    "ModelError",
    "OutOfPagesError",
    "SnapshotError",
    "StorageError",
    "SubmissionError",
    "UsageError",
    "WrongThreadError",
]


class ColdpageError(Exception):
    """The root of the tree."""


class ConfigurationError(ColdpageError, ValueError):
    """A setting can not work."""


class CodecError(ConfigurationError):
    """A codec broke its contract while being configured."""


class UsageError(ColdpageError, RuntimeError):
    """The object's state, or a value that was given, does not allow this call."""


class ClosedError(UsageError):
    """The object is closed."""


class CodecConsumedError(UsageError):
    """The codec was given to a manager before and can not be used again."""


class WrongThreadError(UsageError):
    """A thread other than the one that owns the manager touched it."""


class OutOfPagesError(ColdpageError, MemoryError):
    """The request can never fit the hot level as it is configured."""


class DeviceError(ColdpageError, RuntimeError):
    """An allocation, a copy or a launch failed."""


class SubmissionError(DeviceError):
    """Work was rejected when it was submitted.

    A part of it may have been enqueued, and run: what it reads is untouched, what it writes counts
    for nothing, and whoever submitted waits for the stream before either is used again.
    """


class StorageError(ColdpageError, OSError):
    """The disk tier's file can not be opened, sized or used."""


class SnapshotError(StorageError):
    """A file of saved sequences can not be written, or can not be used here; nothing of it is."""


class ModelError(ColdpageError, ValueError):
    """A model can not be loaded or served."""
