"""What is known of PEFT without a folder: its types, its patterns, its numbers."""

import dataclasses

import pytest

from weighbridge.adapters import peft_config, peft_types


def test_table_of_types_is_peft_s_own() -> None:
    """The table of PEFT's types, prefixes and fields is what the installed PEFT has."""
    mapping = pytest.importorskip("peft.mapping")
    peft = pytest.importorskip("peft")
    known = {str(getattr(t, "value", t)): t for t in mapping.PEFT_TYPE_TO_CONFIG_MAPPING}
    if peft.__version__.split(".")[:2] != ["0", "21"]:
        pytest.skip(f"the table is of PEFT 0.21, {peft.__version__} is installed")
    assert set(known) == set(peft_types.KINDS)
    for name, kind in peft_types.KINDS.items():
        config = mapping.PEFT_TYPE_TO_CONFIG_MAPPING[known[name]]
        assert {f.name for f in dataclasses.fields(config)} == kind.fields | peft_types.COMMON_FIELDS
        assert mapping.PEFT_TYPE_TO_PREFIX_MAPPING[known[name]] == kind.prefix


@pytest.mark.parametrize(
    ("pattern", "module", "value"),
    [
        ("q_proj", "model.layers.0.self_attn.q_proj", 8),
        ("q_proj", "model.layers.0.self_attn.kq_proj", None),
        (r"layers\.[0-9]+\.mlp", "model.layers.12.mlp", 8),
        ("q_proj|v_proj", "model.v_proj", 8),
        ("(?i)Q_PROJ", "q_proj", None),
        ("layers.[01].up", "layers.1.up", 8),
        (r"up\d", "up7", 8),
        ("up_proj$", "up_proj", 8),
        ("a" * 5000, "a" * 5000, None),
    ],
)
def test_patterns_are_looked_up_as_peft_does(pattern: str, module: str, value: int | None) -> None:
    """A pattern stands for the modules whose path ends with it; what cannot be tried stands for none."""
    assert peft_config.in_pattern({"other": 4, pattern: 8}, module) == value


@pytest.mark.parametrize("rank", [10**400, float("inf"), float("nan"), True, "8", None])
def test_what_is_no_number_of_64_bits_is_none(rank: object) -> None:
    """Numbers beyond reason, texts and flags are not taken for a rank."""
    assert peft_config.number(rank) is None
