"""The proof of a merge is shown to fail: on errors planted in the written file, of every kind that merges have had."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weighbridge.adapters import worker
from weighbridge.adapters.merge import behave, block, proof, start
from weighbridge.adapters.merge.preview import look
from weighbridge.adapters.merge.stream import Files
from weighbridge.adapters.merge.tally import Tally
from weighbridge.adapters.merge.values import OutFile, Plan
from weighbridge.registry.errors import RefusedError
from weighbridge_testlib import builders, merging
from weighbridge_testlib.merging import distances

Q0 = "model.layers.0.self_attn.q_proj"
WEIGHT = f"{Q0}.weight"


class Written:
    """A finished merge whose one file can be spoilt and proven again."""

    def __init__(self, tmp_path: Path, *, dtype: str = "BF16", **adapter: Any) -> None:
        self.base = builders.llama_model(tmp_path / "base", dtype=dtype)
        self.adapter = builders.lora_adapter(tmp_path / "adapter", **adapter)
        seen, self.result = merging.staged(self.adapter, self.base, tmp_path / "stage")
        self.plan: Plan = merging.plan_of(seen)
        self.path = tmp_path / "stage" / "out" / "model.safetensors"
        self.dtype = dtype

    @property
    def file(self) -> OutFile:
        """The plan's one file."""
        return self.plan.files[0]

    def check(self) -> proof.Proof:
        """Prove the file as it is now."""
        with Files(self.plan) as files:
            return proof.check(self.file, files, self.path, seed="x", small=True)

    def put(self, name: str, values: Any) -> None:
        """Write other values into a tensor of the result."""
        step = next(step for step in self.file.steps if step.name == name)
        raw = bytearray(self.path.read_bytes())
        stored = np.asarray(values).astype(merging.KINDS[step.dtype]).tobytes()
        raw[step.at : step.at + len(stored)] = stored
        self.path.write_bytes(raw)

    def parts(self) -> tuple[Any, Any, Any]:
        """Return base, A and B of one layer in double precision."""
        theirs = merging.numbers(self.adapter)
        stem = f"base_model.model.{Q0}"
        return (
            merging.numbers(self.base)[WEIGHT],
            theirs[f"{stem}.lora_A.weight"],
            theirs[f"{stem}.lora_B.weight"],
        )


def bf16(values: Any) -> Any:
    """Return values rounded to bf16, in double precision."""
    return np.asarray(values).astype(np.float32).astype(merging.KINDS["BF16"]).astype(np.float64)


def test_a_right_merge_is_proven_whole(tmp_path: Path) -> None:
    """Every tensor is accounted for, every changed element is within its bound, and the figures say how near."""
    written = Written(tmp_path)
    told = written.check()
    assert told.passed
    assert (told.copied, told.cast, told.changed) == (17, 0, 4)
    assert told.elements == 768
    assert 0.9 < told.worst <= 1.0
    assert written.result["proof"] == told.facts()


PLANTED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "the delta rounded before it is added": lambda w, a, b: bf16(w + bf16(2.0 * (b @ a))),
    "the layer left as the base": lambda w, _a, _b: w,
    "a strength wrong by a hundredth": lambda w, a, b: bf16(w + 2.02 * (b @ a)),
    "the delta transposed": lambda w, a, b: bf16(w + 2.0 * (b @ a).T),
    "the matrices rounded to bf16 first": lambda w, a, b: bf16(w + 2.0 * (bf16(b) @ bf16(a))),
    "one element NaN": lambda w, a, b: np.where(np.arange(256).reshape(16, 16) == 77, np.nan, bf16(w + 2.0 * (b @ a))),
    "one element off by one place": lambda w, a, b: bf16(w + 2.0 * (b @ a)) * np.where(
        np.arange(256).reshape(16, 16) == 200, 1 + 2.0**-7, 1.0
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_error_breaks_the_bound(tmp_path: Path, kind: str) -> None:
    """Double rounding, a dropped layer, a wrong strength, a transposed delta, one bad element: each is found."""
    written = Written(tmp_path)
    written.put(WEIGHT, PLANTED[kind](*written.parts()))
    told = written.check()
    assert not told.passed
    assert told.violations > 0
    assert any(WEIGHT in line for line in told.failures)


def test_a_changed_copy_is_found(tmp_path: Path) -> None:
    """One flipped bit in a tensor nobody adapts breaks the proof of the copies."""
    written = Written(tmp_path)
    step = next(step for step in written.file.steps if step.name == "model.norm.weight")
    raw = bytearray(written.path.read_bytes())
    raw[step.at] ^= 1
    written.path.write_bytes(raw)
    told = written.check()
    assert told.failures == ["model.norm.weight: its bytes are not those it was copied from"]


def test_another_header_is_found(tmp_path: Path) -> None:
    """A file whose header is not the planned one is not proven, whatever its bytes."""
    written = Written(tmp_path)
    raw = written.path.read_bytes()
    written.path.write_bytes(raw.replace(b"model.norm.weight", b"model.morn.weight"))
    assert not written.check().passed


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("dora", [False, True])
def test_the_bound_holds_for_every_precision(tmp_path: Path, dtype: str, dora: bool) -> None:
    """No right merge is called wrong, with DoRA or without; and a strength off by a hundredth is caught in each."""
    adapter: dict[str, Any] = {}
    if dora:
        tensors = builders.lora_tensors()
        for name in [n for n in tensors if "lora_B" in n]:
            module, rows = name.partition(".lora_B")[0], tensors[name][1][0]
            tensors[f"{module}.lora_magnitude_vector"] = ("F32", (rows,), 0.9)
        adapter = {"tensors": tensors, "use_dora": True}
    written = Written(tmp_path, dtype=dtype, **adapter)
    assert written.check().passed
    ours = merging.numbers(written.path.parent)[WEIGHT]
    written.put(WEIGHT, ours * 1.01)
    assert written.check().violations > 100


def test_seeded_blocks_reach_every_changed_tensor(tmp_path: Path) -> None:
    """In a large merge some blocks of every changed tensor are checked, the same ones for the same plan."""
    base = merging.wide_model(tmp_path / "base", shards=1, layers=2, hidden=512)
    adapter = merging.wide_adapter(tmp_path / "adapter", base)
    seen, _ = merging.staged(adapter, base, tmp_path / "stage")
    plan = merging.plan_of(seen)
    with Files(plan) as files:
        told = [
            proof.check(plan.files[0], files, tmp_path / "stage/out/model.safetensors", seed=seed, small=False)
            for seed in ("a", "a", "b")
        ]
    assert all(one.passed for one in told)
    assert told[0].changed == 6
    assert told[0].elements < sum(step.origin.count for step in plan.steps if step.factors)
    assert told[0].worst == told[1].worst != told[2].worst


def test_a_failed_proof_publishes_nothing_and_sets_the_result_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result that is not what base and adapter add up to is kept apart and refused with its figures."""
    builders.llama_model(tmp_path / "base")
    builders.lora_adapter(tmp_path / "adapter")
    seen = look([tmp_path / "adapter"], tmp_path / "base")
    real = worker.jailed

    def lying(*arguments: Any, **options: Any) -> worker.Ended:
        ended = real(*arguments, **options)
        proof = {**ended.result["proof"], "passed": False, "bound_violations": 3, "failures": ["w: 3"]}
        return ended._replace(result=ended.result | {"proof": proof})

    monkeypatch.setattr(worker, "jailed", lying)
    with pytest.raises(RefusedError) as caught:
        start.merge(seen, tmp_path / "out")
    assert [one.code for one in caught.value.data["findings"]] == ["merge-unproven"]
    assert not (tmp_path / "out").exists()
    (apart,) = [path for path in tmp_path.iterdir() if path.name.endswith("-failed")]
    assert (apart / "model.safetensors").is_file()
    monkeypatch.undo()
    start.merge(seen, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("seen", "right"),
    [
        (distances(1e-6, 0.0), True),
        (distances(0.02, 0.03), True),
        (distances(0.02, None), False),  # the precision cannot be run: a hundredth of the adapter's effect it is
        (distances(0.02, 0.01), False),
        (distances(1.0, 0.01), False),
        (distances(0.2, 0.5, base=0.2), False),  # as far away as the base, in whatever noise
        (distances(float("nan"), 0.5), False),
    ],
)
def test_what_a_merge_computes_is_judged_by_the_noise_of_its_precision(seen: behave.Distances, *, right: bool) -> None:
    """No further away than base and adapter in that precision, and nearer than the base: else it is something else."""
    assert (behave.wrong(seen) is None) is right


@pytest.mark.parametrize(
    ("seen", "codes"), [(distances(0.5, 0.01), None), (distances(0.01, 0.02), []), ("no room", ["merge-not-compared"])]
)
def test_a_result_that_computes_something_else_is_set_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: behave.Distances | str, codes: list[str] | None
) -> None:
    """Where the comparison was asked for, its figures are told, a failed one publishes nothing, a missing one warns."""
    builders.llama_model(tmp_path / "base")
    builders.lora_adapter(tmp_path / "adapter")
    monkeypatch.setattr(behave, "compare", lambda *_: seen)
    looked = look([tmp_path / "adapter"], tmp_path / "base")
    if codes is None:
        with pytest.raises(RefusedError) as caught:
            start.merge(looked, tmp_path / "out", behaviour=True)
        assert [one.code for one in caught.value.data["findings"]] == ["merge-unproven"]
        assert [path.name.endswith("-failed") for path in tmp_path.glob(".out*") if "out" in path.name].count(True) == 1
        assert not (tmp_path / "out").exists()
        return
    done = start.merge(looked, tmp_path / "out", behaviour=True)
    assert [one.code for one in done.findings if one.severity == "warn"] == codes
    assert (done.facts["behaviour"] or {}).get("distance") == (1.0 if not codes else None)


def test_the_record_and_the_digests_are_those_of_the_files(tmp_path: Path) -> None:
    """The digest taken while writing is the file's, for weights and for what lies beside them."""
    written = Written(tmp_path)
    for path, told in written.result["files"].items():
        raw = (written.path.parent / path).read_bytes()
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (told["size"], told["sha256"])
    assert json.dumps(written.result)  # the child's answer is plain JSON


def test_the_tally_tells_share_and_angle() -> None:
    """Elements that stay are counted, and the angle between wish and result is 1 where all of it was stored."""
    before = np.array([[1.0, 1.0, 1.0, 1.0]], np.float32)
    wanted = before + np.array([[0.001, 0.5, 0.0, 0.25]], np.float32)
    tally = Tally()
    tally.add(before.copy(), wanted.copy(), block.rounded(wanted, "BF16").astype(np.float32))
    assert tally.share == 0.5
    assert tally.cosine is not None
    assert 0.99 < tally.cosine <= 1.0
    empty = Tally()
    assert (empty.share, empty.cosine) == (None, None)


@pytest.mark.parametrize("columns", [8, 16, 24, 100, 256])
def test_row_norms_do_not_depend_on_the_block(columns: int) -> None:
    """A row's norm is the same in any block, and right."""
    values = np.random.default_rng(1).standard_normal((40, columns)).astype(np.float32)
    whole = block.row_norms(values)
    assert np.array_equal(np.concatenate([block.row_norms(values[i : i + 7]) for i in range(0, 40, 7)]), whole)
    assert whole == pytest.approx(np.linalg.norm(values.astype(np.float64), axis=1), rel=1e-6)
