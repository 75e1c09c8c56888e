"""Numbers and patterns of an adapter's config that no loader can use, and patterns matched without going back."""

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.adapters import peft_faults
from weighbridge.adapters.inspect import inspect
from weighbridge.adapters.patterns import Pattern
from weighbridge_testlib import builders


def codes(**config: Any) -> dict[str, Any]:
    """Return the codes told of a config, each with its figures."""
    table = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | config
    return {f.code: f.data for f in peft_faults.judge(table, "adapter_config.json")}


IMPOSSIBLE = st.one_of(
    st.text(), st.none(), st.booleans(), st.floats(), st.integers(max_value=0), st.integers(min_value=1 << 21),
    st.lists(st.integers(1, 8), max_size=2), st.just({}),
)  # fmt: skip


@given(kind=st.sampled_from(["LORA", "LOHA", "LOKR", "VERA", "HIRA"]), rank=IMPOSSIBLE)
def test_a_rank_that_is_none(kind: str, rank: Any) -> None:
    """Texts, null, fractions, lists, zero and less, and what is wider than any layer are told with the value."""
    assert list(codes(peft_type=kind, r=rank)) == ["adapter-number-invalid"]
    assert codes(peft_type="ADALORA", init_r=rank, r=rank)["adapter-number-invalid"]["invalid_numbers"].keys() == {
        "init_r"
    }


@given(kind=st.sampled_from(["LORA", "LOHA", "LOKR"]), rank=st.integers(1, 100_000), alpha=st.floats(-1e6, 1e6))
def test_ranks_and_alphas_that_are_some(kind: str, rank: int, alpha: float) -> None:
    """Every whole rank and every finite alpha goes without a word, in the tables by module, too."""
    table = {"r": rank, "lora_alpha": alpha, "rank_pattern": {"q_proj": rank}, "alpha_pattern": {"q_proj": alpha}}
    assert codes(peft_type=kind, **table) == {}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"lora_alpha": "16"}, "lora_alpha"), ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"lora_alpha": [8]}, "lora_alpha"), ({"rank_pattern": {"q_proj": "8"}}, "rank_pattern of q_proj"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern of q_proj"), ({"rank_pattern": [8]}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": None}}, "alpha_pattern of q_proj"),
    ],
)  # fmt: skip
def test_what_else_is_no_number(config: dict[str, Any], field: str) -> None:
    """Alphas and the tables by module are held to the same."""
    assert list(codes(**config)["adapter-number-invalid"]["invalid_numbers"]) == [field]


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "OFT", "r": 0}, {"peft_type": "SUPERTUNING", "r": None}, {"peft_type": "IA3", "r": "x"},
        {"peft_type": "ADALORA", "init_r": 12, "r": None, "rank_pattern": {"a.lora_E": [True, False]}},
        {"peft_type": "OSF", "rank_pattern": {"q": [1]}}, {"lora_alpha": None}, {"rank_pattern": {}},
    ],
)  # fmt: skip
def test_what_other_types_write(config: dict[str, Any]) -> None:
    """A type that states its rank elsewhere, or has none, is not held to LoRA's."""
    assert "adapter-number-invalid" not in codes(**config)


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern"])
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[q_proj", "adapter-pattern-invalid"), ("*q", "adapter-pattern-invalid"),
        ("(?=.*a)(.*)*(.*)*x", "adapter-pattern-untried"), ("x" * 3000, "adapter-pattern-untried"),
        ("(((a{90}){90}){90})", "adapter-pattern-untried"), (r".*\.(q|v)_proj", None), ("(a|a|a){25}b", None),
    ],
)  # fmt: skip
def test_patterns(field: str, text: str, code: str | None) -> None:
    """What is no expression is refused, what is not tried is said to be not known; what can be answered is neither."""
    assert set(codes(**{field: {text: 4} if field.startswith("rank") else text})) == ({code} if code else set())


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        ("8", {"adapter-number-invalid"}), (None, {"adapter-number-invalid"}),
        (-4, {"adapter-number-invalid", "rank-mismatch"}), (10**9, {"adapter-number-invalid", "rank-mismatch"}),
        (1e9, {"adapter-number-invalid", "rank-mismatch"}),
    ],
)  # fmt: skip
def test_an_adapter_of_an_impossible_rank_is_refused(tmp_path: Any, rank: Any, expected: set[str]) -> None:
    """A look at the folder refuses it by name."""
    builders.write_json(builders.lora_adapter(tmp_path) / "adapter_config.json", builders.lora_config() | {"r": rank})
    found = inspect(tmp_path)
    assert (found.outcome, {f.code for f in found.findings if f.severity == "block"}) == ("refuse", expected)


def test_a_rank_that_is_not_stated(tmp_path: Any) -> None:
    """PEFT then takes 8: matrices of another rank would not load."""
    config = {key: value for key, value in builders.lora_config().items() if key != "r"}
    builders.write_json(builders.lora_adapter(tmp_path) / "adapter_config.json", config)
    (fault,) = [f for f in inspect(tmp_path).findings if f.severity == "block"]
    assert fault.code == "rank-mismatch"
    assert "states no rank" in fault.message


def expression(source: random.Random, depth: int) -> str:
    """Return a random regular expression without look-around."""
    choice = source.random()
    if depth == 0 or choice < 0.35:
        return source.choice(["a", "b", ".", "[ab]", "[^a]", r"\d", r"\.", "1", "c"])
    inner = expression(source, depth - 1)
    opening = source.choice(["(", "(?:", f"(?P<n{source.randrange(10**9)}>"])
    if choice < 0.6:
        return inner + expression(source, depth - 1)
    if choice < 0.75:
        return f"{opening}{inner}|{expression(source, depth - 1)})"
    if choice < 0.95:
        return f"{opening}{inner})" + source.choice(["*", "+", "?", "{2}", "{1,3}", "{,2}", "{1,}", "*?", "??"])
    return source.choice(["^", ""]) + inner + source.choice(["$", ""])


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 1 << 40))
def test_patterns_answer_as_the_library_does(seed: int) -> None:
    """Any expression without look-around gives for any name what `re.fullmatch` gives."""
    source = random.Random(seed)
    text = expression(source, 4)
    ours = Pattern(text)
    for _ in range(4):
        name = "".join(source.choice("abc1.") for _ in range(source.randint(0, 7)))
        assert ours.matches(name) is (re.fullmatch(text, name) is not None), (text, name)


@pytest.mark.parametrize(
    "text",
    ["(?:a|a|a){40}c", "(.*)" * 12 + "x", "((a*)*)*b", "(a?){300}a{300}b", "(x|xx|xxx|x?x?)" * 30 + "y", "(.*a){30}x"],
)
def test_patterns_made_to_run_for_ever_end(text: str) -> None:
    """What makes a backtracking matcher run for longer than a life is answered."""
    ours = Pattern(text)
    assert [ours.matches("a" * 90 + str(i)) for i in range(20)] == [False] * 20


def test_a_pattern_is_not_worn_out_by_use() -> None:
    """What was worked out once costs nothing again, however many names of however many adapters are held against it."""
    text = r"model\.layers\.[0-9]{1,2}\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)"
    one = Pattern(text)
    names = [f"model.layers.{n}.self_attn.{part}_proj" for n in range(40) for part in "qkvox"]
    for _ in range(400):
        assert {one.matches(name) for name in names} == {True, False}
    assert one.matches("model.layers.7.mlp.up_proj") is True


@pytest.mark.parametrize("text", ["a{,}b", "a{}", "(ab){,}", "a{,2}b", "a{1,}"])
def test_braces_are_read_as_python_reads_them(text: str) -> None:
    """Bounds that are left out are bounds, and empty braces are letters."""
    one = Pattern(text)
    for name in ("", "a", "b", "ab", "aab", "aaab", "abab", "a{}", "a{,}b"):
        assert one.matches(name) is (re.fullmatch(text, name) is not None)


@pytest.mark.parametrize(("stem", "code"), [("layer.{}", None), ("layer[.]{}", "adapter-pattern-untried")])
def test_a_table_without_end_costs_little(stem: str, code: str | None) -> None:
    """Of names any number is known to be sound without a look; of expressions so many are tried, and the rest told."""
    table = {stem.format(number): 4 for number in range(5000)}
    found = peft_faults.judge({"peft_type": "LORA", "r": 4, "rank_pattern": table}, "adapter_config.json")
    assert [one.code for one in found] == ([code] if code else [])
    assert all("3000 patterns" in one.message for one in found)
