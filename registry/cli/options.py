"""The options that commands share, so that one word means one thing everywhere."""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import click

from weighbridge.registry.cli.output import FORMATS, Output, aimed
from weighbridge.registry.errors import WeighbridgeError
from weighbridge.registry.shell import load

Command = TypeVar("Command", bound=Callable[..., Any])


config = click.option(
    "--config", metavar="FILE", help="The configuration file [default: WEIGHBRIDGE_CONFIG, the system's, the user's]."
)
offline = click.option("--offline", is_flag=True, help="Ask no remote; answer from what is known here.")
_json = click.option("--json", "json_", is_flag=True, help="Print JSON; the same as -o json.")
_color = click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    help="Colours; auto honours NO_COLOR and TERM=dumb.",
)


def remote(function: Command) -> Callable[..., Any]:
    """Give a command `--remote`; what an error tells people to type names that remote, too."""

    @click.option("--remote", metavar="NAME", help="A configured remote, a URL or a folder [default: the home].")
    @wraps(function)
    def command(*args: Any, remote: str | None, **given: Any) -> Any:
        try:
            return function(*args, remote=remote, **given)
        except WeighbridgeError as error:
            error.fix = _aimed(error, remote)
            raise

    return command


def _aimed(error: WeighbridgeError, remote: str | None) -> str | None:
    """Return the fix of an error as it works here: for the remote that was named, or for somebody who named none."""
    if remote is not None:
        return aimed(error.fix, remote) if error.fix else error.fix
    if "registry" in error.data and not os.environ.get("WEIGHBRIDGE_REMOTE"):
        begin = f"registry init --remote {load('shlex:quote')(str(error.data['registry']))}"
        return f"name the team's remote with --remote URL or WEIGHBRIDGE_REMOTE, or begin one: {begin}"
    return error.fix


def listing(function: Command) -> Callable[..., Any]:
    """Give a command that prints rows `-o`, `--json`, `-q` and `--color`; it receives one `out: Output`."""

    @_color
    @click.option("-q", "--quiet", is_flag=True, help="Print names only; the same as -o name.")
    @_json
    @click.option("-o", "--output", "fmt", type=click.Choice(FORMATS), default="table", help="The format of the rows.")
    @wraps(function)
    def command(*args: Any, fmt: str, json_: bool, quiet: bool, color: str, **given: Any) -> Any:
        chosen = "json" if json_ else "name" if quiet and fmt == "table" else fmt
        return function(*args, out=Output(chosen, quiet=quiet, color=color, remote=given.get("remote")), **given)

    return command


def talking(function: Command) -> Callable[..., Any]:
    """Give a command that does one thing `--json`, `-q` and `--color`; it receives one `out: Output`."""

    @_color
    @click.option("-q", "--quiet", is_flag=True, help="Print results only, no talk.")
    @_json
    @wraps(function)
    def command(*args: Any, json_: bool, quiet: bool, color: str, **given: Any) -> Any:
        chosen = "json" if json_ else "table"
        return function(*args, out=Output(chosen, quiet=quiet, color=color, remote=given.get("remote")), **given)

    return command
