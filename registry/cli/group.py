"""The table of commands; a command's module is imported when it is called, so `ls` does not pay for `push`."""

from typing import TYPE_CHECKING, Final, NamedTuple

import click

from weighbridge import __version__
from weighbridge.registry import shell
from weighbridge.registry.errors import UsageError
from weighbridge.registry.refs import shown

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Entry(NamedTuple):
    """Where a command lives, `module:attribute`, and its line in `registry --help`."""

    target: str
    help: str


_HOME: Final = "weighbridge.registry.cli."

COMMANDS: Final[dict[str, Entry]] = {
    "ls": Entry(_HOME + "ls:ls", "List names and versions."),
    "show": Entry(_HOME + "show:show", "Show everything known about one version."),
    "pull": Entry(_HOME + "pull:pull", "Fetch a version into a folder, verified, all or nothing."),
    "push": Entry(_HOME + "push:push", "Publish a folder as a new version, without a daemon."),
    "inspect": Entry(_HOME + "inspect:inspect", "Say what a folder holds and what would be published."),
    "diagnose": Entry(_HOME + "diagnose:diagnose", "Say why a folder does not load, and what mends it."),
    "extract": Entry(_HOME + "extract:extract", "Take the weights out of a checkpoint, as safetensors."),
    "merge": Entry(_HOME + "merge:merge", "Merge an adapter into its base, streamed and proven."),
    "cast": Entry(_HOME + "cast:cast", "Give a model another precision, streamed and proven."),
    "verify": Entry(_HOME + "verify:verify", "Compare a version or a pulled folder with its manifest."),
    "tag": Entry(_HOME + "tag:tag", "Move a tag such as 'prod', or show its history."),
    "mirror": Entry(_HOME + "mirror:mirror", "Copy a name, or one version, to another remote."),
    "withdraw": Entry(_HOME + "withdraw:withdraw", "Take a version back."),
    "purge": Entry(_HOME + "purge:purge", "Delete the files of a version that was taken back."),
    "sweep": Entry(_HOME + "sweep:sweep", "Remove what killed publishers left on a remote."),
    "allow": Entry(_HOME + "allow:allow", "Allow one finding of a blocked folder, with a reason."),
    "card": Entry(_HOME + "card:card", "Print a version's model card, or edit the part people write."),
    "status": Entry(_HOME + "status:status", "Show what the daemon is doing and what it waits for."),
    "log": Entry(_HOME + "log:log", "Show what happened, newest last."),
    "init": Entry(_HOME + "init:init", "Write a commented weighbridge.toml."),
    "doctor": Entry(_HOME + "doctor:doctor", "Check this machine, the configuration and every remote."),
    "rebuild": Entry(_HOME + "rebuild:rebuild", "Repair the catalogue of a remote from its claims and manifests."),
    "completion": Entry(_HOME + "completion:completion", "Print a completion script for bash, zsh or fish."),
}


class LazyGroup(click.Group):
    """A click group over COMMANDS that knows each command's help line without importing it."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's interface
        """Return the names in the order of the table: the daily ones first."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - as above
        """Import and return one command, or None for a word that is none."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command = shell.load(entry.target)
        shell.warmed_up()
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first argument names. Raises UsageError with the nearest word."""
        word = args[0]
        if word not in COMMANDS and not word.startswith("-") and not ctx.resilient_parsing:
            near = shell.load("weighbridge.config.nearest:nearest")(word, COMMANDS)
            raise UsageError(
                f"there is no command '{shown(word[:80])}'",
                why=f"did you mean '{near}'?" if near else None,
                fix=f"registry {near}" if near else "registry --help",
            )
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        """Complete the names of commands from the table, options as click does."""
        item = shell.load("click.shell_completion:CompletionItem")
        names = [item(name, help=entry.help) for name, entry in COMMANDS.items() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - as above
        """Write the table's help lines."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "--version", message="registry %(version)s")
def registry() -> None:
    """Find, fetch, publish and check model versions.

    Exit codes: 0 ok, 1 failure, 2 usage, 3 not found, 4 login or permission, 5 integrity or licence check failed,
    6 remote unreachable, 7 conflict, 8 not finished, 130 interrupted.
    """
