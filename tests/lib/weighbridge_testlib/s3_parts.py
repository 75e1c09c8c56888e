"""Files in parts as small as a store takes them, and a remote that sends such parts."""

import hashlib
import random
from pathlib import Path
from typing import Any, Final

from weighbridge.registry.remotes.s3 import multipart
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge_testlib.seaweed import Server

MIB: Final = 1 << 20
PART: Final = multipart.PART_LEAST
KEY: Final = "models/m/v1/model.safetensors"


def remote_at(server: Server, prefix: str, **given: Any) -> S3Remote:
    """Open a remote that sends small parts, to a store that was tried out already."""
    return ready(S3Remote(server.place(prefix), single=MIB, part=PART, **given))


def ready(remote: S3Remote) -> S3Remote:
    """Let the probe be over, and count requests from here on."""
    remote.probe.ask()
    remote.link.counts.clear()
    return remote


def big(path: Path, parts: int, seed: int = 0) -> tuple[Path, int, str]:
    """Write a file of so many parts, the last one short; return what `upload` wants to know."""
    body = random.Random(seed).randbytes(parts * PART - 12_345)
    path.write_bytes(body)
    return path, len(body), hashlib.sha256(body).hexdigest()
