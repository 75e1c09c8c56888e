"""The configuration: every key checked, every fault told with file, key, line and the nearest valid word."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.config import places, values
from weighbridge.config.load import DAEMON_KEYS, REMOTE_KEYS, WATCH_KEYS, load, remote_settings
from weighbridge.config.settings import DaemonSettings, RemoteSettings, Settings, WatchRule
from weighbridge.registry.errors import DeniedError, UsageError


def write(folder: Path, text: str) -> Path:
    """Write a configuration that nobody else can change."""
    path = folder / "weighbridge.toml"
    path.write_text(text)
    path.chmod(0o644)
    return path


def read(folder: Path, text: str) -> Settings:
    """Return the settings of a text."""
    return load(write(folder, text), {"HOME": "/home/anna"})


def faults(folder: Path, text: str) -> list[dict[str, Any]]:
    """Return the faults that a text is refused for."""
    with pytest.raises(UsageError) as caught:
        read(folder, text)
    assert caught.value.exit_code == 2
    assert str(folder / "weighbridge.toml") in caught.value.what
    problems: list[dict[str, Any]] = caught.value.data["problems"]
    return problems


def fault(folder: Path, text: str) -> dict[str, Any]:
    """Return the only fault of a text."""
    (problem,) = faults(folder, text)
    return problem


REMOTE = '[remotes.team]\nurl = "/srv/models"\n'
WATCH = '[[watch]]\nroot = "/scratch/runs"\n'


def test_the_smallest_file_has_every_default(tmp_path: Path) -> None:
    """A rule needs a root, a remote a URL; everything else has its default."""
    settings = read(tmp_path, WATCH + REMOTE)
    assert settings.watch == (WatchRule(root="/scratch/runs", home="team"),)
    assert settings.remotes == {"team": RemoteSettings("team", "/srv/models")}
    assert settings.daemon == DaemonSettings(
        state="/home/anna/.local/state/weighbridge",
        socket="/home/anna/.local/state/weighbridge/registryd.sock",
    )
    assert settings.source == str(tmp_path / "weighbridge.toml")


def test_values_are_parsed(tmp_path: Path) -> None:
    """Sizes become bytes, times seconds, lists tuples."""
    settings = read(
        tmp_path,
        '[daemon]\nstaging_max = "1.5 TiB"\ndisk_reserve = 0\nscan = "1m30s"\nquiet = "500ms"\n'
        + WATCH
        + 'max_bytes = "500 GB"\nmin_interval = "10m"\npublish = "all"\nignore = []\n'
        + REMOTE
        + 'deny_licenses = ["llama3"]\n',
    )
    assert settings.daemon.staging_max == 3 << 39
    assert settings.daemon.disk_reserve == 0
    assert settings.daemon.scan == 90.0
    assert settings.daemon.quiet == 0.5
    rule = settings.watch[0]
    assert (rule.max_bytes, rule.min_interval, rule.publish, rule.ignore) == (500 * 10**9, 600.0, ("all",), ())
    assert settings.remotes["team"].deny_licenses == ("llama3",)


@pytest.mark.parametrize(
    ("url", "given_keys", "expected"),
    [
        ("/srv/models", {}, (True, True, "keep", "warn")),
        ("s3://b/p", {}, (True, True, "keep", "warn")),
        ("hf://acme", {}, (False, True, "rewrite", "block")),
        ("s3://b/p", {"private": False}, (True, False, "keep", "block")),
        ("s3://b/p", {"internal": False}, (False, True, "rewrite", "warn")),
        ("hf://acme", {"unknown_license": "note", "paths": "block"}, (False, True, "block", "note")),
    ],
)
def test_defaults_follow_the_scheme(
    url: str, given_keys: dict[str, Any], expected: tuple[bool, bool, str, str]
) -> None:
    """A team's own store keeps paths and warns of unknown licences; the Hub and whatever is public is stricter."""
    found = remote_settings("x", url, given_keys)
    assert (found.internal, found.private, found.paths, found.unknown_license) == expected


@pytest.mark.parametrize(
    ("text", "key", "line", "says"),
    [
        ('[daemon]\nqiuet = "1s"\n', "daemon.qiuet", 2, "did you mean 'quiet'?"),
        ('[deamon]\nquiet = "1s"\n', "deamon", 1, "did you mean 'daemon'?"),
        ("[daemon]\nworkers = 0\n", "daemon.workers", 2, "out of range"),
        ('[daemon]\nworkers = "2"\n', "daemon.workers", 2, "an integer is expected, here is a string"),
        ("[daemon]\nworkers = true\n", "daemon.workers", 2, "here is a boolean"),
        ('[daemon]\nstaging_max = "200 Gx"\n', "daemon.staging_max", 2, "'200 Gx' is not a size"),
        ("[daemon]\nstaging_max = 0\n", "daemon.staging_max", 2, "more than 0"),
        ("[daemon]\nstaging_max = -1\n", "daemon.staging_max", 2, "out of range"),
        ("[daemon]\nscan = 30\n", "daemon.scan", 2, "a time with its unit is expected"),
        ('[daemon]\nscan = "30"\n', "daemon.scan", 2, "'30' is not a time"),
        ('[daemon]\nscan = "0s"\n', "daemon.scan", 2, "more than 0"),
        ('[daemon]\nscan = "-1s"\n', "daemon.scan", 2, "is not a time"),
        ('[daemon]\nstaging = "reflnk"\n', "daemon.staging", 2, "did you mean 'reflink'?"),
        ('[daemon]\nlog = ["json"]\n', "daemon.log", 2, "here is an array"),
        ('[daemon]\nstate = "var/lib"\n', "daemon.state", 2, "it is relative"),
        ('[daemon]\nstate = "~/x"\n', "daemon.state", 2, "'~' is not expanded"),
        (f'[daemon]\nsocket = "/{"x" * 120}"\n', "daemon.socket", 2, "longer than the 107 bytes"),
        ("daemon = 3\n", "daemon", 1, "a table is expected, here is an integer"),
        ('\n[watch]\nroot = "/a"\n', "watch", 2, "an array of tables is expected"),
        ('[[watch]]\nname = "x"\n', "watch[0]", 1, "'root' is missing"),
        ('[[watch]]\nroot = "runs"\n', "watch[0].root", 2, "must be an absolute path"),
        (WATCH + 'backfill = "no"\n', "watch[0].backfill", 3, "true or false is expected"),
        (WATCH + 'home = "locla"\n', "watch[0].home", 3, "there is no remote 'locla'; did you mean 'local'?"),
        (WATCH + 'mirrors = ["hub"]\n', "watch[0].mirrors", 3, "there is no remote 'hub'"),
        (WATCH + 'mirrors = ["local"]\n', "watch[0].mirrors", 3, "is the home already"),
        (
            WATCH + 'home = "a"\nmirrors = ["b"]\n[remotes]\na.url = "/x"\nb.url = "/x"\n',
            "watch[0].mirrors",
            4,
            "the same place",
        ),
        (WATCH + 'mirrors = ["a", "a"]\n' + REMOTE.replace("team", "a"), "watch[0].mirrors", 3, "twice"),
        (WATCH + "publish = []\n", "watch[0].publish", 3, "the list is empty"),
        (WATCH + 'publish = ["bets"]\n', "watch[0].publish", 3, "did you mean 'best'?"),
        (WATCH + 'publish = ["all", "best"]\n', "watch[0].publish", 3, "stand alone"),
        (WATCH + 'best = "eval_loss"\n', "watch[0].best", 3, "names no metric and goal"),
        (WATCH + 'best = "eval_loss:less"\n', "watch[0].best", 3, "names no metric and goal"),
        (WATCH + 'name = "{proj}-{run}"\n', "watch[0].name", 3, "did you mean 'project'?"),
        (WATCH + 'name = "{run"\n', "watch[0].name", 3, "not closed"),
        (WATCH + 'name = "a/{run}"\n', "watch[0].name", 3, "makes no valid names"),
        (WATCH + 'name = "-{run}"\n', "watch[0].name", 3, "makes no valid names"),
        (WATCH + 'name = ""\n', "watch[0].name", 3, "it is empty"),
        (WATCH + 'ignore = ["/abs"]\n', "watch[0].ignore", 3, "must be a pattern below a run"),
        (WATCH + 'ignore = ["../x"]\n', "watch[0].ignore", 3, "must be a pattern below a run"),
        (WATCH + "ignore = [1]\n", "watch[0].ignore", 3, "a string is expected, here is an integer"),
        (WATCH + 'merge = "sometimes"\n', "watch[0].merge", 3, "is not a choice"),
        (WATCH + 'merge_dtype = "f16"\n', "watch[0].merge_dtype", 3, "did you mean 'fp16'?"),
        (WATCH + 'root2 = "x"\n', "watch[0].root2", 3, "did you mean 'root'?"),
        ("remotes = []\n", "remotes", 1, "a table is expected, here is an array"),
        ("[remotes]\nteam = 3\n", "remotes.team", 2, "a table is expected"),
        ("[remotes.team]\nprivate = true\n", "remotes.team", 1, "'url' is missing"),
        ('[remotes."a/b"]\nurl = "/x"\n', "remotes.a/b", 1, "a remote's name has letters"),
        ('[remotes.team]\nurl = "models"\n', "remotes.team.url", 2, "it is relative"),
        ('[remotes.team]\nurl = "s33://x"\n', "remotes.team.url", 2, "did you mean 's3'?"),
        ('[remotes.team]\nurl = "s3://"\n', "remotes.team.url", 2, "nothing follows s3://"),
        ('[remotes.team]\nurl = "s3://b/../c"\n', "remotes.team.url", 2, "'..' segment"),
        ('[remotes.team]\nurl = "s3://b?x=1"\n', "remotes.team.url", 2, "a query"),
        ('[remotes.team]\nurl = "/srv"\nendpoint = "https://x"\n', "remotes.team.endpoint", 3, "only s3:// and hf://"),
        ('[remotes.team]\nurl = "s3://b"\nendpoint = "x.org"\n', "remotes.team.endpoint", 3, "is not an address"),
        (REMOTE + 'internal = false\npaths = "keep"\n', "remotes.team.paths", 4, "contradicts internal = false"),
        (REMOTE + 'unknown_licence = "warn"\n', "remotes.team.unknown_licence", 3, "did you mean 'unknown_license'?"),
        (REMOTE + 'mirror = "latest"\n', "remotes.team.mirror", 3, "did you mean 'latest-only'?"),
        (REMOTE + "max_age = 1979-05-27\n", "remotes.team.max_age", 3, "here is a date or time"),
    ],
)
def test_each_fault_names_key_line_and_cure(tmp_path: Path, text: str, key: str, line: int, says: str) -> None:
    """Whatever is wrong in one place is told with its key, its line and what would be right."""
    found = fault(tmp_path, text)
    assert (found["key"], found["line"]) == (key, line)
    assert says in found["message"]


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    """Several faults are listed in one error, in the order of the file, each with its line."""
    text = (
        '[daemon]\nscam = "1s"\nworkers = "x"\n'
        + WATCH
        + 'home = "hbu"\n[remotes.hub]\nurl = "hf://a"\npath = "keep"\n'
    )
    with pytest.raises(UsageError) as caught:
        read(tmp_path, text)
    error = caught.value
    assert "has 4 faults" in error.what
    assert [problem["line"] for problem in error.data["problems"]] == [2, 3, 6, 9]
    why = (error.why or "").splitlines()
    assert [line.partition(":")[0] for line in why] == ["line 2", "line 3", "line 6", "line 9"]
    assert "[daemon] scam" in why[0]
    assert "[[watch]] home" in why[2]
    assert "[remotes.hub] path" in why[3]


def test_a_flood_of_faults_is_counted(tmp_path: Path) -> None:
    """A file of another program gives a bounded list."""
    with pytest.raises(UsageError) as caught:
        read(tmp_path, "".join(f"key{n} = {n}\n" for n in range(500)))
    assert "500 faults" in caught.value.what
    assert (caught.value.why or "").splitlines()[-1] == "and 480 more"


def test_broken_toml_names_its_line(tmp_path: Path) -> None:
    """A text that is no TOML is refused with the line where it breaks."""
    with pytest.raises(UsageError) as caught:
        read(tmp_path, '[daemon]\nscan = "30s"\nquiet = \n')
    assert caught.value.what.startswith(f"{tmp_path}/weighbridge.toml, line 3: not valid TOML")
    with pytest.raises(UsageError, match="line 2: not valid TOML"):
        read(tmp_path, '[daemon]\nscan = "30s')
    with pytest.raises(UsageError, match="line 4: not valid TOML"):
        read(tmp_path, "[daemon]\n\n\n[daemon]\n")


def test_a_file_that_is_no_text_names_its_line(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 are refused with their line."""
    path = tmp_path / "weighbridge.toml"
    path.write_bytes(b"[daemon]\n# caf\xe9\n")
    path.chmod(0o600)
    with pytest.raises(UsageError, match="line 2: not UTF-8"):
        load(path, {})


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    """An editor's byte order mark is skipped."""
    assert read(tmp_path, "\ufeff" + WATCH).watch


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        ("/scratch/runs/a", "/scratch/runs"),
        ("/scratch/runs/../runs/b", "/scratch/runs"),
    ],
)
def test_roots_may_not_lie_inside_each_other(tmp_path: Path, inner: str, outer: str) -> None:
    """A root in another root is refused at the line of the later one."""
    text = f'[[watch]]\nroot = "{inner}"\n[[watch]]\nroot = "{outer}"\n'
    found = fault(tmp_path, text)
    assert (found["key"], found["line"]) == ("watch[1].root", 4)
    assert "lie inside each other" in found["message"]


def test_a_root_is_watched_once(tmp_path: Path) -> None:
    """The same root in two tables is said to be there twice, and which line to remove."""
    found = fault(tmp_path, '[[watch]]\nroot = "/scratch/runs"\n[[watch]]\nroot = "/scratch/runs"\n')
    assert (found["key"], found["line"]) == ("watch[1].root", 4)
    assert found["message"] == "/scratch/runs is watched twice"


def test_neighbours_with_a_common_beginning_are_fine(tmp_path: Path) -> None:
    """`/scratch/runs` and `/scratch/runs2` are beside each other."""
    assert len(read(tmp_path, '[[watch]]\nroot = "/scratch/runs"\n[[watch]]\nroot = "/scratch/runs2"\n').watch) == 2


def test_links_cannot_hide_a_root_in_a_root(tmp_path: Path) -> None:
    """Roots are compared by their real paths; the settings keep them as written."""
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    text = f'[[watch]]\nroot = "{tmp_path}/link"\n'
    assert read(tmp_path, text).watch[0].root == f"{tmp_path}/link"
    found = fault(tmp_path, text + f'[[watch]]\nroot = "{tmp_path}/real/deep"\n')
    assert "lie inside each other" in found["message"]


def test_reading_commands_touch_no_watched_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `resolve` no path is looked at on the disk, yet plain nesting is found all the same."""

    def hang(_: str) -> str:
        raise AssertionError("a file system was asked")

    monkeypatch.setattr(os.path, "realpath", hang)
    path = write(tmp_path, WATCH + REMOTE)
    assert load(path, {}, resolve=False).watch
    path.write_text(WATCH + '[[watch]]\nroot = "/scratch/runs/a"\n' + REMOTE)
    with pytest.raises(UsageError, match="lie inside each other"):
        load(path, {}, resolve=False)


def test_what_is_written_may_not_be_watched(tmp_path: Path) -> None:
    """State and directory remotes may not lie in a watched folder, nor a watched folder in a remote."""
    found = faults(
        tmp_path,
        '[daemon]\nstate = "/scratch/runs/.state"\n' + WATCH + '[remotes.team]\nurl = "/scratch/runs/published"\n',
    )
    assert [problem["key"] for problem in found] == ["watch[0].root", "remotes.team.url"]
    around = fault(tmp_path, WATCH + '[remotes.team]\nurl = "/scratch"\n')
    assert around["key"] == "remotes.team.url"


def test_home_is_needed_where_there_are_several_remotes(tmp_path: Path) -> None:
    """With one remote it is the home; with several the rule must say which."""
    assert read(tmp_path, WATCH + REMOTE).watch[0].home == "team"
    found = fault(tmp_path, WATCH + REMOTE + '[remotes.hub]\nurl = "hf://acme"\n')
    assert found["key"] == "watch[0]"
    assert found["fix"] == 'add home = "NAME", one of: team, hub'


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o622])
def test_a_file_that_others_can_change_is_refused(tmp_path: Path, mode: int) -> None:
    """Whoever can write the configuration decides what leaves the machine, so only its owner may."""
    path = write(tmp_path, REMOTE)
    path.chmod(mode)
    with pytest.raises(UsageError) as caught:
        load(path, {})
    assert f"{mode:04o}" in (caught.value.why or "")
    assert caught.value.fix == f"chmod go-w {path}"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o400])
def test_a_file_that_only_its_owner_changes_is_read(tmp_path: Path, mode: int) -> None:
    """Reading is for everybody: there are no secrets in it."""
    path = write(tmp_path, REMOTE)
    path.chmod(mode)
    assert load(path, {}).remotes


def test_a_file_that_is_not_there_names_the_cure(tmp_path: Path) -> None:
    """A named configuration must be there; the error says how to write one."""
    path = tmp_path / "none.toml"
    with pytest.raises(UsageError) as caught:
        load(path, {})
    assert caught.value.fix == f"registry init --path {path}"
    with pytest.raises(UsageError, match="is no file"):
        load(tmp_path, {})
    fifo = tmp_path / "fifo.toml"
    os.mkfifo(fifo)
    with pytest.raises(UsageError, match="is no regular file"):
        load(fifo, {})


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    """A file of more than a mebibyte is no configuration."""
    with pytest.raises(UsageError, match="larger than 1 MiB"):
        read(tmp_path, "#" * (1 << 20) + "\n")


def test_secrets_in_urls_are_refused_and_not_repeated(tmp_path: Path) -> None:
    """A password in a URL is refused, and the error does not print it."""
    for text in (
        '[remotes.a]\nurl = "s3://key:hunter2@bucket"\n',
        '[remotes.a]\nurl = "s3://b"\nendpoint = "https://k:hunter2@h"\n',
    ):
        with pytest.raises(UsageError) as caught:
            read(tmp_path, text)
        assert "hunter2" not in f"{caught.value.what}{caught.value.why}{caught.value.fix}{caught.value.data}"
        assert "a user or a password" in caught.value.what


def test_control_characters_are_never_printed(tmp_path: Path) -> None:
    """A key or value with escape sequences is shown escaped."""
    with pytest.raises(UsageError) as caught:
        read(tmp_path, '[daemon]\n"\\u001b[2J" = 1\nstaging = "\\u001b[2J"\nlog = "\\u202e"\n')
    assert all(line.isprintable() for line in f"{caught.value.what}\n{caught.value.why}".splitlines())


def test_without_a_file_there_is_a_local_remote() -> None:
    """With no configuration at all the commands work with a directory in the user's data folder."""
    settings = load(None, {"HOME": "/home/anna"})
    assert settings.remotes == {"local": RemoteSettings("local", "/home/anna/.local/share/weighbridge/registry")}
    assert settings.watch == ()
    assert settings.source is None


def test_the_file_is_looked_for_in_order(tmp_path: Path) -> None:
    """WEIGHBRIDGE_CONFIG wins, then the system's file, then the user's, then none."""
    system, environ = tmp_path / "etc.toml", {"HOME": str(tmp_path)}
    own = tmp_path / ".config/weighbridge/weighbridge.toml"
    own.parent.mkdir(parents=True)
    assert places.locate(environ, system=str(system)) is None
    own.touch()
    assert places.locate(environ, system=str(system)) == str(own)
    system.touch()
    assert places.locate(environ, system=str(system)) == str(system)
    named = {**environ, "WEIGHBRIDGE_CONFIG": "/no/where.toml"}
    assert places.locate(named, system=str(system)) == "/no/where.toml"


def test_xdg_folders_are_honoured() -> None:
    """The XDG variables move our folders; a relative one is ignored, as their specification says."""
    environ = {
        "HOME": "/home/anna",
        "XDG_CONFIG_HOME": "/c",
        "XDG_CACHE_HOME": "/k",
        "XDG_DATA_HOME": "relative",
        "XDG_STATE_HOME": "/s",
        "XDG_RUNTIME_DIR": "/run/user/1000",
    }
    assert places.user_config(environ) == "/c/weighbridge/weighbridge.toml"
    assert places.cache_dir(environ) == "/k/weighbridge"
    assert places.embedded_remote(environ) == "/home/anna/.local/share/weighbridge/registry"
    settings = load(None, environ)
    assert settings.daemon.state == "/s/weighbridge"
    assert settings.daemon.socket == "/run/user/1000/weighbridge/registryd.sock"
    assert places.cache_dir({**environ, "WEIGHBRIDGE_CACHE": "/fast"}) == "/fast"


def test_the_systems_configuration_has_the_systems_places() -> None:
    """A file in /etc/weighbridge keeps state in /var/lib and the socket in /run."""
    assert places.is_system("/etc/weighbridge/weighbridge.toml")
    assert not places.is_system("/home/anna/.config/weighbridge/weighbridge.toml")
    assert not places.is_system(None)
    assert places.state_dir({}, system=True) == "/var/lib/weighbridge"
    assert places.socket_path({}, "/var/lib/weighbridge", system=True) == "/run/weighbridge/registryd.sock"


def test_folders_of_other_services_are_not_ours() -> None:
    """Inside another service's unit its STATE_DIRECTORY and RUNTIME_DIRECTORY change nothing."""
    environ = {"HOME": "/home/anna", "STATE_DIRECTORY": "/var/lib/slurm", "RUNTIME_DIRECTORY": "/run/slurm"}
    assert load(None, environ).daemon.state == "/home/anna/.local/state/weighbridge"


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    """WEIGHBRIDGE_STATE and WEIGHBRIDGE_SOCKET move state and socket of any configuration."""
    path = write(tmp_path, '[daemon]\nstate = "/a"\nsocket = "/b"\n')
    settings = load(path, {"WEIGHBRIDGE_STATE": "/x", "WEIGHBRIDGE_SOCKET": "/y"})
    assert (settings.daemon.state, settings.daemon.socket) == ("/x", "/y")
    plain = load(path, {})
    assert (plain.daemon.state, plain.daemon.socket) == ("/a", "/b")


def test_every_field_has_its_key() -> None:
    """Settings and checked keys are the same words, so that no key is read and forgotten."""
    assert set(DAEMON_KEYS) == set(DaemonSettings._fields)
    assert set(WATCH_KEYS) == set(WatchRule._fields)
    assert set(REMOTE_KEYS) | {"name", "names"} == set(RemoteSettings._fields)  # what a table is called, what all say


def test_names_are_sealed_where_every_remote_keeps_them(tmp_path: Path) -> None:
    """Any remote may become a mirror of what is published to another one: the strictest speaks for all."""
    path = tmp_path / "c.toml"
    tables = '[remotes.team]\nurl = "s3://b"\n[remotes.disk]\nurl = "/d"\n'
    for more, names in (("", True), ('[remotes.hub]\nurl = "hf://acme"\n', False)):
        path.write_text(tables + more)
        assert {one.names for one in load(path, {}).remotes.values()} == {names}
    path.write_text(f'{tables}[remotes.hub]\nurl = "hf://acme"\ninternal = true\npaths = "keep"\n')
    assert {one.names for one in load(path, {}).remotes.values()} == {True}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", None), ("200 GB", 200 * 10**9), ("200GB", 200 * 10**9), ("1KiB", 1024), ("1.5 mb", 1500000), ("7 B", 7)],
)
def test_sizes(text: str, expected: int | None) -> None:
    """A size is a number with a unit; blanks and case do not matter."""
    if expected is None:
        with pytest.raises(values.Fault):
            values.size(text)
    else:
        assert values.size(text) == expected


@given(
    st.one_of(st.text(max_size=12), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.text(max_size=3)))
)
def test_no_value_breaks_a_check(value: Any) -> None:
    """Any value of any type is either taken or refused with a Fault; nothing else is raised."""
    for check in {**DAEMON_KEYS, **WATCH_KEYS, **REMOTE_KEYS}.values():
        with suppress(values.Fault):
            check(value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0),
        ("500ms", 0.5),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        ("2 d", 172800.0),
        ("1w", 604800.0),
        ("0s", 0.0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    """A time is a sum of numbers with units, from milliseconds to weeks."""
    assert values.duration(text) == seconds


@given(st.integers(0, 10**15), st.sampled_from(["B", "kB", "MB", "GiB"]))
def test_whole_sizes_are_exact(number: int, unit: str) -> None:
    """A whole number of bytes within the range of floats is not rounded."""
    factor = {"B": 1, "kB": 1000, "MB": 10**6, "GiB": 1 << 30}[unit]
    if number * factor <= 1 << 53:
        assert values.size(f"{number} {unit}") == number * factor


def test_an_unreadable_file_is_denied(tmp_path: Path) -> None:
    """A configuration that this user may not read ends with a permission error, not with defaults."""
    path = write(tmp_path, REMOTE)
    path.chmod(0)
    own = os.geteuid()
    if own == 0:  # nothing is closed to root: become somebody else for a moment
        os.seteuid(65534)
    try:
        with pytest.raises(DeniedError):
            load(path, {})
    finally:
        os.seteuid(own)
