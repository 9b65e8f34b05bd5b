"""What this machine offers: Python, torch, compilers, processor features, GPUs, cache, and what each target can do with them.

`examine` returns findings as plain data, `environment` the short record that benchmark results carry. Nothing here may
fail because something is missing: what is missing is what the doctor is asked about. Printing is in `postlude.cli`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from postlude.errors import EnvironmentUnsupported, PostludeError

if TYPE_CHECKING:
    from collections.abc import Iterator

State = Literal["ok", "note", "problem"]

PYTHON_FROM, PYTHON_BEFORE = (3, 11), (3, 15)
TORCH_FROM = (2, 11)
# Processor features that choose a kernel variant, as Linux names them.
FEATURES = (
    "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_int8",
    "asimd", "asimdhp", "bf16", "i8mm", "sve",
)  # fmt: skip
# The targets for GPUs, and what each computes where it can be used.
GPU_TARGETS = {
    "cute": "products of many rows with their epilogues, in bfloat16 and float16",
    "triton": "products of few rows with their epilogues, and what cute can't take",
}
# Packages whose versions matter to what Postlude can do or is compared with.
PACKAGES = ("triton", "nvidia-cutlass-dsl", "quack-kernels", "transformers", "onnxruntime", "openvino")


@dataclass(frozen=True)
class Finding:
    """One fact about the machine.

    Attributes:
        subject: what it is about, a few words.
        state: "ok", "note" (works, but less than it could) or "problem" (torch.compile with Postlude does not run).
        text: what was found.
        remedy: what to do about it; empty where there is nothing to do.
    """

    subject: str
    state: State
    text: str
    remedy: str = ""


def version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def python_finding(python: tuple[int, int] | None = None) -> Finding:
    """Whether torch.compile and Postlude run on this Python."""
    here = python or sys.version_info[:2]
    text = platform.python_version() if python is None else ".".join(map(str, python))
    if PYTHON_FROM <= here < PYTHON_BEFORE:
        return Finding("Python", "ok", text)
    why = "torch.compile does not run on it yet" if here >= PYTHON_BEFORE else "it is older than Postlude supports"
    return Finding("Python", "problem", f"{text}: {why}", "Use Python 3.11 to 3.14.")


def torch_finding() -> Finding:
    """Whether a torch that Postlude supports can be imported."""
    remedy = "Install it: pip install 'torch>=2.11'"
    try:
        import torch
    except ImportError as error:
        return Finding("torch", "problem", f"cannot be imported: {first_line(error)}", remedy)
    numbers = torch.__version__.split("+")[0].split(".")[:2]
    if tuple(int(number) for number in numbers) < TORCH_FROM:
        return Finding("torch", "problem", f"{torch.__version__} is older than Postlude supports", remedy)
    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    return Finding("torch", "ok", f"{torch.__version__} ({kind}, {torch.get_num_threads()} threads)")


def compile_finding(backend: str, *, trace: bool = False) -> Finding:
    """Whether torch.compile with this back-end gives the right result for one small layer; `trace` lets its error through."""
    import torch

    subject = f'torch.compile(backend="{backend}")'
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=generator) for size in ((24, 40), (40, 56)))

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ weight)

    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what they would say stands in the other findings
            got = torch.compile(layer, backend=backend)(x, weight)
    except Exception as error:
        if trace:
            raise
        return Finding(subject, "problem", f"failed: {first_line(error)}", "The full error: postlude doctor --trace")
    seconds = time.perf_counter() - start
    distance = float((got.double() - layer(x.double(), weight.double())).abs().max())
    if distance > 1e-4:
        return Finding(subject, "problem", f"a small layer came out wrong by {distance:.1e}", "Please report this.")
    return Finding(subject, "ok", f"a small layer compiled and ran in {seconds:.1f} s, error {distance:.0e}")


def processor() -> str:
    """The processor's name, as the system gives it; virtual machines often hide all but the family and model numbers."""
    facts: dict[str, str] = {}
    for line in _lines("/proc/cpuinfo"):
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    name = facts.get("model name") or facts.get("Model") or platform.processor() or platform.machine()
    numbers = [f"{key.removeprefix('cpu ')} {facts[key]}" for key in ("cpu family", "model") if key in facts]
    return f"{name}, {' '.join(numbers)}" if numbers else name


def features() -> list[str]:
    """The processor features that choose a kernel variant or matter to a peer."""
    from postlude.targets.cpp.toolchain import cpu_features

    found = cpu_features()
    return [feature for feature in FEATURES if feature in found]


def processor_finding() -> Finding:
    """The processor and its vector extensions."""
    found = " ".join(features()) or "no known vector extension"
    return Finding("processor", "ok", f"{processor()} ({platform.machine()}), {usable_cores()} cores: {found}")


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpp_findings() -> Iterator[Finding]:
    """The compiler that builds C++ kernels when a model is compiled, and the kernels that this machine gets."""
    from postlude.targets.cpp import toolchain

    without = "GEMMs stay with Inductor and torch's libraries"
    try:
        compiler = toolchain.compiler()
        isa = toolchain.usable(toolchain.detect(), compiler)
    except PostludeError as error:
        yield Finding("C++ compiler", "note", first_line(error))
        yield Finding("target cpp", "note", f"off: {without}")
        return
    openmp = "" if compiler.openmp else "; no OpenMP, so kernels use one thread"
    remedy = "" if compiler.openmp else "Install libomp (Debian, Ubuntu: apt install libomp-dev; macOS: brew install libomp)."
    yield Finding(
        "C++ compiler", "ok" if compiler.openmp else "note", f"{compiler.version}: {' '.join(compiler.command)}{openmp}", remedy
    )
    best = toolchain.detect()
    tiles = " (in AMX tiles)" if isa is toolchain.AMX_BF16 else ""
    text = f"kernels for {isa}: float32, bfloat16{tiles}, float16, float64"
    if isa != best:
        remedy = "Install a newer g++ or clang++ and set CXX to its command."
        yield Finding("target cpp", "note", f"{text}; the processor has {best}, which this compiler does not know", remedy)
    elif refused := toolchain.refused_features():
        yield Finding("target cpp", "note", f"{text}; the system does not let this process use {', '.join(sorted(refused))}")
    else:
        yield Finding("target cpp", "ok", text)


def gpu_findings() -> Iterator[Finding]:
    """The GPUs that torch sees, and the packages that their targets need."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        yield Finding("GPU", "ok", "none that torch can use" if built else "none: this torch is built for the CPU")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        text = f"{properties.name}, sm_{properties.major}{properties.minor}, {memory:.0f} GiB"
        yield Finding(f"GPU {index}", "ok", text)
    from postlude.targets.base import target

    for name, what in GPU_TARGETS.items():
        reason = target(name).unavailable()
        yield Finding(f"target {name}", "ok", what) if reason is None else Finding(f"target {name}", "note", f"off: {reason}")


def cache_finding() -> Finding:
    """The folder with compiled kernels: where it is, whether it can be written, how full it is."""
    from postlude import cache

    folder = cache.folder()
    lost = "Kernels are rebuilt in every process. Make the folder writable, or set POSTLUDE_CACHE_DIR to another."
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(place, os.W_OK):
        return Finding("cache", "note", f"{folder}: {'it' if place == folder else place} is not writable", lost)
    if place != folder:
        return Finding("cache", "ok", f"{folder} (not created yet)")
    store = cache.Cache(folder)
    return Finding("cache", "ok", f"{folder}: {len(store.entries())} kernels, {store.size() / 2**20:.1f} MiB")


def examine(backend: str = "postlude", *, trace: bool = False) -> list[Finding]:
    """Look at everything, and compile one small layer. Stops after the first findings where Python or torch rule out the rest."""
    findings = []
    for look in (python_finding, torch_finding):
        findings.append(look())
        if findings[-1].state == "problem":
            return findings
    findings += [processor_finding(), *gpu_findings(), *cpp_findings(), cache_finding()]
    findings.append(Finding("target aten", "ok", "interprets every Region with torch's own operators (the reference)"))
    findings.append(compile_finding(backend, trace=trace))
    return findings


def require_compile() -> None:
    """Raise `EnvironmentUnsupported` where torch.compile cannot run, with what is wrong and what to do."""
    for finding in (python_finding(), torch_finding()):
        if finding.state == "problem":
            raise EnvironmentUnsupported(f"{finding.subject} {finding.text}. {finding.remedy}")
    from postlude.targets.cpp import toolchain

    toolchain.compiler()  # Inductor needs one on a CPU too; where there is none, this error says more than Inductor's


def compiler_version() -> str | None:
    """The C++ compiler in use, or None."""
    from postlude.targets.cpp import toolchain

    try:
        return toolchain.compiler().identity
    except PostludeError:
        return None


def environment() -> dict[str, Any]:
    """The record that a measurement carries, so that its numbers can be judged later."""
    import torch

    return {
        "processor": processor(),
        "features": features(),
        "cores": usable_cores(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "compiler": compiler_version(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "postlude": version("postlude"),
        "packages": {name: found for name in PACKAGES if (found := version(name))},
    }


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
