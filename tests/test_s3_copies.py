"""Copies on a bucket: mirrored by hand, gone on with after a kill, verified there without reading a byte."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from weighbridge.registry import layout
from weighbridge.registry.remotes.protocol import Chunk
from weighbridge.registry.remotes.s3.proofs import record_key
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.desk import Desk, conforms
from weighbridge_testlib.seaweed import Server
from weighbridge_testlib.shelf import payload

MIB = 1 << 20
NAME = "medical-sft"


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.credentials(monkeypatch)


def desk_with_bucket(folder: Path, patch: pytest.MonkeyPatch, server: Server, prefix: str) -> Desk:
    """Return a desk whose second remote is a bucket."""
    desk = Desk(folder, patch)
    with desk.config.open("a") as stream:
        stream.write(
            f'[remotes.bucket]\nurl = "s3://{server.bucket}/{prefix}"\nendpoint = "{server.endpoint}"\n'
            'patience = "1m"\n'
        )
    patch.setenv("WEIGHBRIDGE_REMOTE", "team")
    return desk


def large(seed: int, size: int = 17 * MIB) -> dict[str, bytes]:
    """Return the files of an adapter whose weights go in parts."""
    return payload(seed) | {"adapter_model.safetensors": random.Random(seed).randbytes(size)}


def forget_proofs(desk: Desk) -> None:
    """Let this machine know as little of the files in parts as any other."""
    for path in (desk.cache / "s3").glob("*.proofs"):
        path.unlink()


def test_a_copy_on_a_bucket_is_verified_without_reading(
    seaweed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's own checksums prove it from any machine, of files in parts too where they were sent or compared."""
    desk = desk_with_bucket(tmp_path, monkeypatch, seaweed, "copies-verify")
    desk.shelf.publish(NAME, files=large(1))
    told = conforms(desk.ok("mirror", NAME, "--to", "bucket", "--json").json, "mirror")
    assert [(one["outcome"], one["verified"]) for one in told["versions"]] == [("copied", "sha256-server")]
    read: list[str] = []
    fetch = S3Remote.fetch

    def noted(self: S3Remote, key: str, offset: int = 0) -> Iterator[Chunk]:
        read.append(key)
        return fetch(self, key, offset)

    monkeypatch.setattr(S3Remote, "fetch", noted)
    document = conforms(desk.ok("verify", f"{NAME}@v1", "--remote", "bucket", "--json").json, "verify")
    assert (document["verified"], document["levels"], read) == ("sha256-server", {"sha256-server": 3}, [])
    copies = desk.ok("show", f"{NAME}@v1", "--json").json["copies"]
    assert [(copy["remote"], copy["verified"]) for copy in copies] == [("team", None), ("bucket", "sha256-server")]
    forget_proofs(desk)
    document = conforms(desk.ok("verify", f"{NAME}@v1", "--remote", "bucket", "--json").json, "verify")
    assert (document["verified"], document["levels"]) == ("sha256-told", {"sha256-server": 2, "sha256-told": 1})
    said = desk.ok("verify", f"{NAME}@v1", "--remote", "bucket")
    assert "sound by the store's own checksums, for 1 file by the word of whoever published it" in said.out
    record = record_key(layout.version(NAME, 1, "adapter_model.safetensors"))
    seaweed.client().delete_object(Bucket=seaweed.bucket, Key=f"copies-verify/{record}")
    document = conforms(desk.registry("verify", f"{NAME}@v1", "--remote", "bucket", "--json").json, "verify")
    assert (document["outcome"], document["verified"]) == ("wait", "size")
    said = desk.registry("verify", f"{NAME}@v1", "--remote", "bucket")
    assert said.code == 8
    assert "1 file has no checksum there and only the size was compared" in said.out
    assert read == []
    assert desk.ok("verify", f"{NAME}@v1", "--remote", "bucket", "--quick", "--json").json["levels"] == {
        "sha256-server": 2,
        "sha256-read": 1,
    }
    assert [key.rpartition("/")[2] for key in read] == ["adapter_model.safetensors"]
    assert desk.ok("verify", f"{NAME}@v1", "--remote", "bucket", "--read", "--json").json["levels"] == {
        "sha256-read": 3
    }


def test_a_damaged_copy_is_found_without_reading(
    seaweed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that was replaced behind our back has another checksum, and the store says so."""
    desk = desk_with_bucket(tmp_path, monkeypatch, seaweed, "copies-damage")
    desk.shelf.publish(NAME)
    desk.ok("mirror", NAME, "--to", "bucket")
    key = f"copies-damage/{layout.version(NAME, 1, 'adapter_config.json')}"
    client = seaweed.client()
    body = b"x" * len(payload(1)["adapter_config.json"])
    client.put_object(Bucket=seaweed.bucket, Key=key, Body=body, ChecksumAlgorithm="SHA256")
    said = desk.registry("verify", f"{NAME}@v1", "--remote", "bucket", "--json")
    assert said.code == 5
    found = [f for f in conforms(said.json, "verify")["findings"] if f["severity"] == "block"]
    assert [(f["code"], f["subject"]) for f in found] == [("file-damaged", "adapter_config.json")]


def test_a_second_pull_comes_from_the_cache(seaweed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a network what was pulled is kept, up to the limit of the settings; --no-cache does without."""
    desk = desk_with_bucket(tmp_path, monkeypatch, seaweed, "copies-cache")
    desk.shelf.publish(NAME)
    desk.ok("mirror", NAME, "--to", "bucket")
    whole = sum(map(len, payload(1).values()))

    def pull(target: str, *more: str) -> tuple[int, int]:
        told = conforms(desk.ok("pull", NAME, target, "--json", *more).json, "pull")
        return told["fetched"], told["cached"]

    assert pull("plain") == (whole, 0)
    assert not (desk.cache / "files").exists()  # a folder is as near as the cache
    assert pull("a", "--remote", "bucket", "--no-cache") == (whole, 0)
    assert pull("b", "--remote", "bucket") == (whole, 0)
    assert pull("c", "--remote", "bucket") == (0, whole)
    said = desk.ok("pull", NAME, "d", "--remote", "bucket")
    assert f"({whole / 1000:.2f} kB reused, {whole / 1000:.2f} kB of it from the cache)" in said.err
    with desk.config.open("a") as stream:
        stream.write("[cache]\nmax = 0\n")
    assert pull("e", "--remote", "bucket") == (whole, 0)
