"""Rules of the papers: which files a folder needs to be what it is opened as, and what its configs say."""

import re
from collections.abc import Iterable
from typing import Any, Final

from weighbridge.adapters import code_files, layout
from weighbridge.adapters.diagnose import commands
from weighbridge.adapters.diagnose.container import again
from weighbridge.adapters.diagnose.papers import TOKENIZERS
from weighbridge.adapters.diagnose.rule import Case, Evidence, Rule, linked
from weighbridge.adapters.whole import some
from weighbridge.registry.types import Finding

_STAGE: Final = "config"
_KEYWORD: Final = re.compile(r"got an unexpected keyword argument '([a-z_0-9]{1,60})'")
_TALKING: Final = re.compile(r"(?:^|[-_/.])(?:instruct|chat|it|assistant|sft|dpo)(?=$|[-_/.])", re.IGNORECASE)
_TURNS: Final = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<|user|>", "<|assistant|>")
LIBRARIES: Final = {
    "bitsandbytes": ("bitsandbytes",), "gptq": ("optimum", "gptqmodel"), "awq": ("gptqmodel",),
    "compressed-tensors": ("compressed-tensors",), "aqlm": ("aqlm[gpu]",), "hqq": ("hqq",), "eetq": ("eetq",),
    "torchao": ("torchao",), "quanto": ("optimum-quanto",), "fbgemm_fp8": ("fbgemm-gpu",),
    "auto-round": ("auto-round",), "mlx": ("mlx-lm",),
}  # fmt: skip
"""What transformers asks to have installed for a quantization method."""


def base_of(case: Case) -> str | None:
    """Return the base that an adapter names."""
    named = case.facts.get("base_model") or case.facts.get("base_model_hint") or case.artifact.base.id
    return str(named) if named else None


def _as_model(case: Case) -> Iterable[Evidence]:
    """Tell that a folder is an adapter and no model of its own."""
    if not case.is_adapter or layout.ADAPTER_CONFIG not in case.names or layout.MODEL_CONFIG in case.names:
        return
    base = base_of(case)
    against = case.against.root if case.against is not None else base
    yield Evidence(
        case.artifact.relative,
        f"{case.folder} holds an adapter ({case.facts.get('peft_type') or 'of unknown type'}), not a model: "
        f"{layout.ADAPTER_CONFIG} is there and no {layout.MODEL_CONFIG}; its base is {base or 'not stated'}",
        (
            commands.merge(case.folder, against),
            commands.python(
                "from peft import AutoPeftModelForCausalLM as M; "
                f"print(M.from_pretrained({str(case.folder)!r}).peft_config)"
            ),
        ),
        data={"base_model": base},
    )


def _name_base(case: Case, one: Finding) -> tuple[str, ...]:
    hint = case.facts.get("base_model_hint") or case.facts.get("proposed_base") or "BASE"
    return (commands.set_fields(case.path(one.subject), {"base_model_name_or_path": hint}),)


def _name_path(case: Case, one: Finding) -> tuple[str, ...]:
    known = case.facts.get("proposed_base") or case.artifact.base.id or "BASE"
    if known == case.facts.get("base_model"):
        known = "BASE"
    return (commands.set_fields(case.path(one.subject), {"base_model_name_or_path": known}),)


def _adapter_alone(case: Case, _: Finding) -> tuple[str, ...]:
    return (f"cp -n TRAINING_FOLDER/{layout.ADAPTER_CONFIG} {commands.quoted(case.folder)}/",)


def _model_config(case: Case, _: Finding) -> tuple[str, ...]:
    if case.against is not None:
        return (commands.copy(case.against.root / layout.MODEL_CONFIG, case.folder / layout.MODEL_CONFIG),)
    return (f"cp -n BASE_FOLDER/{layout.MODEL_CONFIG} {commands.quoted(case.folder)}/",)


def _both(case: Case) -> Iterable[Evidence]:
    """Tell an adapter's config beside a whole model: loaders then put the adapter on top of it."""
    if case.is_adapter or layout.ADAPTER_CONFIG not in case.names or not case.tensors:
        return
    place = case.folder / layout.ADAPTER_CONFIG
    target = commands.beside(case.folder, "adapter")
    config = case.tables.get(layout.ADAPTER_CONFIG, {})
    lacking = "" if config.get("base_model_name_or_path") else ", and it names no base_model_name_or_path"
    whole = layout.ADAPTER_WEIGHTS in case.names
    yield Evidence(
        layout.ADAPTER_CONFIG,
        f"{layout.ADAPTER_CONFIG} lies beside a whole model of {len(case.tensors)} tensors{lacking}: transformers then "
        "looks for an adapter and puts it on top of the model" + (" a second time" if whole else ""),
        (f"mkdir -p {commands.quoted(target)}", commands.move(place, target / layout.ADAPTER_CONFIG)),
        "block" if lacking else "warn",
    )


def _config_values(case: Case, one: Finding) -> tuple[str, ...]:
    fields = one.data.get("conflicting_fields")
    if one.code == "generation-conflict" and isinstance(fields, list):
        return (commands.set_fields(case.path(one.subject), {"do_sample": True}),)
    return ()


def _leftover(case: Case, one: Finding) -> tuple[str, ...]:
    field = one.data.get("leftover")
    if field == "quantize_config.json":
        place = case.folder / "quantize_config.json"
        return (commands.move(place, place.with_suffix(".json.left")),)
    return (commands.drop_fields(case.path(one.subject), [str(field)]),)


def _needs_library(case: Case) -> Iterable[Evidence]:
    """Tell which library opens a quantized model."""
    method = case.facts.get("quant_method")
    if case.artifact.kind != "quantized" or not isinstance(method, str):
        return
    wanted = LIBRARIES.get(method.replace("_", "-")) or LIBRARIES.get(method)
    bits = case.facts.get("bits")
    yield Evidence(
        case.artifact.config or case.artifact.relative,
        f"the weights are truly quantized ({method}{f', {bits} bits' if bits else ''}): loading them asks for "
        + (f"the library {' and '.join(wanted)}" if wanted else "a library of that method"),
        (commands.install(*wanted),) if wanted else (),
        data={"quant_method": method, "bits": bits},
    )


def _field_unknown(case: Case) -> Iterable[Evidence]:
    """Find the field that an older library stumbles over in the adapter's config."""
    if case.text is None:
        return
    for line in case.text.lines:
        for match in _KEYWORD.finditer(line.shown):
            if match[1] not in case.config:
                continue
            version = case.config.get("peft_version") or case.config.get("transformers_version")
            name = (case.artifact.config or layout.ADAPTER_CONFIG).rpartition("/")[2]
            library = "peft" if case.is_adapter else "transformers"
            known = (
                f"{library}>={version}" if isinstance(version, str) and re.fullmatch(r"[0-9.]+", version) else library
            )
            yield Evidence(
                case.artifact.config or name,
                f"{name} has the field {match[1]} ({case.config[match[1]]!r}), which the installed {library} "
                "does not know" + (f"; {version} wrote it" if version else ""),
                (commands.install(known), commands.drop_fields(case.folder / name, [match[1]])),
                data={"field": match[1]},
            )
            return


def _type_new(case: Case) -> Iterable[Evidence]:
    """Tell which type a config asks the library for."""
    name = case.config.get("peft_type") if case.is_adapter else case.config.get("model_type")
    if case.text is None or not isinstance(name, str) or not name:
        return
    word = name.lower()
    if not any(f"`{word}`" in line.plain or f"'{word}'" in line.plain for line in case.text.lines):
        return
    library = "peft" if case.is_adapter else "transformers"
    version = case.config.get(f"{library}_version")
    yield Evidence(
        case.artifact.config or case.artifact.relative,
        f"the config asks for the {'adapter' if case.is_adapter else 'model'} type {name}, which the "
        f"installed {library} "
        "does not know" + (f"; version {version} wrote it" if version else ""),
        (commands.install(library),),
        data={"type": name},
    )


def _type_missing(case: Case, one: Finding) -> tuple[str, ...]:
    lora = any(".lora_A." in name for name in case.tensors)
    return (commands.set_fields(case.path(one.subject), {"peft_type": "LORA"}),) if lora else ()


def _no_type(case: Case) -> Iterable[Evidence]:
    """Find a model's config that states no model_type."""
    if case.is_adapter or not case.config or case.config.get("model_type") or layout.MODEL_CONFIG not in case.names:
        return
    if not any(key in case.config for key in ("hidden_size", "architectures", "num_hidden_layers", "vocab_size")):
        return
    known = case.against is not None and papers_type(case)
    yield Evidence(
        case.artifact.config or layout.MODEL_CONFIG,
        f"{layout.MODEL_CONFIG} states no model_type: the library cannot tell which model it describes",
        (commands.set_fields(case.folder / layout.MODEL_CONFIG, {"model_type": known or "TYPE"}),),
    )


def papers_type(case: Case) -> str | None:
    """Return the model_type that the base's config states."""
    from_base = case.tables.get("base/config.json", {}).get("model_type")
    return from_base if isinstance(from_base, str) else None


def _no_template(case: Case) -> Iterable[Evidence]:
    """Find a model that was made for talking and has no chat template."""
    if case.artifact.kind not in {"model", "quantized", "merged"} or case.facts.get("has_chat_template") is not False:
        return
    if not any(name in case.names for name in TOKENIZERS):
        return
    sign = _talks(case)
    if sign is None:
        return
    source = None if case.against is None else case.against.root
    template = "chat_template.jinja"
    yield Evidence(
        "tokenizer_config.json",
        f"there is no chat template, neither {template} nor in tokenizer_config.json, though {sign}: prompts "
        "then do not "
        "look as they did in training",
        (
            commands.copy(source / template, case.folder / template)
            if source is not None and (source / template).is_file()
            else f"cp -n TRAINING_FOLDER/{template} {commands.quoted(case.folder)}/",
        ),
    )


def _talks(case: Case) -> str | None:
    """Return the sign that a model is one that talks in turns: its base's template, its name, or its tokens."""
    if case.against is not None and case.against.papers.template is not None:
        return "its base has one"
    named = case.config.get("_name_or_path")
    if isinstance(named, str) and _TALKING.search(named):
        return f"the config calls it {named}"
    added = case.tables.get("tokenizer.json", {}).get("added_tokens")
    words = {t.get("content") for t in added if isinstance(t, dict)} if isinstance(added, list) else set()
    turn = next((word for word in _TURNS if word in words), None)
    return f"its tokenizer has {turn}" if turn is not None else None


def _no_tokenizer(case: Case) -> Iterable[Evidence]:
    """Find a language model without any tokenizer."""
    if case.artifact.kind not in {"model", "quantized", "merged"} or not case.tensors:
        return
    architecture = str(case.facts.get("architecture") or "")
    if not architecture.endswith(("ForCausalLM", "ForConditionalGeneration")) or case.artifact.file is not None:
        return
    if any(name in case.names for name in TOKENIZERS) or any(name.endswith(".tiktoken") for name in case.names):
        return
    source: Any = "BASE_FOLDER" if case.against is None else case.against.root
    yield Evidence(
        case.artifact.relative,
        f"{architecture} without a tokenizer: none of {', '.join(TOKENIZERS[:4])} is in {case.folder}",
        (f"cp -n {commands.quoted(source)}/tokenizer* {commands.quoted(case.folder)}/",),
    )


def _code_absent(case: Case) -> Iterable[Evidence]:
    """Find Python files that auto_map names and that are not in the folder; those of other repositories never are."""
    if not case.config.get("auto_map") or case.artifact.config is None:
        return
    wanted = sorted(name for name in code_files.needed(case.path(case.artifact.config)) if "--" not in name)
    gone = [name for name in wanted if not (case.folder / name).is_file()]
    if gone:
        source = "BASE_FOLDER" if case.against is None else commands.quoted(case.against.root)
        yield Evidence(
            gone[0],
            f"{some(gone)} {'is' if len(gone) == 1 else 'are'} not in {case.folder}, and the config's auto_map needs "
            f"{'it' if len(gone) == 1 else 'them'}",
            tuple(f"cp -n {source}/{commands.quoted(name)} {commands.quoted(case.folder)}/" for name in gone[:8]),
            finding="code-missing",
            data={"files": gone},
        )


def _newer_tokenizer(case: Case) -> Iterable[Evidence]:
    """Find merges that are stored as pairs, as tokenizers writes them from 0.20 on and older ones do not read."""
    inner = case.tables.get("tokenizer.json", {}).get("model")
    merges = inner.get("merges") if isinstance(inner, dict) else None
    if isinstance(merges, list) and merges and isinstance(merges[0], list):
        yield Evidence(
            "tokenizer.json",
            f"its {len(merges)} merges are stored as pairs, as tokenizers 0.20 and transformers 4.45 began to "
            "write them; "
            "older ones cannot read that",
            (commands.install("tokenizers>=0.20", "transformers>=4.45"),),
            data={"merges": len(merges)},
        )


def _no_targets(case: Case) -> Iterable[Evidence]:
    """Find a LoRA config that names no target."""
    config = case.config
    lora = str(config.get("peft_type") or "").upper() == "LORA"
    if case.is_adapter and lora and not config.get("target_modules") and not config.get("target_parameters"):
        modules = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in case.tensors if ".lora_A." in name})
        subject = case.artifact.config or layout.ADAPTER_CONFIG
        yield Evidence(
            subject,
            f"{subject} states no target_modules"
            + (f"; the file holds matrices for {some(modules)}" if modules else ""),
            (commands.set_fields(case.path(subject), {"target_modules": modules}),) if modules else (),
            data={"modules": modules},
        )


RULES: Final = (
    Rule(
        "tokenizer-of-newer-library", _STAGE, "note", ("tokenizer-broken",),
        "the tokenizer's merges are stored in a form that older libraries do not read",
        "install newer tokenizers and transformers",
        _newer_tokenizer,
    ),
    Rule(
        "targets-unstated", _STAGE, "note", ("target-not-found",),
        "the adapter's config names no module to adapt, which PEFT can make up for well-known models only",
        "put the adapter_config.json of the training beside the weights, or write target_modules into it",
        _no_targets,
    ),
    Rule(
        "adapter-as-model", _STAGE, "note",
        ("adapter-as-model", "files-missing", "config-field-unknown", "base-unreachable"),
        "the folder holds an adapter, which is loaded on top of its base",
        "load it with PEFT, or merge it into its base",
        _as_model,
    ),
    Rule(
        "adapter-beside-model", _STAGE, "warn", ("adapter-as-model", "garbage-output", "unexpected-keys"),
        "an adapter's config lies in the folder of a whole model",
        "move the adapter's files into a folder of their own",
        _both,
    ),
    linked(
        "adapter-without-config", _STAGE, "block",
        ("adapter-config-missing", "files-missing", "adapter-as-model", "garbage-output"), ("config-missing",),
        "adapter weights without adapter_config.json: type, alpha and base are unknown",
        "put the adapter_config.json of the training beside the weights",
        _adapter_alone,
        when=lambda case: case.is_adapter,
    ),
    linked(
        "model-without-config", _STAGE, "block", ("files-missing", "adapter-as-model"), ("config-missing",),
        "weights without config.json",
        "put the config of the same model beside its weights",
        _model_config,
        when=lambda case: not case.is_adapter,
    ),
    linked(
        "weights-absent", _STAGE, "block",
        ("files-missing", "adapter-as-model", "adapter-silent", "base-unreachable"),
        ("weights-missing", "weights-none", "no-artifact", "adapter-empty"),
        "configs, and no weights beside them",
        "copy the weights here, or save again",
        again,
        when=lambda case: not (case.is_adapter and layout.is_whole_model(case.names)),
    ),
    linked(
        "base-unnamed", _STAGE, "warn", ("adapter-as-model", "base-unreachable"), ("base-unknown",),
        "nothing names the adapter's base, so a loader that opens the adapter alone ends in a KeyError",
        "write base_model_name_or_path into adapter_config.json",
        _name_base,
    ),
    linked(
        "base-is-path", _STAGE, "warn", ("base-unreachable", "adapter-as-model"), ("base-local-path",),
        "the adapter names its base by a path of the training machine",
        "write the base's Hub id into adapter_config.json",
        _name_path,
    ),
    linked(
        "type-unstated", _STAGE, "block", ("config-field-unknown",), ("adapter-type-missing",),
        "the adapter's config states no peft_type",
        "put the adapter_config.json of the training beside the weights",
        _type_missing,
    ),
    linked(
        "adapter-config-impossible", _STAGE, "block", ("config-field-unknown",),
        ("adapter-number-invalid", "adapter-pattern-invalid"),
        "the adapter's config has a rank, an alpha or a pattern that cannot be one",
        "put the adapter_config.json of the training beside the weights",
    ),
    Rule(
        "model-type-unstated", _STAGE, "block", ("adapter-as-model", "config-field-unknown"),
        "config.json states no model_type",
        "write model_type into config.json, as the base's config has it",
        _no_type,
    ),
    Rule(
        "field-of-newer-library", _STAGE, "note", ("config-field-unknown",),
        "the config has a field that an older library does not know",
        "install the version that wrote the config, or take the field out",
        _field_unknown,
    ),
    Rule(
        "type-of-newer-library", _STAGE, "note", ("config-field-unknown",),
        "the config asks for a model or adapter type that the installed library does not know",
        "install a newer version of the library",
        _type_new,
    ),
    Rule(
        "code-absent", _STAGE, "block", ("remote-code", "files-missing", "class-not-found"),
        "the config names Python files that are not in the folder",
        "copy the model's own Python files beside its config",
        _code_absent,
        ("code-missing",),
    ),
    linked(
        "code-needed", _STAGE, "note", ("remote-code", "config-field-unknown"), ("remote-code",),
        "the config names Python files (auto_map), which loaders run only when told to",
        "read the files, then pass trust_remote_code=True",
    ),
    linked(
        "sampling-conflict", _STAGE, "warn", ("generation-refused",), ("generation-conflict",),
        "generation settings exclude each other",
        "set do_sample to true, or drop the sampling fields",
        _config_values,
    ),
    linked(
        "quantization-left", _STAGE, "block", ("quantization-library", "garbage-quantized", "garbage-output"),
        ("quantization-leftover",),
        "the config says quantized over weights that are not",
        "take the entry out of the config",
        _leftover,
    ),
    Rule(
        "quantization-library", _STAGE, "note", ("quantization-library",),
        "the weights are quantized, and their method needs a library of its own",
        "install the library",
        _needs_library,
    ),
    Rule(
        "template-lost", _STAGE, "warn", ("template-lost", "garbage-output"),
        "a model made for talking has no chat template",
        "copy the template of the training beside the weights",
        _no_template,
    ),
    Rule(
        "tokenizer-lost", _STAGE, "warn", ("template-lost", "files-missing", "garbage-output"),
        "a language model without its tokenizer",
        "copy the tokenizer of the training, else of the base, beside the weights",
        _no_tokenizer,
    ),
)  # fmt: skip
