"""Every error that blendserve raises on purpose. Each message names the thing and the way out.

    BlendserveError
    ├── ConfigError             a setting is unknown or out of its range
    ├── InputError              this question, passage or option cannot be used
    │   └── PromptTooLong       the prompt does not fit the reader's context
    ├── CorpusError             a corpus is missing, empty or has a broken line
    ├── ModelError              a reader or embedder cannot be had
    │   └── ModelUnsupported    the reader is known, but blending would not be right on it
    ├── VectorIndexError             an index
    │   ├── IndexMissing        ... is not there
    │   ├── IndexMismatch       ... was built with another embedder, reader or format
    │   └── IndexDamaged        ... has files that do not belong together
    ├── StoreError              a KV store
    │   ├── StoreUnavailable    ... cannot be opened, read or written
    │   │   └── StoreLeftAlone  ... and is left alone for a while: the log has said so
    │   ├── StoreVersion        ... has a format that this version does not read
    │   ├── StoreFull           ... is at its byte cap, or the disk is full
    │   ├── TablesMissing       ... has no tables for the codec that is to write
    │   ├── CorruptRecord       ... holds a record that fails its checksum (never fails a request: recomputed)
    │   ├── CorruptBlob         ... holds codec tables or a part of a collection that fail their checksum
    │   └── ChunkLost          ... gives no more of a chunk that was used while it came (never fails a request)
    ├── ClusterUnavailable      no Ray cluster can be had, or its workers ended
    └── ServeError              the server refuses a request
        ├── Busy                ... for now: its queue is full, or a key has used up its share
        ├── BodyTooLarge        ... whose body has too many bytes
        ├── BodyTooSlow         ... whose body does not come
        ├── Stopping            ... because it is shutting down
        ├── NotAuthenticated    ... that brings no valid API key
        ├── NotAllowed          ... that its API key does not cover
        └── NotFound            ... for something that is not there, or not for this key

The command line prints the message and exits with 2 for any of these; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

from copy import copy
from typing import Any, TypeVar

Raised = TypeVar("Raised", bound=Exception)


class BlendserveError(Exception):
    """Base of the tree above. The message is for people; code reads the class and the fields.

    setting: the setting, option or JSON field with the wrong value, dotted as in a configuration file
    path: the file or folder that cannot be used
    line: the number of the line or record in `path`, from 1
    """

    def __init__(
        self, message: str = "", *, setting: str | None = None, path: object = None, line: int | None = None
    ) -> None:
        super().__init__(message)
        self.setting = setting
        self.path = None if path is None else str(path)
        self.line = line

    def __reduce__(self) -> tuple[Any, ...]:
        """For other processes as it is: some take other arguments than the message that they make of them."""
        return _as_it_was, (type(self), self.args), self.__dict__


def unraised(error: Raised) -> Raised:
    """The same, as if it had never been raised: to keep it, and to raise what was kept.

    A raised error holds the frame of everybody who called, and so whatever they have in hand: kept with a request's
    snapshot, it would hold that request's KV cache until the garbage collector comes by.
    """
    return copy(error)


def _as_it_was(kind: type[BlendserveError], args: tuple[Any, ...]) -> BlendserveError:
    error = kind.__new__(kind)
    error.args = args
    return error


class ConfigError(BlendserveError):
    """A setting is unknown or out of its range."""


class InputError(BlendserveError):
    """This question, passage or option cannot be used."""


class PromptTooLong(InputError):
    """The prompt does not fit the reader's context, or what a server gives a request of it."""

    def __init__(self, tokens: int, limit: int, reserved: int, at_least: bool = False) -> None:
        """at_least: not all of it was tokenised."""
        least = "at least " if at_least else ""
        super().__init__(
            f"the prompt has {least}{tokens} tokens and {reserved} are reserved for the answer, "
            f"{least}{tokens + reserved - limit} too many for a context of {limit}: ask in fewer words, "
            "use fewer passages (top_k), shorter ones, or fewer new tokens"
        )
        self.over = tokens + reserved - limit


class CorpusError(BlendserveError):
    """A corpus is missing, empty or has a broken line."""


class ModelError(BlendserveError):
    """A reader or embedder cannot be had."""


class ModelUnsupported(ModelError):
    """The reader is known, but blending would not be right on it."""


class VectorIndexError(BlendserveError):
    """Something is wrong with an index."""


class IndexMissing(VectorIndexError):
    """The index is not there."""


class IndexMismatch(VectorIndexError):
    """The index was built with another embedder, reader or format."""


class IndexDamaged(VectorIndexError):
    """The index has files that do not belong together."""


class StoreError(BlendserveError):
    """Something is wrong with a KV store."""


class StoreUnavailable(StoreError):
    """The store cannot be opened, read or written."""


class StoreLeftAlone(StoreUnavailable):
    """The store's server has just failed, which was logged, and is not asked for a while."""


class StoreVersion(StoreError):
    """The store, or a chunk in it, has a format that this version does not read."""


class TablesMissing(StoreError):
    """The codec that is to write needs tables for this reader, which the store does not have."""


class StoreFull(StoreError):
    """The store is at its byte cap, or the disk is full."""


class CorruptRecord(StoreError):
    """A record fails its checksum; the request recomputes its chunk. layer: None where the header fails."""

    def __init__(self, key: bytes, what: str, layer: int | None = None) -> None:
        super().__init__(f"chunk {key.hex()}: {what}")
        self.key, self.what, self.layer = key, what, layer


class CorruptBlob(StoreError):
    """Codec tables, or a part of a collection, do not have their hash."""


class ChunkLost(StoreError):
    """A layer of a chunk that is used while it comes does not come: ask the same snapshot for the chunk again."""

    def __init__(self, key: bytes) -> None:
        super().__init__(f"chunk {key.hex()}: not all of it comes as it had begun to")
        self.key = key


class ClusterUnavailable(BlendserveError):
    """No Ray cluster can be had, or the workers that were to do something ended."""


class ServeError(BlendserveError):
    """The server refuses a request."""


class Busy(ServeError):
    """The queue is full, or a key has used up its share: try again in `retry_after` seconds."""

    def __init__(self, why: str, retry_after: int) -> None:
        super().__init__(f"{why}: try again in {retry_after} s")
        self.retry_after = retry_after


class BodyTooLarge(ServeError):
    """The body has more bytes than are taken."""


class BodyTooSlow(ServeError):
    """The body has not come in time."""


class Stopping(ServeError):
    """The server is shutting down."""


class NotAuthenticated(ServeError):
    """No valid API key came with the request."""


class NotAllowed(ServeError):
    """The API key does not cover this."""


class NotFound(ServeError):
    """It is not there, or not for this key."""
