"""Every finding code in one table, from which docs/findings.md is printed, and what findings add up to."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from weighbridge.registry.errors import utf8
from weighbridge.registry.types import Finding, Outcome, Severity


class Code(NamedTuple):
    """One code: its usual severity, what it means, and how it may be treated."""

    severity: Severity
    meaning: str
    waits: bool = False
    """The folder is not finished: the outcome is `wait`, not `refuse`."""
    integrity: bool = False
    """Bytes or structure are wrong; `registry allow` cannot allow it."""


CODES: Final[dict[str, Code]] = {
    "file-empty": Code("block", "a weights file has no bytes", integrity=True),
    "header-cut": Code("block", "a safetensors file ends inside its header", integrity=True),
    "header-too-large": Code("block", "a safetensors header is beyond every limit", integrity=True),
    "header-damaged": Code("block", "a safetensors header is not valid JSON, or not of the format", integrity=True),
    "tensor-invalid": Code("block", "a header entry has a dtype, shape or place that cannot be", integrity=True),
    "tensors-overlap": Code("block", "two tensors share bytes", integrity=True),
    "data-hole": Code("block", "bytes between two tensors belong to none", integrity=True),
    "file-short": Code("block", "a weights file is shorter than its header asks for", integrity=True),
    "file-long": Code("block", "a weights file is longer than its header asks for", integrity=True),
    "lfs-pointer": Code("block", "a Git LFS pointer stands in for a file that was not downloaded", integrity=True),
    "link-dangling": Code("block", "a file is a link to nothing", integrity=True),
    "suffix-lies": Code("block", "a file's content is not what its suffix says"),
    "json-damaged": Code("block", "a configuration file is not valid JSON", integrity=True),
    "weights-missing": Code("block", "a config without its weights", integrity=True),
    "config-missing": Code("block", "weights without the config that says how to use them", integrity=True),
    "config-absent": Code(
        "note", "weights under a name of their tool's own, beside no config; whoever publishes them is warned"
    ),
    "no-artifact": Code("block", "nothing here can be published"),
    "index-damaged": Code("block", "an index cannot be read", integrity=True),
    "index-missing": Code("block", "shards without an index", integrity=True),
    "index-incomplete": Code("block", "an index leaves out shards of its own set", integrity=True),
    "index-path-unsafe": Code("block", "an index names files outside the folder", integrity=True),
    "index-total-wrong": Code("warn", "an index declares another total than its shards add up to"),
    "shard-missing": Code("block", "a shard that the index or the names ask for is not there", integrity=True),
    "shards-stale": Code("warn", "shards of another save lie beside the set"),
    "sets-conflict": Code("block", "two sets of weights, of which only one can be the model", integrity=True),
    "tensor-missing": Code("block", "a tensor that must be there is in no file", integrity=True),
    "tensor-misplaced": Code("block", "the index puts a tensor into a shard that does not hold it", integrity=True),
    "tensor-unlisted": Code("warn", "a shard holds a tensor that the index does not list"),
    "tensor-duplicated": Code("warn", "the same tensor is in two shards"),
    "tensors-empty": Code(
        "block", "tensors of no elements: the parts of other ranks were not gathered", integrity=True
    ),
    "copies-extra": Code("warn", "the same weights lie here again in another file"),
    "format-metadata-missing": Code("warn", "the safetensors header does not say which framework wrote it"),
    "adapter-empty": Code("block", "an adapter file without adapter weights", integrity=True),
    "alpha-unknown": Code("warn", "nothing states the adapter's alpha, so its strength is assumed"),
    "base-unknown": Code("warn", "nothing names the adapter's base"),
    "base-local-path": Code("warn", "the adapter's base is named by a path"),
    "base-unproven": Code("warn", "which model of the Hub a base in a local folder is, is not known"),
    "base-not-on-hub": Code("warn", "the base is not on the Hub, or not for this token"),
    "base-gated": Code("note", "the base is gated: users of the artifact need access to it"),
    "base-renamed": Code("note", "the base has another name on the Hub now"),
    "base-unasked": Code("note", "the Hub could not be asked about the base"),
    "base-quantized": Code("warn", "the adapter's base is a quantized repository"),
    "base-mutated-at-start": Code("warn", "the adapter's start method changed the base"),
    "adapter-number-invalid": Code(
        "block", "a rank or an alpha of an adapter config that is no possible number", integrity=True
    ),
    "adapter-pattern-invalid": Code(
        "block", "a pattern of an adapter config that is no regular expression", integrity=True
    ),
    "adapter-pattern-untried": Code(
        "warn", "a pattern of an adapter config that could run for ever, so what it covers is not known"
    ),
    "adapter-fields-unknown": Code("warn", "an adapter config has fields that PEFT ignores"),
    "adapter-fields-legacy": Code("note", "an adapter config has fields that PEFT has dropped"),
    "peft-type-unknown": Code("note", "an adapter type this version does not know"),
    "keys-wrapped": Code("block", "adapter keys hold a wrapper's segment, so the loader ignores them"),
    "keys-without-prefix": Code("block", "adapter keys lack PEFT's prefix, so the loader ignores them"),
    "keys-with-adapter-name": Code("warn", "adapter keys still hold the adapter's name"),
    "lora-flat": Code("block", "LoRA matrices with one dimension", integrity=True),
    "lora-half-missing": Code("block", "one half of a LoRA without the other", integrity=True),
    "lora-merged-linear": Code("warn", "LoRA matrices in a layout that today's PEFT cannot merge"),
    "lora-b-zero": Code("warn", "every lora_B is zero: the adapter changes nothing"),
    "lora-b-some-zero": Code("note", "some lora_B are zero"),
    "lora-b-partly-zero": Code("warn", "the same share of every lora_B is zero, as if one rank had been gathered"),
    "rank-mismatch": Code("block", "the config states another rank than the matrices show", integrity=True),
    "target-stray": Code("block", "modules have weights that the config does not target, so the loader ignores them"),
    "target-without-weights": Code("warn", "the config targets modules for which the file holds no weights"),
    "token-rows": Code("note", "trained embedding rows ride with the adapter"),
    "dora-mismatch": Code("block", "config and weights disagree about DoRA", integrity=True),
    "full-modules": Code("note", "whole modules ride with the adapter"),
    "base-inside-adapter": Code("warn", "an adapter file holds tensors of the frozen base"),
    "saved-module-missing": Code("block", "a module that was to be saved whole is not in the file", integrity=True),
    "saved-module-absent": Code("note", "a head that PEFT declares by itself is not in the file"),
    "side-file": Code("warn", "adapter data outside the weights file, which must travel with it"),
    "not-merged": Code("block", "a whole model that still holds adapter weights", integrity=True),
    "quantization-leftover": Code("block", "a config says quantized over weights that are not", integrity=True),
    "dtype-mismatch": Code("warn", "config and weights disagree about the dtype"),
    "vocab-mismatch": Code("block", "config and embedding disagree about the vocabulary", integrity=True),
    "tokenizer-beyond-vocab": Code("warn", "the tokenizer can emit ids that the embedding has no row for"),
    "generation-conflict": Code("warn", "generation settings exclude each other"),
    "trainer-state-damaged": Code("warn", "trainer_state.json cannot be read"),
    "best-checkpoint-gone": Code("warn", "trainer_state.json points at a best checkpoint that is gone"),
    "end-mark-missing": Code("block", "the file that the trainer writes last is not there", waits=True),
    "rank-state-missing": Code("warn", "a rank's training state is missing: training cannot go on from here"),
    "latest-tag-missing": Code("warn", "DeepSpeed's latest names a state that is not there"),
    "still-writing": Code("block", "a file is still being written, or has just been begun", waits=True),
    "save-left-over": Code("note", "a temporary file of a save that was broken off, older than the whole weights"),
    "staging-name": Code("block", "a folder still has the name that trainers write under", waits=True),
    "runs-mixed": Code("warn", "the checkpoints of one folder come from several runs"),
    "same-bytes": Code("note", "two artifacts have the same content and are stored once"),
    "artifacts-share-folder": Code("warn", "a whole model and an adapter share one folder and are published apart"),
    "adapter-type-missing": Code("block", "an adapter config that states no type", integrity=True),
    "remote-code": Code("warn", "the model cannot be loaded without Python files of its own"),
    "private-metadata": Code("warn", "a safetensors header holds paths or captions"),
    "license-denied": Code("block", "the licence is one that a remote of the name denies"),
    "code-missing": Code("block", "Python files that the config names are not there", integrity=True),
    "file-name-unsafe": Code("block", "a file cannot be published under its name", integrity=True),
    "file-unreadable": Code("block", "a weights file cannot be opened", integrity=True),
    "values-nan": Code("block", "a tensor holds NaN or infinities", integrity=True),
    "values-zero": Code("note", "whole matrices are zero"),
    "values-unread": Code("note", "the values of a weights file were not looked at, so nothing is known of them"),
    "file-extra": Code("block", "a file that the manifest does not list", integrity=True),
    "file-missing": Code("block", "a file that the manifest lists is not there", integrity=True),
    "file-size": Code("block", "a file is longer or shorter than the manifest says", integrity=True),
    "file-damaged": Code("block", "a file's sha256 is not the manifest's", integrity=True),
    # verify (registry/flow/verify)
    "manifest-damaged": Code("block", "a manifest is not what was claimed and announced", integrity=True),
    "claim-damaged": Code("block", "a claim is not the one that was announced", integrity=True),
    "card-damaged": Code("block", "a card is not the one that was announced", integrity=True),
    "history-differs": Code("note", "training.json is not what this version renders from the manifest"),
    "pull-unfinished": Code("block", "a pull into this folder was cut short", integrity=True),
    # containers of weights (adapters/formats)
    "container-damaged": Code("block", "a weights container is not sound", integrity=True),
    "not-recognised": Code("block", "the content is of no kind that is known", integrity=True),
    "not-a-file": Code("block", "a name that is no regular file", integrity=True),
    "zip-cut": Code("block", "a zip container is cut short", integrity=True),
    "zip-damaged": Code(
        "block", "a zip container is not sound, or two readers would disagree about it", integrity=True
    ),
    "zip-duplicate": Code("block", "a zip container holds one name twice", integrity=True),
    "zip-encrypted": Code("block", "a zip container is encrypted", integrity=True),
    "zip-too-large": Code("block", "a zip container lists more than any checkpoint has", integrity=True),
    "not-zip": Code("block", "a file that should be a zip container is none", integrity=True),
    "not-torch": Code("block", "a zip archive that is no torch file", integrity=True),
    "record-compressed": Code(
        "block", "a record of a torch file is compressed, which torch never does", integrity=True
    ),
    "record-damaged": Code("block", "a record does not match its checksum", integrity=True),
    "record-missing": Code("block", "the memory of a tensor is not in the file", integrity=True),
    "record-short": Code("block", "the memory of a tensor is shorter than the tensor", integrity=True),
    "storage-mismatch": Code("block", "a storage has another length than the pickle says", integrity=True),
    "pickle-cut": Code("block", "a pickle ends in the middle", integrity=True),
    "pickle-damaged": Code("block", "a pickle is not sound", integrity=True),
    "pickle-too-large": Code(
        "block", "a pickle asks for more time or memory than any checkpoint needs", integrity=True
    ),
    "pickle-trailing": Code("warn", "something follows the pickle"),
    "pickled-array": Code("block", "an array of objects, which is a pickle", integrity=True),
    "runs-code": Code("block", "loading this file would run code", integrity=True),
    "foreign-call": Code("warn", "loading this file would call a function of somebody's package"),
    "foreign-global": Code("note", "loading this file would import somebody's package"),
    "whole-object": Code("block", "a whole object is pickled, which opens only where its class is"),
    "torchscript": Code("block", "a TorchScript program, code and weights in one"),
    "torch-tar": Code("block", "a torch file from before 2017"),
    "big-endian": Code("warn", "numbers are stored big end first"),
    "byteorder-unknown": Code("block", "a torch file states a byte order that does not exist", integrity=True),
    "tensor-unknown": Code("block", "tensors of a kind that this version does not know", integrity=True),
    "tensor-outside": Code("block", "a tensor reaches out of its memory", integrity=True),
    "tensor-expanded": Code("block", "a tensor claims more than its memory holds", integrity=True),
    "tensor-incomplete": Code("block", "the pieces of a tensor do not cover it", integrity=True),
    "views-multiply": Code("block", "views of one memory claim many times its size", integrity=True),
    "metadata-missing": Code("block", "a distributed checkpoint without its .metadata, written last", waits=True),
    "metadata-damaged": Code("block", "the .metadata of a distributed checkpoint is not sound", integrity=True),
    "data-missing": Code("block", "a data file that a container names is not there", integrity=True),
    "path-unsafe": Code("block", "a container names a file outside its folder", integrity=True),
    "gguf-version": Code("block", "a GGUF file of an unknown version"),
    "ggml-legacy": Code("note", "a container of ggml from before GGUF"),
    "not-portable": Code("warn", "an engine that runs on one kind of machine only"),
    "not-a-model": Code("note", "a container that holds no model"),
    "still-open": Code("warn", "a writer has not closed this file"),
    "archive-cut": Code("note", "the list of an archive may not be whole"),
    # layouts (adapters/families, adapters/torch_weights)
    "weights-none": Code("block", "a file or folder that holds no weights"),
    "weights-ambiguous": Code("block", "several tables of a checkpoint could be the model"),
    "weight-sets": Code("warn", "a checkpoint holds several sets of weights, of which one is taken"),
    "average-partial": Code("warn", "a running average that lacks tensors of the model, and is not preferred to it"),
    "names-collide": Code("block", "without the wrappers' segments two tensors would have one name", integrity=True),
    "tensor-unstorable": Code("block", "a tensor that safetensors cannot hold", integrity=True),
    "copies-disagree": Code("block", "two files that should be the same weights hold different values", integrity=True),
    "weights-converted": Code("note", "torch pickles, published as safetensors with the same tensors"),
    "weights-assembled": Code("note", "weights put together from rank files or pieces, published as safetensors"),
    "adapter-not-taken-out": Code("block", "an adapter that cannot be taken out of the whole model around it"),
    "adapter-inside": Code("warn", "a checkpoint that holds adapter weights beside the frozen base"),
    "rank-file-missing": Code("block", "a rank's part of the weights is not there", integrity=True),
    "rank-files": Code("block", "the weights are in one file per rank and must be put together by their framework"),
    "rank-part-zero": Code("block", "a rank's part of the weights holds nothing but zeros"),
    "iteration-missing": Code("warn", "a tracker file names an iteration that is not there"),
    "split-part-missing": Code("block", "a part of a split file is not there", integrity=True),
    "byte-parts": Code("block", "a file that was cut into byte parts and must be joined first", integrity=True),
    "recorded-only": Code("note", "a container that is recorded with its facts and not published"),
    "lora-dialect-torchtune": Code("block", "LoRA matrices in torchtune's own form, which no other loader reads"),
    "lora-dialect-unknown": Code("block", "LoRA matrices under names that no known tool writes"),
    "keys-transposed": Code("note", "the factors are stored transposed, which other loaders do not know"),
    # card, licence, secrets and paths (adapters/card_facts, license, secrets, paths, sidecar)
    "card-byte-order-mark": Code("note", "the card starts with a byte-order mark; the published card has none"),
    "card-not-text": Code("warn", "the card is no UTF-8 text"),
    "card-front-matter-invalid": Code("warn", "the front matter of the card is no valid YAML; the Hub refuses it"),
    "card-front-matter-displaced": Code("warn", "the front matter does not begin at line 1, so no reader sees it"),
    "card-license-unknown-to-hub": Code("warn", "the Hub does not know the licence id of the card"),
    "card-license-unnamed": Code("warn", "the card says `license: other` without a name or a link"),
    "card-license-spelled": Code("note", "the card spells the licence as a name; the published card has its id"),
    "card-license-in-text": Code("note", "a licence is stated in the text of the card, but not declared"),
    "card-base-missing": Code("note", "the card names no base model; the published card does"),
    "card-base-differs": Code("warn", "card and config name different base models; the config wins"),
    "card-value-refused": Code("warn", "a field of the card has a value that the Hub refuses"),
    "card-local-path": Code("warn", "the card names a model or a data set by a local path; the Hub refuses it"),
    "card-null-entries": Code("warn", "a list of the card has empty entries; the published card has none"),
    "card-keys-refused": Code("warn", "the card has keys that the Hub cannot store"),
    "card-incomplete": Code("warn", "the card lacks fields that the Hub requires"),
    "license-unknown": Code("note", "no licence is stated anywhere here"),
    "license-inherited": Code("note", "the licence is that of the base model"),
    "license-conflict": Code("warn", "card and LICENSE file name different licences"),
    "license-text-unclear": Code("note", "a LICENSE file is there, but it is not the text of one known licence"),
    "license-looser-than-base": Code("warn", "the stated licence allows more than the licence of the base model"),
    "file-unsearched": Code("block", "a file besides the weights is too large to be searched for secrets"),
    "secret-in-file": Code("block", "a file that would be published holds a token, key or password"),
    "private-path": Code("warn", "a file that would be published holds a path of somebody's machine"),
    "private-path-rewritten": Code("note", "a path was replaced by what evidence states"),
    "path-outside-bundle": Code("block", "a config names a file outside its own folder"),
    "sidecar-invalid": Code("block", "weighbridge.yaml cannot be read, so what it asks for is not known"),
    "sidecar-unknown-key": Code("warn", "weighbridge.yaml has a key that is not known"),
    # what the Hub is known to refuse (registry/remotes/hub)
    "hub-limit": Code("block", "a file or folder is beyond what the Hub takes", integrity=True),
    "hub-card-refused": Code("block", "the Hub refuses the front matter of the card", integrity=True),
    # merging (adapters/merge)
    "merge-impossible": Code("block", "what the adapter computes cannot be expressed as weights", integrity=True),
    "merge-not-streamed": Code("block", "this version does not merge such an adapter", integrity=True),
    "merge-layers-replicated": Code("block", "one layer of the base stands for several of the adapter", integrity=True),
    "merge-base-changed": Code("block", "the adapter belongs to a base that its start method changed", integrity=True),
    "merge-base-quantized": Code("block", "a delta cannot be added to quantized weights", integrity=True),
    "merge-base-format": Code("block", "base or adapter are no safetensors", integrity=True),
    "merge-base-differs": Code("block", "the adapter's copy of a base tensor is not this base's", integrity=True),
    "merge-base-other": Code("warn", "the adapter names another base, or another revision of it"),
    "merge-adapter-twice": Code("block", "an adapter would be merged twice into the same weights", integrity=True),
    "merge-bias-homeless": Code("block", "the base has no bias that could take the adapter's", integrity=True),
    "merge-target-missing": Code("block", "the base has no tensor for a module of the adapter", integrity=True),
    "merge-tensor-unused": Code("block", "nothing in the base takes a tensor of the adapter", integrity=True),
    "merge-shape-mismatch": Code("block", "adapter and base have different shapes", integrity=True),
    "merge-ambiguous": Code("block", "what a tensor of the adapter means is open", integrity=True),
    "merge-vocabulary-torn": Code("block", "embedding and head would have different vocabularies", integrity=True),
    "merge-vocabulary-grows": Code("warn", "the merged model has more embedding rows than the base"),
    "merge-vocabulary-shrinks": Code("warn", "the merged model has fewer embedding rows than the base"),
    "merge-tokenizer-missing": Code("block", "a changed vocabulary without its tokenizer", integrity=True),
    "merge-tokenizer-beyond": Code("block", "the adapter's tokenizer emits ids without a row", integrity=True),
    "merge-unties": Code("warn", "the merged model has a head of its own, the base had none"),
    "merge-template-differs": Code("warn", "the chat template of the adapter is not the base's"),
    "merge-eos-differs": Code("warn", "the adapter's tokenizer ends at another token than the base's"),
    "merge-update-lost": Code("warn", "the precision of the result cannot hold the adapter's change"),
    "merge-applies-more": Code("warn", "the merge applies a part of the adapter that the model passes over beside it"),
    "merge-changes-nothing": Code("block", "the merged model would equal the base", integrity=True),
    "merge-not-finite": Code("block", "the merge gives values that cannot be stored", integrity=True),
    "merge-unproven": Code("block", "the written model is not what base and adapter add up to", integrity=True),
    "merge-memory-short": Code("block", "the memory of this machine does not hold what the merge needs"),
    "jail-weak": Code("warn", "the kernel cannot confine the child process that reads untrusted files as it should"),
    "merge-not-compared": Code("warn", "what the merged model computes could not be compared, though it was asked for"),
    "merge-proven": Code("note", "copies and changed elements of a merged model were read again and proven"),
    "merge-inside": Code("note", "adapters are merged into the model already, by the record beside it"),
    # casting (adapters/merge/casting)
    "cast-impossible": Code("block", "what a folder holds cannot get another precision", integrity=True),
    "cast-changes-nothing": Code("block", "the weights have the wanted precision already", integrity=True),
    "cast-unproven": Code("block", "the written model is not the original, rounded once", integrity=True),
    "cast-proven": Code("note", "every element of a cast model was read again and is the original's, rounded once"),
    "download-differs": Code("warn", "a file is not what the record of its download from the Hub says"),
    # what the daemon finds (daemon/)
    "publish-refused": Code("block", "a step of the publication was refused; the message says by whom", integrity=True),
    "wait-limit": Code("block", "a folder did not become whole within the limit", integrity=True),
    "name-taken": Code("block", "the name belongs to another run, and the rule does not share it"),
    "name-invalid": Code("block", "the name a run asks for breaks the grammar of names"),
    "late-file": Code("warn", "a folder changed after a version of it was published; this version supersedes that one"),
    "source-drift": Code("warn", "bytes of a published folder changed though names, sizes and times did not"),
    "job-quarantined": Code("block", "a job failed again and again in ways nobody foresaw", integrity=True),
    "merge-not-made": Code("block", "a merge that a rule asks for gets no further", integrity=True),
    "merge-waits": Code("warn", "a merge that a rule asks for waits; the message says for what"),
    "mirror-refuses": Code("block", "a version has no copy on a mirror, and no further try can help", integrity=True),
    "mirror-waits": Code("warn", "a version has no copy on a mirror yet: it is refused there for now, and tried again"),
    "mirror-diverged": Code("block", "a mirror holds something else under this name or number", integrity=True),
    "watch-limit": Code("warn", "the kernel has no watches left, so folders are scanned only"),
    "database-damaged": Code("warn", "the daemon's database was damaged and is filled again"),
    "folder-unreadable": Code("warn", "a watched folder cannot be read"),
    "copy-unproven": Code("note", "of a published version only sizes could be compared: its store has no checksums"),
    "root-missing": Code("warn", "a watched root is not there"),
    "remote-unreachable": Code(
        "warn", "a remote cannot be used now: no answer, no leave, or set up wrongly; jobs wait with their bytes kept"
    ),
}

_NEVER_ALLOWED: Final = frozenset({"secret-in-file"})

_ORDER: Final[tuple[Outcome, ...]] = ("accept", "warn", "wait", "refuse")


def outcome(findings: Iterable[Finding]) -> Outcome:
    """Return the strictest outcome of some findings, in the order refuse, wait, warn, accept."""
    worst = 0
    for finding in findings:
        code = CODES[finding.code]
        if code.waits:
            worst = max(worst, 2)
        elif finding.severity == "block":
            worst = 3
        elif finding.severity == "warn":
            worst = max(worst, 1)
    return _ORDER[worst]


def may_be_allowed(code: str) -> bool:
    """Tell whether a person may publish in spite of a finding of this code: integrity and secrets are not theirs."""
    known = CODES[code]
    return not (known.integrity or known.waits or code in _NEVER_ALLOWED)


def strictest(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the strictest of several outcomes; accept for none."""
    return max(outcomes, key=_ORDER.index, default="accept")


def finding(
    code: str, subject: str, message: str, fix: str | None = None, *, severity: Severity | None = None, **data: object
) -> Finding:
    """Return a finding of a listed code with that code's usual severity. Raises KeyError for an unlisted code.

    Bytes of a file name that are no UTF-8 are spelled out: manifests and databases hold findings.
    """
    return Finding(
        code=code,
        severity=severity or CODES[code].severity,
        subject=utf8(subject),
        message=utf8(message),
        fix=None if fix is None else utf8(fix),
        data={key: _spelled(value) for key, value in data.items()},
    )


def _spelled(value: object) -> object:
    """Return a fact that every file and database can hold: a name out of a file may hold half a character."""
    if isinstance(value, str):
        return value if value.isascii() else utf8(value)
    if isinstance(value, dict):
        return {_spelled(key): _spelled(item) for key, item in value.items()}
    return [_spelled(item) for item in value] if isinstance(value, (list, tuple)) else value
