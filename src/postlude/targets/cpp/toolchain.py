"""The C++ compiler and the instruction set of this machine.

`compiler()` finds a compiler: ``$CXX`` if set (a whole command line, so ``CXX="ccache g++"`` works), else g++, clang++, c++, and
last the clang that comes with the `ziglang` wheel. `detect()` reads the CPU's features and picks the `Isa`; whoever wants less
(a test, a fleet of mixed machines) passes an `Isa` explicitly. What is done with the two is in `build`.

Instruction sets are spelled out flag by flag, not ``-march=native``: the same Isa then means the same code on every machine that
shares a cache folder, and the cache key needs no CPU model.
"""

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from postlude.errors import CompilerFailed, CompilerNotFound

_NAMES = ("g++", "clang++", "c++")

#: Flags of every compilation. Many objects with equal names live in one process, so nothing in them may be unified by
#: name: inline functions are hidden, and GCC's unique symbols (below) are off. Contraction to FMA is wanted; NaN, Inf and
#: -0.0 must behave as in ATen, so no -ffast-math.
_COMMON = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility-inlines-hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-w",
)


@dataclass(frozen=True, slots=True)
class Isa:
    """One instruction set variant: its name, the CPU features it needs and the compiler flags that turn them on."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    macro: str

    def __str__(self) -> str:
        return self.name


_AVX2_FEATURES = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2")
_AVX512_FEATURES = _AVX2_FEATURES | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AVX512_FLAGS = (
    *_AVX2_FLAGS,
    "-mavx512f",
    "-mavx512bw",
    "-mavx512dq",
    "-mavx512vl",
    "-mprefer-vector-width=512",
)

AVX512_BF16 = Isa(
    "avx512_bf16",
    _AVX512_FEATURES | {"avx512_bf16"},
    (*_AVX512_FLAGS, "-mavx512bf16"),
    "__AVX512BF16__",
)
_AMX_FEATURES = frozenset({"amx_tile", "amx_bf16"})
AMX_BF16 = Isa(
    "amx_bf16",
    AVX512_BF16.needs | _AMX_FEATURES,
    (*AVX512_BF16.flags, "-mamx-tile", "-mamx-bf16"),
    "__AMX_BF16__",
)
AVX512 = Isa("avx512", _AVX512_FEATURES, _AVX512_FLAGS, "__AVX512F__")
AVX2 = Isa("avx2", _AVX2_FEATURES, _AVX2_FLAGS, "__AVX2__")
PORTABLE = Isa("portable", frozenset(), (), "")

#: Best first.
ISAS: tuple[Isa, ...] = (AMX_BF16, AVX512_BF16, AVX512, AVX2, PORTABLE)


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler that answered."""

    command: tuple[str, ...]
    version: str
    target: str
    openmp: bool
    gcc: bool

    @property
    def identity(self) -> str:
        """What tells two compilers apart in a cache key."""
        return f"{' '.join(self.command)}|{self.version}|{self.target}"

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of every compilation with this compiler."""
        own = ("-fno-gnu-unique",) if self.gcc else ()
        return (*_COMMON, *own, "-fopenmp") if self.openmp else (*_COMMON, *own)

    @property
    def shared(self) -> tuple[str, ...]:
        """Flags that link a shared object (undefined symbols are looked up in the running process on macOS)."""
        return ("-shared", "-undefined", "dynamic_lookup") if "apple" in self.target else ("-shared",)

    def run(self, arguments: Iterable[str], *, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run the compiler; what it says and returns is for the caller to judge."""
        try:
            return _run((*self.command, *arguments), stdin)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompilerFailed(self.identity, str(error)) from error


def _run(command: tuple[str, ...], stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a compiler with messages in English, whatever the user's locale."""
    return subprocess.run(
        command,
        input=stdin,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=600,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )


def _candidates() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [(path,) for name in _NAMES if (path := shutil.which(name))]
    if find_spec("ziglang"):
        found.append((sys.executable, "-m", "ziglang", "c++", *_zig_target()))
    return found


def _zig_target() -> tuple[str, ...]:
    """Zig brings C libraries for many systems: what it builds must use the one that this process runs on."""
    library, version = platform.libc_ver()
    if sys.platform != "linux" or library != "glibc":
        return ()
    oldest = min(version, "2.17", key=lambda text: [int(part) for part in text.split(".")])
    return ("-target", f"{platform.machine()}-linux-gnu.{oldest}")


def _probe(command: tuple[str, ...]) -> Compiler | None:
    try:
        version = _run((*command, "--version"))
        target = _run((*command, "-dumpmachine"))
    except (OSError, subprocess.TimeoutExpired):
        return None
    if version.returncode != 0 or not version.stdout:
        return None
    first_line = version.stdout.splitlines()[0]
    is_gcc = "Free Software Foundation" in version.stdout
    triple = target.stdout.strip() or platform.machine()
    return Compiler(command, first_line, triple, openmp=is_gcc or _links_openmp(command), gcc=is_gcc)


def _links_openmp(command: tuple[str, ...]) -> bool:
    """GCC always can; a clang may come without omp.h or the runtime library."""
    source = "#include <omp.h>\nint main() { return omp_get_max_threads() < 1; }\n"
    try:
        return _run((*command, "-fopenmp", "-x", "c++", "-", "-o", os.devnull), source).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@lru_cache(maxsize=8)
def _find(cxx: str | None, path: str | None) -> Compiler:
    # The arguments are the parts of the environment that decide, so that a change of either is seen.
    del path
    if cxx:
        command = tuple(shlex.split(cxx))
        program = shutil.which(command[0])
        found = _probe((program, *command[1:])) if program else None
        if found is None:
            raise CompilerNotFound(f"CXX={cxx!r}, which does not run")
        return found
    for candidate in _candidates():
        if found := _probe(candidate):
            return found
    raise CompilerNotFound(f"no {', '.join(_NAMES)} on PATH and no ziglang package")


def compiler(command: str | None = None) -> Compiler:
    """The C++ compiler to use, or `CompilerNotFound`. `command` takes the place of the environment variable CXX."""
    return _find(command or os.environ.get("CXX") or None, os.environ.get("PATH"))


@lru_cache(maxsize=1)
def cpu_features() -> frozenset[str]:
    """Features of this CPU that the operating system lets programs use, in the spelling of Linux's /proc/cpuinfo."""
    if platform.machine().lower() not in ("x86_64", "amd64", "i686"):
        return frozenset()
    if found := _cpuinfo():
        return found - refused_features()
    if sys.platform == "darwin":
        return parse_sysctl(_output(("sysctl", "-n", "machdep.cpu.features", "machdep.cpu.leaf7_features")))
    try:
        return parse_macros(compiler().run(["-march=native", "-dM", "-E", "-x", "c++", os.devnull]).stdout)
    except (CompilerNotFound, CompilerFailed):
        return frozenset()


@lru_cache(maxsize=1)
def _cpuinfo() -> frozenset[str]:
    try:
        return parse_cpuinfo(Path("/proc/cpuinfo").read_text())
    except OSError:
        return frozenset()


def refused_features() -> frozenset[str]:
    """Features that the CPU has, and that the operating system does not let this process use."""
    return frozenset() if "amx_tile" not in _cpuinfo() or tiles_permitted() else _AMX_FEATURES & _cpuinfo()


@lru_cache(maxsize=1)
def tiles_permitted() -> bool:
    """Whether Linux lets this process use AMX's registers. It gives them on request, once, to all threads of a process."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    try:
        return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)
    except (OSError, AttributeError):
        return False


def _output(command: tuple[str, ...]) -> str:
    try:
        return _run(command).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def parse_cpuinfo(text: str) -> frozenset[str]:
    """The features all processors share (a machine with unlike cores may run us on any of them)."""
    lines = [line.partition(":")[2].split() for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return frozenset.intersection(*map(frozenset, lines)) if lines else frozenset()


def parse_sysctl(text: str) -> frozenset[str]:
    """Features as macOS names them: AVX2 -> avx2."""
    return frozenset(word.lower().replace(".", "_") for word in text.split())


def parse_macros(text: str) -> frozenset[str]:
    """Features from predefined macros: __AVX512BF16__ -> avx512_bf16, __BMI__ -> bmi1, the rest by their names."""
    spelling = {"avx512bf16": "avx512_bf16", "bmi": "bmi1"}
    words = (line.split()[1].strip("_").lower() for line in text.splitlines() if line.startswith("#define __"))
    return frozenset(spelling.get(word, word) for word in words)


def detect(features: frozenset[str] | None = None) -> Isa:
    """The best Isa of this machine (or of a machine with `features`)."""
    have = cpu_features() if features is None else features
    return next(isa for isa in ISAS if isa.needs <= have)


@lru_cache(maxsize=16)
def usable(isa: Isa, with_compiler: Compiler) -> Isa:
    """`isa`, or the best lower one whose flags this compiler knows (g++ 9 has no avx512_bf16)."""
    lower = ISAS[ISAS.index(isa) :] if isa in ISAS else (isa,)
    for candidate in lower:
        done = with_compiler.run([*candidate.flags, "-dM", "-E", "-x", "c++", os.devnull])
        if done.returncode == 0 and candidate.macro in done.stdout:
            return candidate
    raise CompilerFailed(with_compiler.identity, done.stderr.strip())


def isa_named(name: str) -> Isa:
    """An `Isa` by its name, as options and command lines give it."""
    for isa in ISAS:
        if isa.name == name:
            return isa
    raise ValueError(f"no instruction set {name!r}; there are {', '.join(map(str, ISAS))}")
