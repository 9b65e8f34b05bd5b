"""Prepacked weights that are never stale.

    kernel = freeze(load(path, operands=3), (1,))     operand 1 is a weight: use a packed form of it where one is valid

A packed form is a copy, and the weight may change under it: by an optimizer, load_state_dict, `.data`, an alias. Version counters
do not see all of these. Copy-on-write storages do:

- When a weight is packed, ``torch._lazy_clone`` makes its storage copy-on-write, shared with a clone that we hold and
  never write. Whatever asks ATen for a writable pointer to the weight from then on (every in-place op, optimizer, `.data`,
  set_data, numpy(), data_ptr(), DLPack, a compiled kernel of Inductor) first gives the weight memory of its own at another
  address. Reads don't.
- So as long as the clone lives, a tensor whose first element lies at the address that we packed, with the same shape, strides and
  dtype, holds what we packed, whichever tensor object it is. At each call the launcher compares exactly that, in C, through a
  function that does not ask for a writable pointer. It is a look-up in a small table, not a check that can be forgotten.
- What is not in the table goes to `_meet` below, which packs it or has the kernel read it as it lies.

A weight is packed when a kernel meets it unchanged for the second time: one-off and streamed weights are never copied. A weight
whose packed forms do not live long enough to pay (training) is left alone for a while. A weight is not packed if

- torch refuses to make it copy-on-write: its memory came from outside of ATen (numpy, DLPack, shared memory, files). Exception:
  weights in a private mapping of a checkpoint (how transformers and safetensors load) are first moved to memory of their own, if
  nothing else in the process looks at those bytes; to the program this is no change;
- something else holds its storage: an alias, a numpy array or DLPack consumer that was made earlier and writes without ATen, a
  collective or a copy that is under way, a graph that saved it for backward. This is asked again later;
- the packed form would take a large part of the memory that is free. This is asked again later, too;
- it is a subclass of Tensor, not on the CPU, not dense, or this torch lacks the functions that all of this needs.

What can't be seen: writes through a raw address that was taken before the weight was packed and that holds no reference to the
tensor's storage (`p.data_ptr()` kept as an integer, in ctypes or in a C extension, and written through later). Nothing in
torch can see these. And, as in eager mode, a write in one thread while another thread runs the kernel is a race.

What fails: to resize the storage of a packed weight (`untyped_storage().resize_`, growing with `resize_`) and then write to it.
Torch's copy-on-write storages don't support that: it raises an internal assertion, and nothing stale is ever computed. `release`
makes all weights ordinary again.

Making a storage copy-on-write costs no memory until the weight is written; then the old contents live on until the next call
notices, or the weight dies. The packed form is as large as the weight. Both are freed when the weight's storage dies.
"""

import gc
import logging
import os
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postlude.targets.cpp import launcher
from postlude.targets.cpp.launcher import Kernel

log = logging.getLogger(__name__)

#: A packed form that served fewer calls than this before its weight changed was not worth making.
WORTHWHILE_USES = 16

#: After this many in a row, the weight is left alone for `LEFT_ALONE` calls.
MOST_FAILURES = 3
LEFT_ALONE = 2000

#: A weight that could not be packed because something else held it is looked at again after 4, 16, 64, ... calls, at most this.
LONGEST_PATIENCE = 4096

#: How long a list of all live tensors serves: a model's weights come one after the other.
_CENSUS_SECONDS = 1.0

#: A packed form may take at most this part (one over it) of the memory that is free now.
MEMORY_SHARE = 4

_FOREVER = -1


@dataclass(slots=True)
class _Use:
    """What one kernel did with one weight at one operand position."""

    kernel: Kernel
    index: int
    addresses: set[int] = field(default_factory=set)  # with an entry in the kernel's table
    met: int = 0  # address at which it was met and not packed yet
    failures: int = 0
    patience: int = 4


@dataclass(slots=True)
class _Weight:
    """One storage: everything that is to be forgotten when it dies."""

    watch: "weakref.ref[torch.UntypedStorage]"
    uses: dict[tuple[int, int], _Use] = field(default_factory=dict)


_weights: dict[int, _Weight] = {}  # by the address of the StorageImpl
_frozen: dict[tuple[int, tuple[int, ...], bool], tuple[Kernel, Kernel]] = {}
_lock = threading.RLock()


def _after_fork() -> None:
    """Another thread may have held the lock at the fork; it does not exist in the child."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def freeze(kernel: Kernel, operands: tuple[int, ...], *, constant: bool = False) -> Kernel:
    """`kernel`, with packed forms for the weights it meets as these operands. Called in the same way.

    `constant` is for weights that somebody else has declared constant (TorchInductor's own freezing): they are packed at first
    sight, whatever else holds them and wherever their memory came from. Writes are still seen where torch can see them.
    """
    if not launcher.can_freeze() or not _works():
        return kernel
    with _lock:
        # The kernel is kept with its frozen form, so that its id stays its own.
        key = (id(kernel), tuple(operands), constant)
        if key not in _frozen:
            handler = _meet_constant if constant else _meet
            _frozen[key] = (kernel, kernel.frozen(handler, tuple(operands)))
        return _frozen[key][1]


def release() -> int:
    """Free every packed form and make the weights' storages ordinary again; returns how many forms there were.

    Kernels go on, and pack anew what they meet again.
    """
    count = 0
    with _lock:
        weights = list(_weights.values())
        _weights.clear()
        for weight in weights:
            count += _forget(weight)
            if storage := weight.watch():
                with suppress(RuntimeError):  # torch can't make a storage ordinary that was resized while it was shared
                    storage.data_ptr()  # the last holder of the memory: this makes it an ordinary storage, without a copy
    return count


def packed_bytes() -> int:
    """Bytes that packed forms take now."""
    total = 0
    for weight in list(_weights.values()):
        for use in list(weight.uses.values()):
            for address in list(use.addresses):
                if packed := _table(use.kernel).packed(use.index, address):
                    total += packed.nbytes
    return total


def _table(kernel: Kernel) -> Any:
    """The part of a kernel that only frozen ones have."""
    return kernel


# Meeting a weight ------------------------------------------------------------------------------------------------------


def _meet_constant(kernel: Kernel, index: int, tensor: Tensor) -> None:
    _meet(kernel, index, tensor, constant=True)


def _meet(kernel: Kernel, index: int, tensor: Tensor, *, constant: bool = False) -> None:
    """Called by the launcher when `tensor` has no valid entry: make one, so that it is not asked at every call.

    Never raises: whatever goes wrong, the natural path is right.
    """
    with _lock:
        address = 0
        try:
            address = _address(tensor)
            use = _use_of(kernel, index, tensor)
            _drop_stale(use, tensor, address)
            refusal = _pack(use, tensor, address, constant=constant)
            if refusal is not None:
                patience = refusal.patience(use)
                log.debug("operand %d of %s is not packed: %s (asked again: %d)", index, kernel.path, refusal.reason, patience)
                _natural(use, address, patience)
        except Exception:
            log.debug("operand %d of %s is not packed", index, kernel.path, exc_info=True)
            if address:
                _table(kernel).use_natural(index, address, _FOREVER)


@dataclass(frozen=True, slots=True)
class _Refusal:
    reason: str
    calls: int = _FOREVER  # that take the natural path until the next look
    doubling: bool = False  # instead: 4, 16, 64, ...

    def patience(self, use: _Use) -> int:
        if not self.doubling:
            return self.calls
        now, use.patience = use.patience, min(use.patience * 4, LONGEST_PATIENCE)
        return now


_FIRST_TIME = _Refusal("met for the first time", calls=0)
_CHANGES = _Refusal("changes too often", calls=LEFT_ALONE)
_HELD = _Refusal("something else holds its storage", doubling=True)
_SUBCLASS = _Refusal("not a plain tensor")
_NOT_DENSE = _Refusal("not a dense tensor on the CPU")
_FOREIGN = _Refusal("its memory is not managed by torch", doubling=True)
_UNAFFORDABLE = _Refusal("there is too little free memory", doubling=True)
_UNSUITABLE = _Refusal("the kernel packs no operand like this")


def _pack(use: _Use, tensor: Tensor, address: int, *, constant: bool) -> _Refusal | None:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return _SUBCLASS
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_neg() or tensor.is_conj():
        return _NOT_DENSE
    if use.failures >= MOST_FAILURES:
        use.failures = MOST_FAILURES - 1  # one more chance after the pause
        use.met = 0
        return _CHANGES
    if use.met != address and not constant:
        use.met = address
        return _FIRST_TIME
    bytes_needed = use.kernel.pack_size(use.index, tensor)
    if bytes_needed <= 0:
        return _UNSUITABLE
    if bytes_needed > available_memory() // MEMORY_SHARE:
        return _UNAFFORDABLE
    if not constant and not _sole_owner(tensor):
        return _HELD
    clone = _clone(tensor)
    if clone is None and not constant and _move_home(tensor):
        use = _use_of(use.kernel, use.index, tensor)  # the old storage has died
        clone = _clone(tensor)
    if clone is None and not constant:
        return _FOREIGN
    # Pack from the clone, which can't change: a write to the weight by another thread, now or later, moves the weight.
    packed = use.kernel.pack(use.index, tensor if clone is None else clone, clone)
    if packed is None:
        return _UNSUITABLE
    _table(use.kernel).use_packed(use.index, packed)
    use.addresses.add(packed.address)
    use.patience = 4
    return None


def _natural(use: _Use, address: int, patience: int) -> None:
    if address:
        _table(use.kernel).use_natural(use.index, address, patience)
        use.addresses.add(address)


def _drop_stale(use: _Use, tensor: Tensor, address: int) -> None:
    """Forget entries that this weight has left behind, and judge whether they had been worth making."""
    storage = tensor.untyped_storage()
    start = address - tensor.storage_offset() * tensor.element_size()
    for old in list(use.addresses):
        packed = _table(use.kernel).packed(use.index, old)
        if start <= old < start + storage.nbytes() and old != address:
            continue  # another view of the same storage, unchanged
        if packed is not None:
            use.failures = use.failures + 1 if packed.uses < WORTHWHILE_USES else 0
        _table(use.kernel).forget(use.index, old)
        use.addresses.discard(old)


def _use_of(kernel: Kernel, index: int, tensor: Tensor) -> _Use:
    storage = tensor.untyped_storage()
    key = storage._cdata
    weight = _weights.get(key)
    if weight is None or weight.watch() is not storage:
        # A storage has one Python object for as long as it lives, so this reference dies with the storage. (A reference to
        # the tensor would die too late, with .data replaced, and torch.utils.swap_tensors refuses tensors that have one.)
        weight = _weights[key] = _Weight(weakref.ref(storage, lambda _: _died(key)))
    return weight.uses.setdefault((id(kernel), index), _Use(kernel, index))


def _died(key: int) -> None:
    # Takes no lock: it may run at any point of any thread. Each step is atomic under the GIL.
    if weight := _weights.pop(key, None):
        _forget(weight)


def _forget(weight: _Weight) -> int:
    count = 0
    for use in list(weight.uses.values()):
        while use.addresses:
            address = use.addresses.pop()
            count += _table(use.kernel).packed(use.index, address) is not None
            _table(use.kernel).forget(use.index, address)
    return count


# What torch can tell about a weight ------------------------------------------------------------------------------------


def _address(tensor: Tensor) -> int:
    extension = launcher.extension()
    assert extension is not None
    return int(extension.address(tensor))


@lru_cache(maxsize=1)
def _works() -> bool:
    """Whether this torch has what is needed, and behaves as described above."""
    try:
        tensor = torch.nn.Parameter(torch.ones(4, 4, device="cpu"))
        before = _address(tensor)
        clone = torch._lazy_clone(tensor.detach())
        shared = torch._C._is_cow_tensor(tensor) and _address(tensor) == before == _address(clone)  # type: ignore[attr-defined]
        reads = float(tensor.detach().sum()) == 16 and _address(tensor) == before
        with torch.no_grad():
            tensor.add_(1)
        moved = _address(tensor) != before and _address(clone) == before and float(clone.sum()) == 16
        storage = tensor.untyped_storage()
        alive = weakref.ref(storage)
        del storage
        watched = alive() is not None
        alias = tensor.detach()
        counted = not _sole_owner(tensor)
        del alias
        return shared and reads and moved and watched and counted and _sole_owner(tensor)
    except Exception:
        log.debug("weights are not frozen with this torch", exc_info=True)
        return False


@lru_cache(maxsize=1)
def _alone() -> int:
    """The use count of a storage that one tensor (and the storage's own Python object) holds."""
    tensor = torch.empty(1, device="cpu")
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that can be allocated without swapping; very many where the system does not tell."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 1 << 62


def _sole_owner(tensor: Tensor) -> bool:
    count = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return int(count) <= _alone()


def _clone(tensor: Tensor) -> Tensor | None:
    """A copy-on-write clone, or None where ATen does not manage the memory."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            return torch._lazy_clone(tensor.detach())
    except RuntimeError:
        return None


# Weights in a mapped checkpoint ----------------------------------------------------------------------------------------

#: How checkpoints begin that loaders map: a zip archive (torch.save); a JSON header after its length (safetensors).
_ZIP = b"PK\x03\x04"


def _move_home(tensor: Tensor) -> bool:
    """Move a weight from a private mapping of a checkpoint file to memory of its own, if nobody can tell the difference.

    Private: no other process and no file sees what is written there. A checkpoint: the mapping belongs to a loader, not to a
    np.memmap that somebody writes through. And no other tensor in this process may look at the same bytes.
    """
    span = _span(tensor)
    if span is None or span.end - span.start != tensor.numel() * tensor.element_size():
        return False  # no memory, or gaps or repetitions in it
    path = private_mapping(span.start)
    if path is None or not is_checkpoint(path) or _overlaps(span):
        return False
    with torch.inference_mode(False), torch.no_grad():
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        copy.copy_(tensor.detach())
        tensor.data = copy
    return True


def private_mapping(address: int, maps: str | None = None) -> Path | None:
    """The file of which a private mapping holds this address. None where there is none, or the system can't tell."""
    try:
        lines = (Path("/proc/self/maps").read_text() if maps is None else maps).splitlines()
    except OSError:
        return None
    for line in lines:
        span, permissions, _, _, inode, *name = line.split(maxsplit=5)
        low, high = (int(part, 16) for part in span.split("-"))
        if low <= address < high:
            private = permissions.endswith("p") and inode != "0" and bool(name)
            return Path(name[0]) if private and not name[0].endswith(" (deleted)") else None
    return None


def is_checkpoint(path: Path) -> bool:
    """Whether a file is one that torch.load or safetensors map."""
    try:
        with path.open("rb") as file:
            head = file.read(9)
            size = path.stat().st_size
    except OSError:
        return False
    header = int.from_bytes(head[:8], "little")
    return head.startswith(_ZIP) or (head[8:9] == b"{" and 0 < header < size)


@dataclass(frozen=True, slots=True, order=True)
class _Span:
    """The bytes that a tensor looks at."""

    start: int
    end: int
    impl: int


_census: tuple[float, list[_Span]] = (-_CENSUS_SECONDS, [])


def _overlaps(span: _Span) -> bool:
    """Whether another live tensor object looks at bytes of this one."""
    global _census
    now = time.monotonic()
    if now - _census[0] > _CENSUS_SECONDS:
        # type(), not isinstance(): proxies of all kinds run code when asked for their __class__
        tensors = (found for found in gc.get_objects() if issubclass(type(found), Tensor))
        _census = (now, [other for tensor in tensors if (other := _span(tensor))])
    return any(other.start < span.end and other.end > span.start and other.impl != span.impl for other in _census[1])


def _span(tensor: Tensor) -> _Span | None:
    try:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
            return None
        start = _address(tensor)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return _Span(start, start + (last + 1) * tensor.element_size(), tensor._cdata)
    except (RuntimeError, TypeError, NotImplementedError):
        return None  # fake, functional, ...: no memory
