"""Reading a large object in windows: in order, in bounded memory, and never a mixture of two objects."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weighbridge.registry import errors
from weighbridge.registry.remotes.s3.ranges import STEP, Buffers, Reader
from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.s3_parts import KEY, MIB, PART, big, remote_at
from weighbridge_testlib.seaweed import Server


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.credentials(monkeypatch)


@pytest.mark.parametrize("allowed", [1, 3 * MIB, 64 * MIB])
def test_windows_come_in_order(seaweed: Server, tmp_path: Path, allowed: int) -> None:
    """Whatever is fetched ahead, bytes come in order, from any offset, in chunks of at most 2 MiB."""
    remote = remote_at(seaweed, f"windows-{allowed}")
    source, size, _ = big(tmp_path / "f", 2)
    body = source.read_bytes()
    remote.upload(KEY, source, size, hashlib.sha256(body).hexdigest())
    buffers = Buffers(allowed, 2 * MIB)
    with ThreadPoolExecutor(4) as pool:
        for offset in (0, 1, MIB, 3 * MIB + 7, size - 1, size, size + 5):
            chunks = [bytes(chunk) for chunk in Reader(remote.link, pool, buffers, KEY).chunks(offset)]
            assert b"".join(chunks) == body[offset:]
            assert all(len(chunk) <= STEP for chunk in chunks)
    assert (buffers._taken, buffers._free) == (0, [])
    remote.close()


def test_a_reader_that_stops_gives_everything_back(seaweed: Server, tmp_path: Path) -> None:
    """Whoever stops in the middle of a file holds no memory and no connection."""
    remote = remote_at(seaweed, "stopped")
    remote.upload(KEY, *big(tmp_path / "f", 3))
    buffers = Buffers(64 * MIB, MIB)
    with ThreadPoolExecutor(4) as pool:
        chunks = Reader(remote.link, pool, buffers, KEY).chunks(0)
        next(chunks)
        chunks.close()  # type: ignore[attr-defined]
    assert (buffers._taken, buffers._free) == (0, [])
    remote.close()


def test_a_chunk_that_is_kept_too_long_is_an_error(seaweed: Server, tmp_path: Path) -> None:
    """The memory of a chunk is used again: whoever looks at it later gets an error and never other bytes.

    One that is being written while its reader gives up stays as it is, and its memory is not used again.
    """
    remote = remote_at(seaweed, "kept-chunk")
    remote.upload(KEY, *big(tmp_path / "f", 2))
    buffers = Buffers(2 * MIB, MIB)
    with ThreadPoolExecutor(1) as pool:
        chunks = Reader(remote.link, pool, buffers, KEY).chunks(0)
        kept = next(chunk for chunk in chunks if isinstance(chunk, memoryview))
        next(chunks)
        with pytest.raises(ValueError, match="released"):
            bytes(kept)
        held = next(chunk for chunk in chunks if isinstance(chunk, memoryview))
        written = memoryview(held)
        before = bytes(written)
        next(chunks)
        assert bytes(written) == before
        assert all(spare is not written.obj for spare in buffers._free)
        chunks.close()  # type: ignore[attr-defined]
    assert (buffers._taken, buffers._free) == (0, [])
    remote.close()


def test_a_replaced_object_is_not_mixed(seaweed: Server, tmp_path: Path) -> None:
    """An object that somebody replaces while it is read is an error, not a mixture of two."""
    remote = remote_at(seaweed, "replaced")
    remote.upload(KEY, *big(tmp_path / "f", 2))
    with ThreadPoolExecutor(1) as pool:
        chunks = Reader(remote.link, pool, Buffers(1, MIB), KEY).chunks(0)
        next(chunks)
        seaweed.client().put_object(Bucket="registry", Key=f"replaced/{KEY}", Body=b"y" * (2 * PART))
        with pytest.raises(errors.IntegrityError, match="replaced"):
            list(chunks)
    remote.close()
