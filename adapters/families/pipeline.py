"""diffusers pipelines: model_index.json names the components, each a folder with a config and weights of its own."""

from collections.abc import Mapping
from typing import Any, Final

from weighbridge.adapters import layout, shards, weights
from weighbridge.adapters.draft import Draft, read_json
from weighbridge.adapters.families import pickled
from weighbridge.adapters.formats.safetensors import Tensor
from weighbridge.adapters.plan import Named
from weighbridge.adapters.reading import Place
from weighbridge.adapters.weights import WeightSet
from weighbridge.adapters.whole import some
from weighbridge.registry import findings

_NO_WEIGHTS: Final = (
    "Tokenizer", "TokenizerFast", "Scheduler", "Processor", "FeatureExtractor", "ImageProcessor", "Guider",
)  # fmt: skip
"""How classes of components end that hold no weights."""


def judge(place: Place) -> Draft:
    """Return a pipeline as a draft: every component that holds weights is whole, or named."""
    draft = Draft(place, "full-model", "model", Named(root=place.folder))
    config = read_json(draft, layout.PIPELINE_CONFIG, needed=True) or {}
    draft.config, draft.config_path = config, place.path(layout.PIPELINE_CONFIG)
    draft.facts |= {"architecture": config.get("_class_name"), "pickle_format": False}
    hint = config.get("_name_or_path")
    if isinstance(hint, str) and hint:
        draft.facts["base_model_hint"] = hint
    tree = place.reader.tree
    tensors: dict[str, Tensor] = {}
    files: list[str] = []
    copies: list[str] = []
    listings: list[str] = []
    pickles: list[str] = []
    count = 0
    parts = sorted(name for name in config if not name.startswith("_") and place.path(name) in tree.folders)
    absent = [
        place.path(name)
        for name, entry in sorted(config.items())
        if not name.startswith("_") and _wanted(entry) and place.path(name) not in tree.folders
    ]
    for name in parts:
        found, from_pickles = _component(Place(place.reader, place.path(name)))
        if found is None:
            if _wanted(config[name]) and _has_weights(config[name]):
                absent.append(place.path(f"{name}/diffusion_pytorch_model.safetensors"))
            continue
        count += 1
        tensors |= {f"{name}.{label}": tensor for label, tensor in found.tensors.items()}
        files += found.files
        copies += [*found.copies, *found.stale, *_variants(found, place, name)]
        listings += [found.index] if found.index else []
        pickles += found.files if from_pickles else ()
        draft.add({k: v for k, v in found.facts.items() if isinstance(v, list)}, found.findings)
    draft.facts["components"] = parts
    if absent:
        draft.add(
            {"missing_files": absent},
            [
                findings.finding(
                    "weights-missing",
                    absent[0],
                    f"the pipeline names {some(absent)}, which {'is' if len(absent) == 1 else 'are'} not there",
                    "copy the component here, or save the pipeline again",
                    missing_files=absent,
                )
            ],
        )
    counted, draft.weights = weights.summary(tensors, shards=max(1, len(files)))
    draft.facts |= counted
    if not files and not absent and not draft.findings:
        draft.findings.append(
            findings.finding("weights-none", draft.config_path, "no component of the pipeline holds weights")
        )
    taken = [path for path in copies if path not in files]
    draft.named = Named(
        root=place.folder,
        weights=(*files, *listings),
        copies=tuple(taken),
        parts=tuple(parts),
    )
    if taken:
        draft.add(
            {"extra_full_copies": sorted(taken)},
            [
                findings.finding(
                    "copies-extra",
                    taken[0],
                    f"the same weights lie here again and are left out: {some(sorted(taken))}",
                    "delete what nobody loads",
                    extra_full_copies=sorted(taken),
                )
            ],
        )
    if pickles and not any(f.severity == "block" for f in draft.findings):
        pickled.converted(draft, tuple(pickles))
    return draft


def _component(place: Place) -> tuple[WeightSet | None, bool]:
    found = shards.weight_set(place)
    if found is not None:
        return found, False
    return pickled.weight_set(place), True


def _variants(found: WeightSet, place: Place, name: str) -> list[str]:
    """Return pickles beside the safetensors of a component."""
    here = place.reader.tree.inside(place.path(name))
    return [f.path for n, f in here.items() if layout.is_model_pickle(n) and f.path not in found.files]


def _wanted(entry: Any) -> bool:
    """Return whether an entry of model_index.json names a component that was saved."""
    return isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) and part for part in entry)


def _has_weights(entry: Any) -> bool:
    return not str(entry[1]).endswith(_NO_WEIGHTS)


def is_pipeline(table: Mapping[str, Any] | None) -> bool:
    """Return whether a model_index.json is diffusers' and not somebody's card data."""
    return table is not None and isinstance(table.get("_class_name"), str)
