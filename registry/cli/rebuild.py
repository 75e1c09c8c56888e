"""`registry rebuild`: write the team's catalogue anew from what lies on the remote."""

from typing import Final

import click
import msgspec

from weighbridge.registry.cli import context, fresh, options
from weighbridge.registry.cli.output import Output
from weighbridge.registry.flow.marker import check_writer, open_registry
from weighbridge.registry.flow.rebuild import rebuild as repair

SCHEMA: Final = "weighbridge/rebuild/1"


@click.command("rebuild")
@options.remote
@options.config
@options.talking
def rebuild(*, remote: str | None, config: str | None, out: Output) -> int:
    """Repair the catalogue of a remote from its claims, manifests, tags, withdrawals and notes.

    Nothing is removed, no version is touched, publishers may go on. Reads three small objects a version. Ends 5 when
    some of them were damaged; they are named and left out.
    """
    chosen = context.choose_remote(context.settings(config), remote)
    with_remote = context.connect(chosen)
    try:
        registry = open_registry(with_remote, create=False)
        check_writer(registry)
        report = repair(
            with_remote, registry, progress=lambda name: None if out.as_json else out.talk(f"read {name}", "dim")
        )
    finally:
        with_remote.close()
    for problem in dict.fromkeys(report.problems):
        out.talk(f"warning: {problem}", "yellow")
    if out.as_json:
        out.json({"schema": SCHEMA, "remote": chosen.name, **msgspec.to_builtins(report)})
    else:
        out.say(
            f"catalogue of {chosen.name} rebuilt: {report.names} names, {report.versions} versions, "
            f"{report.entries} facts, epoch {report.epoch}"
        )
    with fresh.opened(chosen, Output(quiet=True)):  # what is damaged was told above
        pass
    return 5 if report.problems else 0
