"""`registry pull`: a version as a folder, verified, all or nothing."""

import os
import time
from pathlib import Path
from typing import Any, Final

import click

from weighbridge.config.places import cache_dir
from weighbridge.registry.cli import context, fresh, options, paths
from weighbridge.registry.cli.catalogue import complete, folder_of
from weighbridge.registry.cli.output import Output, short, size
from weighbridge.registry.cli.progress import following
from weighbridge.registry.flow.cache import Cache
from weighbridge.registry.flow.pull import Pulled
from weighbridge.registry.flow.pull import pull as deliver
from weighbridge.registry.refs import shown

SCHEMA: Final = "weighbridge/pull/1"


@click.command("pull")
@click.argument("ref", shell_complete=complete)
@click.argument("target", type=paths.PLACE, required=False)
@click.option("--step", type=int, metavar="N", help="The version of a plain name that was made at this training step.")
@click.option("--include", multiple=True, metavar="PATTERN", help="Only files like this; repeatable.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="No files like this; repeatable.")
@click.option("--no-cache", is_flag=True, help="Neither use nor keep files in the cache of what was pulled before.")
@click.option("--force", is_flag=True, help="Replace what a pull put there before.")
@options.remote
@options.config
@options.talking
def pull(
    *,
    ref: str,
    target: Path | None,
    step: int | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    no_cache: bool,
    force: bool,
    remote: str | None,
    config: str | None,
    out: Output,
) -> None:
    """Fetch a version into TARGET, verified, all or nothing [default: a folder of its name, here].

    REF is name@v7, name:tag, name (its latest version) or @sha256:<8 or more hex digits>. The folder appears at once
    when every byte is checked; after a cut the same command goes on where it stopped. Patterns are those of paths or
    file names, such as '*.safetensors' or 'tokenizer/'. Files that were pulled from behind a network before come from
    the cache ('[cache] max' in the configuration), each hashed again.
    """
    settings = context.settings(config)
    chosen = context.choose_remote(settings, remote)
    near = folder_of(chosen.url) is not None
    cache = (
        None if no_cache or near or not settings.cache.max else Cache(Path(cache_dir(os.environ)), settings.cache.max)
    )
    with fresh.opened(chosen, out, ref=ref) as found:
        version = found.resolve(ref, step)
        place = target if target is not None else Path(version.name)
        begun = time.monotonic()
        with following(out) as follower:

            def begin(files: Any) -> None:
                whole = sum(file.size for file in files)
                what = f"{shown(ref)} -> v{version.n} ({short(version.content)})" if ref != version.ref else version.ref
                count = "1 file" if len(files) == 1 else f"{len(files)} files"
                if not out.as_json:
                    out.talk(f"{what} from {chosen.name}, {count}, {size(whole)}")
                follower.begin(files)

            result = deliver(
                found.remote,
                version.name,
                version.n,
                place,
                include=include,
                exclude=exclude,
                force=force,
                cache=cache,
                manifest_sha256=version.manifest,
                card_sha256=version.card,
                begin=begin,
                progress=follower.moved,
            )
        if result.fetched == result.bytes and not result.partial:
            fresh.remember(found, result.name, result.n, "sha256-read")
        tell(result, place, time.monotonic() - begun, out)


def tell(result: Pulled, place: Path, seconds: float, out: Output) -> None:
    """Print where the version lies now, and how it came there."""
    for note in result.notes:
        out.talk(f"warning: {note}", "yellow")
    if out.as_json:
        out.json(
            {
                "schema": SCHEMA,
                "ref": f"{result.name}@v{result.n}",
                "name": result.name,
                "version": result.n,
                "content": result.content,
                "manifest_sha256": result.manifest,
                "path": result.path,
                "files": result.files,
                "bytes": result.bytes,
                "fetched": result.fetched,
                "reused": result.reused,
                "cached": result.cached,
                "weaker": result.weaker,
                "partial": result.partial,
                "already": result.already,
                "notes": result.notes,
            }
        )
        return
    number = len(result.files)
    if result.already:
        out.talk(f"{result.name}@v{result.n} is there already: verified {number}/{number} sha256")
    else:
        cached = f", {size(result.cached)} of it from the cache" if result.cached else ""
        how = f"{size(result.bytes)} in {seconds:.1f} s ({size(result.reused)} reused{cached})"
        out.talk(f"verified {number}/{number} sha256   {how}")
    if result.weaker:
        out.talk("weaker form: the target is a mount point, so files were moved in one by one, the manifest last")
    out.say(str(place))
