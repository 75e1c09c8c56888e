"""The child process's part of a merge: write what is missing, prove every file, complete the bundle.

Shards are written by several threads, one each: numpy, the hash and the system calls let go of the interpreter.
"""

import hashlib
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from weighbridge.adapters.merge import proof, stream
from weighbridge.adapters.merge.journal import Journal
from weighbridge.adapters.merge.proof import Proof
from weighbridge.adapters.merge.stream import Files, Written
from weighbridge.adapters.merge.tally import Tally
from weighbridge.adapters.merge.values import Bundle, OutFile, Plan
from weighbridge.adapters.whole import some
from weighbridge.registry import errors
from weighbridge.registry.disk import copy_hashing, open_source, speaking, sync_folder, write_all

PLAN: Final = "plan.msgpack"
BUNDLE: Final = "bundle.msgpack"
JOURNAL: Final = "journal.jsonl"
RESULT: Final = "out"
FORMULA: Final = "round(W + (B @ A) * s), in fp32, rounded once"
_WORST: Final = 12
_COSINE: Final = 0.95
_COPY_LIMIT: Final = 1 << 40


def run(request: dict[str, Any], tell: Callable[[int], None]) -> dict[str, Any]:
    """Carry out the plan that lies in `request["stage"]` and return what was written and proven.

    Files that the journal lists and that are there keep their bytes. Raises SourceChangedError, RefusedError,
    DiskFullError and what else the disk gives.
    """
    stage = Path(request["stage"])
    plan = msgspec.msgpack.decode((stage / request.get("file", PLAN)).read_bytes(), type=Plan)
    bundle = msgspec.msgpack.decode((stage / BUNDLE).read_bytes(), type=Bundle)
    identity, seed = request["plan"], request["plan"]
    out = stage / RESULT
    out.mkdir(exist_ok=True)
    _recheck(plan)
    journal = Journal(stage / JOURNAL, identity)
    engine, told = _engine(request)
    begun = time.monotonic()
    with speaking("the merged model cannot be written"):
        kept = journal.finished(out)
        look, small = stream.every(plan), proof.is_small(plan)

        def one(file: OutFile) -> tuple[Written, Proof]:
            target = out / file.path
            written = kept.get(file.path)
            if written is None:
                target.parent.mkdir(parents=True, exist_ok=True)
                written = stream.write(file, files, str(target), look, tell, engine=engine)
                journal.record(written)
            else:
                tell(file.size)
            return written, proof.check(file, files, target, seed=seed, small=small)

        with Files(plan) as files, ThreadPoolExecutor(request["workers"]) as pool:
            try:
                done = list(pool.map(one, sorted(plan.files, key=lambda f: -f.size)))
            except ArithmeticError as error:
                pool.shutdown(cancel_futures=True)
                if not plan.adapters:
                    raise _beyond(plan, files) from error
                raise errors.RefusedError(
                    "the merge gives values that cannot be stored",
                    why=str(error),
                    fix="look at the adapter, or --dtype",
                ) from error
        streamed = time.monotonic() - begun
        if engine is not None:
            engine.close()
        _recheck(plan)
        extra = _complete(bundle, out)
        for folder in {(out / file.path).parent for file in plan.files} | {out}:
            sync_folder(folder)
    written = [one for one, _ in done]
    whole = Proof()
    for _, part in done:
        whole.join(part)
    return {
        "files": {w.path: {"size": w.size, "sha256": w.sha256} for w in written} | extra,
        "kept": sorted(kept),
        "proof": whole.facts(),
        "fidelity": fidelity(written, look),
        "formula": FORMULA,
        "dtype": plan.dtype,
        "seconds": {"weights": round(streamed, 3)},
        "arithmetic": {"numpy": np.__version__, "python": sys.version.split()[0], "workers": request["workers"]} | told,
    }


def _engine(request: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return what does the arithmetic, None for numpy, and what the record says of it."""
    wanted = request.get("device")
    if wanted is None:
        return None, {"device": "cpu", "device_told": request.get("device_why", "")}
    from weighbridge.adapters.merge import device  # noqa: PLC0415 - torch takes seconds, and is rarely wanted

    engine, why = device.take(wanted, Path(request.get("locks") or request["stage"]))
    told = {"device": engine.name if engine is not None else "cpu", "device_told": why}
    return engine, told if wanted == "processor" else told | {"device_wanted": "cuda"}


def _beyond(plan: Plan, files: Files) -> errors.RefusedError:
    """Return the refusal of a cast that would make infinities, with every tensor it is about."""
    found = stream.beyond(plan, files)
    told = [f"{name} (up to {top:.4g})" for name, top in found]
    return errors.RefusedError(
        "the weights do not fit into the new precision",
        why=f"{len(found)} tensors hold values that {plan.dtype} cannot hold: {some(told)}",
        fix="choose --dtype bf16 or fp32, or leave the layers in single precision: --keep-fp32",
        tensors=dict(found),
    )


def fidelity(written: list[Written], look: int) -> dict[str, Any]:
    """Return how much of the intended change the stored tensors hold, in all and for the worst of them."""
    whole = Tally()
    still: list[str] = []
    each: list[tuple[float, str, Tally]] = []
    for file in written:
        for name, tally in file.tallies.items():
            whole.join(tally)
            each.append((tally.cosine if tally.cosine is not None else 1.0, name, tally))
            if not tally.changed:
                still.append(name)
    each.sort(key=lambda item: (item[0], item[1]))
    return {
        "unchanged_share": whole.share,
        "cosine": whole.cosine,
        "elements": whole.elements,
        "every": look,
        "tensors": len(each),
        "tensors_unchanged": sorted(still),
        "tensors_below": sum(1 for cosine, _, _ in each if cosine < _COSINE),
        "worst": [
            {"tensor": name, "cosine": cosine, "unchanged_share": tally.share} for cosine, name, tally in each[:_WORST]
        ],
    }


def _recheck(plan: Plan) -> None:
    """Stop where a source is not what the plan was made from."""
    for source in plan.sources:
        try:
            now = os.stat(source.path)  # noqa: PTH116 - a plain string
        except FileNotFoundError as error:
            raise errors.VanishedError(f"{source.path} is gone") from error
        if (now.st_size, now.st_mtime_ns, now.st_ino) != (source.size, source.mtime_ns, source.ino):
            raise errors.SourceChangedError(
                f"{source.path} changed while it was merged", fix="wait until nobody writes it, then merge again"
            )


def _complete(bundle: Bundle, out: Path) -> dict[str, dict[str, Any]]:
    """Write the files beside the weights, durably."""
    files: dict[str, dict[str, Any]] = {}
    for path, body in bundle.written.items():
        target = _fresh(out / path)
        try:
            write_all(target, body)
            os.fsync(target)
        finally:
            os.close(target)
        files[path] = {"size": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    for path, origin in bundle.copies.items():
        source = open_source(os.path.realpath(origin))
        try:
            target = _fresh(out / path)
            try:
                size, digest = copy_hashing(source, target, limit=_COPY_LIMIT)
                os.fsync(target)
            finally:
                os.close(target)
        finally:
            os.close(source)
        files[path] = {"size": size, "sha256": digest}
    return files


def _fresh(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
