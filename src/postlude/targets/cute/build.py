"""From a generated module to a compiled kernel, through the content-addressed cache.

Two kinds of entries: the generated source, from which it is imported, and the compiled object (host code that encodes the tensor
maps and launches, with the device code inside), which a later process loads in milliseconds. An object is compiled for symbolic
sizes: types, which dimension lies along memory, the configuration and the architecture are all that it is special to.
"""

import hashlib
import importlib.metadata
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from postlude import cache
from postlude.ir import Region
from postlude.ir.region import DTYPE_NAMES
from postlude.op import region_of
from postlude.targets.cute import codegen
from postlude.targets.cute.configurations import Configuration
from postlude.targets.cute.form import Argument, Form, forms


@dataclass(frozen=True)
class Target:
    """What a kernel is compiled for.

    Attributes:
        major: major compute capability.
        minor: minor compute capability.
        clusters: clusters of each size 1, 2, 4 that run at once on the device.
    """

    major: int
    minor: int
    clusters: tuple[int, int, int]

    @property
    def architecture(self) -> str:
        """As the compiler names it."""
        return f"sm_{self.major}{self.minor}{'a' if self.major >= 9 else ''}"

    def active_clusters(self, size: int) -> int:
        """Clusters of a size that run at once."""
        return self.clusters[(1, 2, 4).index(size)]


#: For each argument of a kernel: its number of dimensions, which differs from that of its axes where a batch is several, and
#: which of them has a stride of 1 (-1: none, it is one element).
Layout = tuple[tuple[int, int], ...]

_OBJECT = "kernel.o"
_FUNCTION = "launch"
_lock = threading.Lock()


@dataclass(frozen=True)
class Specialization:
    """One kernel, with all that its object is special to.

    Attributes:
        program: the Region's text.
        index: of the group.
        reverse: for a pair: whether its second right operand lies below the first.
        layout: where each tensor's elements lie behind each other.
        configuration: tiles and clusters.
        target: what it is compiled for.
    """

    program: str
    index: int
    reverse: bool
    layout: Layout
    configuration: Configuration
    target: Target

    @property
    def region(self) -> Region:
        """The program."""
        return region_of(self.program)

    @lru_cache(maxsize=4096)  # noqa: B019 (a plain value: equal ones are one entry)
    def key(self) -> str:
        """Names the object in the cache."""
        parts = {
            "source": codegen.generate(self.region, self.reverse),
            "group": self.index,
            "layout": self.layout,
            "configuration": asdict(self.configuration),
            "target": asdict(self.target),
            "toolchain": _toolchain(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Attributes:
        function: callable with the group's tensors, operands first.
        address: of the same in C, by TVM-FFI's calling convention.
        module: what holds it in memory.
    """

    function: Callable[..., None]
    address: int
    module: Any


def load(kernel: Specialization) -> Compiled:
    """The compiled kernel, from the cache if it is there, or soon will be."""
    import cutlass.cute as cute

    from postlude.targets.cute import ahead

    ahead.wait(kernel)
    module = cute.runtime.load_module(str(object_path(kernel)), enable_tvm_ffi=True)
    return Compiled(module[_FUNCTION], module.engine.lookup(f"__tvm_ffi_{_FUNCTION}"), module)


def object_path(kernel: Specialization) -> Path:
    """The object file of a kernel, compiled if it is not in the cache."""

    def build(folder: Path) -> None:
        compile_kernel(kernel).export_to_c(object_file_path=str(folder / _OBJECT), function_name=_FUNCTION)

    return cache.default().get_or_build(kernel.key(), build) / _OBJECT


@lru_cache
def _toolchain() -> dict[str, str]:
    """What else decides the object: versions, and our own files that are traced."""
    packages = ("nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi")
    versions = {name: importlib.metadata.version(name) for name in packages}
    return versions | {"traced": traced()}


@lru_cache
def traced() -> str:
    """A hash of our own files that are traced."""
    names = ("build", "functions", "operands", "reductions", "tracing")
    return hashlib.sha256(b"".join((Path(__file__).parent / f"{name}.py").read_bytes() for name in names)).hexdigest()


def compile_kernel(kernel: Specialization, options: str = "") -> Any:
    """Trace and compile a kernel; needs no GPU. One at a time: the compiler is not safe under threads."""
    import cutlass.cute as cute

    region, target = kernel.region, kernel.target
    form = forms(region, kernel.reverse)[kernel.index]
    with _lock:
        module = import_module(codegen.generate(region, kernel.reverse))
        suffix = codegen.suffix_of(region, form)
        gemm = _gemm(getattr(module, f"epilogue{suffix}"), form, kernel.configuration, target)
        stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
        arguments = _fake_arguments(form, kernel.layout)
        options = f"--enable-tvm-ffi --gpu-arch={target.architecture} {options}".strip()
        return cute.compile(getattr(module, f"launch{suffix}"), gemm, *arguments, stream, options=options)


def source_path(region: Region, reverse: bool) -> Path:
    """The file of a Region's generated module."""
    return _stored(codegen.generate(region, reverse))


def _stored(source: str) -> Path:
    key = hashlib.sha256(source.encode()).hexdigest()
    return cache.default().get_or_build(key, lambda folder: _write(folder / "kernel.py", source)) / "kernel.py"


def import_module(source: str) -> ModuleType:
    """The generated module, imported from its file in the cache, where people and tracebacks find it."""
    name = f"postlude_cute_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        path = _stored(source)
        module = ModuleType(name)
        module.__file__ = str(path)
        sys.modules[name] = module
        try:
            exec(compile(source, str(path), "exec"), module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _gemm(epilogue: Any, form: Form, configuration: Configuration, target: Target) -> Any:
    """The GEMM object with this epilogue."""
    import cutlass
    from quack.rounding import RoundingMode

    kinds = codegen.load_kinds(form)
    if configuration.swapped:
        exchanged = {"row": "col", "col": "row"}
        kinds = {name: exchanged.get(kind, kind) for name, kind in kinds.items()}
    cls = epilogue._mint(tuple(kinds.items()), target.major, form.paired, False, (), RoundingMode.RN, (), False)
    tile = (configuration.tile_m, configuration.tile_n, *([configuration.tile_k] if configuration.tile_k else []))
    cluster = (configuration.cluster_m, configuration.cluster_n, 1)
    more = {"pingpong": configuration.pingpong, "is_persistent": True} if target.major in (9, 12) else {}
    gemm = cls(cutlass.Float32, _cutlass_type(form.of_kind("left")[0]), tile, cluster, **more)
    gemm.configuration = configuration
    gemm.active_clusters = target.active_clusters(configuration.cluster_size)
    gemm.block_tile = configuration.block(target.major)
    return gemm


def _cutlass_type(argument: Argument) -> Any:
    import cutlass

    names = {"bf16": "BFloat16", "f16": "Float16", "f32": "Float32", "bool": "Uint8"}
    return getattr(cutlass, names[DTYPE_NAMES[argument.dtype]])


def _fake_arguments(form: Form, layout: Layout) -> list[Any]:
    """Tensors of symbolic sizes and strides; the compiled function checks real ones against them at each call."""
    import cutlass
    import cutlass.cute as cute

    sizes = {axis: cute.sym_int() for argument in form.arguments for axis in argument.axes}
    pair_strides: dict[tuple[str, ...], tuple[Any, ...]] = {}
    fakes = []
    for argument, (dims, unit) in zip(form.arguments, layout, strict=True):
        dtype = _cutlass_type(argument)
        if argument.kind == "scalar":
            fakes.append(cute.runtime.make_fake_tensor(dtype, (1,), stride=(1,), assumed_align=dtype.width // 8))
            continue
        align = alignment(argument)
        elements = max(align * 8 // dtype.width, 1)
        split = dims - len(argument.axes)
        batch = tuple(cute.sym_int() for _ in range(split + 1)) if split else ()
        shape = (*batch, *(sizes[axis] for axis in argument.axes[bool(batch) :]))
        stride = tuple(1 if dim == unit else cute.sym_int64(divisibility=elements) for dim in range(len(shape)))
        if form.paired and argument.kind == "right":
            stride = pair_strides.setdefault(argument.axes, stride)
        fakes.append(cute.runtime.make_fake_tensor(dtype, shape, stride=stride, assumed_align=align))
    if form.reductions:
        fakes.append(cute.runtime.make_fake_tensor(cutlass.Float32, (cute.sym_int64(),), stride=(1,), assumed_align=16))
    return fakes


def alignment(argument: Argument) -> int:
    """Bytes to which an argument's address and strides are multiples: tensor maps need 16, vectors are read 4 bytes at a time."""
    if argument.kind in ("row", "col"):
        return 4
    return argument.dtype.itemsize if argument.kind in ("scalar", "vector", "total") else 16
