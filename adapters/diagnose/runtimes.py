"""Rules of pickles, ONNX and engines: what a runtime refuses for its own safety, its version or its machine."""

from collections.abc import Iterable
from typing import Any, Final

from weighbridge.adapters import layout
from weighbridge.adapters.diagnose import commands
from weighbridge.adapters.diagnose.rule import Case, Evidence, Rule, linked
from weighbridge.adapters.diagnose.text import number_after
from weighbridge.adapters.whole import some
from weighbridge.registry.types import Finding

_STAGE: Final = "runtime"


def _extract(case: Case, one: Finding) -> tuple[str, ...]:
    whole = any(layout.is_model_pickle(name) or name in layout.ADAPTER_PICKLES for name in case.names)
    return (commands.extract(case.folder if whole else case.path(one.subject)),)


def _pickled(case: Case) -> Iterable[Evidence]:
    """Tell that the weights are torch pickles, and what they name beyond tensors."""
    facts = case.facts
    files = [f for f in case.artifact.files if f.role == "weights"] or [
        f for f in case.artifact.files if layout.is_model_pickle(f.path.rpartition("/")[2])
    ]
    ranks = case.artifact.artifact in {"deepspeed-zero", "ckpt-dcp", "megatron"}
    if not facts.get("pickle_format") or case.artifact.kind is None or ranks or not files:
        return
    if any(f.code in {"runs-code", "whole-object", "torchscript"} for f in case.findings):
        return
    foreign = facts.get("foreign_globals") or []
    loads = facts.get("weights_only_loadable")
    said = "" if loads is None else f"torch's safe loading {'reads' if loads else 'refuses'} it"
    parts = [f"{files[0].path} is a torch pickle"]
    parts += [said] if said else []
    parts += [f"it names {some(str(name) for name in foreign)}"] if foreign else []
    whole = any(layout.is_model_pickle(name) or name in layout.ADAPTER_PICKLES for name in case.names)
    yield Evidence(
        files[0].path,
        "; ".join(parts),
        (commands.extract(case.folder if whole else case.path(files[0].path)),),
        "warn" if loads is False else None,
        data={"foreign_globals": list(foreign)[:50]},
    )


def _other_pickles(case: Case) -> Iterable[Evidence]:
    """Tell of the trainer's own pickles, which no loader of models needs."""
    rest = [
        f for f in case.artifact.files if f.reason == "resume-only" and f.path.endswith((".bin", ".pt", ".pth", ".pkl"))
    ]
    if not rest or case.artifact.artifact in {"deepspeed-zero", "ckpt-dcp"}:
        return
    yield Evidence(
        rest[0].path,
        f"{some(f.path for f in rest)} {'is a pickle' if len(rest) == 1 else 'are pickles'} of the trainer's "
        "own objects; "
        "the model runs without, and only resuming needs them",
        (commands.inspect(case.folder),),
    )


def _opset(case: Case) -> Iterable[Evidence]:
    """Compare the versions an ONNX file states with the ones the text allows."""
    for path, facts in _graphs(case):
        version, opset = facts.get("ir_version"), (facts.get("opsets") or {}).get("ai.onnx")
        limit = number_after(case.text, "max supported ir version") if case.text is not None else None
        if isinstance(version, int) and limit is not None and version <= limit:
            continue
        producer = " ".join(str(facts[key]) for key in ("producer", "producer_version") if facts.get(key))
        yield Evidence(
            path,
            f"{path} has IR version {version} and opset {opset}"
            + (f", written by {producer}" if producer else "")
            + (f"; the runtime takes IR version {limit} at most" if limit is not None else ""),
            (commands.install("onnxruntime"), _lowered(case, path, version, limit, opset)),
            data={"ir_version": version, "opset": opset},
        )


def _lowered(case: Case, path: str, version: Any, limit: int | None, opset: Any) -> str:
    source = case.path(path)
    target = source.with_name(source.name.removesuffix(".onnx") + "-older.onnx")
    if limit is not None and isinstance(version, int):
        change = f"m.ir_version = {limit}"
    else:
        wanted = opset - 1 if isinstance(opset, int) and opset > 1 else commands.Fill("OPSET")
        change = f"m = version_converter.convert_version(m, {wanted!r})"
    return commands.python(
        f"import onnx; from onnx import version_converter; m = onnx.load({str(source)!r}); {change}; "
        f"onnx.save(m, {str(target)!r})"
    )


def _domains(case: Case) -> Iterable[Evidence]:
    """Find operators that no plain runtime has."""
    for path, facts in _graphs(case):
        custom = facts.get("custom_domains") or []
        if custom:
            yield Evidence(
                path,
                f"{path} uses operators of {some(map(str, custom))}, which a plain ONNX Runtime does not have",
                (commands.install("onnxruntime-extensions"),),
                data={"domains": list(custom)},
            )


def _axes(case: Case) -> Iterable[Evidence]:
    """Tell the inputs of a graph whose axes are all fixed."""
    for path, facts in _graphs(case):
        inputs = facts.get("inputs")
        if facts.get("dynamic_axes") is False and isinstance(inputs, dict) and inputs:
            name, shape = next(iter(inputs.items()))
            yield Evidence(
                path,
                f"every axis of {path} is fixed, such as {name} {shape}: inputs of another length are refused",
                data={"inputs": {str(key): str(value) for key, value in list(inputs.items())[:20]}},
            )


def _graphs(case: Case) -> list[tuple[str, dict[str, Any]]]:
    """Return the ONNX files of a case with their facts."""
    table = case.facts.get("containers")
    if isinstance(table, dict):
        return [(path, facts) for path, facts in sorted(table.items()) if facts.get("container") == "onnx"]
    if case.facts.get("container") != "onnx":
        return []
    path = next((f.path for f in case.artifact.files if f.path.endswith(".onnx")), case.artifact.relative)
    return [(path, dict(case.facts))]


def _engine(case: Case) -> Iterable[Evidence]:
    """Tell what an engine is bound to."""
    for one in case.findings:
        if one.code == "not-portable":
            binding = case.facts.get("binding")
            table = binding if isinstance(binding, dict) else {}
            bound = ", ".join(f"{key} {value}" for key, value in sorted(table.items()))
            target = commands.quoted(commands.beside(case.path(one.subject), "rebuilt.engine"))
            yield Evidence(
                one.subject,
                f"{one.subject} is a TensorRT engine{f', built with {bound}' if bound else '; nothing says for what'}: "
                "another version or GPU does not open it",
                (f"trtexec --onnx=MODEL.onnx --saveEngine={target}",),
                finding=one.code,
                data={"binding": table},
            )


RULES: Final = (
    Rule(
        "weights-pickled", _STAGE, "note", ("unsafe-pickle", "class-not-found", "memory-blow-up"),
        "the weights are a torch pickle, which could run code when it is opened",
        "take the tensors out as safetensors; nothing of the pickle is run for that",
        _pickled,
    ),
    linked(
        "pickle-runs-code", _STAGE, "block", ("unsafe-pickle", "class-not-found"), ("runs-code",),
        "opening the file would run code",
        "do not open it; ask its author for safetensors",
    ),
    linked(
        "object-pickled", _STAGE, "block", ("class-not-found", "unsafe-pickle"), ("whole-object", "torch-tar"),
        "a whole object was pickled and opens only where its class can be imported",
        "open it where the class is and save its state_dict",
        lambda case, one: (
            commands.python(
                "import torch; from safetensors.torch import save_file; "
                f"m = torch.load({str(case.path(one.subject))!r}, map_location='cpu', weights_only=False); "
                f"save_file(m.state_dict(), {str(case.path(one.subject).with_suffix('.safetensors'))!r}, "
                f"{{'format': 'pt'}})"
            ),
        ),
    ),
    linked(
        "class-of-a-package", _STAGE, "warn", ("class-not-found", "unsafe-pickle"), ("foreign-global", "foreign-call"),
        "the pickle names classes or functions of somebody's package",
        "take the tensors out as safetensors, which needs no package",
        _extract,
        when=lambda case: case.artifact.kind is not None,
    ),
    linked(
        "program-inside", _STAGE, "warn", ("class-not-found", "unsafe-pickle", "file-broken"), ("torchscript",),
        "the file is a TorchScript program, code and weights in one, and no state dict",
        "load it with torch.jit.load, or export the weights where the model's class is",
    ),
    Rule(
        "trainer-pickles", _STAGE, "note", ("unsafe-pickle", "class-not-found"),
        "the pickles of the folder are the trainer's own and serve only to resume",
        "load the weights alone; they lie beside",
        _other_pickles,
    ),
    Rule(
        "onnx-version", _STAGE, "note", ("onnx-version",),
        "the ONNX file states an IR version or an opset that this runtime may not have",
        "install a newer runtime, or write the file for an older one",
        _opset,
    ),
    Rule(
        "onnx-operators", _STAGE, "warn", ("onnx-version",),
        "the graph uses operators outside of ONNX's own",
        "register the library of the operators, or export without them",
        _domains,
    ),
    Rule(
        "onnx-axes-fixed", _STAGE, "note", ("onnx-version", "size-mismatch"),
        "every input axis of the graph is fixed",
        "export again with dynamic axes",
        _axes,
    ),
    Rule(
        "engine-bound", _STAGE, "warn", ("engine-version",),
        "a TensorRT engine opens only with the version and on the GPU it was built for",
        "build the engine again on the machine that runs it, from the model it was made of",
        _engine,
        ("not-portable",),
    ),
)  # fmt: skip
