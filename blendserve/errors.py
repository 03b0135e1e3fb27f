"""Every error that blendserve raises on purpose. Each message names the cause and the remedy.

    BlendserveError
    ├── ConfigError
    ├── InputError ── PromptTooLong
    ├── CorpusError
    ├── ModelError ── ModelUnsupported
    ├── VectorIndexError ── IndexMissing, IndexMismatch, IndexDamaged
    ├── StoreError ── StoreUnavailable (StoreCircuitOpen), StoreVersion, StoreFull, TablesMissing, CorruptRecord,
    │                 CorruptBlob, ChunkLost
    ├── ClusterUnavailable
    └── ServeError ── RateLimited, BodyTooLarge, BodyTooSlow, ShuttingDown, NotAuthenticated, PermissionDenied, NotFound

The command line prints the message and exits with 2 for each of them. Any other exception is a bug and keeps its
traceback.
"""

from __future__ import annotations

from copy import copy
from typing import Any, ClassVar, TypeVar

Raised = TypeVar("Raised", bound=Exception)


class BlendserveError(Exception):
    """Base of the tree above. The message is for people; code reads the class and the fields.

    setting: the setting, option or JSON field with the wrong value, dotted as in a configuration file
    path: the file or folder that cannot be used
    line: the number of the line or record in `path`, from 1
    """

    # what clients of a server read in place of the message; "": the message itself
    public: ClassVar[str] = ""

    def __init__(
        self, message: str = "", *, setting: str | None = None, path: object = None, line: int | None = None
    ) -> None:
        super().__init__(message)
        self.setting = setting
        self.path = None if path is None else str(path)
        self.line = line

    @property
    def public_message(self) -> str:
        """The message for clients of a server: it names no path and no address of the machine."""
        return self.public or (
            str(self) if self.path is None else "a file of the server cannot be used: see its log"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle fields and message: some constructors take other arguments."""
        return _restore, (type(self), self.args), self.__dict__


def unraised(error: Raised) -> Raised:
    """A copy without traceback, to keep and raise later.

    A traceback holds the frames of all callers: a kept error would hold a request's KV cache until garbage collection.
    """
    return copy(error)


def _restore(kind: type[BlendserveError], args: tuple[Any, ...]) -> BlendserveError:
    error = kind.__new__(kind)
    error.args = args
    return error


class ConfigError(BlendserveError):
    """A setting is unknown or out of its range."""


class InputError(BlendserveError):
    """This question, passage or option cannot be used."""


class PromptTooLong(InputError):
    """The prompt does not fit the model's context, or the tokens that a server reserves for a request."""

    def __init__(self, tokens: int, limit: int, reserved: int, at_least: bool = False) -> None:
        """at_least: the prompt was only tokenised in part."""
        least = "at least " if at_least else ""
        super().__init__(
            f"the prompt has {least}{tokens} tokens and the answer needs {reserved}, "
            f"{least}{tokens + reserved - limit} too many for a context of {limit}: ask in fewer words, "
            "use fewer passages (top_k), shorter ones, or fewer new tokens"
        )
        self.over = tokens + reserved - limit


class CorpusError(BlendserveError):
    """A corpus is missing, empty or has a broken line."""


class ModelError(BlendserveError):
    """A model or embedder cannot be loaded, or not be used in a forked child."""

    public = "the model cannot be used: see the server's log"


class ModelUnsupported(ModelError):
    """Blending is not correct with this type of model."""


class VectorIndexError(BlendserveError):
    """An index cannot be used."""

    public = "the index cannot be used now: see the server's log"


class IndexMissing(VectorIndexError):
    """The index does not exist."""


class IndexMismatch(VectorIndexError):
    """The index was built with another embedder, model or format."""


class IndexDamaged(VectorIndexError):
    """The files of the index do not belong together."""


class StoreError(BlendserveError):
    """A KV store cannot be used."""

    public = "the KV store cannot be used now: see the server's log"


class StoreUnavailable(StoreError):
    """The store cannot be opened, read or written."""


class StoreCircuitOpen(StoreUnavailable):
    """The store's server failed a moment ago, which was logged; no request is sent to it until a backoff ends."""


class StoreVersion(StoreError):
    """The store, or a chunk in it, has a format that this version does not read."""


class TablesMissing(StoreError):
    """The codec of new chunks needs tables for this model, and the store has none."""


class StoreFull(StoreError):
    """The store is at its byte cap, or the disk is full."""

    public = "the KV store is full, and its chunks may not be evicted: unpin or delete chunks"


class CorruptRecord(StoreError):
    """A record fails its checksum; the request recomputes its chunk. layer: None if the header fails."""

    def __init__(self, key: bytes, what: str, layer: int | None = None) -> None:
        super().__init__(f"chunk {key.hex()}: {what}")
        self.key = key
        self.what = what
        self.layer = layer


class CorruptBlob(StoreError):
    """Codec tables, or a part of a collection, do not match their hash."""


class ChunkLost(StoreError):
    """The transfer of a chunk stopped while a request used it: ask the same snapshot for the chunk again."""

    def __init__(self, key: bytes) -> None:
        super().__init__(f"chunk {key.hex()}: its transfer stopped")
        self.key = key


class ClusterUnavailable(BlendserveError):
    """No Ray cluster can be reached, or its workers ended."""

    public = "the replicas cannot be reached now: see the server's log"


class ServeError(BlendserveError):
    """The server rejects a request."""


class RateLimited(ServeError):
    """The queue is full, or a key has reached its limit: try again in `retry_after` seconds."""

    def __init__(self, why: str, retry_after: int) -> None:
        super().__init__(f"{why}: try again in {retry_after} s")
        self.retry_after = retry_after


class BodyTooLarge(ServeError):
    """The request body is too large."""


class BodyTooSlow(ServeError):
    """The request body was not received in time."""


class ShuttingDown(ServeError):
    """The server is shutting down."""


class NotAuthenticated(ServeError):
    """The request has no valid API key."""


class PermissionDenied(ServeError):
    """The API key does not allow this."""


class NotFound(ServeError):
    """It does not exist, or the key may not use it."""
