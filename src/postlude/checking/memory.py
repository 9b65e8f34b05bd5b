"""Peak memory of one call, beyond what is there before it.

On a GPU torch's allocator counts. On Linux it is the growth of the process's resident memory to its peak, which the system
keeps and lets a process reset (``/proc/self/clear_refs``): it has the workspaces of libraries too, which no allocator of torch
sees. Pages that the C library kept from earlier calls are given back before, so that they count when they are touched again.
"""

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")
#: What is written there to reset the peak (proc_pid_clear_refs(5)).
RESET_PEAK = "5"


def how(device: torch.device) -> str:
    """In words, how `peak` measures."""
    if device.type == "cuda":
        return "growth of torch.cuda.max_memory_allocated over one call"
    return "growth of the process's peak resident memory over one call" if STATUS.exists() else "not measured on this system"


def peak(call: Callable[[], object], device: torch.device) -> int | None:
    """Bytes that one call needs beyond what is allocated before it, its results included; None where that can't be measured."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = call()
        torch.cuda.synchronize(device)
        del kept
        return torch.cuda.max_memory_allocated(device) - before
    try:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        CLEAR.write_text(RESET_PEAK)
        before = _status("VmRSS")
        kept = call()
        del kept
        return max(0, _status("VmHWM") - before)
    except OSError:
        return None


def _status(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {field}")
