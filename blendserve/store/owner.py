"""Who holds a lease: the process, so that those of a dead one end at once on its own machine."""

from __future__ import annotations

import os
import platform
import secrets
import struct
import uuid
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

_OWNER = struct.Struct("<16s16sQQ")
SIZE = _OWNER.size


class Owner(NamedTuple):
    """One open store."""

    token: bytes  # 16, of this opening
    machine: bytes  # 16, where process ids mean the same: a machine, or a container of it
    pid: int
    started: int  # when the process was started, on the machine's own scale; 0 where it does not tell

    @classmethod
    def new(cls) -> Owner:
        return cls(secrets.token_bytes(16), _machine(), os.getpid(), _started(os.getpid()))

    def to_bytes(self) -> bytes:
        return _OWNER.pack(*self)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Owner:
        """Raises struct.error."""
        return cls(*_OWNER.unpack(raw))

    @property
    def is_dead(self) -> bool:
        """Whether its process has ended. False on another machine, which cannot be asked."""
        if self.machine != _machine():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return self.started != _started(self.pid)  # the number may be another process's by now


@cache
def _machine() -> bytes:
    parts = [platform.node(), str(uuid.getnode())]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return blake2b("\0".join(parts).encode(), digest_size=16).digest()


def _started(pid: int) -> int:
    """0 where the system does not tell, and for a process that has ended and waits for its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
