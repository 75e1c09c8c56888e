"""What a merge or a cast is made of, a folder or a published version that is fetched for it; and how it goes out."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from weighbridge.adapters import license  # noqa: A004 - the module is about licences
from weighbridge.adapters.inspection import Artifact
from weighbridge.adapters.merge.preview import Look
from weighbridge.adapters.merge.staging import Merged, make_way
from weighbridge.adapters.target import free
from weighbridge.config.nearest import nearest
from weighbridge.config.places import cache_dir
from weighbridge.config.settings import RemoteSettings
from weighbridge.registry import disk, layout
from weighbridge.registry.cli import context, doubted, fresh, paths
from weighbridge.registry.cli.catalogue import folder_of
from weighbridge.registry.cli.inspect import plain
from weighbridge.registry.cli.output import Output, size
from weighbridge.registry.cli.progress import following
from weighbridge.registry.cli.pushing import compared, say_mended
from weighbridge.registry.errors import (
    IntegrityError,
    NotFoundError,
    RefusedError,
    UsageError,
    WeighbridgeError,
    WithdrawnError,
)
from weighbridge.registry.findings import outcome
from weighbridge.registry.flow import place
from weighbridge.registry.flow import stage as staging
from weighbridge.registry.flow.admission import Admission
from weighbridge.registry.flow.marker import check_writer
from weighbridge.registry.flow.merged import Parent, content_of
from weighbridge.registry.flow.publish import prepare, publish, standing
from weighbridge.registry.flow.pull import checked_manifest, pull
from weighbridge.registry.flow.resolve import Resolved
from weighbridge.registry.hashing import sha256_bytes
from weighbridge.registry.hub_rules import is_repo_id
from weighbridge.registry.manifest import Manifest
from weighbridge.registry.refs import shown
from weighbridge.registry.remotes import commits
from weighbridge.registry.types import Facts, Models, Receipt

KEPT: Final = 2 * 86_400.0
"""Seconds for which what a command left that failed or was killed is kept: the same command goes on from there."""


SILENT: Final = 1 << 30
"""Bytes up to which a folder is hashed without a word."""

RESULT: Final = "result"


class Away(NamedTuple):
    """A published version that is not fetched yet."""

    version: Resolved
    facts: Facts

    @property
    def parent(self) -> Parent:
        """What is recorded of it as a side of a merge or a cast."""
        return Parent(self.version.ref, self.version.content, self.facts.provenance, self.facts.base)


class Side(NamedTuple):
    """A folder, and what is known of it where it is a published version that was fetched."""

    path: Path
    ref: str
    parent: Parent | None = None
    facts: Facts | None = None


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


@contextmanager
def stoppable(goal: Path, out: Output) -> Iterator[None]:
    """Tell whoever interrupts the work on a result that what is finished of it is not lost."""
    try:
        yield
    except KeyboardInterrupt:
        with suppress(OSError):
            if goal.exists() or any(one.name.startswith(f".{goal.name}.merge-") for one in goal.parent.iterdir()):
                out.talk("what is finished is kept: the same command goes on from there")
        raise


def find(text: str, remote: str | None, config: str | None, out: Output, *, hub: bool = False) -> Side | Away:
    """Return what a word of the command means; with `hub` it may be an id in the Hub cache. Raises NotFoundError."""
    if Path(text).exists():
        return Side(Path(text), text)
    if Path(text).is_symlink():
        raise paths.absent(Path(text))
    cached = license.cache_folder(text, None, license.cache_roots(os.environ)) if hub and is_repo_id(text) else None
    if cached is not None:
        return Side(cached, text)
    if "/" in text or text.startswith((".", "~")):
        fetch = f"; a model of the Hub is fetched with: hf download {text}" if hub and is_repo_id(text) else ""
        raise NotFoundError(
            f"there is no {shown(text)}",
            why="it is no folder here" + (", and not in the Hub cache" if hub else ""),
            fix=_meant(text) or f"name a folder that exists, or a version such as name@v7{fetch}",
        )
    try:
        chosen = context.choose_remote(context.settings(config), remote)
        with fresh.opened(chosen, out, ref=text) as opened:
            version = opened.resolve(text)
            return Away(version, checked_manifest(opened.remote, version.name, version.n, version.manifest).facts)
    except WithdrawnError:
        raise
    except (NotFoundError, UsageError) as error:
        if "@" in text or ":" in text or (isinstance(error, UsageError) and _meant(text) is None):
            raise  # it cannot have been meant as a folder
        raise NotFoundError(
            f"there is no {shown(text)}",
            why="it is no folder here; as a version: " + error.what + (f", {error.why}" if error.why else ""),
            fix=_meant(text) or error.fix,
        ) from error


def _meant(text: str) -> str | None:
    """Return the question after a folder that is called much like this."""
    path = Path(text)
    with suppress(OSError):
        near = nearest(path.name, [one.name for one in path.parent.iterdir() if one.is_dir()])
        return f"did you mean {shown(str(path.with_name(near)))}?" if near is not None else None
    return None


def told_apart(found: Side | Away, *, adapter: bool, fix: str) -> None:
    """See that a version is an adapter, or is none, before it is fetched. Raises RefusedError with this fix."""
    if isinstance(found, Away) and (found.facts.kind == "adapter") is not adapter:
        raise RefusedError(
            f"{found.version.ref} is {'no' if adapter else 'an'} adapter",
            why=f"it was published as {found.facts.kind}",
            fix=fix,
        )


def fetched(found: Side | Away, make: Callable[[], Path], remote: str | None, config: str | None, out: Output) -> Side:
    """Return what was found as a folder."""
    if isinstance(found, Side):
        return found
    version = found.version
    folder = make() / f"{version.name}@v{version.n}"
    opened = context.connect(context.choose_remote(context.settings(config), remote))
    try:
        with following(out) as follower:
            pull(
                opened,
                version.name,
                version.n,
                folder,
                manifest_sha256=version.manifest,
                card_sha256=version.card,
                begin=follower.begin,
                progress=follower.moved,
            )
    finally:
        opened.close()
    return Side(folder, version.ref, found.parent, found.facts)


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


def content(artifact: Artifact, out: Output) -> str:
    """Return the content digest of what a folder holds; of a large one it is said that this takes a while.

    Raises OSError.
    """
    if artifact.size >= SILENT and not out.as_json:
        out.talk(
            f"{size(artifact.size)} of {artifact.root} are hashed: what a version is made of is known by its content"
        )
    return content_of(artifact)


class Goal(NamedTuple):
    """Where a result is published: under which name, by which command; `again` in spite of a withdrawal."""

    name: str
    maker: str
    chosen: RemoteSettings
    again: bool


class There(NamedTuple):
    """A version that was made of the same things in the same way, and what it was published with."""

    receipt: Receipt
    manifest: Manifest

    @property
    def facts(self) -> dict[str, Any]:
        """What was proven of it when it was made."""
        proven = [one for one in self.manifest.facts.findings if one.code.endswith("-proven")]
        return proven[0].data if proven else {}


def made_before(goal: Goal, derivation: Callable[[], str], target: Path | None, out: Output) -> There | None:
    """Return the version that need not be made again, None where the work is to be done; the team is told at need.

    `derivation` is asked for where something was published under the name: it may have to hash folders. Where a folder
    is wanted as well, as `target`, the work is to be done in any case.

    Raises what `fresh.registry_of`, `claim.made_before` and `doubted.looked_at` raise, and what else is known to stand
    against publishing where the work is to be done: better before it than after.
    """
    untold: list[WeighbridgeError] = []
    opened = context.connect(goal.chosen)
    try:
        owner = fresh.writer()
        registry = fresh.registry_of(goal.chosen, opened, writer=owner.daemon)
        with _in_words_of(goal):
            found = standing(
                opened, goal.chosen.name, registry, goal.name, derivation, again=goal.again, untold=untold.append
            )
            if found is not None:
                found = doubted.looked_at(opened, registry, found[0], out), found[1]
        if found is not None:
            fresh.published(goal.chosen, opened, found[0], untold, out)
        if (found is None or target is not None) and not opened.properties.commits:
            check_writer(registry, opened, owner)
        root = folder_of(goal.chosen.url)
        if found is None and root is not None:
            free(Path(root, layout.claim(goal.name, 0)))  # where a number would be taken
    finally:
        opened.close()
    return There(*found) if found is not None and target is None else None


@contextmanager
def _in_words_of(goal: Goal) -> Iterator[None]:
    """Put this command in the place of the one that an error's fix names: the flow does not know who asks."""
    try:
        yield
    except WeighbridgeError as error:
        if error.data.get("option") == "again" and error.fix:
            error.fix = error.fix.replace("registry push --again", f"registry {goal.maker} ... --again")
        raise


def publish_made(goal: Goal, derivation: str, admission: Admission, out: Output) -> Receipt:
    """Publish what a command has made, or join what was made from the same before."""
    untold: list[WeighbridgeError] = []
    mended: list[WeighbridgeError] = []
    chosen, name = goal.chosen, goal.name
    opened = context.connect(chosen)
    try:
        owner = fresh.writer()
        registry = fresh.registry_of(chosen, opened, writer=owner.daemon)
        with following(out) as follower, _in_words_of(goal):
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
                    opened, chosen.name, registry, candidate, owner,
                    again=goal.again, untold=untold.append, mended=mended.append, progress=follower.total,
                )  # fmt: skip
            except BaseException:
                staging.discard(candidate.bundle)
                raise
        say_mended(mended, out)
        fresh.published(chosen, opened, receipt, untold, out)
    finally:
        opened.close()
    return receipt


def say_version(receipt: Receipt | None, out: Output) -> None:
    """Say where a result came to be no new version."""
    if receipt is not None and receipt.joined:
        out.talk(f"the same was published before, under this number ({compared(receipt)})")


def say_there(there: There, words: dict[str, Any], seconds: float, out: Output) -> None:
    """Say that nothing had to be made; `words` are what every document of the command holds."""
    receipt, manifest = there
    ref = f"{receipt.name}@v{receipt.n}"
    if out.as_json:
        files = {file.path: {"size": file.size, "sha256": file.sha256} for file in manifest.files}
        found = manifest.facts.findings
        done = Merged("", "", files, there.facts, found)
        out.json(plain({**words, "outcome": outcome(found)} | told(done, receipt, seconds, kept=False)))
        return
    out.talk(
        f"it is there already, as {ref}: made before of the same parents in the same way, and not made again "
        f"({compared(receipt)})"
    )
    out.say(ref)


def told(done: Merged, receipt: Receipt | None, seconds: float, *, kept: bool) -> dict[str, Any]:
    """Return what is printed of something made: its version, its files, what was proven, and where it is `kept`."""
    return {
        "dry_run": False,
        "path": done.path if kept else None,
        "ref": f"{receipt.name}@v{receipt.n}" if receipt is not None else None,
        "verified": receipt.verified if receipt is not None else None,
        "joined": done.joined or (receipt is not None and receipt.joined),
        "facts": done.facts,
        "findings": done.findings,
        "files": [{"path": path, **file} for path, file in sorted(done.files.items())],
        "seconds": round(seconds, 3),
    }
