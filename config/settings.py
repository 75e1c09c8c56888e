"""What the configuration says, as frozen values; every key of weighbridge.toml with its default.

On the start-up path of `registry ls`: no msgspec, no dataclasses, no pathlib; folders and files are absolute paths as
text. Only the two top programs load settings; everything below them is handed the values it needs.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

KB: Final = 1000
MB: Final = 1000 * KB
GB: Final = 1000 * MB
MINUTE: Final = 60.0
HOUR: Final = 60 * MINUTE

STAGING: Final = ("auto", "reflink", "copy", "direct")
LOGS: Final = ("json", "text")
PUBLISH: Final = ("best", "last", "all", "manual")
MERGE: Final = ("never", "best", "last", "all")
MERGE_DTYPES: Final = ("bf16", "fp16", "fp32")
MERGE_RETRY: Final = ("never", "fp32")
EXECUTORS: Final = ("local", "slurm")
EMA: Final = ("keep", "prefer", "drop")
PATHS: Final = ("keep", "rewrite", "block")
UNKNOWN_LICENSE: Final = ("note", "warn", "block")
REMOTE_CODE: Final = ("block", "allow")
MIRROR: Final = ("all", "latest-only")
ADDRESSING: Final = ("auto", "path", "virtual")
STORAGE_CLASSES: Final = ("STANDARD", "STANDARD_IA", "ONEZONE_IA", "INTELLIGENT_TIERING", "GLACIER_IR")
"""Classes of S3 whose objects can be read at once."""
HUB: Final = "https://huggingface.co"
"""Where `hf://` leads when neither the remote's `endpoint` nor HF_ENDPOINT names another Hub."""
WRITERS: Final = ("many", "one")
PLACEHOLDERS: Final = ("project", "run")
"""What a name template may use: the first folder under the watch root, and the run's folder."""

DEFAULT_IGNORE: Final = ("wandb/", "*.tmp", "tmp-*")


class DaemonSettings(NamedTuple):
    """The `[daemon]` table; sizes in bytes, times in seconds."""

    state: str
    socket: str
    staging: str = "auto"
    staging_max: int = 200 * GB
    disk_reserve: int = 20 * GB
    workers: int = 2
    scan: float = 30.0
    quiet: float = 60.0
    wait_limit: float = 24 * HOUR
    log: str = "json"


class WatchRule(NamedTuple):
    """One `[[watch]]` table; `root` is absolute and as written, `home` and `mirrors` name remotes."""

    root: str
    name: str = "{project}-{run}"
    home: str = "local"
    mirrors: tuple[str, ...] = ()
    publish: tuple[str, ...] | None = None
    """("all",), ("manual",), or of "best" and "last"; None: all adapters up to 1 GB, best + last for full models."""
    best: str | None = None
    """`metric:min` or `metric:max`."""
    max_bytes: int | None = None
    min_interval: float = 0.0
    backfill: bool = False
    share: bool = False
    merge: str = "never"
    merge_dtype: str = "bf16"
    merge_retry: str = "never"
    """"fp32": a merge whose update `merge_dtype` cannot hold is made again in fp32."""
    merge_fetch: bool = False
    """Bases that are nowhere here are fetched from the Hub."""
    ignore: tuple[str, ...] = DEFAULT_IGNORE
    ema: str = "keep"


_NAME_MAX: Final = 64


def names_table(word: str) -> bool:
    """Tell whether a word can stand in `[remotes.WORD]`."""
    return word.replace("-", "").replace("_", "").isalnum() and word.isascii() and len(word) <= _NAME_MAX


class RemoteSettings(NamedTuple):
    """One `[remotes.NAME]` table; what a scheme defaults to is filled in by `load`."""

    name: str
    url: str
    endpoint: str | None = None
    internal: bool = True
    private: bool = True
    paths: str = "keep"
    unknown_license: str = "warn"
    deny_licenses: tuple[str, ...] = ()
    remote_code: str = "block"
    max_age: float = 60.0
    mirror: str = "all"
    region: str | None = None
    addressing: str = "auto"
    """How a bucket stands in an address: "path", "virtual", or "auto": path where there is an endpoint."""
    ca: str | None = None
    """PEM file of the certificate authority of an S3 endpoint."""
    profile: str | None = None
    """Profile of ~/.aws/config; no secret ever stands in the configuration."""
    encryption: str | None = None
    """"AES256", "aws:kms" or "aws:kms:KEY"; None: what the bucket does by itself."""
    storage_class: str | None = None
    writers: str = "many"
    """"one" is for stores that cannot refuse a key that is taken."""
    patience: float | None = None
    """Seconds in which an S3 store has to give its first answer; None: whoever asks says how long."""
    names: bool = True
    """Whether a machine and its user may be sealed: every configured remote, any of which may become a mirror, keeps
    paths."""

    @property
    def word(self) -> str:
        """What names this remote in a command, as it is typed into a shell."""
        return self.name

    def written(self, *lines: str) -> str:
        """Return in words where these lines of the configuration have to stand."""
        return f"{' and '.join(lines)} in [remotes.{self.name}]"


class SlurmSettings(NamedTuple):
    """The `[merge.slurm]` table: what `sbatch` is told; None leaves it to the cluster."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gres: str | None = None
    time: float | None = None
    """Seconds; Slurm counts whole minutes."""
    cpus: int = 2
    memory: int | None = None
    """Bytes; None: what the merge is going to need."""
    poll: float = 15.0


class MergeSettings(NamedTuple):
    """The `[merge]` table: where merges are made, by whom, and where their bases are looked for."""

    executor: str = "local"
    scratch: str | None = None
    """None: `merge` in the state folder."""
    bases: tuple[str, ...] = ()
    """Folders that hold base models, as `organisation/model` or `model`."""
    fetch_max: int = 200 * GB
    """Bytes of bases that were fetched from the Hub, all together."""
    behaviour: bool = False
    """What a merged model computes is compared with base and adapter, where they can be run."""
    slurm: SlurmSettings = SlurmSettings()


class CacheSettings(NamedTuple):
    """The `[cache]` table: what `registry pull` keeps; sizes in bytes."""

    max: int = 20 * GB
    """Files that were pulled, all together; 0 keeps none."""


class Settings(NamedTuple):
    """The whole configuration; `source` is the file it was read from, None for the built-in one."""

    daemon: DaemonSettings
    watch: tuple[WatchRule, ...]
    remotes: Mapping[str, RemoteSettings]
    source: str | None
    merge: MergeSettings = MergeSettings()
    cache: CacheSettings = CacheSettings()
