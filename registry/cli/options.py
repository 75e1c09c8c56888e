"""The options that commands share, so that one word means one thing everywhere."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import click

from weighbridge.registry.cli.output import FORMATS, Output

Command = TypeVar("Command", bound=Callable[..., Any])

config = click.option(
    "--config", metavar="FILE", help="The configuration file [default: WEIGHBRIDGE_CONFIG, the system's, the user's]."
)
remote = click.option("--remote", metavar="NAME", help="A configured remote, a URL or a folder [default: the home].")
offline = click.option("--offline", is_flag=True, help="Ask no remote; answer from what is known here.")
_json = click.option("--json", "json_", is_flag=True, help="Print JSON; the same as -o json.")
_color = click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    help="Colours; auto honours NO_COLOR and TERM=dumb.",
)


def listing(function: Command) -> Callable[..., Any]:
    """Give a command that prints rows `-o`, `--json`, `-q` and `--color`; it receives one `out: Output`."""

    @_color
    @click.option("-q", "--quiet", is_flag=True, help="Print names only; the same as -o name.")
    @_json
    @click.option("-o", "--output", "fmt", type=click.Choice(FORMATS), default="table", help="The format of the rows.")
    @wraps(function)
    def command(*args: Any, fmt: str, json_: bool, quiet: bool, color: str, **given: Any) -> Any:
        chosen = "json" if json_ else "name" if quiet and fmt == "table" else fmt
        return function(*args, out=Output(chosen, quiet=quiet, color=color), **given)

    return command


def talking(function: Command) -> Callable[..., Any]:
    """Give a command that does one thing `--json`, `-q` and `--color`; it receives one `out: Output`."""

    @_color
    @click.option("-q", "--quiet", is_flag=True, help="Print results only, no talk.")
    @_json
    @wraps(function)
    def command(*args: Any, json_: bool, quiet: bool, color: str, **given: Any) -> Any:
        return function(*args, out=Output("json" if json_ else "table", quiet=quiet, color=color), **given)

    return command
