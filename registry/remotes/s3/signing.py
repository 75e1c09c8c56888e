"""Signing without hashing a large body once more: the digest that goes along for the store is the one to be signed.

Over plain http the library signs the sha256 of a body, which it computes itself, though the same sha256 stands in the
request already as the checksum by which the store refuses damaged bytes. Over TLS it signs none, as before.
"""

from base64 import b64decode
from collections.abc import Mapping
from typing import Any, Final

from botocore.auth import AUTH_TYPE_MAPS, S3SigV4Auth

LARGE: Final = 1 << 20
"""Bytes of a body from which on its given sha256 is signed.

Smaller ones are hashed as ever, which costs nothing; the probe sends some with a wrong checksum, and a store that
refused them for the signature would pass for one that verifies checksums.
"""
_CHECKSUM: Final = "x-amz-checksum-sha256"
_USUAL: Final = frozenset({"v4", "s3v4"})
_OURS: Final = "s3v4-weighbridge"
"""The name of this signature among the library's."""


class KnownPayload(S3SigV4Auth):  # type: ignore[misc]  # botocore has no types
    """The usual signature, which takes the sha256 of a large body from the checksum that was given with it."""

    def payload(self, request: Any) -> str:
        """Return the hash that is signed."""
        told, body = request.headers.get(_CHECKSUM), request.body
        known = told and isinstance(body, bytes | bytearray) and len(body) >= LARGE
        if known and self._should_sha256_sign_payload(request):
            return b64decode(told).hex()
        return str(super().payload(request))


def use_known_payload(client: Any) -> None:
    """Have a client sign its uploads that way; signatures of another kind that were chosen for it stay."""
    AUTH_TYPE_MAPS.setdefault(_OURS, KnownPayload)
    for operation in ("PutObject", "UploadPart"):
        client.meta.events.register_first(f"choose-signer.s3.{operation}", _choose)


def _choose(signature_version: Any, context: Mapping[str, Any], **_: Any) -> str | None:
    usual = signature_version in _USUAL and context.get("auth_type") in {None, "v4"}
    return _OURS if usual else None
