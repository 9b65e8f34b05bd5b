"""Source -> shared object: compiled once per content, in parallel, through the content-addressed cache.

    build(source)          the path of the compiled object; waits
    build_many(sources)    the same for many, in parallel
    submit(source)         starts compiling in the background, so that capture need not wait
    micro_table()          the address of the table of microkernels, whose library is built through the same path

The key of an entry covers the source, every file of our include folder, the compiler and its flags. Compilers run as
subprocesses of a few daemon threads, as many as this process may use cores.
"""

import ctypes
import hashlib
import os
import queue
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import lru_cache
from pathlib import Path
from typing import Any

from postlude import cache
from postlude.errors import KernelBuildError, KernelLoadError
from postlude.targets.cpp import toolchain
from postlude.targets.cpp.toolchain import Compiler, Isa

#: Changes when the meaning of the binary interface changes in a way that abi.h does not show.
ABI_VERSION = 1

HERE = Path(__file__).parent
INCLUDE = HERE / "include"
SERIAL = HERE / "serial"
MICRO_SOURCE = HERE / "micro.cpp"

OBJECT = "kernel.so"
SOURCE = "kernel.cpp"

#: A terminal shows what is going on when it takes longer than this many seconds.
PATIENCE = 2.0

_ERROR_LINES = 8


# What is compiled ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def include_digest() -> str:
    """A hash of every file below the include folders (read once per process)."""
    digest = hashlib.sha256()
    for path in sorted((*INCLUDE.rglob("*"), *SERIAL.rglob("*"))):
        if path.is_file():
            digest.update(path.relative_to(HERE).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def key_of(source: str, compiler: Compiler, flags: Sequence[str]) -> str:
    """The cache key of an object."""
    parts = (str(ABI_VERSION), include_digest(), compiler.identity, "\0".join(flags), source)
    return hashlib.sha256("\0\0".join(parts).encode()).hexdigest()


def compile_to_cache(source: str, compiler: Compiler, flags: Sequence[str], *, name: str = SOURCE) -> Path:
    """Compile and link `source`; returns the path of the verified shared object."""
    key = key_of(source, compiler, flags)
    entry = cache.default().get_or_build(key, lambda folder: _compile(folder, name, source, compiler, flags))
    return entry / OBJECT


def _compile(folder: Path, name: str, source: str, compiler: Compiler, flags: Sequence[str]) -> None:
    path = folder / name
    path.write_text(source)
    folders = [INCLUDE] if compiler.openmp else [INCLUDE, SERIAL]
    command = [*flags, *compiler.shared, *(f"-I{each}" for each in folders), str(path), "-o", str(folder / OBJECT)]
    done = compiler.run(command)
    if done.returncode == 0:
        return
    # A full disk looks like a broken source to the compiler. Writing says what it is, and the cache then moves elsewhere.
    (folder / "probe").write_bytes(bytes(1 << 20))
    (folder / "probe").unlink()
    kept = _keep_failed(source, name)
    raise KernelBuildError(str(kept), shlex.join([*compiler.command, *command]), first_errors(done.stderr))


def _keep_failed(source: str, name: str) -> Path:
    path = cache.default().scratch("failed") / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}{Path(name).suffix}"
    path.write_text(source)
    return path


def first_errors(output: str) -> str:
    """The first lines that name an error, without the include chains and the notes around them."""
    lines = output.splitlines()
    errors = [line for line in lines if ": error:" in line or ": fatal error:" in line or "undefined reference" in line]
    return "\n".join((errors or lines)[:_ERROR_LINES]) or "(the compiler printed nothing)"


# Background threads ----------------------------------------------------------------------------------------------------


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Workers:
    """A few daemon threads that run jobs in order.

    Not a ThreadPoolExecutor: at exit it would run everything still queued, and a finished program would wait for kernels that
    nobody is going to call.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._threads = 0
        self._lock = threading.Lock()

    def submit(self, job: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        with self._lock:
            if self._threads < cores():
                self._threads += 1
                threading.Thread(target=self._work, name="postlude-compile", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            future, job = self._jobs.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except BaseException as error:  # whatever it is, it belongs to whoever waits
                future.set_exception(error)


_workers = _Workers()
_pending: dict[tuple[str, str, Path], "Future[Path]"] = {}
_pending_lock = threading.Lock()


def _after_fork() -> None:
    """Threads do not survive a fork, and what they had in hand will never be finished in the child."""
    global _workers, _pending_lock
    _workers = _Workers()
    _pending_lock = threading.Lock()
    for key in [key for key, future in _pending.items() if not future.done()]:
        del _pending[key]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


_started: set[Callable[[], Any]] = set()


def background(job: Callable[[], Any]) -> None:
    """Run a job on the compiling threads, once per process, for its side effect."""
    with _pending_lock:
        if job in _started:
            return
        _started.add(job)
    _workers.submit(job)


def _tools(isa: Isa | None) -> tuple[Compiler, Isa]:
    compiler = toolchain.compiler()
    return compiler, toolchain.usable(toolchain.detect() if isa is None else isa, compiler)


def submit(source: str, *, isa: Isa | None = None) -> "Future[Path]":
    """Start compiling `source` in the background. The same source is compiled once, whoever asks."""
    compiler, isa = _tools(isa)
    key = (source, isa.name, cache.folder())
    with _pending_lock:
        future = _pending.get(key)
        if future is not None and future.done() and (future.exception() or not future.result().exists()):
            future = None  # failed, or pruned by another process
        if future is None:
            flags = (*compiler.flags, *isa.flags)
            future = _workers.submit(lambda: compile_to_cache(source, compiler, flags))
            _pending[key] = future
    return future


def settle() -> None:
    """Wait until nothing is being compiled in the background, whether it succeeds or not."""
    with _pending_lock:
        futures = list(_pending.values())
    wait(futures)


def build(source: str, *, isa: Isa | None = None) -> Path:
    """The path of the object compiled from `source` (default Isa: the best of this machine)."""
    return build_many([source], isa=isa)[0]


def build_many(sources: Sequence[str], *, isa: Isa | None = None) -> list[Path]:
    """The paths of the objects compiled from `sources`, in order. The first error is raised."""
    futures = [submit(source, isa=isa) for source in sources]
    wait_for(futures)
    return [future.result() for future in futures]


# Progress ----------------------------------------------------------------------------------------------------------------

_progress_lock = threading.Lock()


def wait_for(futures: "Sequence[Future[Any]]", shown: "Sequence[Future[Any]] | None" = None) -> None:
    """Wait for all; on a terminal, and only if it takes long, with one line that shows progress, of `shown` if given."""
    _, missing = wait(futures, timeout=PATIENCE)
    if not missing:
        return
    if not sys.stderr.isatty() or not _progress_lock.acquire(blocking=False):
        wait(futures)
        return
    try:
        _show(set(futures), set(futures if shown is None else shown))
    finally:
        _progress_lock.release()


def _show(futures: "set[Future[Any]]", shown: "set[Future[Any]] | None" = None) -> None:
    shown = shown or futures
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Compiling kernels", total=len(shown))
        missing = futures
        while missing:
            _, missing = wait(missing, timeout=0.2)
            progress.update(task, completed=sum(future.done() for future in shown))


# The library of microkernels -------------------------------------------------------------------------------------------


def _micro_source(element: str) -> str:
    """The library's source for one type of right operand: a process compiles only what its models need."""
    numbers, _, codes = element.partition(" ")
    second = f"#define POSTLUDE_CODES {codes}\n" if codes else ""
    return f"#define POSTLUDE_ELEMENT {numbers}\n{second}{MICRO_SOURCE.read_text()}"


@lru_cache(maxsize=16)
def _micro_library(element: str, isa: Isa, root: Path) -> ctypes.CDLL:
    del root  # a part of the key: another cache folder has its own objects
    return load_library(build(_micro_source(element), isa=isa))


def micro_table(element: str = "f32", isa: Isa | None = None) -> int:
    """The address of the table of microkernels for `isa`: what goes into PostludeCall::micro.

    `element` is the storage type of the right operands: f32, f64, bf16 or f16. Behind it, after a space, may stand that of codes
    which kernels decode: i8, f8e4m3, f8e5m2, f4e2m1, i4 or u4.
    """
    _, isa = _tools(isa)
    table = _micro_library(element, isa, cache.folder()).postlude_micro_table
    table.restype = ctypes.c_void_p
    address = table()
    if not address:
        raise KernelLoadError(str(MICRO_SOURCE), f"postlude_micro_table() returned no table for {isa}")
    return int(address)


def submit_micro(element: str = "f32", isa: Isa | None = None) -> "Future[Path]":
    """Start compiling the microkernels in the background."""
    return submit(_micro_source(element), isa=isa)


def load_library(path: Path) -> ctypes.CDLL:
    """Load with local symbols: every Region's object exports the same names."""
    try:
        return ctypes.CDLL(str(path), mode=getattr(os, "RTLD_LOCAL", 0) | getattr(os, "RTLD_NOW", 0))
    except OSError as error:
        raise KernelLoadError(str(path), str(error)) from error
