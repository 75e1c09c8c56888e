"""The systemd units: valid, hardened below a threshold, written with the paths of this installation."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from weighbridge.daemon import install
from weighbridge.daemon.install import install_unit
from weighbridge.registry.errors import NotFoundError, UsageError

ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze")
TEMPLATES = ("weighbridge.service", "weighbridge-user.service")
SYSTEM = '[daemon]\nstate = "/var/lib/weighbridge"\nsocket = "/run/weighbridge/registryd.sock"\n'


def configured(folder: Path, text: str = "") -> Path:
    """Write a configuration that suits a system unit."""
    path = folder / "weighbridge.toml"
    path.write_text(SYSTEM + '[[watch]]\nroot = "/scratch/runs"\n' + (text or '[remotes.local]\nurl = "/srv/models"\n'))
    path.chmod(0o644)
    return path


def program(folder: Path) -> Path:
    """Make a `registryd` that can be executed."""
    path = folder / "bin dir" / "registryd"
    path.parent.mkdir(exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def analyze(*arguments: str, runtime: Path) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze without a running manager."""
    assert ANALYZE is not None
    world = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    return subprocess.run([ANALYZE, *arguments], capture_output=True, text=True, env=world, check=False)


@needs_systemd
@pytest.mark.parametrize("user", [False, True])
def test_written_units_are_valid(tmp_path: Path, user: bool) -> None:
    """Systemd finds no unknown key and no bad value in what `install-unit` writes."""
    done = install_unit(
        user=user, to=tmp_path / "units", config=configured(tmp_path), program=program(tmp_path), environ={}
    )
    (unit,) = [path for path in done.paths if path.suffix == ".service"]
    checked = analyze("verify", "--recursive-errors=yes", *(["--user"] if user else []), str(unit), runtime=tmp_path)
    assert checked.returncode == 0, checked.stderr


@needs_systemd
def test_the_check_would_find_a_fault(tmp_path: Path) -> None:
    """The check above is one: an unknown key in the same unit is refused."""
    done = install_unit(
        user=False, to=tmp_path / "units", config=configured(tmp_path), program=program(tmp_path), environ={}
    )
    unit = done.paths[0]
    unit.write_text(unit.read_text().replace("[Service]", "[Service]\nProtectSytem=strict"))
    assert analyze("verify", "--recursive-errors=yes", str(unit), runtime=tmp_path).returncode != 0


@needs_systemd
@pytest.mark.parametrize(("user", "threshold"), [(False, 20), (True, 70)])
def test_units_are_hardened(tmp_path: Path, user: bool, threshold: int) -> None:
    """The exposure that systemd computes stays below 2.0 for the system unit and 7.0 for the user's."""
    done = install_unit(
        user=user, to=tmp_path / "units", config=configured(tmp_path), program=program(tmp_path), environ={}
    )
    checked = analyze("security", "--offline=true", f"--threshold={threshold}", str(done.paths[0]), runtime=tmp_path)
    assert checked.returncode == 0, checked.stdout[-400:]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_restriction_has_its_reason(name: str) -> None:
    """Each group of lines is introduced by a comment, and no group is longer than a reader remembers."""
    text = install.template(name)
    group = 0
    for line in text.splitlines():
        if line.startswith("#"):
            group = 0
        elif "=" in line:
            group += 1
            assert group <= 8, f"{line} has no reason nearby"
    service = text.partition("[Service]")[2]
    assert service.lstrip().startswith("#")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_merge_that_runs_out_of_memory_does_not_stop_the_daemon(name: str) -> None:
    """The kernel ends the child alone: by systemd's default the whole unit would be stopped, and begin it again."""
    service = install.template(name).partition("[Service]")[2].partition("[Install]")[0]
    assert "OOMPolicy=continue" in service.splitlines()
    assert "MemoryMax=4G" in service.splitlines()


@pytest.mark.parametrize("name", TEMPLATES)
def test_uploads_may_hold_many_files_open(name: str) -> None:
    """The default of 1024 descriptors is what uploads of many shards by xet run out of."""
    assert "LimitNOFILE=16384" in install.template(name).splitlines()


def test_the_system_unit_says_what_matters() -> None:
    """It is told when it is ready and alive, sees a read-only machine, and gives up after some failures."""
    text = install.template("weighbridge.service")
    for line in (
        *(
            "Type=notify",
            "WatchdogSec=120",
            "ProtectSystem=strict",
            "StateDirectory=weighbridge",
            "NoNewPrivileges=yes",
        ),
        *(
            "StateDirectoryMode=0700",
            "RuntimeDirectory=weighbridge",
            "RuntimeDirectoryPreserve=yes",
            "UMask=0077",
            "PrivateTmp=yes",
            "Restart=on-failure",
        ),
        *("StartLimitBurst=5", "StartLimitIntervalSec=10min", "RestartPreventExitStatus=2 7", "User=weighbridge"),
    ):
        assert line in text.splitlines()


def test_paths_are_those_of_this_installation(tmp_path: Path) -> None:
    """ExecStart is the console script that was found, the configuration is named, our folders are writable."""
    config = configured(tmp_path)
    start = program(tmp_path)
    done = install_unit(user=False, to=tmp_path / "units", config=config, program=start, environ={})
    unit, account = done.paths
    lines = unit.read_text().splitlines()
    assert f'ExecStart="{start}" run' in lines
    assert f"Environment=WEIGHBRIDGE_CONFIG={config}" in lines
    assert "ReadWritePaths=-/srv/models" in lines
    assert not any(line.startswith("ReadWritePaths=") and "/var/lib" in line for line in lines)
    assert account.read_text().splitlines()[-1].startswith("u weighbridge ")
    assert stat.S_IMODE(unit.stat().st_mode) == 0o644
    assert sum(line.startswith("ExecStart=") for line in lines) == 1


def test_a_scratch_folder_for_merges_is_writable_and_made(tmp_path: Path) -> None:
    """A service that may write nowhere else can write where its merges are made; the command that makes it is named."""
    config = configured(tmp_path)
    config.write_text(config.read_text() + f'[merge]\nscratch = "{tmp_path}/shared"\n')
    config.chmod(0o644)
    done = install_unit(user=False, to=tmp_path / "units", config=config, program=program(tmp_path), environ={})
    assert f"ReadWritePaths=-{tmp_path}/shared" in done.paths[0].read_text().splitlines()
    assert f"install -d -o weighbridge -g weighbridge -m 0700 {tmp_path}/shared" in done.commands


def test_the_script_of_this_interpreter_is_found() -> None:
    """Without another choice the unit starts the `registryd` beside this Python."""
    assert install.find_program() == Path(sys.executable).parent / "registryd"


def test_without_a_script_there_is_no_unit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where no `registryd` is installed nothing is written."""
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(sys, "argv", ["python"])
    with pytest.raises(NotFoundError, match="no registryd"):
        install_unit(user=False, to=tmp_path / "units", config=configured(tmp_path), environ={})
    assert not (tmp_path / "units").exists()


def test_special_characters_are_quoted(tmp_path: Path) -> None:
    """Blanks and per cent signs in paths reach systemd as they are."""
    folder = tmp_path / "50% of it"
    folder.mkdir()
    config = configured(folder)
    done = install_unit(user=False, to=tmp_path / "units", config=config, program=program(tmp_path), environ={})
    text = done.paths[0].read_text()
    escaped = str(config).replace("%", "%%")
    assert f'Environment="WEIGHBRIDGE_CONFIG={escaped}"' in text.splitlines()


def test_own_state_and_tmp_change_the_sandbox(tmp_path: Path) -> None:
    """A state folder elsewhere becomes writable; a watched folder below /tmp is not hidden from the daemon."""
    config = tmp_path / "weighbridge.toml"
    config.write_text('[daemon]\nstate = "/data/wb"\nsocket = "/run/wb.sock"\n[[watch]]\nroot = "/tmp/runs"\n')
    config.chmod(0o600)
    done = install_unit(
        user=False, to=tmp_path / "units", config=config, program=program(tmp_path), environ={"HOME": "/h"}
    )
    lines = done.paths[0].read_text().splitlines()
    assert "ReadWritePaths=/data/wb" in lines
    assert "PrivateTmp=no" in lines
    assert "PrivateTmp=yes" not in lines


def test_a_users_unit_needs_no_root(tmp_path: Path) -> None:
    """`--user` writes into the user's own folder, names no account, and keeps to the default configuration silently."""
    home = tmp_path / "home"
    own = home / ".config" / "weighbridge"
    own.mkdir(parents=True)
    configured(own)
    environ = {"HOME": str(home)}
    done = install_unit(user=True, program=program(tmp_path), config=own / "weighbridge.toml", environ=environ)
    assert done.paths == (home / ".config/systemd/user/weighbridge.service",)
    text = done.paths[0].read_text()
    assert "User=" not in text
    assert "WEIGHBRIDGE_CONFIG" not in text
    assert done.commands[0] == "systemctl --user daemon-reload"
    assert done.warnings == ()
    other = configured(tmp_path)
    named = install_unit(user=True, program=program(tmp_path), config=other, environ=environ)
    assert f"Environment=WEIGHBRIDGE_CONFIG={other}" in named.paths[0].read_text().splitlines()


def test_next_commands_lead_to_a_running_daemon(tmp_path: Path) -> None:
    """The account is made, the folder of a missing remote created for it, and the unit enabled, in this order."""
    config = configured(tmp_path, f'[remotes.local]\nurl = "{tmp_path}/st ore"\n')
    done = install_unit(user=False, to=tmp_path / "units", config=config, program=program(tmp_path), environ={})
    assert done.commands[-2:] == ("systemctl daemon-reload", "systemctl enable --now weighbridge")
    assert f"install -d -o weighbridge -g weighbridge -m 0755 '{tmp_path}/st ore'" in done.commands


def test_what_the_account_cannot_reach_is_told(tmp_path: Path) -> None:
    """A program, a configuration or a remote that is closed to the account is named before the service fails."""
    (tmp_path / "store").mkdir()
    config = configured(tmp_path, f'[remotes.local]\nurl = "{tmp_path}/store"\n')
    config.chmod(0o600)
    start = program(tmp_path)
    tmp_path.chmod(0o700)
    done = install_unit(user=False, to=tmp_path / "units", config=config, program=start, environ={})
    assert any(warning.startswith(f"{start} cannot be reached") for warning in done.warnings)
    assert any(warning.startswith(f"{config} cannot be") for warning in done.warnings)
    assert any(f"{tmp_path}/store belongs to" in warning for warning in done.warnings)


def test_writing_again_replaces_the_unit(tmp_path: Path) -> None:
    """`install-unit` after an upgrade writes the new path and leaves drop-ins alone."""
    config = configured(tmp_path)
    folder = tmp_path / "units"
    install_unit(user=False, to=folder, config=config, program=program(tmp_path), environ={})
    drop_in = folder / "weighbridge.service.d" / "override.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nMemoryMax=8G\n")
    install_unit(user=False, to=folder, config=config, environ={})
    assert "/bin dir/" not in (folder / "weighbridge.service").read_text()
    assert drop_in.exists()
    assert sorted(path.name for path in folder.iterdir()) == [
        "weighbridge.conf",
        "weighbridge.service",
        "weighbridge.service.d",
    ]


def test_a_configuration_is_needed(tmp_path: Path) -> None:
    """Without a configuration, or with one whose state would be a user's own folder, no system unit is written."""
    with pytest.raises(UsageError) as caught:
        install_unit(user=False, to=tmp_path / "units", environ={"HOME": str(tmp_path)})
    assert "registry init" in (caught.value.fix or "")
    config = tmp_path / "weighbridge.toml"
    config.write_text('[[watch]]\nroot = "/scratch/runs"\n')
    config.chmod(0o600)
    with pytest.raises(UsageError, match="does not say where"):
        install_unit(user=False, to=tmp_path / "units", config=config, environ={"HOME": str(tmp_path)})
    assert not (tmp_path / "units").exists()


def test_the_manual_of_the_units_names_real_settings() -> None:
    """Each drop-in in systemd/README.md uses settings spelled as systemd does."""
    text = Path(__file__).parent.parent.joinpath("systemd/README.md").read_text()
    blocks = re.findall(r"```ini\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        assert block.startswith(("[Service]", "[Unit]"))


@needs_systemd
def test_every_drop_in_of_the_manual_is_valid(tmp_path: Path) -> None:
    """The drop-ins of systemd/README.md are accepted on top of the unit."""
    done = install_unit(
        user=False, to=tmp_path / "units", config=configured(tmp_path), program=program(tmp_path), environ={}
    )
    text = Path(__file__).parent.parent.joinpath("systemd/README.md").read_text()
    folder = tmp_path / "units" / "weighbridge.service.d"
    folder.mkdir()
    for number, block in enumerate(re.findall(r"```ini\n(.*?)```", text, re.DOTALL)):
        (folder / f"{number}.conf").write_text(block)
    checked = analyze("verify", "--recursive-errors=yes", str(done.paths[0]), runtime=tmp_path)
    assert checked.returncode == 0, checked.stderr
