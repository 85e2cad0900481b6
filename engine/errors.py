"""Every error that a user can cause or meet, each with a hint and an exit code.

    MetalctlError                      1   expected failure
    ├── UsageError                     2   the command or request was put wrongly
    ├── ModelNotFoundError             3   no such model, file, revision or tag
    │   ├── TagNotFoundError           3   the repository is there, but not in that quantisation
    │   ├── AmbiguousTagError          3   several of its models fit what was asked for
    │   └── NotCachedError             3   offline, and what was asked for is not here
    │       ├── RevisionNotCachedError 3   only other revisions of it are
    │       ├── IncompleteModelError   3   only some of its files are
    │       └── TagNotCachedError      3   only other quantisations of it are
    ├── HubError                       4   network or hub: unreachable, refused, limited, cut off
    ├── CheckpointError                1   a model file that is broken
    │   └── UnsupportedModelError      1   a sound file that this version cannot run
    ├── ContextLengthError             1   more tokens than the context holds
    ├── OutOfMemoryError               5   the model or its cache does not fit
    └── StorageError                   1   disk full, read-only, not permitted

Anything else that escapes is a bug (exit code 70).
"""

from typing import ClassVar


class MetalctlError(Exception):
    """A failure with a message for a person, and a hint that says what to do next.

    `type` is the stable name that programs match on (in JSON output and in HTTP bodies).
    """

    exit_code: ClassVar[int] = 1
    type: ClassVar[str] = "error"

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(MetalctlError):
    exit_code = 2
    type = "usage"


class ModelNotFoundError(MetalctlError):
    exit_code = 3
    type = "model_not_found"


class TagNotFoundError(ModelNotFoundError):
    type = "tag_not_found"


class AmbiguousTagError(ModelNotFoundError):
    type = "ambiguous_tag"


class NotCachedError(ModelNotFoundError):
    type = "not_cached"


class RevisionNotCachedError(NotCachedError):
    type = "revision_not_cached"


class IncompleteModelError(NotCachedError):
    type = "incomplete_model"


class TagNotCachedError(NotCachedError):
    type = "tag_not_cached"


class HubError(MetalctlError):
    exit_code = 4
    type = "hub"


class CheckpointError(MetalctlError):
    type = "checkpoint"


class UnsupportedModelError(CheckpointError):
    type = "unsupported_model"


class ContextLengthError(MetalctlError):
    type = "context_length"


class OutOfMemoryError(MetalctlError):
    exit_code = 5
    type = "out_of_memory"


class StorageError(MetalctlError):
    type = "storage"
