"""Read weighbridge.toml: every key checked, every fault listed with its line, nothing half-configured.

On the start-up path of `registry ls`: what words a fault (line numbers, nearest keys) is imported only when there is
one.
"""

import os
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple

from weighbridge.config import places, values
from weighbridge.config.places import cache_dir, locate
from weighbridge.config.settings import (
    ADDRESSING,
    EMA,
    EXECUTORS,
    LOGS,
    MERGE,
    MERGE_DTYPES,
    MERGE_RETRY,
    MIRROR,
    PATHS,
    REMOTE_CODE,
    STAGING,
    STORAGE_CLASSES,
    UNKNOWN_LICENSE,
    WRITERS,
    CacheSettings,
    DaemonSettings,
    MergeSettings,
    RemoteSettings,
    Settings,
    SlurmSettings,
    WatchRule,
    names_table,
)
from weighbridge.config.values import Check, Fault
from weighbridge.registry.errors import DeniedError, UsageError
from weighbridge.registry.refs import shown

__all__ = ["cache_dir", "load", "locate"]

_SIZE_LIMIT: Final = 1 << 20
_MARK: Final = b"\xef\xbb\xbf"
"""The byte order mark that some editors write; naming the codec that skips it would import one more module."""

DAEMON_KEYS: Final[dict[str, Check]] = {
    "state": values.path,
    "socket": values.socket_path,
    "staging": values.choice(*STAGING),
    "staging_max": values.positive_size,
    "disk_reserve": values.size,
    "workers": values.whole(1, 256),
    "scan": values.positive_duration,
    "quiet": values.duration,
    "wait_limit": values.positive_duration,
    "log": values.choice(*LOGS),
}
WATCH_KEYS: Final[dict[str, Check]] = {
    "root": values.path,
    "name": values.template,
    "home": values.text,
    "mirrors": values.words,
    "publish": values.publish,
    "best": values.metric,
    "max_bytes": values.positive_size,
    "min_interval": values.duration,
    "backfill": values.flag,
    "share": values.flag,
    "merge": values.choice(*MERGE),
    "merge_dtype": values.choice(*MERGE_DTYPES),
    "merge_retry": values.choice(*MERGE_RETRY),
    "merge_fetch": values.flag,
    "ignore": values.patterns,
    "ema": values.choice(*EMA),
}
REMOTE_KEYS: Final[dict[str, Check]] = {
    "url": values.url,
    "endpoint": values.endpoint,
    "internal": values.flag,
    "private": values.flag,
    "paths": values.choice(*PATHS),
    "unknown_license": values.choice(*UNKNOWN_LICENSE),
    "deny_licenses": values.words,
    "remote_code": values.choice(*REMOTE_CODE),
    "max_age": values.duration,
    "mirror": values.choice(*MIRROR),
    "region": values.text,
    "addressing": values.choice(*ADDRESSING),
    "ca": values.path,
    "profile": values.text,
    "encryption": values.encryption,
    "storage_class": values.choice(*STORAGE_CLASSES),
    "writers": values.choice(*WRITERS),
    "patience": values.positive_duration,
}
CACHE_KEYS: Final[dict[str, Check]] = {"max": values.size}
S3_KEYS: Final = ("region", "addressing", "ca", "profile", "encryption", "storage_class", "writers", "patience")
MERGE_KEYS: Final[dict[str, Check]] = {
    "executor": values.choice(*EXECUTORS),
    "scratch": values.path,
    "bases": values.folders,
    "fetch_max": values.positive_size,
    "behaviour": values.flag,
}
SLURM_KEYS: Final[dict[str, Check]] = {
    "partition": values.slurm_word,
    "account": values.slurm_word,
    "qos": values.slurm_word,
    "gres": values.slurm_word,
    "time": values.positive_duration,
    "cpus": values.whole(1, 1024),
    "memory": values.positive_size,
    "poll": values.positive_duration,
}
TOP_KEYS: Final = ("daemon", "watch", "remotes", "merge", "cache")
_HOMES: Final = {
    "[daemon]": DAEMON_KEYS,
    "[[watch]]": WATCH_KEYS,
    "[remotes.NAME]": REMOTE_KEYS,
    "[merge]": MERGE_KEYS,
    "[merge.slurm]": SLURM_KEYS,
    "[cache]": CACHE_KEYS,
}
"""Each table as it is written, for keys that stand in another one."""


class Problem(NamedTuple):
    """One fault of a configuration: where, what, and how to mend it; `near` are words that may have been meant."""

    path: tuple[str | int, ...]
    message: str
    fix: str | None = None
    word: str | None = None
    near: tuple[str, ...] = ()


def load(
    path: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None, *, resolve: bool = True
) -> Settings:
    """Return the settings of a file, or of the one that `locate` finds, or the built-in ones where there is none.

    With `resolve` folders are compared by their real paths. Commands that only read do without: a watched file system
    that does not answer must not hold up `registry ls`.

    Raises UsageError that names the file and, for each fault, key, line and nearest valid key; DeniedError when the
    file may not be read.
    """
    given = os.environ if environ is None else environ
    source = os.fspath(path) if path is not None else locate(given)
    if source is None:
        return _settings({}, None, given, [], resolve=False)
    return read_text(_read(source), source, given, resolve=resolve)


def read_text(text: str, source: str, environ: Mapping[str, str], *, resolve: bool = True) -> Settings:
    """Return the settings of a configuration's text; `source` is the file it stands in, or is about to.

    Raises UsageError as `load` does.
    """
    document = _parse(source, text)
    problems: list[Problem] = []
    settings = _settings(document, source, environ, problems, resolve=resolve)
    if problems:
        raise import_module("weighbridge.config.problems").as_error(source, text, problems)
    return settings


def _read(source: str) -> str:
    """Return the text of a file that nobody but its owner can change."""
    try:
        with open(source, "rb", opener=_at_once) as stream:
            mode = os.fstat(stream.fileno()).st_mode
            stored = stream.read(_SIZE_LIMIT + 1)
    except FileNotFoundError as error:
        raise UsageError(
            f"the configuration {source} is not there", fix=f"registry init --path {source}", file=source
        ) from error
    except PermissionError as error:
        raise DeniedError(
            f"the configuration {source} may not be read",
            fix="run as a user who may, or name another file in WEIGHBRIDGE_CONFIG",
            file=source,
        ) from error
    except (IsADirectoryError, NotADirectoryError) as error:
        raise UsageError(f"the configuration {source} is no file", fix="name a file", file=source) from error
    if not stat.S_ISREG(mode):
        raise UsageError(f"the configuration {source} is no regular file", fix="name a file", file=source)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = "everybody" if mode & stat.S_IWOTH else "its group"
        raise UsageError(
            f"the configuration {source} can be changed by {who}",
            why=f"its mode is {stat.S_IMODE(mode):04o}; whoever can write it decides what leaves this machine",
            fix=f"chmod go-w {source}",
            file=source,
        )
    if len(stored) > _SIZE_LIMIT:
        raise UsageError(f"the configuration {source} is larger than 1 MiB", fix="name the right file", file=source)
    try:
        return stored.removeprefix(_MARK).decode()
    except UnicodeDecodeError as error:
        line = stored.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{source}, line {line}: not UTF-8", fix="save it as UTF-8", file=source, line=line) from error


def _at_once(path: str, flags: int) -> int:
    """Open without waiting for the other end of a pipe; it is refused right after."""
    return os.open(path, flags | os.O_NONBLOCK)


def _parse(source: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise import_module("weighbridge.config.problems").not_toml(source, text, error) from error


def _settings(
    document: Mapping[str, Any],
    source: str | None,
    environ: Mapping[str, str],
    problems: list[Problem],
    *,
    resolve: bool,
) -> Settings:
    """Return settings, adding what is wrong to `problems`; they mean nothing when there are any."""
    problems += [_unknown((key,), TOP_KEYS) for key in document if key not in TOP_KEYS]
    daemon = _daemon(document, source, environ, problems)
    remotes = _remotes(document, environ, problems)
    watch = _watch(document, remotes, problems)
    merge = _merge(document, problems)
    cache = CacheSettings(**_section(document.get("cache", {}), ("cache",), CACHE_KEYS, problems))
    settings = Settings(daemon=daemon, watch=watch, remotes=remotes, source=source, merge=merge, cache=cache)
    if not problems:
        problems += _places(settings, os.path.realpath if resolve else os.path.normpath)
    return settings


def _daemon(
    document: Mapping[str, Any], source: str | None, environ: Mapping[str, str], problems: list[Problem]
) -> DaemonSettings:
    found = _section(document.get("daemon", {}), ("daemon",), DAEMON_KEYS, problems)
    system = places.is_system(source)
    state = environ.get("WEIGHBRIDGE_STATE") or found.get("state") or places.state_dir(environ, system=system)
    socket = environ.get("WEIGHBRIDGE_SOCKET") or found.get("socket")
    found["state"] = os.path.abspath(state)  # noqa: PTH100 - pathlib stays off the start-up path
    found["socket"] = os.path.abspath(socket or places.socket_path(environ, state, system=system))  # noqa: PTH100
    return DaemonSettings(**found)


def _merge(document: Mapping[str, Any], problems: list[Problem]) -> MergeSettings:
    table = document.get("merge", {})
    plain = {key: value for key, value in table.items() if key != "slurm"} if isinstance(table, dict) else table
    found = _section(plain, ("merge",), MERGE_KEYS, problems, tables=("slurm",))
    given = table.get("slurm", {}) if isinstance(table, dict) else {}
    slurm = SlurmSettings(**_section(given, ("merge", "slurm"), SLURM_KEYS, problems))
    if found.get("executor") == "slurm" and "scratch" not in found:
        problems.append(
            Problem(
                ("merge", "executor"),
                "'slurm' needs a scratch folder that this machine and the nodes see under the same path",
                'add scratch = "/shared/folder"',
            )
        )
    return MergeSettings(**found, slurm=slurm)


def _remotes(
    document: Mapping[str, Any], environ: Mapping[str, str], problems: list[Problem]
) -> dict[str, RemoteSettings]:
    tables = document.get("remotes", {})
    if not isinstance(tables, dict):
        problems.append(Problem(("remotes",), f"a table is expected, here is {values.kind(tables)}", "[remotes.team]"))
        return {}
    if not tables:
        return {"local": RemoteSettings(name="local", url=places.embedded_remote(environ))}
    remotes: dict[str, RemoteSettings] = {}
    for name, table in tables.items():
        at = ("remotes", name)
        if not names_table(name):
            problems.append(Problem(at, "a remote's name has letters, digits, '-' and '_' only", "choose such a name"))
        elif isinstance(table, dict) and "url" not in table:
            problems.append(Problem(at, "'url' is missing", 'add url = "/absolute/folder", "s3://..." or "hf://..."'))
        found = _section(table, at, REMOTE_KEYS, problems)
        remotes[name] = remote_settings(name, found.pop("url", "/"), found)
        _check_remote(remotes[name], found, problems)
    names = all(remote.paths == "keep" for remote in remotes.values())
    return {name: remote._replace(names=names) for name, remote in remotes.items()}


def remote_settings(name: str, url: str, given: Mapping[str, Any] | None = None) -> RemoteSettings:
    """Return a remote's settings with what its scheme defaults to.

    A directory and S3 are taken as the team's own: private paths are kept, an unknown licence is a warning. The Hub is
    somebody else's house, also where a repository is private: paths are rewritten, an unknown licence blocks, and it
    blocks on every remote that is public.
    """
    found = dict(given or {})
    hub = url.startswith("hf://")
    internal = found.setdefault("internal", not hub)
    private = found.setdefault("private", True)
    found.setdefault("paths", "keep" if internal else "rewrite")
    found.setdefault("unknown_license", "block" if hub or not private else "warn")
    return RemoteSettings(name=name, url=url, **found)


def _check_remote(remote: RemoteSettings, given: Mapping[str, Any], problems: list[Problem]) -> None:
    at = ("remotes", remote.name)
    foreign = [key for key in S3_KEYS if key in given and not remote.url.startswith("s3://")]
    problems += [Problem((*at, key), f"only s3:// remotes have {key}", "remove the line") for key in foreign]
    if "endpoint" in given and not remote.url.startswith(("s3://", "hf://")):
        problems.append(Problem((*at, "endpoint"), "only s3:// and hf:// remotes have endpoint", "remove the line"))
    if given.get("internal") is False and remote.paths == "keep":
        problems.append(
            Problem(
                (*at, "paths"),
                "'keep' contradicts internal = false, which says that private paths may not be kept",
                'write paths = "rewrite" or internal = true',
            )
        )


def _watch(
    document: Mapping[str, Any], remotes: Mapping[str, RemoteSettings], problems: list[Problem]
) -> tuple[WatchRule, ...]:
    tables = document.get("watch", [])
    if not isinstance(tables, list):
        problems.append(Problem(("watch",), "an array of tables is expected", "write [[watch]] with two brackets"))
        return ()
    rules = []
    for number, table in enumerate(tables):
        at = ("watch", number)
        found = _section(table, at, WATCH_KEYS, problems)
        if isinstance(table, dict) and "root" not in table:
            problems.append(Problem(at, "'root' is missing", 'add root = "/absolute/folder"'))
        if isinstance(table, dict) and "home" not in table:
            found["home"] = next(iter(remotes), "")
            if len(remotes) > 1:
                problems.append(Problem(at, "'home' is missing and there are several remotes", _home_fix(remotes)))
        found.setdefault("root", "/")
        rule = WatchRule(**found)
        _check_targets(rule, at, remotes, problems)
        rules.append(rule)
    return tuple(rules)


def _home_fix(remotes: Mapping[str, RemoteSettings]) -> str:
    return f'add home = "NAME", one of: {", ".join(remotes)}'


def _check_targets(
    rule: WatchRule, at: tuple[str | int, ...], remotes: Mapping[str, RemoteSettings], problems: list[Problem]
) -> None:
    """Every remote a rule names is there, and no mirror is the home."""
    for key, name in (("home", rule.home), *(("mirrors", mirror) for mirror in rule.mirrors)):
        if name not in remotes and remotes:
            problems.append(
                Problem(
                    (*at, key),
                    f"there is no remote '{shown(name[:80])}'",
                    f"name one of: {', '.join(remotes)}",
                    name,
                    tuple(remotes),
                )
            )
    home = remotes.get(rule.home)
    for name in rule.mirrors:
        mirror = remotes.get(name)
        if home and mirror and name != rule.home and (mirror.url, mirror.endpoint) == (home.url, home.endpoint):
            problems.append(
                Problem((*at, "mirrors"), f"'{name}' is the same place as the home '{rule.home}'", "remove one of them")
            )
    if rule.home in rule.mirrors:
        problems.append(
            Problem((*at, "mirrors"), f"'{shown(rule.home[:80])}' is the home already", "remove it from mirrors")
        )


def _section(
    table: Any,
    at: tuple[str | int, ...],
    checks: Mapping[str, Check],
    problems: list[Problem],
    *,
    tables: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the parsed values of one table; `tables` are keys that may have been meant and are read elsewhere."""
    if not isinstance(table, dict):
        problems.append(Problem(at, f"a table is expected, here is {values.kind(table)}"))
        return {}
    found: dict[str, Any] = {}
    for key, value in table.items():
        check = checks.get(key)
        if check is None:
            problems.append(_unknown((*at, key), (*checks, *tables)))
            continue
        try:
            found[key] = check(value)
        except values.Choice as fault:
            problems.append(Problem((*at, key), fault.message, fault.fix, fault.word, fault.words))
        except Fault as fault:
            problems.append(Problem((*at, key), fault.message, fault.fix))
    return found


def _unknown(path: tuple[str | int, ...], known: tuple[str, ...]) -> Problem:
    word = str(path[-1])
    homes = [table for table, keys in _HOMES.items() if word in keys]
    if homes:
        where = " or ".join(homes)
        return Problem(path, f"this key belongs to {where}", f"move it below {where}")
    return Problem(path, "unknown key", f"the keys here are: {', '.join(known)}", word, known)


def _places(settings: Settings, real_path: Callable[[str], str]) -> Iterator[Problem]:
    """Yield a problem for each root that lies in another, and for state or a directory remote in or around a root.

    Compared by `real_path`, so that a link cannot hide it: a watched folder is never written to, and what is published
    must not be found again as a run.
    """
    watched = [(rule.root, real_path(rule.root)) for rule in settings.watch]
    state = settings.daemon.state
    for number, (root, real) in enumerate(watched):
        at = ("watch", number, "root")
        for other, other_real in watched[:number]:
            if real == other_real:
                yield Problem(at, f"{root} is watched twice", "remove one of the two")
            elif _nested(real, other_real):
                yield Problem(
                    at, f"{root} and {other} lie inside each other", "watch the outer one only, or split them"
                )
        if _inside(real_path(state), real):
            yield Problem(at, f"the state folder {state} lies inside it", "move state to a folder of its own")
        scratch = settings.merge.scratch
        if scratch is not None and _nested(real_path(scratch), real):
            yield Problem(
                ("merge", "scratch"),
                f"{scratch} and the watched {root} lie inside each other",
                "make merges outside the watched folders",
            )
        for remote in settings.remotes.values():
            if remote.url.startswith("/") and _nested(real_path(remote.url), real):
                yield Problem(
                    ("remotes", remote.name, "url"),
                    f"{remote.url} and the watched {root} lie inside each other",
                    "keep published versions outside the watched folders",
                )


def _nested(one: str, other: str) -> bool:
    return _inside(one, other) or _inside(other, one)


def _inside(inner: str, outer: str) -> bool:
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")
