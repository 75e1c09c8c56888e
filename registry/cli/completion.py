"""`registry completion`: a script that lets the shell complete commands, options, names, versions and tags."""

from typing import Final

import click
from click.shell_completion import get_completion_class

from weighbridge.registry.cli import options
from weighbridge.registry.cli.output import Output, write

SHELLS: Final = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
@options.talking
@click.pass_context
def completion(context: click.Context, *, shell: str, out: Output) -> None:
    """Print a completion script, for your shell's start-up file.

    Names, versions and tags come from the cached catalogue; no remote is asked.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    root = context.find_root()
    script = kind(root.command, {}, "registry", "_REGISTRY_COMPLETE").source()
    if out.as_json:
        out.json({"schema": "weighbridge/completion/1", "shell": shell, "script": script})
    else:
        write(script.rstrip("\n") + "\n")
