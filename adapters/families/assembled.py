"""Weights that are no publishable file yet - rank files, pieces, another tool's torch file: what is published of them.

config.json + global_step500/            the model, as DeepSpeed's ranks hold it
adapter_config.json + last.ckpt          the adapter, taken out of the whole wrapped model
global_step500/, pytorch_model_fsdp_0/   the model; its config is not here
"""

from collections.abc import Mapping
from typing import Any

from weighbridge.adapters import audit, items, keys, layout, torch_weights, unwrap, weights
from weighbridge.adapters.draft import Draft
from weighbridge.adapters.families import deepspeed, distributed, torch_files
from weighbridge.adapters.formats import safetensors, sniff
from weighbridge.adapters.formats.protocol import FormatFault
from weighbridge.adapters.listing import Tree
from weighbridge.adapters.plan import Named
from weighbridge.adapters.reading import Place, Reader
from weighbridge.adapters.whole import some, without_config
from weighbridge.adapters.witness import Witness, look
from weighbridge.registry import errors, findings
from weighbridge.registry.types import Finding


def probe(place: Place, *, adapter: bool = False) -> Draft | None:
    """Return what a folder without weights of its own holds in another form, None where there is nothing.

    With `adapter` a torch file of another name counts, where it holds the matrices of an adapter.
    """
    if deepspeed.tags(place):
        return deepspeed.judge(place)
    if distributed.folders(place):
        return distributed.judge(place)
    return _torch_file(place) if adapter else None


def _torch_file(place: Place) -> Draft | None:
    """Return the one torch file of a folder that holds an adapter's matrices."""
    found: list[Draft] = []
    for name, file in sorted(place.names.items()):
        if not layout.is_weights_name(name) or place.reader.container(file) not in sniff.PICKLED:
            continue
        draft = Draft(place, "ckpt", None, Named(root=place.folder, slices=(file.path,)))
        held = torch_files.take(draft, file)
        if torch_weights.lora_split(held.tensors)[0]:
            draft.tensors = dict(held.tensors)
            draft.inputs = (file.path,) if held.sound else ()
            draft.facts["assembled_from"] = file.path
            found.append(draft)
    if len(found) < 2:
        return found[0] if found else None
    newest = max(found, key=lambda draft: -1 if draft.step is None else draft.step)
    others = [draft.facts["assembled_from"] for draft in found if draft is not newest]
    newest.facts["other_files"] = others
    return newest


def take_in(draft: Draft, held: Draft) -> None:
    """Let a draft of a folder's config stand for the weights that were found in another form."""
    draft.add({k: v for k, v in held.facts.items() if k != "step"}, held.findings)
    draft.weights, draft.tensors, draft.inputs = held.weights, held.tensors, held.inputs
    draft.step = held.step if draft.step is None else draft.step
    draft.named = Named(root=draft.place.folder, slices=held.named.slices)


def alone(draft: Draft) -> Draft:
    """Say what of weights without any config beside them can be published: a model can, an adapter needs its config."""
    if not draft.inputs or draft.kind is not None:
        return draft
    mine, others = torch_weights.lora_split(draft.tensors)
    if mine and not others:
        path = draft.place.path(layout.ADAPTER_CONFIG)
        draft.add({"missing_files": [path]}, [torch_files.adapter_alone(path, draft.inputs[0], len(mine), None)])
    if mine:
        draft.inputs = ()
        return draft
    draft.kind = "model"
    draft.findings.append(told(draft))
    if layout.MODEL_CONFIG not in draft.place.names:
        path = draft.place.path(layout.MODEL_CONFIG)
        draft.findings.append(without_config(path, draft.inputs, owed=False))
    values(draft)
    return draft


def adapter(draft: Draft, config: Mapping[str, Any]) -> Mapping[str, safetensors.Tensor] | None:
    """Return the adapter's tensors under the names of its own file, and count them; None where they do not come out."""
    if not draft.inputs:
        return None
    subject = draft.inputs[0]
    if keys.is_torchtune(draft.tensors):
        draft.inputs = ()
        draft.findings.append(audit.torchtune(subject))
        return None
    found = unwrap.unwrap(draft.tensors, config)
    if found.problem is not None or not found.names:
        draft.inputs = ()
        draft.findings.append(
            findings.finding(
                "adapter-not-taken-out",
                subject,
                f"no adapter is taken out of {draft.facts['assembled_from']}: "
                + (found.problem or "none of its tensors belongs to one"),
                "save it with save_pretrained, which writes the adapter alone",
            )
        )
        return None
    whole = draft.tensors
    draft.tensors = {new: whole[old]._replace(name=new) for old, new in found.names.items()}
    left = [name for name in whole if name not in found.names]
    counted, draft.weights = weights.summary(draft.tensors)
    draft.facts |= counted
    draft.findings = [f for f in draft.findings if f.code not in {"adapter-inside", "keys-wrapped"}]
    size = sum(whole[name].size for name in left)
    draft.findings.append(told(draft, left_behind={"tensors of the base": len(left), "bytes": size} if left else None))
    return draft.tensors


def held(draft: Draft, config: Mapping[str, Any] | None = None) -> tuple[items.Item, ...]:
    """Return the tensors of a draft with the places their bytes come from; `config` is that of an adapter inside.

    Raises RefusedError.
    """
    tree = draft.place.reader.tree
    inputs = set(draft.inputs)
    kept = {path: file for path, file in tree.files.items() if path in inputs}
    found = items.in_parts(_only(draft.place, Tree(tree.root, kept, tree.folders))).items
    if config is None:
        return found
    names = unwrap.unwrap([item.name for item in found], config).names
    return tuple(item._replace(name=names[item.name]) for item in found if item.name in names)


def _only(place: Place, tree: Tree) -> Place:
    return Place(Reader(tree, averaged=place.reader.averaged), place.folder)


def values(draft: Draft) -> None:
    """Look at every value of a set that is not too large; of larger ones the staging pass does."""
    draft.facts["values_checked"] = False
    if sum(tensor.size for tensor in draft.tensors.values()) > draft.place.reader.values:
        return
    witness = Witness(str(draft.facts["assembled_from"]), draft.tensors)
    try:
        look(held(draft), witness)
    except (OSError, FormatFault, errors.RefusedError):
        return
    draft.facts["values_checked"] = True
    draft.findings += witness.findings()


def told(draft: Draft, **more: Any) -> Finding:
    """Return the note that says what the published weights are put together from."""
    made_of = str(draft.facts["assembled_from"])
    count, size = len(draft.tensors), sum(t.size for t in draft.tensors.values())
    inputs = list(draft.inputs)
    dropped = draft.facts.get("dropped_top_keys") or []
    words = f"{count} tensors of {size} bytes are put together from {made_of} and published as safetensors"
    words += f"; left behind: {some(dropped)}" if dropped else ""
    return findings.finding("weights-assembled", inputs[0], words, assembled_from=made_of, inputs=inputs, **more)
