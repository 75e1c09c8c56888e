"""The inert pickle machine: the same values as pickle for plain data, records for everything else, a budget for all."""

import collections
import gc
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.adapters.formats import globals as judged
from weighbridge.adapters.formats.inert import Blob, Record, TupleKey, uncollected
from weighbridge.adapters.formats.machine import Machine
from weighbridge.adapters.formats.protocol import FormatFault
from weighbridge.adapters.formats.torch_calls import answers
from weighbridge_testlib import containers as c
from weighbridge_testlib.containers import call, name

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 80), 1 << 80)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.text(max_size=10) | st.integers(-(1 << 60), 1 << 60), inner, max_size=5)
        | st.lists(inner, max_size=4).map(tuple)
    ),
    max_leaves=25,
)


def run(data: bytes) -> Any:
    """Run one pickle."""
    machine = Machine()
    machine.calls = answers(machine)
    return machine.run(data)


@settings(max_examples=400, deadline=None)
@given(value=PLAIN, protocol=st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_data_is_itself(value: Any, protocol: int) -> None:
    """Whatever plain value pickle writes, in any protocol, the machine reads as that value."""
    assert run(pickle.dumps(value, protocol=protocol)) == value


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_shared_and_looping_values_stay_so(protocol: int) -> None:
    """What is one object in the pickle is one object in the tree, loops included."""
    shared = ["x"]
    loop: list[Any] = [shared, shared]
    loop.append(loop)
    found = run(pickle.dumps(loop, protocol=protocol))
    assert found[0] is found[1]
    assert found[2] is found


def test_containers_of_the_standard_library_are_plain() -> None:
    """Ordered, default and counting dicts are dicts; sets and others are records of what they hold."""
    found = run(pickle.dumps([collections.OrderedDict(a=1), collections.defaultdict(list, b=2), {3}], protocol=2))
    assert found[:2] == [{"a": 1}, {"b": 2}]
    assert isinstance(found[2], Record)
    assert found[2].symbol.full == "builtins.set"
    assert found[2].args == ([3],)


def test_tuples_as_keys_become_texts() -> None:
    """A tuple as a key is kept as a text, because tuples can be made to collide and to nest without end."""
    found = run(pickle.dumps({(1, "a"): 1, ((2,), None): 2}))
    assert list(found) == ["(1, a)", "((2), None)"]
    assert all(isinstance(key, TupleKey) for key in found)


def test_long_texts_stay_where_they_are() -> None:
    """A long text is not copied into the tree; its place and size are."""
    found = run(pickle.dumps("x" * 100_000, protocol=2))
    assert isinstance(found, Blob)
    assert (found.size, found.text) == (100_000, True)


def test_objects_are_records_of_their_making() -> None:
    """An object of an unknown class keeps the class's name, its arguments and its state."""
    data = b"\x80\x02" + call(name("a.b", "C"), 1, "x") + c.plain({"s": 2}) + b"b."
    found = run(data)
    assert (found.symbol.full, found.args, found.state) == ("a.b.C", (1, "x"), {"s": 2})
    assert found.symbol.called
    assert found.symbol.built


def test_old_names_are_today_s() -> None:
    """Names of Python 2 are judged as what they are today."""
    machine = Machine()
    machine.run(b"\x80\x02(" + name("__builtin__", "eval") + name("cPickle", "loads") + name("copy_reg", "_x") + b"t.")
    assert judged.foreign(machine.symbols.values()) == ["builtins.eval", "copyreg._x", "pickle.loads"]
    assert [h.subject for h in judged.hazards(machine.symbols.values()) if h.severity == "block"] == [
        "builtins.eval",
        "pickle.loads",
    ]


def test_a_place_is_named_where_a_pickle_breaks() -> None:
    """A damaged pickle says near which byte."""
    with pytest.raises(FormatFault) as caught:
        run(b"\x80\x02}(K\x01u.")
    assert caught.value.code == "pickle-damaged"
    assert caught.value.data == {"position": 7}


def test_the_collector_is_as_it_was() -> None:
    """Building a tree pauses the collector of cycles and gives it back, whatever happens."""
    assert gc.isenabled()
    seen: list[bool] = []

    def broken() -> None:
        with uncollected():
            seen.append(gc.isenabled())
            run(b"\x80\x02R.")

    with pytest.raises(FormatFault):
        broken()
    assert seen == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
