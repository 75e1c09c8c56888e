"""The promises of docs/promises.md that only the whole house can keep or break, and where the others are attacked."""

import ast
import gzip
import json
import os
import pickle
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weighbridge
from weighbridge.registry.flow import place
from weighbridge.registry.flow.marker import open_registry
from weighbridge.registry.flow.publish import publish
from weighbridge.registry.flow.pull import pull
from weighbridge.registry.remotes.directory import DirectoryRemote
from weighbridge_testlib.builders import llama_model, lora_adapter, lora_config, trainer_checkpoint, write_json
from weighbridge_testlib.publishing import OWNER, candidate, rendered
from weighbridge_testlib.yard import Yard

TESTS = Path(__file__).parent

ATTACKS: dict[str, tuple[str, ...]] = {
    "complete or invisible": (
        "test_settle:test_quiet_time_alone_is_not_enough",
        "test_daemon_timelines:test_a_file_that_grows_with_pauses",
    ),
    "bytes hashed are bytes stored": (
        "test_stage:test_a_source_that_changes_while_it_is_read_stops_the_job",
        "test_upload_decide:test_a_damaged_stage_is_never_visible",
    ),
    "the decision comes last": (
        "test_jobs_killed:test_killed_at_every_call",
        "test_upload_decide:test_files_go_in_the_order_that_fails_loaders_safely",
    ),
    "acknowledged is durable": (
        "test_promises:test_what_is_acknowledged_is_on_the_disk",
        "test_catalog:test_the_database_is_durable_and_strict_about_foreign_keys",
    ),
    "versions never change": (
        "test_races:test_processes_on_one_folder",
        "test_upload_decide:test_foreign_bytes_stop_the_job",
    ),
    "doing it again is harmless": (
        "test_publish:test_publishing_again_gives_the_same_version",
        "test_jobs:test_an_amnesiac_publishes_nothing_twice",
    ),
    "a pull is all or nothing": ("test_pull_kills:test_killed_anywhere_the_target_is_absent_or_perfect",),
    "deletion needs proof": (
        "test_promises:test_what_is_watched_is_never_touched",
        "test_remote_directory:test_a_remote_whose_mount_is_gone_is_not_empty",
        "test_withdraw:test_a_damaged_mark_deletes_nothing",
        "test_withdraw:test_the_payload_goes_after_the_grace",
        "test_withdraw:test_a_tag_wins",
        "test_cli_copies:test_files_go_only_after_a_withdrawal_and_its_grace",
        "test_mirrors:test_a_mirror_that_holds_something_else_is_left_alone",
        "test_cli_copies:test_verify_names_a_damaged_copy",
        "test_problems:test_nothing_is_forgotten_under_a_root_that_is_not_there",
    ),
    "locks die with the process": (
        "test_daemon_service:test_a_killed_daemon_starts_again_at_once",
        "test_daemon_service:test_the_listening_process_does_not_keep_the_lock_alive",
    ),
    "events are hints, the scan is the truth": (
        "test_daemon_timelines:test_the_result_is_that_of_a_daemon_without_events",
    ),
    "no code from weights ever runs": (
        "test_hostile:test_nothing_runs_and_nothing_is_written",
        "test_promises:test_no_module_can_unpickle_or_run_text",
        "test_promises:test_a_pickle_that_strikes_back_is_neither_run_nor_published",
        "test_jail:test_what_the_jail_forbids_is_refused_and_told",
    ),
    "nothing unlisted leaves": ("test_promises:test_nothing_unlisted_leaves", "test_admit:test_what_cannot_be_allowed"),
    "trainer first": (
        "test_promises:test_what_is_watched_is_never_touched",
        "test_stage:test_the_reserve_stays_free",
        "test_jobs:test_poison_is_quarantined_while_others_go_on",
    ),
    "no flood": (
        "test_daemon_timelines:test_a_first_start_publishes_nothing_old",
        "test_jobs_choice:test_a_backlog_is_thinned_before_it_is_published",
    ),
    "nothing is invented": (
        "test_promises:test_what_is_not_on_disk_is_unknown",
        "test_provenance:test_nothing_on_disk_gives_nothing",
    ),
}
"""Promise -> the tests that try to break it; crashes, power loss and full disks are in `tests/proofs` as well."""

LOADS = frozenset({"hub", "jit", "load", "package", "serialization"})
"""What of torch reads pickles or programs."""

RUNS_TEXT = frozenset({"eval", "exec", "compile", "__import__"})
JAILED = frozenset({"peft_job", "behave_job", "device"})
"""What imports torch, in `adapters/merge`."""
UNPICKLES = frozenset({"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "torch"})


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    """Give a yard where every artifact at rest is published."""
    with Yard(tmp_path) as found:
        yield found


@pytest.mark.parametrize("promise", ATTACKS)
def test_every_promise_is_attacked(promise: str) -> None:
    """Each promise of the manual names tests that are there."""
    for attack in ATTACKS[promise]:
        file, _, name = attack.partition(":")
        tree = ast.parse((TESTS / f"{file}.py").read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, attack


def test_the_manual_and_the_attacks_know_the_same_promises() -> None:
    """A promise that is added to the manual needs a test that tries to break it."""
    manual = (TESTS.parent / "docs/promises.md").read_text()
    assert [line.split("**")[1].lower() for line in manual.splitlines() if line.startswith("- **")] == list(ATTACKS)


def inode(path: str | Path | int) -> int:
    """Return the number of a file or an open descriptor."""
    return os.fstat(path).st_ino if isinstance(path, int) else Path(path).lstat().st_ino


class Disk:
    """Watches what becomes durable in which order; every call is carried out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: dict[int, list[int]] = {}
        self.named: list[tuple[int, int, int, str]] = []
        self.made: list[tuple[int, int, str]] = []
        self._tick = 0
        fsync, link, mkdir, rename = os.fsync, os.link, os.mkdir, place._renameat2

        def seen_fsync(descriptor: int) -> None:
            fsync(descriptor)
            self.synced.setdefault(inode(descriptor), []).append(self._next())

        def seen_link(source: Any, target: Any, **options: Any) -> None:
            at = self._next()
            link(source, target, **options)
            self.named.append((at, inode(target), inode(Path(target).parent), str(target)))

        def seen_mkdir(path: Any, *options: Any, **more: Any) -> None:
            mkdir(path, *options, **more)
            self.made.append((self._next(), inode(Path(path).parent), str(path)))

        def seen_rename(old: Path, new: Path, flags: int) -> bool:
            at = self._next()
            done = rename(old, new, flags)
            self.named.append((at, inode(new), inode(new.parent), str(new)))
            return done

        monkeypatch.setattr(os, "fsync", seen_fsync)
        monkeypatch.setattr(os, "link", seen_link)
        monkeypatch.setattr(os, "mkdir", seen_mkdir)
        monkeypatch.setattr(place, "_renameat2", seen_rename)

    def _next(self) -> int:
        self._tick += 1
        return self._tick

    def check(self, root: Path) -> int:
        """Assert that what got a name under a root was synced before, and the name after; return how many names."""
        names = [entry for entry in self.named if Path(entry[3]).is_relative_to(root)]
        for at, own, folder, name in names:
            assert min(self.synced.get(own, [at])) < at, f"{name} was not synced before it was named"
            assert max(self.synced.get(folder, [0])) > at, f"the folder of {name} was not synced after it was named"
        for at, above, name in self.made:
            if Path(name).is_relative_to(root) and Path(name).exists() and "stage" not in Path(name).parts:
                assert max(self.synced.get(above, [0])) > at, f"the name of the folder {name} was not synced"
        return len(names)


def test_what_is_acknowledged_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a publish or a pull returns, every file it made was synced, and so was every folder that names one."""
    root, target = tmp_path / "remote", tmp_path / "pulled"
    disk = Disk(monkeypatch)
    remote = DirectoryRemote(root)
    registry = open_registry(remote, create=True)
    publish(remote, "home", registry, candidate(remote, tmp_path / "run"), OWNER, render=rendered)
    objects = [path for path in root.rglob("*") if path.is_file() and "stage" not in path.parts]
    assert disk.check(root) == len(objects) > 8
    assert all(inode(path) in disk.synced for path in objects)
    pull(remote, "medical-sft", 1, target)
    assert disk.check(target) == 1
    assert all(inode(path) in disk.synced for path in target.rglob("*"))


def as_it_is(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return everything but access times that a trainer could notice of its files."""
    found: dict[str, tuple[int, ...]] = {}
    for path in (folder, *folder.rglob("*")):
        s = path.lstat()
        found[str(path)] = (s.st_ino, s.st_mode, s.st_nlink, s.st_uid, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
    return found


def test_what_is_watched_is_never_touched(yard: Yard) -> None:
    """Publishing, refusing, inspecting, verifying and pushing leave no mark in watched folders, nor do failures."""
    trainer_checkpoint(yard.runs / "team/run/checkpoint-1", step=1, seed=1)
    llama_model(yard.runs / "team/full/checkpoint-2", seed=2, shards=2)
    (yard.runs / "team/full/checkpoint-2/model-00001-of-00002.safetensors").write_bytes(b"")
    lora_adapter(yard.runs / "team/bare")
    before = as_it_is(yard.runs)
    yard.daemon_once()
    assert yard.check()["committed"]
    yard.registry("inspect", yard.runs)
    yard.registry("verify", yard.runs / "team/bare")
    assert yard.push(yard.runs / "team/bare", "by-hand").returncode == 0
    yard.remote.rename(yard.remote.with_name("away"))
    yard.remote.mkdir()
    assert yard.daemon_once().returncode != 0
    assert as_it_is(yard.runs) == before


def product_files() -> Iterator[tuple[Path, ast.Module]]:
    """Yield every module of the product, parsed."""
    for part in ("registry", "adapters", "daemon", "config"):
        for path in sorted((Path(weighbridge.__file__).parent / part).resolve().rglob("*.py")):
            yield path, ast.parse(path.read_text())


def test_no_module_can_unpickle_or_run_text() -> None:
    """Nothing in the product imports an unpickler or hands text to the interpreter.

    Only what runs in the child process imports torch, and opens no file with it; nobody imports those modules but the
    tasks of that child: `merge/job.py` the arithmetic, `merge/behave_job.py` what loads models.
    """
    files = 0
    for path, tree in product_files():
        files += 1
        place = path.parts[-3:]
        jailed = place[:2] == ("adapters", "merge") and place[2].removesuffix(".py") in JAILED
        barred = JAILED - {{"job.py": "device", "behave_job.py": "peft_job"}.get(place[2])}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
                assert not UNPICKLES & (names - {"torch"} if jailed else names), path
                assert not any(alias.name.rpartition(".")[2] in barred for alias in node.names), path
            elif isinstance(node, ast.ImportFrom) and any(alias.name in barred for alias in node.names):
                raise AssertionError(f"{path}:{node.lineno}")
            elif isinstance(node, ast.Attribute) and jailed:
                called = isinstance(node.value, ast.Name) and node.value.id == "torch" and node.attr in LOADS
                assert not called, f"{path}:{node.lineno}"
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in UNPICKLES, path
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in RUNS_TEXT, f"{path}:{node.lineno}"
            elif isinstance(node, ast.Call) and any(k.arg == "trust_remote_code" for k in node.keywords):
                raise AssertionError(f"{path}:{node.lineno}")
    assert files > 100


class Bomb:
    """Makes a file when somebody loads it."""

    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.sentinel,)


def test_a_pickle_that_strikes_back_is_neither_run_nor_published(yard: Yard, tmp_path: Path) -> None:
    """Weights, optimizer and arguments that would run code when loaded do not, and no such byte reaches the remote."""
    sentinel = tmp_path / "it-ran"
    bomb = pickle.dumps(Bomb(sentinel))
    folder = trainer_checkpoint(yard.runs / "team/run/checkpoint-1", step=1)
    for name in ("optimizer.pt", "training_args.bin", "rng_state.pth", "scheduler.pt"):
        (folder / name).write_bytes(bomb)
    write_json(yard.runs / "team/bin/adapter_config.json", lora_config())
    (yard.runs / "team/bin/adapter_model.bin").write_bytes(bomb)
    yard.daemon_once()
    yard.registry("inspect", yard.runs)
    assert list(yard.check()["committed"]) == ["team-run@v1"]
    assert not sentinel.exists()
    assert not any(str(sentinel).encode() in path.read_bytes() for path in yard.remote.rglob("*") if path.is_file())
    pickle.loads(bomb)
    assert sentinel.exists(), "the bomb itself is live"


def everything_in(folder: Path) -> bytes:
    """Return every byte under a folder, unpacked where it is packed."""
    found = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        body = path.read_bytes()
        found.append(gzip.decompress(body) if path.suffix == ".gz" else body)
    return b"\0".join(found)


def test_nothing_unlisted_leaves(yard: Yard) -> None:
    """Of everything else that lies in a run not one byte of content reaches the remote, not even in a fact."""
    run = yard.runs / "team/run"
    checkpoint = trainer_checkpoint(run / "checkpoint-1", step=1, state={"trial_name": "canary-in-the-state"})
    strangers = (
        ".env", "id_rsa", "notes.md", "data.jsonl", "train.py", "core", "events.out.tfevents.1",
        "wandb/run.log", "private/prompts.json", "adapter_model.safetensors.bak", "README.md~", "weights.zip",
    )  # fmt: skip
    for number, name in enumerate(strangers):
        for place_ in (run, checkpoint):
            path = place_ / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"canary-%d-in-a-stranger " % number * 40)
    done = yard.daemon_once()
    assert done.returncode == 0, done.stderr
    pushed = yard.registry("push", checkpoint, "--name", "by-hand", "--remote", "team")
    assert pushed.returncode == 0, pushed.stderr
    stored = everything_in(yard.remote)
    assert b"lora_A" in stored
    assert b"canary-" not in stored
    payload = {path.name for path in (yard.remote / "models/by-hand/v1").iterdir()}
    assert payload == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
        "training.json",
    }


def test_what_is_not_on_disk_is_unknown(yard: Yard) -> None:
    """An adapter that tells nothing of itself gets a manifest of nulls and a card that says unknown."""
    folder = lora_adapter(yard.runs / "team/bare", base=None, readme=None, peft_version=None)
    done = yard.push(folder, "bare")
    assert done.returncode == 0, done.stderr
    version = yard.remote / "models/bare/v1"
    manifest = json.loads((version / "manifest.json").read_bytes())
    assert {k: manifest["base"][k] for k in ("id", "revision", "content")} == dict.fromkeys(
        ("id", "revision", "content")
    )
    assert (manifest["license"]["id"], manifest["license"]["source"]) == (None, None)
    told = manifest["provenance"]
    unknown = ("step", "epoch", "best", "code", "purpose", "history")
    assert {key: told[key] for key in unknown} == dict.fromkeys(unknown)
    assert (told["metrics"], told["training"], told["data"], told["packages"], told["log_history"]) == (
        {},
        {},
        [],
        {},
        [],
    )
    card = (version / "README.md").read_text()
    front = card.split("---")[1]
    assert not {"license:", "base_model:", "datasets:", "language:"} & set(front.split())
    for word in ("base", "licence", "step", "epoch", "best", "metrics"):
        assert any(line.startswith(f"| {word} |") and "unknown" in line for line in card.splitlines()), word
    assert stat.S_IMODE((version / "manifest.json").stat().st_mode) & 0o222 == 0
    claim = json.loads((yard.remote / "models/bare/_wb/claims/00000001.json").read_bytes())
    assert re.fullmatch(r"push-[0-9a-f]{32}", claim["owner"]["daemon"]), "no user name belongs into a claim"
