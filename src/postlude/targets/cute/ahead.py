"""Kernels compiled before they are needed, several at once.

The compiler works on one kernel at a time in a process, for seconds. So while a graph is compiled, what it will call is handed to
processes that do nothing else and see no GPU (worker.py). They write into the cache, where the first call finds the kernels; it
waits for those that are not finished. The processes end when they have had nothing to do for a while, and with this one.
"""

import itertools
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass

from postlude import cache
from postlude.targets.cpp.build import cores, wait_for
from postlude.targets.cute.build import Specialization

#: Seconds without work after which a process ends.
IDLE = 30.0

#: Most processes: each takes about a gigabyte.
MOST = 16


@dataclass(frozen=True)
class _Task:
    """A kernel that is to be compiled, and who waits for it. The result is what went wrong, or nothing."""

    kernel: Specialization
    folder: str
    future: "Future[str]"


class _Workers:
    """Daemon threads, each with a process that compiles."""

    def __init__(self) -> None:
        self.tasks: queue.PriorityQueue[tuple[bool, int, _Task]] = queue.PriorityQueue()
        self.pending: dict[tuple[str, str], Future[str]] = {}
        self.threads = 0
        self.lock = threading.Lock()
        self.numbers = itertools.count()

    def submit(self, kernels: Sequence[Specialization], later: bool, most: int) -> "list[Future[str]]":
        folder = str(cache.folder())
        futures = []
        for kernel in kernels:
            key = (kernel.key(), folder)
            with self.lock:
                future = self.pending.get(key)
                if future is None and cache.default().get(key[0]) is None:
                    future = self.pending[key] = Future()
                    self.tasks.put((later, next(self.numbers), _Task(kernel, folder, future)))
                    if self.threads < most:
                        self.threads += 1
                        threading.Thread(target=self._work, name="postlude-compile-cuda", daemon=True).start()
            if future is not None:
                futures.append(future)
        return futures

    def hurry(self, kernel: Specialization) -> "Future[str] | None":
        """Put a kernel that nobody has begun with in front; its future, if it is to be compiled at all."""
        folder = str(cache.folder())
        with self.lock:
            future = self.pending.get((kernel.key(), folder))
            if future is not None and not future.running():
                self.tasks.put((False, -next(self.numbers), _Task(kernel, folder, future)))
        return future

    def _work(self) -> None:
        process: subprocess.Popen[str] | None = None
        while True:
            try:
                _, _, task = self.tasks.get(timeout=IDLE)
            except queue.Empty:
                with self.lock:
                    if not self.tasks.empty():
                        continue
                    self.threads -= 1
                if process is not None:
                    process.communicate()  # closes its input, at which it ends
                return
            with self.lock:
                if task.future.running() or task.future.done():
                    continue  # it was put twice, since somebody waits for it
                task.future.set_running_or_notify_cancel()
            try:
                if process is None or process.poll() is not None:
                    process = _start()
                answer = _ask(process, task)
            except (OSError, ValueError) as error:  # it died, or could not be started; the next task gets another
                if process is not None:
                    process.kill()
                    process.communicate()
                process = None
                answer = f"{type(error).__name__}: {error}"
            with self.lock:
                del self.pending[task.kernel.key(), task.folder]
            task.future.set_result(answer)


def _start() -> "subprocess.Popen[str]":
    # Not multiprocessing: its children import the user's script again.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "postlude.targets.cute.worker"]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def _ask(process: "subprocess.Popen[str]", task: _Task) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"folder": task.folder, **asdict(task.kernel)}) + "\n")
    process.stdin.flush()
    return str(json.loads(process.stdout.readline()))


_workers = _Workers()


def _after_fork() -> None:
    """Threads and their processes belong to the parent."""
    global _workers
    _workers = _Workers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def submit(kernels: Sequence[Specialization], *, later: bool = False, most: int | None = None) -> "list[Future[str]]":
    """Start compiling what is not in the cache; each kernel once, whoever asks.

    Args:
        kernels: what to compile.
        later: whether others go first.
        most: processes at once; by default as many as there are cores, and at most `MOST`.

    Returns:
        What is under way of these. A future's result is what went wrong, or an empty string.
    """
    return _workers.submit(kernels, later, min(cores(), MOST) if most is None else most)


def wait(kernel: Specialization) -> None:
    """Wait for a kernel that is being compiled ahead; if nobody does, return at once."""
    if future := _workers.hurry(kernel):
        wait_for([future], [*_workers.pending.values()])
