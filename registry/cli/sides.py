"""What a merge or a cast is made of, a folder or a published version that is fetched for it; and how it goes out."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters import license  # noqa: A004 - the module is about licences
from weighbridge.adapters.merge.preview import Look
from weighbridge.adapters.merge.staging import Merged, make_way
from weighbridge.config.places import cache_dir
from weighbridge.config.settings import RemoteSettings
from weighbridge.registry import disk
from weighbridge.registry.cli import context, fresh, paths
from weighbridge.registry.cli.output import Output
from weighbridge.registry.cli.progress import following
from weighbridge.registry.errors import IntegrityError, NotFoundError, UsageError, WeighbridgeError
from weighbridge.registry.flow import place
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.admission import Admission
from weighbridge.registry.flow.publish import prepare, publish
from weighbridge.registry.flow.pull import checked_manifest, pull
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.hub_rules import is_repo_id
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes import commits
from weighbridge.registry.types import BaseFacts, Facts, Models, Provenance, Receipt

KEPT: Final = 2 * 86_400.0
"""Seconds for which what a command left that failed or was killed is kept: the same command goes on from there."""


RESULT: Final = "result"


class Side(NamedTuple):
    """Where it lies, and what is known of it where it is a published version."""

    path: Path
    ref: str
    name: str | None = None
    content: str | None = None
    facts: Facts | None = None

    @property
    def provenance(self) -> Provenance | None:
        """Where a published version comes from."""
        return self.facts.provenance if self.facts is not None else None

    @property
    def base(self) -> BaseFacts:
        """The base of a published version."""
        return self.facts.base if self.facts is not None else BaseFacts()


def apart(target: Path | None, *sources: Side) -> None:
    """See that a result does not lie in, or above, what it is made of. Raises UsageError."""
    if target is None:
        return
    goal = Path(os.path.realpath(target))
    for side in sources:
        source = Path(os.path.realpath(side.path))
        if goal == source or source in goal.parents or goal in source.parents:
            raise UsageError(
                f"{shown(str(target))} cannot hold the result",
                why=f"{shown(str(side.path))} is what it is made of, and sources are never touched",
                fix="name a folder beside it that is not there yet",
            )


@contextmanager
def scratch(words: Sequence[str], *, dry_run: bool) -> Iterator[Callable[[], Path]]:
    """Yield what makes the folder of one command, named after its words, and holds it against its like.

    It stays where the command failed and can go on from there; one that nobody came back for goes when another command
    needs one. A dry run has a folder of its own, and leaves none. Raises ConflictError while the same command runs.
    """
    named = sha256_bytes("\0".join([_here(), *words]).encode("utf-8", "surrogateescape"))[:16]
    folders = Path(cache_dir(os.environ), "merge")
    folder = folders / (f"{named}-{os.getpid()}" if dry_run else named)
    with ExitStack() as stack:

        def make() -> Path:
            if not made:
                with disk.speaking(f"{folder} cannot be written"):
                    folders.mkdir(mode=0o700, parents=True, exist_ok=True)
                stack.enter_context(place.locked(folder, "the same command is running already"))
                made.append(folder)
                os.utime(folder)
                place.sweep_scratch(folders, KEPT)
            return folder

        made: list[Path] = []
        try:
            yield make
        except BaseException as error:
            if made and (dry_run or not _worth(folder, error)):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if made:
            shutil.rmtree(folder, ignore_errors=True)


def _worth(folder: Path, error: BaseException) -> bool:
    """Tell whether the same command could go on from what lies there: what is wrong with it will stay wrong."""
    begun = False
    with suppress(OSError):  # it may be gone; the error that brought us here is the one to tell
        begun = any(path.name == RESULT or path.name.startswith(f".{RESULT}.") for path in folder.iterdir())
    return begun or not isinstance(error, UsageError | NotFoundError | IntegrityError)


def _here() -> str:
    """Return where the command stands: the same words mean other folders elsewhere."""
    try:
        return os.getcwd()  # noqa: PTH109 - a plain string
    except OSError:
        return ""


def result(folder: Path, seen: Look, record: str) -> Path:
    """Return where a result lies that is only made to be published; one of other contents is removed from there.

    Raises what `staging.make_way` raises.
    """
    goal = folder / RESULT
    make_way(seen, goal, record)
    return goal


def find(
    text: str, make: Callable[[], Path], remote: str | None, config: str | None, out: Output, *, hub: bool = False
) -> Side:
    """Return what a word of the command means; with `hub` it may be an id in the Hub cache. Raises NotFoundError."""
    if Path(text).exists():
        return Side(Path(text), text)
    if Path(text).is_symlink():
        raise paths.absent(Path(text))
    cached = license.cache_folder(text, None, license.cache_roots(os.environ)) if hub and is_repo_id(text) else None
    if cached is not None:
        return Side(cached, text)
    if "/" in text or text.startswith((".", "~")):
        raise NotFoundError(
            f"there is no {shown(text)}",
            why="it is no folder here" + (", and not in the Hub cache" if hub else ""),
            fix="name a folder that exists, or a version such as name@v7",
        )
    return _fetched(text, make(), remote, config, out)


def _fetched(ref: str, scratch: Path, remote: str | None, config: str | None, out: Output) -> Side:
    """Return a published version as a folder."""
    chosen = context.choose_remote(context.settings(config), remote)
    with fresh.opened(chosen, out, ref=ref) as opened:
        version = opened.resolve(ref)
        folder = scratch / f"{version.name}@v{version.n}"
        with following(out) as follower:
            pull(
                opened.remote,
                version.name,
                version.n,
                folder,
                manifest_sha256=version.manifest,
                card_sha256=version.card,
                begin=follower.begin,
                progress=follower.moved,
            )
        manifest = checked_manifest(opened.remote, version.name, version.n, version.manifest)
    return Side(folder, version.ref, version.name, version.content, manifest.facts)


@contextmanager
def asking(chosen: RemoteSettings) -> Iterator[Models | None]:
    """Yield how the Hub that a remote is on is asked about models, None for other remotes."""
    if not chosen.url.startswith("hf://"):
        yield None
        return
    opened = context.connect(chosen)
    try:
        hub = commits.of(opened)
        yield hub.model if hub is not None else None
    finally:
        opened.close()


def publish_made(name: str, admission: Admission, derivation: str, *, chosen: RemoteSettings, out: Output) -> Receipt:
    """Publish what a command has made, or join what was made from the same before."""
    untold: list[WeighbridgeError] = []
    opened = context.connect(chosen)
    try:
        owner = fresh.writer()
        registry = fresh.registry_of(chosen, opened, writer=owner.daemon)
        with following(out) as follower:
            candidate = prepare(
                opened,
                name,
                admission.files,
                admission.facts,
                transform=admission.transform,
                made=admission.made,
                derivation=derivation,
                progress=follower.total,
            )
            try:
                receipt = publish(
                    opened, chosen.name, registry, candidate, owner, untold=untold.append, progress=follower.total
                )
            except BaseException:
                staging.discard(candidate.bundle)
                raise
        fresh.published(chosen, opened, receipt, untold, out)
    finally:
        opened.close()
    return receipt


def say_version(receipt: Receipt | None, out: Output) -> None:
    """Say where a result came to be no new version."""
    if receipt is not None and receipt.joined:
        out.talk("the same was published before, under this number")


def told(done: Merged, receipt: Receipt | None, seconds: float) -> dict[str, Any]:
    """Return what is printed of something made: where it lies, its version, its files and what was proven."""
    return {
        "dry_run": False,
        "path": done.path,
        "ref": f"{receipt.name}@v{receipt.n}" if receipt is not None else None,
        "joined": done.joined or (receipt is not None and receipt.joined),
        "facts": done.facts,
        "findings": done.findings,
        "files": [{"path": path, **file} for path, file in sorted(done.files.items())],
        "seconds": round(seconds, 3),
    }
