"""Rules of memory: what a loader holds at once, what comes along without need, and what only looks large."""

from collections.abc import Iterable
from typing import Final

from weighbridge.adapters import layout, weights
from weighbridge.adapters.diagnose import commands
from weighbridge.adapters.diagnose.rule import Case, Evidence, Rule, linked

_STAGE: Final = "runtime"
_WIDE: Final = frozenset({"F32", "F64"})


def _whole_file(case: Case) -> Iterable[Evidence]:
    """Find pickles that are read whole, with all that lies in them beside the model."""
    files = [f for f in case.artifact.files if f.role == "weights" and not f.path.endswith((".safetensors", ".gguf"))]
    if not case.facts.get("pickle_format") or not files:
        return
    dropped = case.facts.get("dropped_bytes")
    spare = sum(dropped.values()) if isinstance(dropped, dict) else 0
    needed = case.facts.get("payload_bytes")
    largest = max(files, key=lambda f: f.size)
    told = (
        f"{largest.path} has {largest.size} bytes, and torch.load reads them into memory before the model gets its own "
        "copy"
    )
    if spare and isinstance(needed, int):
        told += f"; {spare} bytes of it are no weights ({', '.join(sorted(dropped or {}))}), the model needs {needed}"
    whole = any(layout.is_model_pickle(name) or name in layout.ADAPTER_PICKLES for name in case.names)
    source = case.folder if whole else case.path(largest.path)
    yield Evidence(
        largest.path,
        told,
        (
            commands.extract(source),
            commands.python(
                f"import torch; torch.load({str(case.path(largest.path))!r}, map_location='cpu', mmap=True, "
                "weights_only=True)"
            ),
        ),
        data={"file_bytes": largest.size, "dropped_bytes": spare},
    )


def _wide(case: Case) -> Iterable[Evidence]:
    """Find weights in 32 bits."""
    main = weights.main_dtype(case.tensors.values()) if case.tensors else None
    if main not in _WIDE or case.facts.get("quant_method"):
        return
    size = sum(tensor.size for tensor in case.tensors.values())
    half = size // (2 if main == "F32" else 4)
    declared = case.facts.get("config_dtype")
    yield Evidence(
        next(iter(sorted(set(case.owners.values()))), case.artifact.relative),
        f"the weights are {main}, {size} bytes; in 16 bits they would be {half}"
        + (f" (the config says {declared})" if declared else ""),
        (
            commands.python(
                "import torch; from transformers import AutoModelForCausalLM as M; "
                f"M.from_pretrained({str(case.folder)!r}, dtype=torch.bfloat16)"
            ),
        )
        if not case.is_adapter
        else (),
        data={"bytes": size, "main_dtype": main},
    )


def _mapped(case: Case) -> Iterable[Evidence]:
    """Explain resident memory of mapped files by the bytes that are mapped."""
    files = sorted({path for path in case.owners.values() if path.endswith(".safetensors")})
    if not files:
        return
    size = sum(f.size for f in case.artifact.files if f.path in files)
    yield Evidence(
        files[0],
        f"{len(files)} safetensors file{'' if len(files) == 1 else 's'} of {size} bytes are mapped, not read: "
        "the kernel counts "
        "their pages as the process's until it needs the room. What cannot be given back is in RssAnon",
        ("grep -E 'VmRSS|RssAnon|RssFile' /proc/PID/status",),
        data={"bytes": size},
    )


RULES: Final = (
    Rule(
        "read-whole", _STAGE, "note", ("memory-blow-up",),
        "a pickle is read whole, with optimizer state and all, before the model gets its copy",
        "take the weights out as safetensors, which are mapped; or load with mmap=True on the CPU",
        _whole_file,
    ),
    Rule(
        "weights-wide", _STAGE, "note", ("memory-blow-up",),
        "the weights are stored in 32 bits",
        "load them in 16 bits",
        _wide,
    ),
    Rule(
        "mapped-pages", _STAGE, "note", ("mmap-memory",),
        "safetensors are mapped, and mapped pages are counted as memory of the process",
        "nothing is wrong; look at RssAnon for what the process itself holds",
        _mapped,
    ),
    linked(
        "saved-twice", _STAGE, "note", ("zero-huge", "memory-blow-up"), ("copies-extra",),
        "the same weights lie in the folder a second time",
        "delete the copy that nobody loads",
        lambda case, one: (
            (commands.remove([case.path(str(p)) for p in one.data["extra_full_copies"][:20]]),)
            if isinstance(one.data.get("extra_full_copies"), list)
            else ()
        ),
    ),
)  # fmt: skip
