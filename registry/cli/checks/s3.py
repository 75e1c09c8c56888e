"""Checks of a bucket: what its store was seen to do, whether it may be listed, and rules that would delete versions."""

from collections.abc import Iterator
from typing import Final

from weighbridge.config.settings import RemoteSettings
from weighbridge.registry.cli.checks.check import FAIL, OK, WARN, Check
from weighbridge.registry.errors import DeniedError, WeighbridgeError
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes.s3 import health
from weighbridge.registry.remotes.s3.client import Place
from weighbridge.registry.remotes.s3.probe import Capabilities
from weighbridge.registry.remotes.s3.remote import S3Remote, open_s3

_MANUAL: Final = "docs/remotes-s3.md says what each lack costs"


def check(remote: RemoteSettings, *, write: bool, needed: bool) -> Iterator[Check]:
    """Yield what is found about a bucket; the probe is only repeated with `write`."""
    name = f"remote-{remote.name}"
    opened = open_s3(remote.url, remote.endpoint, remote)
    try:
        yield from _endpoint(opened.link.place, name, remote)
        yield from _listing(opened, name, remote)
        yield from _rules(opened, name, remote)
        yield from _store(opened, name, remote, write=write, needed=needed)
    finally:
        opened.close()


def _endpoint(place: Place, name: str, remote: RemoteSettings) -> Iterator[Check]:
    """Warn of an endpoint that may stand for the bucket: what a person meant by it nobody can tell."""
    if place.named_twice:
        yield Check(
            WARN,
            f"{name}-endpoint",
            f"{remote.name}: {shown(place.endpoint or '')} names the bucket too; if it is the bucket's own address, "
            "everything lies one folder too deep",
            f"leave {place.bucket} out of endpoint in [remotes.{remote.name}], if the store answers there as well",
        )


def _listing(opened: S3Remote, name: str, remote: RemoteSettings) -> Iterator[Check]:
    try:
        health.refuse_unlisted(opened.link)
    except DeniedError as error:
        yield Check(
            FAIL,
            f"{name}-list",
            f"{remote.name} may not be listed with these credentials: {error.why}",
            "allow s3:ListBucket on the prefix (docs/policies/reader.json)",
        )


def _rules(opened: S3Remote, name: str, remote: RemoteSettings) -> Iterator[Check]:
    try:
        harmful = list(health.lifecycle(opened.link))
    except DeniedError:
        yield Check(OK, f"{name}-lifecycle", f"{remote.name}: the bucket's lifecycle rules may not be looked at")
        return
    except WeighbridgeError as error:
        yield Check(OK, f"{name}-lifecycle", f"{remote.name}: lifecycle rules are not known ({error.why})")
        return
    for words in harmful:
        yield Check(
            WARN, f"{name}-lifecycle", f"{remote.name}: {words}", "leave the prefix of the registry out of that rule"
        )


def _store(opened: S3Remote, name: str, remote: RemoteSettings, *, write: bool, needed: bool) -> Iterator[Check]:
    try:
        can = opened.probe.ask(again=True) if write else opened.probe.known()
    except DeniedError as error:
        yield Check(
            FAIL if needed else WARN,
            f"{name}-probe",
            f"{remote.name} cannot be tried out: {error.why or error.what}" + ("" if needed else "; pull works"),
            error.fix,
        )
        return
    if can is None:
        yield Check(OK, f"{name}-probe", f"{remote.name} was not tried out; leave --no-write out to do so")
        return
    yield from _found(can, name, remote)


def _found(can: Capabilities, name: str, remote: RemoteSettings) -> Iterator[Check]:
    lacks = [words for words, works in _promises(can) if not works]
    if not lacks:
        yield Check(OK, f"{name}-probe", f"{remote.name} ({can.server}): taken keys are refused, sha256 is verified")
    elif not can.conditional_put and remote.writers != "one":
        yield Check(
            FAIL,
            f"{name}-probe",
            f"{remote.name} ({can.server}) cannot be shared:\n" + "\n".join(lacks),
            "use another store, or set " + remote.written('writers = "one"') + f"; {_MANUAL}",
        )
    else:
        status = WARN if can.read_back and can.ordered else FAIL
        yield Check(status, f"{name}-probe", f"{remote.name} ({can.server}):\n" + "\n".join(lacks), _MANUAL)
    if can.conditional_put and remote.writers == "one":
        yield Check(OK, f"{name}-writers", f'{remote.name} could be shared: writers = "one" is not needed')
    if can.trailers in {"refused", "damaged"}:
        yield Check(
            OK,
            f"{name}-trailers",
            f"{remote.name}: checksum trailers are {can.trailers}; copy into it with other tools only with "
            "request_checksum_calculation = when_required",
        )


def _promises(can: Capabilities) -> list[tuple[str, bool]]:
    """Return what may be lacking, in words, each with whether it was seen to work."""
    return [
        (
            "a put to a taken key is not refused: one writer only, and a second one is noticed, not prevented",
            can.conditional_put,
        ),
        (
            "the completion of a large upload to a taken key is not refused: it is looked at before",
            can.conditional_complete or not can.conditional_put,
        ),
        ("sha256 is not verified: each file is read back once after it was published", can.sha256_parts),
        ("there are no uploads in parts: files above 16 MiB cannot be published", can.multipart),
        ("listings are not in the order of keys: no registry can be kept there", can.ordered),
        ("bytes come back changed: no registry can be kept there", can.read_back),
    ]
