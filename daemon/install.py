"""Write the systemd unit with the paths of this installation; one inside a virtual environment is found by nobody."""

import os
import pwd
import shlex
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple

from weighbridge.config import places
from weighbridge.config.load import load
from weighbridge.config.settings import Settings
from weighbridge.registry.errors import DeniedError, NotFoundError, UsageError, WeighbridgeError

UNIT: Final = "weighbridge.service"
ACCOUNT: Final = "weighbridge"
SYSTEM_UNITS: Final = "/etc/systemd/system"
SYSTEM_USERS: Final = "/etc/sysusers.d"
_PRIVATE_TMP: Final = ("/tmp", "/var/tmp")  # noqa: S108 - what PrivateTmp= hides, not a place to write


class Installed(NamedTuple):
    """What was written, what to type next, and what will be in the way."""

    paths: tuple[Path, ...]
    commands: tuple[str, ...]
    warnings: tuple[str, ...]


def install_unit(
    *,
    user: bool,
    to: Path | None = None,
    config: Path | None = None,
    program: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Installed:
    """Write the unit (and for the system the account it runs under) and return what to type next.

    `to` is another folder for both files, `program` another `registryd`. Raises UsageError where the configuration has
    faults or does not fit a system unit, NotFoundError where there is no `registryd` to start, DeniedError where the
    folder may not be written.
    """
    given = os.environ if environ is None else environ
    settings = load(config, given)
    if settings.source is None:
        raise UsageError(
            "there is no configuration yet",
            why="the daemon watches nothing without one",
            fix="registry init --watch DIR" if user else f"registry init --path {places.SYSTEM_CONFIG} --watch DIR",
        )
    source = Path(settings.source).absolute()
    if not user:
        _fits_system(settings, source, given)
    start = (program or find_program()).absolute()
    texts = {(to or _unit_folder(given, user=user)) / UNIT: render(settings, start, source, given, user=user)}
    if not user:
        texts[(to or Path(SYSTEM_USERS)) / "weighbridge.conf"] = template("weighbridge.sysusers")
    for path, text in texts.items():
        _write(path, text, user=user)
    return Installed(
        paths=tuple(texts),
        commands=tuple(_commands(settings, list(texts), user=user)),
        warnings=() if user else tuple(_warnings(settings, start, source)),
    )


def render(settings: Settings, program: Path, config: Path, environ: Mapping[str, str], *, user: bool) -> str:
    """Return the text of the unit: the template with this installation's program, configuration and folders."""
    out = []
    hidden = [path for path in _used(settings) if path.startswith(tuple(f"{tmp}/" for tmp in _PRIVATE_TMP))]
    for line in template("weighbridge-user.service" if user else UNIT).splitlines():
        if line.startswith("ExecStart="):
            out.append(f"ExecStart={_word(str(program))} run")
            if user and str(config) != places.user_config(environ):
                out.append(f"Environment={_word(f'WEIGHBRIDGE_CONFIG={config}')}")
        elif line.startswith("Environment=WEIGHBRIDGE_CONFIG="):
            out.append(f"Environment={_word(f'WEIGHBRIDGE_CONFIG={config}')}")
        elif line.startswith("PrivateTmp=") and hidden:
            out += [f"# {hidden[0]} lies in the shared /tmp, which PrivateTmp=yes would hide.", "PrivateTmp=no"]
        elif line.startswith("ProtectHome=") and not user:
            out += [line, *_writable(settings)]
        else:
            out.append(line)
    return "\n".join(out) + "\n"


def template(name: str) -> str:
    """Return a file of systemd/, from the repository in a checkout, else from the installed distribution."""
    checkout = Path(str(files("weighbridge.daemon"))).resolve().parent / "systemd" / name
    if checkout.is_file():
        return checkout.read_text(encoding="utf-8")
    with suppress(PackageNotFoundError):
        for file in distribution("weighbridge").files or ():
            if file.name == name and file.parent.name == "systemd":
                return Path(str(file.locate())).read_text(encoding="utf-8")
    raise NotFoundError(
        f"the template {name} is not part of this installation", fix="pip install --force-reinstall weighbridge"
    )


def find_program() -> Path:
    """Return the console script `registryd` of this interpreter. Raises NotFoundError where there is none."""
    own = Path(sys.argv[0])
    candidates = [own] if own.name == "registryd" else []
    candidates += [Path(sysconfig.get_path("scripts"), "registryd"), Path(sys.executable).parent / "registryd"]
    for path in candidates:
        if os.access(path, os.X_OK) and path.is_file():
            return path.absolute()
    raise NotFoundError(
        "there is no registryd to start",
        why=f"looked for {' and '.join(sorted({str(path) for path in candidates}))}",
        fix="pip install weighbridge",
    )


def _fits_system(settings: Settings, source: Path, environ: Mapping[str, str]) -> None:
    """Refuse a configuration whose state would be one thing for the daemon's account and another for everybody else."""
    own = places.state_dir(environ, system=False)
    if not places.is_system(str(source)) and settings.daemon.state == own:
        raise UsageError(
            f"{source} does not say where a system service keeps its state and its socket",
            why="outside /etc/weighbridge the defaults are the user's own folders",
            fix=f'set [daemon] state = "{places.SYSTEM_STATE}" and socket = "{places.SYSTEM_RUNTIME}/{places.SOCKET}"',
        )


def _unit_folder(environ: Mapping[str, str], *, user: bool) -> Path:
    return Path(places.user_config(environ)).parent.parent / "systemd" / "user" if user else Path(SYSTEM_UNITS)


def _used(settings: Settings) -> list[str]:
    remotes = [remote.url for remote in settings.remotes.values() if remote.url.startswith("/")]
    more = [folder for folder in (settings.merge.scratch, *settings.merge.bases) if folder is not None]
    return [settings.daemon.state, *(rule.root for rule in settings.watch), *remotes, *more]


def _writable(settings: Settings) -> Iterator[str]:
    """Yield the lines that open the folders we write to: directory remotes, a state or scratch folder of one's own."""
    state = settings.daemon.state
    if state != places.SYSTEM_STATE:
        yield "# The state folder of the configuration."
        yield f"ReadWritePaths={_word(state)}"
    for remote in settings.remotes.values():
        if remote.url.startswith("/"):
            yield f"# The remote {remote.name}; a missing folder is not created but reported."
            yield f"ReadWritePaths={_word(remote.url, optional=True)}"
    if settings.merge.scratch is not None:
        yield "# Where merges are made."
        yield f"ReadWritePaths={_word(str(settings.merge.scratch), optional=True)}"


def _commands(settings: Settings, paths: list[Path], *, user: bool) -> Iterator[str]:
    if user:
        yield "systemctl --user daemon-reload"
        yield "systemctl --user enable --now weighbridge"
        yield "loginctl enable-linger   # keeps it running after you log out"
        return
    try:
        pwd.getpwnam(ACCOUNT)
    except KeyError:
        yield f"systemd-sysusers {shlex.quote(str(paths[1]))}"
    for remote in settings.remotes.values():
        if remote.url.startswith("/") and not Path(remote.url).exists():
            yield f"install -d -o {ACCOUNT} -g {ACCOUNT} -m 0755 {shlex.quote(remote.url)}"
    scratch = settings.merge.scratch
    if scratch is not None and not Path(scratch).exists():
        yield f"install -d -o {ACCOUNT} -g {ACCOUNT} -m 0700 {shlex.quote(scratch)}"
    yield "systemctl daemon-reload"
    yield "systemctl enable --now weighbridge"


def _warnings(settings: Settings, program: Path, config: Path) -> Iterator[str]:
    """Yield what the service's account will stumble over: a program or a configuration it cannot reach."""
    for path, wanted in ((program, stat.S_IXOTH), (config, stat.S_IROTH)):
        closed = [folder for folder in path.parents if not _allows(folder, stat.S_IXOTH)]
        if closed:
            yield f"{path} cannot be reached by the account {ACCOUNT}: {closed[-1]} is closed to others"
        elif not _allows(path, wanted):
            yield f"{path} cannot be used by the account {ACCOUNT}: its mode is {stat.S_IMODE(path.stat().st_mode):04o}"
    for remote in settings.remotes.values():
        if remote.url.startswith("/") and Path(remote.url).exists() and not _allows(Path(remote.url), stat.S_IWOTH):
            owner = _owner(Path(remote.url))
            if owner != ACCOUNT:
                yield f"{remote.url} belongs to {owner}: it must be writable for the account {ACCOUNT}"


def _owner(path: Path) -> str:
    try:
        return path.owner()
    except KeyError:
        return f"uid {path.stat().st_uid}"


def _allows(path: Path, bit: int) -> bool:
    try:
        return bool(path.stat().st_mode & bit)
    except OSError:
        return False


def _word(text: str, *, optional: bool = False) -> str:
    """Return one word of a unit file: specifiers doubled, quoted where it holds blanks."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    mark = "-" if optional else ""
    return f'"{mark}{plain}"' if any(c.isspace() or c in "\"'\\;" for c in text) else f"{mark}{plain}"


def _write(path: Path, text: str, *, user: bool) -> None:
    """Let a file appear whole, mode 0644; one that we wrote earlier is replaced, drop-ins stay."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, fresh = tempfile.mkstemp(prefix=".weighbridge-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
                os.fchmod(stream.fileno(), 0o644)
            Path(fresh).replace(path)
        finally:
            with suppress(FileNotFoundError):
                Path(fresh).unlink()
    except PermissionError as error:
        raise DeniedError(
            f"{path} may not be written",
            fix=f"sudo {sys.argv[0]} install-unit, or for yourself: registryd install-unit --user"
            if not user
            else "name another folder with --to",
        ) from error
    except OSError as error:
        raise WeighbridgeError(f"{path} cannot be written", why=error.strerror) from error
