"""Whether this target can be used here: the packages, the GPU, and whether what they compile is right."""

import importlib.metadata
import importlib.util
import warnings
from functools import lru_cache, partial

import torch

from postlude.errors import ToolchainRefused
from postlude.ir import parse
from postlude.targets.planned import elsewhere

#: Package -> versions that the kernels were checked with on a GPU.
TESTED = {"nvidia-cutlass-dsl": ("4.7.1",), "quack-kernels": ("0.6.5",)}

#: A bias, an activation, a residual and a second result, on a tile that is cut off on both sides.
_PROBE = (
    "region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16; %row = operand [n] bf16; %tile = operand [m, n] bf16;"
    " %acc = contract %x, %w : f32; %0 = add %acc, %row; %1 = sigmoid %0; %2 = mul %0, %1; %3 = add %2, %tile;"
    " yield [m, n] bf16 %3; yield [m, n] f32 %0"
)
_PROBE_SIZES = {"m": 328, "n": 392, "k": 264}

#: Largest error, relative to the largest result, that the probe may show. bfloat16 keeps 8 bits.
_PROBE_ERROR = 2.0**-7


@lru_cache(maxsize=1)
def unavailable() -> str | None:
    """Why the target can't be used here, or None. Imports nothing heavy and never raises; the self-test is `refused`'s."""
    for module, package in (("cutlass", "nvidia-cutlass-dsl"), ("quack", "quack-kernels"), ("tvm_ffi", "apache-tvm-ffi")):
        try:
            found = importlib.util.find_spec(module) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            return f"the package {package} is not installed: pip install 'postlude[cuda]'"
    if torch.version.hip is not None:
        return "this torch is built for AMD's GPUs, whose capabilities have other meanings"
    try:
        if torch.version.cuda is None or not torch.cuda.is_available():  # ROCm's GPUs are "cuda" to torch as well
            return "no CUDA device is visible to torch"
        major, minor = torch.cuda.get_device_capability()
    except Exception as error:  # whatever a broken driver raises
        return f"torch can't ask the CUDA device: {error}"
    if major not in (9, 10, 12):
        return f"there are no kernels for compute capability {major}.{minor}"
    return None


@lru_cache
def prepare(device: torch.device) -> None:
    """Start compiling the self-test's kernel in the background."""
    from postlude.targets.cute.launcher import submit

    region = parse(_PROBE)
    like = [
        torch.empty([_PROBE_SIZES[axis] for axis in axes], dtype=dtype, device="meta")
        for axes, dtype in [(o.axes, o.dtype) for o in region.operands] + [(y.axes, y.dtype) for y in region.yields]
    ]
    submit(region, like, device, rows_vary=False)


_refused: dict[torch.device, bool] = {}


def refused(device: torch.device) -> bool | None:
    """Whether the self-test failed on a device. The first call runs it; a failure is told as a warning, once.

    None where that is not known: while a CUDA graph is being captured nothing can be run.
    """
    if device not in _refused:
        if torch.cuda.is_current_stream_capturing():
            return None
        try:
            elsewhere(partial(check, device))
            _refused[device] = False
        except ToolchainRefused as error:
            _refused[device] = True
            warnings.warn(str(error), stacklevel=2)
    return _refused[device]


def check(device: torch.device) -> None:
    """Compile and run one kernel.

    Raises:
        ToolchainRefused: it failed, or its results are wrong.
    """
    from postlude.targets.aten import evaluate
    from postlude.targets.cute.launcher import Kernel

    region = parse(_PROBE)
    generator = torch.Generator(device).manual_seed(0)
    operands = [
        torch.randn([_PROBE_SIZES[axis] for axis in o.axes], device=device, dtype=torch.float32, generator=generator).to(o.dtype)
        for o in region.operands
    ]
    results = [torch.full((_PROBE_SIZES["m"], _PROBE_SIZES["n"]), torch.nan, device=device, dtype=y.dtype) for y in region.yields]
    exact = evaluate(region, operands, arithmetic=torch.float64, rounded=False)
    kernel = Kernel(region, trusted=True)
    # As Python launches it; then as graphs do: the first such call finds the plan, the second launches it from C.
    for call in (kernel, kernel.fast, kernel.fast):
        for result in results:
            result.fill_(torch.nan)
        try:
            with torch.cuda.device(device):  # this thread's current device is the first
                call(*operands, *results)
                torch.cuda.synchronize()
        except Exception as error:  # whatever another version of the packages raises
            said = str(error).strip().splitlines()[0] if str(error) else ""
            raise _refusal(f"{type(error).__name__}: {said}") from error
        for result, expected in zip(results, exact, strict=True):
            off = ((result.double() - expected).abs().max() / expected.abs().max()).item()
            if not off <= _PROBE_ERROR:  # NaN is wrong too
                raise _refusal(f"an error of {off:.2g} where at most {_PROBE_ERROR:.2g} was expected")


def _refusal(reason: str) -> ToolchainRefused:
    tested = "; ".join(f"{name} {', '.join(versions)}" for name, versions in TESTED.items())
    return ToolchainRefused(reason, _installed(), tested)


def _installed() -> str:
    versions = []
    for name in TESTED:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} without a version")
    return ", ".join(versions)
