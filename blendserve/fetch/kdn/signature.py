"""Ed25519 signatures of descriptions. Keys are PEM files, as openssl writes them:

openssl genpkey -algorithm ed25519 -out private.pem
openssl pkey -in private.pem -pubout -out public.pem
"""

from __future__ import annotations

from blendserve.errors import ConfigError
from blendserve.store.bounded import PeerUnusable

ED25519 = "no Ed25519 key in PEM: make one by `openssl genpkey -algorithm ed25519`"


class NotSigned(PeerUnusable):
    """A description lacks the publisher's signature, or the signature cannot be checked."""


def sign(raw: bytes, private_pem: bytes) -> str:
    """Sign bytes -> the signature in hex, equal for equal bytes. Raises ConfigError."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # optional
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(private_pem, password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"the file of --sign has {ED25519}")
    return bytes(key.sign(raw)).hex()


def is_signed(raw: bytes, signature: str, public_pem: bytes) -> bool:
    """Return whether this key signed these bytes. Raises NotSigned if that cannot be checked."""
    try:
        from cryptography.exceptions import InvalidSignature  # optional
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError:
        raise NotSigned(
            "cannot be checked without the package cryptography: `pip install '.[cloud]'`"
        ) from None
    try:
        key = load_pem_public_key(public_pem)
    except ValueError:
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise NotSigned(f"cannot be checked, as the file of trust has {ED25519}, and `openssl pkey -pubout`")
    try:
        key.verify(bytes.fromhex(signature), raw)
    except (InvalidSignature, ValueError):
        return False
    return True
