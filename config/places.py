"""Where configuration, state, socket, cache and data lie: the system's places, else the user's own (XDG).

Spelled by hand and as text because this is on the start-up path of `registry ls`: platformdirs would cost half as much
as a whole interpreter there, pathlib a third. Nothing here reads the environment by itself.
"""

import os
from collections.abc import Mapping
from typing import Final

SYSTEM_CONFIG: Final = "/etc/weighbridge/weighbridge.toml"
SYSTEM_STATE: Final = "/var/lib/weighbridge"
SYSTEM_RUNTIME: Final = "/run/weighbridge"
SOCKET: Final = "registryd.sock"
_APP: Final = "weighbridge"
_FILE: Final = "weighbridge.toml"


def home(environ: Mapping[str, str]) -> str:
    """Return the user's home folder: HOME, else what the user database says."""
    given = environ.get("HOME", "")
    return given if given.startswith("/") else os.path.expanduser("~")  # noqa: PTH111 - Path costs more than it gives


def _xdg(environ: Mapping[str, str], variable: str, fallback: str) -> str:
    """Return our folder under an XDG base folder; a relative one is ignored, as its specification says."""
    base = environ.get(variable, "")
    return f"{base if base.startswith('/') else f'{home(environ)}/{fallback}'}/{_APP}"


def user_config(environ: Mapping[str, str]) -> str:
    """Return where the user's own configuration file lies, there or not."""
    return f"{_xdg(environ, 'XDG_CONFIG_HOME', '.config')}/{_FILE}"


def cache_dir(environ: Mapping[str, str]) -> str:
    """Return the folder of the commands' disposable caches: WEIGHBRIDGE_CACHE, else the user's cache folder."""
    return environ.get("WEIGHBRIDGE_CACHE") or _xdg(environ, "XDG_CACHE_HOME", ".cache")


def embedded_remote(environ: Mapping[str, str]) -> str:
    """Return the folder that is the remote "local" where nothing is configured."""
    return f"{_xdg(environ, 'XDG_DATA_HOME', '.local/share')}/registry"


def locate(environ: Mapping[str, str], *, system: str = SYSTEM_CONFIG) -> str | None:
    """Return the configuration file: WEIGHBRIDGE_CONFIG, else the system's, else the user's, else None.

    A system file that this user may not read gives way to the user's own, where there is one.
    """
    named = environ.get("WEIGHBRIDGE_CONFIG")
    if named:
        return named
    own = user_config(environ)
    for path in (system, own):
        if os.access(path, os.R_OK):
            return path
    return next((path for path in (system, own) if os.path.exists(path)), None)  # noqa: PTH110 - as above


def is_system(source: str | None, *, system: str = SYSTEM_CONFIG) -> bool:
    """Tell whether a configuration belongs to the machine rather than to a user."""
    return source is not None and _folder(source) == _folder(system)


def state_dir(environ: Mapping[str, str], *, system: bool) -> str:
    """Return the daemon's state folder: WEIGHBRIDGE_STATE, the system's or the user's.

    STATE_DIRECTORY and RUNTIME_DIRECTORY are not read: whoever types `registry status` inside some other service's unit
    (a Slurm job, say) has that service's folders in them.
    """
    named = environ.get("WEIGHBRIDGE_STATE")
    if named:
        return named
    return SYSTEM_STATE if system else _xdg(environ, "XDG_STATE_HOME", ".local/state")


def socket_path(environ: Mapping[str, str], state: str, *, system: bool) -> str:
    """Return the daemon's socket: WEIGHBRIDGE_SOCKET, else in the runtime folder of system or user, else in `state`."""
    named = environ.get("WEIGHBRIDGE_SOCKET")
    if named:
        return named
    if system:
        return f"{SYSTEM_RUNTIME}/{SOCKET}"
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    return f"{runtime}/{_APP}/{SOCKET}" if runtime.startswith("/") else f"{state}/{SOCKET}"


def _folder(path: str) -> str:
    return os.path.normpath(path).rpartition("/")[0]
