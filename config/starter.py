"""The text of a first weighbridge.toml: the commented example, with only what was asked for switched on."""

from collections.abc import Sequence
from importlib.resources import files
from typing import Final

REMOTE_NAMES: Final = {"s3": "team", "hf": "hub"}
"""What the remote of a new configuration is called, by scheme; a directory is "local"."""


def example() -> str:
    """Return the example configuration that holds every key."""
    return files("weighbridge.config").joinpath("example.toml").read_text(encoding="utf-8")


def remote_name(url: str) -> str:
    """Return the name that a first configuration gives the remote of a URL."""
    return REMOTE_NAMES.get(url.partition("://")[0], "local")


def starter(watch: Sequence[str], url: str) -> str:
    """Return a configuration that watches these folders and keeps versions at `url`; all other keys are comments."""
    chosen = remote_name(url)
    active: dict[str, dict[str, str]] = {f"[remotes.{chosen}]": {"url": url}}
    if watch:
        active["[[watch]]"] = {"root": watch[0], "home": chosen}
    out: list[str] = []
    section = ""
    for line in example().splitlines():
        if line.startswith("["):
            section = line
            out.append(line if line in {"[daemon]", *active} else f"# {line}")
        elif line and not line.startswith("#"):
            out.append(_key(line, active.get(section, {})))
        else:
            out.append(line)
            if not line and section == "[[watch]]":
                out += _more_rules(watch[1:], chosen)
    return "\n".join(out) + "\n"


def _key(line: str, active: dict[str, str]) -> str:
    """Return a key line with its new value, or as a comment that shows its example."""
    key, _, rest = line.partition(" = ")
    if key not in active:
        return f"# {line}"
    comment = rest.partition("#")[2].strip()
    return f"{key} = {_quoted(active[key])}" + (f"  # {comment}" if comment and key != "url" else "")


def _more_rules(roots: Sequence[str], home: str) -> list[str]:
    out: list[str] = []
    for root in roots:
        out += ["[[watch]]", f"root = {_quoted(root)}", f"home = {_quoted(home)}", ""]
    return out


def _quoted(text: str) -> str:
    """Return a TOML basic string."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
