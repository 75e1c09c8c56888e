"""The nouns of the registry: frozen values that cross module borders and the disk.

Nothing here does anything. Field names are the on-disk contract (docs/formats.md); JSON objects may carry fields
that are not listed here, and whoever stores one keeps them.
"""

from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec

Severity = Literal["block", "warn", "note"]
Outcome = Literal["accept", "warn", "refuse", "wait"]

KINDS: Final = ("adapter", "model", "quantized", "merged")
"""Every kind a name can have. A second kind out of one run gets the suffix in KIND_SUFFIX."""

KIND_SUFFIX: Final = {"adapter": "-adapter", "model": "-model", "quantized": "-quantized"}

WEIGHT_FORMATS: Final = ("safetensors", "gguf", "onnx")
"""Formats a published bundle may store its weights in. Torch pickles are none: their tensors go as safetensors."""

ROLES: Final = ("weights", "tokenizer", "index", "config", "code", "license", "other")
"""What a payload file is for."""

PAPERS: Final = ("README.md", "training.json", "manifest.dsse.json")
"""What goes with the payload of a version, in the order in which it is stored; the first one there stays."""

RENDERED_FILES: Final = (*PAPERS, "manifest.json")
"""Files of a version that are rendered or sealed, hence not payload and not part of the content digest."""

SCHEMA_MANIFEST: Final = "weighbridge/manifest/1"
SCHEMA_CLAIM: Final = "weighbridge/claim/1"
SCHEMA_FEED: Final = "weighbridge/feed/1"
SCHEMA_REGISTRY: Final = "weighbridge/registry/1"
SCHEMA_TAG: Final = "weighbridge/tag/1"
SCHEMA_WITHDRAWN: Final = "weighbridge/withdrawn/1"
SCHEMA_NOTE: Final = "weighbridge/note/1"
SCHEMA_INSPECT: Final = "weighbridge/inspect/1"
SCHEMA_TRAINING: Final = "weighbridge/training/1"


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A frozen value with named fields only."""


class FileEntry(Value, frozen=True):
    """One payload file of a version; `path` is relative with `/`, `sha256` 64 lower-case hex digits."""

    path: str
    size: int
    sha256: str
    role: str


class LeftOut(Value, frozen=True):
    """A file of the source folder that is not published, and why."""

    path: str
    size: int
    reason: str


class Finding(Value, frozen=True):
    """One result of a check; `code` is listed in `findings.CODES`, `subject` the file, tensor or field."""

    code: str
    severity: Severity
    subject: str
    message: str
    fix: str | None = None
    data: dict[str, Any] = {}


class DtypeCount(Value, frozen=True):
    """Tensors and elements stored in one dtype."""

    tensors: int
    parameters: int


class WeightsFacts(Value, frozen=True):
    """What the weights of a bundle are; `bytes` counts tensor data without headers, `architecture` is the config's.

    `parameters` is None where the weights are packed in a way that does not tell how many they are.
    """

    format: str
    shards: int
    tensors: int
    parameters: int | None
    bytes: int
    dtypes: dict[str, DtypeCount]
    tensor_digest: str | None = None
    architecture: str | None = None


class AdapterFacts(Value, frozen=True):
    """What the adapter's config says of it; `variants` holds words such as `dora`, `task_type` is as PEFT spells it."""

    peft_type: str
    rank: int | float | None = None
    alpha: int | float | None = None
    scaling: float | None = None
    targets: list[str] | str | None = None
    variants: list[str] = []
    task_type: str | None = None


class BaseFacts(Value, frozen=True):
    """The base model and how we know; `id` is None where nothing on disk states it."""

    id: str | None = None
    revision: str | None = None
    content: str | None = None
    relation: str | None = None
    evidence: str | None = None


class ModelSeen(Value, frozen=True):
    """What a Hub, or a cache of it, says of a model now.

    `gated` is how access to it is given where not everybody has it, `files` are sizes and, of stored objects, sha256,
    `card` is the front matter of its card.
    """

    id: str
    commit: str
    gated: str | None = None
    files: dict[str, tuple[int, str | None]] = {}
    card: dict[str, Any] = {}


class ModelUnseen(Value, frozen=True):
    """Why nothing is said of a model: it is not there for us (`absent`), or nobody could be asked."""

    why: str
    absent: bool = False


Models = Callable[[str, str | None], ModelSeen | ModelUnseen]
"""Asks a Hub for a model by id and revision; raises nothing that a remote can cause."""


class PublishedAs(Value, frozen=True):
    """The version that a sealed manifest is of, as `name@v7`; on a Hub `repo` and `tag` say where it lies."""

    ref: str
    repo: str | None = None
    tag: str | None = None


Published = Callable[[str, str], PublishedAs | None]
"""Tells which version a content and the sha256 of a manifest are, as far as is known here; asks nobody."""


class LicenseFacts(Value, frozen=True):
    """A licence as the Hub spells it, or None; `source` is card, config, file, base, sidecar or note."""

    id: str | None = None
    source: str | None = None
    evidence: str | None = None
    name: str | None = None
    link: str | None = None


class RunFacts(Value, frozen=True):
    """Which run a version came from; `id` is stable for the run and binds its name."""

    project: str
    name: str
    id: str


class BestFacts(Value, frozen=True):
    """The best metric the trainer recorded so far, with the step it was reached at."""

    metric: str
    value: float | str | None
    step: int | None = None


class Provenance(Value, frozen=True):
    """Where a version came from. A fact that is not on disk is None or absent, never guessed."""

    run: RunFacts
    step: int | None = None
    epoch: float | str | None = None
    created_at: str | None = None
    started_at: str | None = None
    owner: str | None = None
    host: str | None = None
    metrics: dict[str, Any] = {}
    best: BestFacts | None = None
    history: str | None = None
    log_history: list[dict[str, Any]] = []
    training: dict[str, Any] = {}
    code: dict[str, Any] | None = None
    data: list[dict[str, Any]] = []
    packages: dict[str, str] = {}
    purpose: str | None = None


class LineageEdge(Value, frozen=True):
    """An edge to another artifact: extracted-from, adapter-of, merged-from, converted-from or cast-from."""

    relation: str
    ref: str
    content: str | None = None


class Tool(Value, frozen=True):
    """The program that sealed a manifest."""

    name: str
    version: str


class Facts(Value, frozen=True):
    """All that is sealed beside the file list."""

    kind: str
    weights: WeightsFacts
    base: BaseFacts
    license: LicenseFacts
    provenance: Provenance
    adapter: AdapterFacts | None = None
    lineage: list[LineageEdge] = []
    findings: list[Finding] = []
    left_out: list[LeftOut] = []


class Owner(Value, frozen=True):
    """Who claims a number: a host and the identity of its state folder."""

    host: str
    daemon: str


class Registry(Value, frozen=True):
    """The marker `weighbridge.json` at the root of a remote; `writer` is who alone may write in single-writer mode."""

    schema: str
    registry: str
    format: int
    min_reader: int
    min_writer: int
    mode: Literal["shared", "single-writer"]
    epoch: int = 1
    writer: str | None = None


class Claim(Value, frozen=True):
    """A number bound to a content; `manifest` is the manifest's full text, `prev` the sha256 of the claim before."""

    schema: str
    registry: str
    name: str
    n: int
    content: str
    manifest: str
    owner: Owner
    nonce: str
    prev: str | None
    derivation: str | None = None


class TagMove(Value, frozen=True):
    """One move of a tag; `to` None removes it."""

    schema: str
    name: str
    tag: str
    seq: int
    to: int | None
    from_: int | None = msgspec.field(name="from")
    who: str
    when: str
    why: str | None
    nonce: str


class Row(Value, frozen=True):
    """What `ls` shows of a version; travels in the feed so that nobody has to open manifests."""

    kind: str
    base: str | None = None
    license: str | None = None
    size: int = 0
    parameters: int | None = 0
    owner: str | None = None
    step: int | None = None
    run: str | None = None
    run_id: str | None = None
    run_started: str | None = None
    worst: str | None = None
    created_at: str | None = None


class FeedEntry(Value, frozen=True, omit_defaults=True):
    """One fact of the feed; `source` is the object that proves it and `sha256` that object's digest as stored."""

    type: Literal["claim", "version", "void", "tag", "withdrawn", "note"]
    name: str
    source: str
    sha256: str
    n: int | None = None
    content: str | None = None
    card_sha256: str | None = None
    row: Row | None = None
    tag: str | None = None
    to: int | None = None
    from_: int | None = msgspec.field(name="from", default=None)
    stored_at: str | None = None


class Receipt(Value, frozen=True):
    """What a remote confirmed after a publish; `verified` names the level the files were checked at."""

    remote: str
    name: str
    n: int
    content: str
    manifest_sha256: str
    location: str
    committed_at: str
    verified: str
    files: dict[str, str] = {}
    joined: bool = False
