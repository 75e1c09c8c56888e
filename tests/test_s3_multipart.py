"""Large files in parts: proven by the server's own hash, gone on with after a kill, in bounded memory."""

import hashlib
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from weighbridge.registry import errors
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import prepare, publish
from weighbridge.registry.remotes.s3 import multipart, proofs
from weighbridge.registry.remotes.s3.ranges import Budget
from weighbridge.registry.remotes.s3.remote import S3Remote
from weighbridge.registry.remotes.wrappers import Retrying
from weighbridge_testlib import seaweed as servers
from weighbridge_testlib.proxy import Fault, Proxy, Request
from weighbridge_testlib.publishing import OWNER, write_files
from weighbridge_testlib.s3_parts import KEY, MIB, PART, big, ready, remote_at
from weighbridge_testlib.seaweed import Server
from weighbridge_testlib.shelf import facts


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    servers.credentials(monkeypatch)


def hashes(body: bytes, known: bool = True) -> list[bytes]:
    """Return the hashes of the parts, where they are to be known."""
    return [hashlib.sha256(body[at : at + PART]).digest() for at in range(0, len(body), PART)] if known else []


def unfinished(server: Server, prefix: str) -> list[dict[str, Any]]:
    """Return the unfinished uploads below a prefix."""
    return list(server.client().list_multipart_uploads(Bucket=server.bucket, Prefix=f"{prefix}/").get("Uploads", []))


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_the_server_proves_the_whole_file(seaweed: Server, tmp_path: Path, tls: bool) -> None:
    """After an upload in parts the server's hash is the one we compute, and `stat` tells the sha256 without reading."""
    remote = ready(S3Remote(seaweed.place(f"proof-{tls}", tls=tls), single=MIB, part=PART))
    moved: list[int] = []
    source, size, sha256 = big(tmp_path / "f", 3)
    remote.upload(KEY, source, size, sha256, moved.append)
    assert sum(moved) == size
    assert remote.stat(KEY)[:3] == (KEY, size, sha256)
    assert remote.link.counts["get_object"] == 0
    head = seaweed.client().head_object(Bucket="registry", Key=f"proof-{tls}/{KEY}", ChecksumMode="ENABLED")
    with source.open("rb") as stream:
        assert multipart.composite_of(stream.fileno(), PART) == (size, sha256, head["ChecksumSHA256"])
    assert head["Metadata"] == {multipart.PART_SIZE_KEY: str(PART)}
    assert b"".join(map(bytes, remote.fetch(KEY))) == source.read_bytes()
    assert unfinished(seaweed, f"proof-{tls}") == []
    remote.close()


def test_what_is_there_is_compared_and_not_sent(seaweed: Server, tmp_path: Path) -> None:
    """Whoever has the same file compares it by the server's hash: nothing is sent, nothing is read."""
    first = remote_at(seaweed, "compare")
    given = big(tmp_path / "f", 2)
    first.upload(KEY, *given)
    for number, told in enumerate((given[2], None)):
        other = remote_at(seaweed, "compare")
        with pytest.raises(errors.ExistsError):
            other.upload(KEY, *(given if told else big(tmp_path / "g", 2, seed=1)))
        assert (other.link.counts["upload_part"], other.link.counts["get_object"]) == (0, 0), number
        other.close()
    first.close()


@pytest.mark.parametrize("said", ["right", "nothing", "of another file", "damaged"])
def test_what_was_proven_is_told_everywhere(seaweed: Server, tmp_path: Path, said: str) -> None:
    """A machine that never saw the file learns what its sender proved, if it fits what lies there: a word, no proof."""
    first, other = (remote_at(seaweed, f"known-{said}") for _ in range(2))
    given = big(tmp_path / "f", 2)
    if said != "right":
        first.create(proofs.record_key(KEY), b'{"composite":"AAAA-2","sha256":"00"}' if said != "damaged" else b"\xff[")
    first.upload(KEY, *given)
    if said == "nothing":
        first.delete(proofs.record_key(KEY))
    found = first.stat(KEY)
    assert (found.sha256, found.told) == (given[2], None)
    found = other.stat(KEY)
    assert (found.sha256, found.told) == (None, given[2] if said == "right" else None)
    with pytest.raises(errors.ExistsError):
        other.upload(KEY, *given)
    assert other.stat(KEY).sha256 == given[2]  # compared with the same file, it is proven here too
    for remote in (first, other):
        remote.close()


def test_a_record_that_cannot_be_kept_fails_no_upload(
    seaweed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is there and proven; that its record beside it was refused costs others one look, not the upload."""
    remote = remote_at(seaweed, "unkept")

    def refuse(key: str, body: bytes) -> None:
        raise errors.UsageError(f"{key} is refused", why=f"{len(body)} bytes are too many today")

    monkeypatch.setattr(remote, "create", refuse)
    given = big(tmp_path / "f", 2)
    remote.upload(KEY, *given)
    assert remote.stat(KEY).sha256 == given[2]
    remote.close()


def leave(server: Server, prefix: str, bodies: list[bytes], key: str = KEY) -> None:
    """Leave an unfinished upload with these parts."""
    client, key = server.client(), f"{prefix}/{key}"
    upload = client.create_multipart_upload(Bucket=server.bucket, Key=key, ChecksumAlgorithm="SHA256")["UploadId"]
    for number, body in enumerate(bodies, 1):
        client.upload_part(
            Bucket=server.bucket,
            Key=key,
            UploadId=upload,
            PartNumber=number,
            Body=body,
            ChecksumSHA256=multipart.spelled(hashlib.sha256(body).digest()),
        )


@pytest.mark.parametrize("known", [False, True])
def test_parts_of_another_file_are_not_trusted(seaweed: Server, tmp_path: Path, known: bool) -> None:
    """A part that holds other bytes is sent again; of an upload whose first part differs, nothing is used."""
    given = big(tmp_path / "f", 3)
    body = given[0].read_bytes()
    leave(seaweed, f"foreign-late-{known}", [body[:PART], b"x" * PART])
    remote = remote_at(seaweed, f"foreign-late-{known}")
    remote.upload(KEY, *given, parts=hashes(body, known))
    assert remote.link.counts["upload_part"] == 2
    assert b"".join(map(bytes, remote.fetch(KEY))) == body
    remote.close()
    leave(seaweed, f"foreign-early-{known}", [b"x" * PART])
    remote = remote_at(seaweed, f"foreign-early-{known}")
    remote.upload(KEY, *given, parts=hashes(body, known))
    assert remote.link.counts["upload_part"] == 3
    assert remote.stat(KEY).sha256 == given[2]
    remote.close()


@pytest.mark.parametrize(("tls", "left"), [(False, False), (False, True), (True, False)])
def test_the_store_refuses_what_is_not_the_part_that_was_hashed(
    seaweed: Server, tmp_path: Path, tls: bool, left: bool
) -> None:
    """One byte that is another than when the parts were hashed is told as a change of the source; nothing appears.

    Not even where a killed upload left exactly the bytes that the file holds now.
    """
    prefix = f"other-{tls}-{left}"
    remote = ready(S3Remote(seaweed.place(prefix, tls=tls), single=MIB, part=PART))
    remote.link.patience = 0.001
    source, size, sha256 = big(tmp_path / "f", 3)
    body = source.read_bytes()
    with source.open("r+b") as stream:
        stream.seek(PART + 5)
        stream.write(bytes([body[PART + 5] ^ 1]))
    if left:
        now = source.read_bytes()
        leave(seaweed, prefix, [now[:PART], now[PART : 2 * PART]])
    with pytest.raises(errors.SourceChangedError) as caught:
        remote.upload(KEY, source, size, sha256, parts=hashes(body))
    assert "part 2" in str(caught.value.why)
    assert list(remote.list("")) == []
    assert unfinished(seaweed, prefix) == []
    remote.close()


def test_hashes_that_do_not_fit_the_file_are_not_used(seaweed: Server, tmp_path: Path) -> None:
    """Hashes of parts of another size are none: the file is hashed while it is sent."""
    remote = remote_at(seaweed, "unfit")
    source, size, sha256 = big(tmp_path / "f", 3)
    remote.upload(KEY, source, size, sha256, parts=hashes(source.read_bytes())[:2])
    assert remote.stat(KEY).sha256 == sha256
    remote.close()


@pytest.mark.parametrize("mode", ["direct", "copy"])
def test_a_publication_hashes_its_parts_once(
    seaweed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Literal["direct", "copy"]
) -> None:
    """The pass that hashes a large file for its record hashes its parts as well, and the upload is told of them."""
    remote = remote_at(seaweed, f"once-{mode}")
    body = big(tmp_path / "f", 2)[0].read_bytes()
    files = write_files(tmp_path / "run", {"w.bin": body, "config.json": b"{}"})
    made = prepare(remote, "m", files, facts(), mode=mode, staging_folder=tmp_path / "stage")
    assert made.bundle.mode == mode
    told: list[Any] = []
    real = remote.upload

    def upload(*given: Any, parts: Any) -> None:
        told.append(list(parts))
        real(*given, parts=parts)

    monkeypatch.setattr(remote, "upload", upload)
    done = publish(remote, "team", open_registry(remote, create=True), made, OWNER)
    assert done.verified == "sha256-server"
    assert sorted(told) == [[], hashes(body)]
    remote.close()


def test_a_file_that_is_whole_ends_what_was_unfinished_of_its_key(seaweed: Server, tmp_path: Path) -> None:
    """Killed tries leave uploads with no part yet, a part of ours and one of another file; of other keys all stay."""
    given = big(tmp_path / "f", 2)
    for key, parts in ((KEY, []), (KEY, [given[0].read_bytes()[:PART]]), (KEY, [b"x" * PART]), (f"{KEY}.old", [])):
        leave(seaweed, "tries", parts, key)
    remote = remote_at(seaweed, "tries")
    remote.upload(KEY, *given)
    assert remote.link.counts["upload_part"] == 1
    assert remote.stat(KEY).sha256 == given[2]
    assert [upload["Key"] for upload in unfinished(seaweed, "tries")] == [f"tries/{KEY}.old"]
    assert remote.sweep(3600) == 0
    assert remote.sweep(-10) == 1
    assert unfinished(seaweed, "tries") == []
    remote.close()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("change", ["rewritten", "longer", "shorter"])
def test_a_source_that_changes_leaves_nothing(seaweed: Server, tmp_path: Path, change: str, known: bool) -> None:
    """A file that changes while its parts are sent never appears, and its upload is given up."""
    remote = remote_at(seaweed, f"changed-{change}-{known}", workers=1)
    remote.link.patience = 0.001
    remote._sending = Budget(PART)  # one part at a time, so that the change comes before the last one is read
    source, size, sha256 = big(tmp_path / "f", 3)

    def meddle(_: int) -> None:
        with source.open("r+b") as stream:
            match change:
                case "rewritten":
                    stream.seek(size - 5)
                    stream.write(b"other")
                case "longer":
                    stream.seek(size)
                    stream.write(b"more")
                case "shorter":
                    stream.truncate(size - 5)

    parts = hashes(source.read_bytes(), known)
    with pytest.raises(errors.SourceChangedError):
        remote.upload(KEY, source, size, sha256, meddle, parts=parts)
    assert list(remote.list("")) == []
    assert unfinished(seaweed, f"changed-{change}-{known}") == []
    remote.close()


def test_of_two_files_for_one_key_the_later_is_told(seaweed: Server, tmp_path: Path) -> None:
    """A large file that is complete while another is on its way to the same key stays; the other leaves nothing."""
    first, late = (remote_at(seaweed, "race") for _ in range(2))
    given, other = (big(tmp_path / name, 2, seed) for seed, name in enumerate("ab"))
    moved: list[int] = []

    def overtake(count: int) -> None:
        moved.append(count)
        if sum(moved) == other[1]:  # every part is there, and the completion comes next
            first.upload(KEY, *given)

    with pytest.raises(errors.ExistsError):
        Retrying(late, base=0.01).upload(KEY, *other, overtake)
    assert b"".join(map(bytes, first.fetch(KEY))) == given[0].read_bytes()
    assert unfinished(seaweed, "race") == []
    for remote in (first, late):
        remote.close()


def test_who_was_overtaken_after_the_completion_is_told(seaweed: Server, tmp_path: Path) -> None:
    """Where a store completes two uploads of one moment, whose file is not there is told that the key is taken."""
    given = big(tmp_path / "f", 2)
    completed: list[int] = []

    def plan(request: Request) -> None:
        if request.method == "POST" and "uploadId=" in request.target:
            completed.append(request.number)
        elif completed and request.method == "HEAD":
            seaweed.client().put_object(Bucket=seaweed.bucket, Key=f"overtaken/{KEY}", Body=b"other")

    with Proxy(seaweed.endpoint, plan) as proxy:
        remote = S3Remote(seaweed.place("overtaken", endpoint=proxy.endpoint), single=MIB, part=PART)
        remote.probe.trust(S3Remote(seaweed.place("overtaken")).probe.ask())
        with pytest.raises(errors.ExistsError, match="taken"):
            remote.upload(KEY, *given)
        remote.close()
    assert completed


def test_an_upload_that_somebody_gave_up_begins_anew(seaweed: Server, tmp_path: Path) -> None:
    """When a sweep takes an upload away under its writer's hands, the next try sends everything, and it ends well."""
    remote = remote_at(seaweed, "swept", workers=1)
    given = big(tmp_path / "f", 3)
    swept: list[int] = []

    def sweep(_: int) -> None:
        if not swept:
            swept.append(remote.sweep(-10))

    Retrying(remote, base=0.01).upload(KEY, *given, sweep)
    assert swept == [1]
    assert remote.stat(KEY).sha256 == given[2]
    remote.close()


def test_memory_is_bounded(seaweed: Server, tmp_path: Path) -> None:
    """However many parts and workers there are, no more bytes lie in memory than were allowed."""
    remote = remote_at(seaweed, "memory")
    most: list[int] = []

    class Watched(Budget):
        def take(self, count: int) -> bytearray:
            buffer = super().take(count)
            most.append(self._used + sum(map(len, self._spare)))
            return buffer

    remote._sending = Watched(2 * PART)
    remote.upload(KEY, *big(tmp_path / "f", 6))
    assert len(most) == 6
    assert max(most) <= 2 * PART
    assert (remote._sending._used, remote._sending._spare) == (0, [])
    remote.close()


def test_credentials_are_refreshed_on_the_way(seaweed: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that end in a moment are replaced by others between two parts; the upload does not notice."""
    asked = tmp_path / "asked"
    script = tmp_path / "give.py"
    script.write_text(
        "import datetime, json, pathlib\n"
        f"asked = pathlib.Path({str(asked)!r})\n"
        "asked.open('a').write('x')\n"
        f"key, secret = {[(servers.ACCESS, servers.SECRET), servers.ROTATED]!r}[asked.stat().st_size % 2]\n"
        "end = (datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes=5)).isoformat()\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': key, 'SecretAccessKey': secret, 'Expiration': end}))\n"
    )
    config = tmp_path / "config"
    config.write_text(f"[profile short]\ncredential_process = {sys.executable} {script}\n")
    remote_at(seaweed, "refreshed").close()  # so that what is asked for below is the upload alone
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with Proxy(seaweed.endpoint) as proxy:
        place = seaweed.place("refreshed", profile="short", endpoint=proxy.endpoint)
        remote = S3Remote(place, single=MIB, part=PART)
        remote.probe.trust(S3Remote(seaweed.place("refreshed")).probe.ask())
        given = big(tmp_path / "f", 2)
        remote.upload(KEY, *given)
        assert remote.stat(KEY).sha256 == given[2]
        remote.close()
        signed = [
            str(request.header("authorization")).partition("Credential=")[2].partition("/")[0]
            for request in proxy.requests
            if "partNumber=" in request.target
        ]
    assert set(signed) == {servers.ACCESS, servers.ROTATED[0]}


def test_the_size_of_parts() -> None:
    """Parts are of one size unless that makes too many, and never smaller than servers take."""
    assert multipart.part_size(1) == multipart.PART
    assert multipart.part_size(100 * MIB, 1) == multipart.PART_LEAST
    five = 5 << 40
    part = multipart.part_size(five)
    assert -(-five // part) <= multipart.PARTS_MAX


@pytest.mark.parametrize(
    ("settings", "always", "class_of_large"),
    [
        ({}, {}, None),
        (
            {"encryption": "aws:kms:alias/k", "storage_class": "STANDARD_IA"},
            {"x-amz-server-side-encryption": "aws:kms", "x-amz-server-side-encryption-aws-kms-key-id": "alias/k"},
            "STANDARD_IA",
        ),
    ],
)
def test_encryption_and_class_go_over_the_wire(
    seaweed: Server,
    tmp_path: Path,
    settings: dict[str, Any],
    always: dict[str, str],
    class_of_large: str | None,
) -> None:
    """Encryption is asked for all objects, the class only for large files; nothing is asked for by default."""
    source = big(tmp_path / "f", 2)
    small = tmp_path / "small"
    small.write_bytes(b"small")
    given = (small, 5, hashlib.sha256(b"small").hexdigest())

    def plan(request: Request) -> Fault | None:
        return Fault("deny") if request.method in {"PUT", "POST"} else None

    with Proxy(seaweed.endpoint, plan) as proxy:
        place = seaweed.place("wire", endpoint=proxy.endpoint, **settings)
        remote = S3Remote(place, single=MIB, part=PART)
        remote.probe.trust(S3Remote(seaweed.place("wire")).probe.ask())
        with pytest.raises(errors.DeniedError):
            remote.create("weighbridge.json", b"{}")
        for key, file in (("models/m/v1/small", given), (KEY, source)):
            with pytest.raises(errors.DeniedError):
                remote.upload(key, *file)
        remote.close()
    sent = [request for request in proxy.requests if request.method in {"PUT", "POST"}]
    names = ("x-amz-server-side-encryption", "x-amz-server-side-encryption-aws-kms-key-id")
    assert len({request.target.partition("?")[0] for request in sent}) == 3
    for request in sent:
        assert {name: value for name in names if (value := request.header(name)) is not None} == always
        large = request.target.partition("?")[0].endswith(KEY)
        assert request.header("x-amz-storage-class") == (class_of_large if large else None)


def test_a_bucket_that_refuses_what_is_not_encrypted(seaweed: Server, tmp_path: Path) -> None:
    """The trial of the store, small objects and parts are encrypted at rest, and are proven and read like others."""
    given = big(tmp_path / "f", 2)

    def plan(request: Request) -> Fault | None:
        begins = {"PUT": "partNumber=" not in request.target, "POST": "uploads" in request.target}
        plain = request.header("x-amz-server-side-encryption") != "AES256"
        return Fault("deny") if begins.get(request.method) and plain else None

    with Proxy(seaweed.endpoint, plan) as proxy:
        place = seaweed.place("encrypted", endpoint=proxy.endpoint, encryption="AES256")
        remote = S3Remote(place, single=MIB, part=PART)
        remote.create("weighbridge.json", b"{}")
        remote.upload(KEY, *given)
        assert [remote.stat(key).sha256 for key in (KEY, "weighbridge.json")] == [
            given[2],
            hashlib.sha256(b"{}").hexdigest(),
        ]
        assert b"".join(map(bytes, remote.fetch(KEY))) == given[0].read_bytes()
        remote.close()
    for key in (KEY, "weighbridge.json"):
        head = seaweed.client().head_object(Bucket=seaweed.bucket, Key=f"encrypted/{key}")
        assert head["ServerSideEncryption"] == "AES256"
