"""What a global that a pickle names would mean to a plain load. We never do one; whoever reads a finding might.

harmless   rebuilds data: numpy arrays, dates, paths, sets, enums
foreign    a class or function of somebody's package: a plain load would import that package
runs-code  can do anything: the file is an attack, or carries a program
"""

import sys
from collections.abc import Iterable
from typing import Final

from weighbridge.adapters.formats.inert import Symbol
from weighbridge.adapters.formats.protocol import Hazard, shown
from weighbridge.adapters.formats.torch_names import SAFE_LOADING, TORCH_ALLOWED


def _words(text: str) -> list[str]:
    return text.split()


_HARMLESS_MODULES: Final = frozenset(
    _words(
        "collections datetime decimal fractions uuid pathlib pathlib._local enum typing ipaddress zoneinfo numbers "
        "dataclasses inspect abc"
    )
)
"""Modules whose classes are values. Their few functions that do more are in _CODE."""

_BUILTINS: Final = (
    "set frozenset bytearray bytes complex int float str bool list dict tuple slice range object NotImplemented "
    "Ellipsis NoneType getattr Exception ValueError RuntimeError KeyError TypeError"
)
_HARMLESS: Final = frozenset(
    [f"builtins.{name}" for name in _words(_BUILTINS)]
    + [f"numpy{core}.{name}" for core in (".core", "._core") for name in _words(
        "multiarray.scalar multiarray._reconstruct numeric._frombuffer")]
    + [f"numpy.{name}" for name in _words("dtype ndarray float64 float32 float16 int64 int32 bool_ str_ bytes_")]
    + [f"numpy.dtypes.{name}DType" for name in _words("Float64 Float32 Float16 Int64 Int32 Bool UInt8 UInt32 Str")]
    + [f"numpy.random._pickle.__{name}_ctor" for name in _words("randomstate generator bit_generator")]
    + [f"copyreg.{name}" for name in _words("_reconstructor __newobj__ __newobj_ex__")]
    + _words(
        "_codecs.encode argparse.Namespace types.SimpleNamespace types.MappingProxyType functools.partial "
        "logging.getLogger logging.Logger re._compile array.array array._array_reconstructor time.struct_time "
        "random.Random random.getrandbits signal.Signals _io.BytesIO io.BytesIO itertools.count itertools.chain "
        "torch.storage._load_from_bytes torch._utils._rebuild_xla_tensor torch._tensor._rebuild_from_type"
    )
)  # fmt: skip

_CODE_MODULES: Final = frozenset(
    _words(
        "os posix nt subprocess sys socket ssl shutil imp runpy pty _ctypes code codeop pickle _pickle cpickle marshal "
        "webbrowser venv pydoc doctest timeit cprofile profile bdb pdb trace threading _thread commands "
        "popen2 platform tempfile zipimport zipfile tarfile ftplib smtplib telnetlib sh mmap fcntl resource gc atexit "
        "sched crypt getpass test turtle shelve fileinput glob linecache mailcap msilib nntplib poplib imaplib "
        "pkgutil modulefinder site sysconfig symtable tracemalloc faulthandler winreg _winapi _posixsubprocess io _io"
    )
)
"""Modules with no business in weights. Only they themselves: a `code.model` or `test.net` is somebody's own folder."""

_CODE_PACKAGES: Final = frozenset(
    _words(
        "importlib multiprocessing concurrent asyncio http urllib xmlrpc ctypes distutils setuptools pip pkg_resources "
        "ensurepip lib2to3 unittest tkinter sqlite3 dbm idlelib requests httpx aiohttp urllib3 fsspec paramiko fabric "
        "boto3 botocore dill cloudpickle joblib ipython ipykernel jupyter_client pexpect psutil"
    )
)
"""Packages with no business in weights, whatever is named in them."""

_PACKAGES: Final = frozenset(
    _words(
        "collections email encodings html json logging pathlib re os sysconfig curses wsgiref xml zoneinfo pydoc_data "
        "turtledemo tomllib"
    )
)
"""The other packages of the standard library: what is named in them belongs to it."""

_CODE: Final = frozenset(
    [f"builtins.{name}" for name in _words(
        "eval exec compile open __import__ setattr delattr globals locals vars breakpoint input apply execfile file "
        "reload memoryview map filter reduce super help exit quit __build_class__ type print")]
    + [f"types.{name}" for name in _words("FunctionType CodeType MethodType ModuleType LambdaType")]
    + [f"{module}.{name}" for module in ("operator", "_operator") for name in ("attrgetter", "methodcaller")]
    + [f"numpy.{name}" for name in _words("load save savetxt fromfile loadtxt genfromtxt memmap DataSource")]
    + _words(
        "functools.reduce _functools.reduce codecs.open codecs.decode _codecs.decode logging.config torch.load "
        "torch.serialization.load torch.compile torch.ops.load_library torch.classes.load_library "
        "torch.utils.collect_env.run torch._dynamo.guards.GuardBuilder.get pandas.eval pandas.read_pickle "
        "pandas.io.pickle.read_pickle yaml.load yaml.unsafe_load numpy.core.multiarray.fromfile inspect.getsource "
        "typing.get_type_hints typing.ForwardRef transformers.pipeline huggingface_hub.hf_hub_download "
        "huggingface_hub.snapshot_download dataclasses.make_dataclass collections.namedtuple"
    )
)  # fmt: skip

_CODE_PREFIXES: Final = tuple(
    _words(
        "torch.hub. torch.jit. torch.package. torch._inductor. torch.utils.cpp_extension. torch.testing. torch.export. "
        "torch.utils._config_module. torch.utils.bottleneck. torch.fx. torch.multiprocessing. "
        "torch.distributed.elastic. torch.distributed.run torch.distributed.launch numpy.testing. numpy.f2py. "
        "numpy.distutils. numpy.lib.npyio. numpy.lib._npyio numpy.ctypeslib test.support. scipy.io. "
        "sklearn.externals. keras. tensorflow."
    )
)


def foreign(symbols: Iterable[Symbol]) -> list[str]:
    """Return what a pickle names beyond torch's tensor rebuilding and `collections`, sorted."""
    return sorted({s.full for s in symbols if s.module and s.full not in TORCH_ALLOWED and s.module != "collections"})


def safe(symbols: Iterable[Symbol]) -> bool:
    """Return whether torch's own safe loading allows all of them."""
    return all(symbol.full in SAFE_LOADING for symbol in symbols)


def hazards(symbols: Iterable[Symbol]) -> list[Hazard]:
    """Return what must be known of the globals of a pickle, blocking ones first."""
    found: dict[str, Hazard] = {}
    for symbol in symbols:
        hazard = _judge(symbol)
        if hazard and (symbol.full not in found or hazard.severity == "block"):
            found[symbol.full] = hazard
    order = {"block": 0, "warn": 1, "note": 2}
    return sorted(found.values(), key=lambda hazard: (order[hazard.severity], hazard.subject))


def _judge(symbol: Symbol) -> Hazard | None:
    full, module = symbol.full, symbol.module
    if not module or full in TORCH_ALLOWED or full in _HARMLESS:
        return None
    top = module.partition(".")[0].lower()
    code = module.lower() in _CODE_MODULES or top in _CODE_PACKAGES
    if code or full in _CODE or full.startswith(_CODE_PREFIXES) or _reaches(symbol):
        return Hazard(
            "runs-code",
            "block",
            full,
            f"the pickle {'calls' if symbol.called else 'names'} {shown(full)}: a plain load would run it",
            {"global": full, "called": symbol.called},
        )
    if module in _HARMLESS_MODULES and not (symbol.called and "." in symbol.name):
        return None
    if module in sys.stdlib_module_names or top in _PACKAGES or top in {"__builtin__", "__builtins__"}:
        severity, verb = ("block", "calls") if symbol.called else ("note", "names")
        return Hazard(
            "runs-code" if symbol.called else "foreign-global",
            "block" if severity == "block" else "note",
            full,
            f"the pickle {verb} {shown(full)}, which has no business in weights",
            {"global": full, "called": symbol.called},
        )
    if top == "torch" and symbol.called and "rebuild" in symbol.name:
        return Hazard(
            "tensor-unknown",
            "block",
            full,
            f"tensors are rebuilt by {shown(full)}, which this version does not know: they are not in the list",
            {"global": full},
        )
    function = symbol.called and symbol.name.rpartition(".")[2].lstrip("_")[:1].islower()
    return Hazard(
        "foreign-call" if function else "foreign-global",
        "warn" if function else "note",
        full,
        f"the pickle {'calls' if symbol.called else 'names'} {shown(full)}: a plain load would import that package",
        {"global": full, "called": symbol.called},
    )


def _reaches(symbol: Symbol) -> bool:
    """Whether the name walks through a module into another, into attributes that no value has, or is no name at all."""
    names = symbol.name.split(".")
    parts = [*symbol.module.split("."), *names]
    hidden = any(part.startswith("__") and part.endswith("__") and len(part) > 4 for part in parts)
    return hidden or (len(names) > 1 and names[0].lstrip("_")[:1].islower()) or not all(map(_is_name, parts))


def _is_name(part: str) -> bool:
    return part == "<locals>" or part.isidentifier()
