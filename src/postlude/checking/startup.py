"""Compile time: of the first call, with all caches empty and with the caches that another process has filled.

Where the model can be loaded by a name (TARGET of the command line), each measurement is a process of its own, which is what
a user waits for. An object that is only in this process is compiled in it, in empty folders: what a process does once, importing
Inductor and asking the compiler what it is, is then not part of the first time, nor are loaded kernels of the second.

`python -m postlude.checking.startup` is that process, or forks it: it reads requests and answers with the seconds, both as JSON.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from postlude.checking.result import EAGER, SIDES
from postlude.checking.sides import Runner, Settings
from postlude.select.database import default_path as database_path
from postlude.targets.cpp.build import settle

#: Folders of compiled code, by the variable that names them.
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "POSTLUDE_CACHE_DIR": "postlude"}

#: A process that takes longer is given up.
PATIENCE = 1800


@contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """Environment variables that name empty folders, which are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="postlude-check-", ignore_cleanup_errors=True) as folder:
        # What was tuned is no cache: kernels are chosen as they are for the user.
        variables = {"POSTLUDE_TUNING_DB": str(database_path())}
        variables |= {variable: str(Path(folder) / name) for variable, name in CACHES.items()}
        for variable in CACHES:
            Path(variables[variable]).mkdir()
        yield variables


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables while open. What Inductor remembers of its folders is forgotten on both ends."""
    from torch._inductor.utils import clear_caches

    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    clear_caches()
    try:
        yield
    finally:
        settle()  # a folder that is about to go must not be written to
        clear_caches()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Processes:
    """Measures first calls, each in a process of its own, which must be entered as a context.

    Where nothing but CPUs is used, they are forked from one that has imported torch and Inductor, which takes seconds; a process
    that has asked for a GPU must not be forked.
    """

    def __init__(self, target: str, settings: Settings, threads: int, *, forks: bool) -> None:
        self.request = {"target": target, "settings": asdict(settings), "threads": threads}
        self.forks = forks and hasattr(os, "fork")
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def seconds(self, side: str, variables: dict[str, str]) -> float:
        """Seconds of a side's first call in a new process with these environment variables.

        Raises:
            OSError: the process failed; the message is the last line that it wrote.
        """
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "postlude.checking.startup"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        server = self._server
        assert server.stdin is not None
        assert server.stdout is not None
        late = threading.Timer(PATIENCE, _kill, [server])
        late.start()
        try:
            server.stdin.write(json.dumps({**self.request, "side": side, "variables": variables, "fork": self.forks}) + "\n")
            server.stdin.flush()
            answer = json.loads(server.stdout.readline() or '{"error": "the process ended without a word"}')
        finally:
            late.cancel()
            if not self.forks:
                self._stop()
        if "error" in answer:
            self._stop()
            raise OSError(answer["error"])
        return float(answer["seconds"])

    def _stop(self) -> None:
        if self._server is not None:
            _kill(self._server)
            self._server.communicate()
            self._server = None


def _kill(process: "subprocess.Popen[str]") -> None:
    """Kill a process with those that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def first_call(make: Callable[[], Runner]) -> float:
    """Seconds of the first call of what `make` returns, in this process."""
    call = make().timed()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _serve() -> None:
    """Answer requests, a line of JSON each, until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the model prints
    import torch  # noqa: F401  what a process imports once is not compile time
    from torch._inductor import compile_fx  # noqa: F401

    import postlude.checking.run  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        answers.write(_forked(asked) if asked["fork"] else _answer(asked))
        answers.write("\n")
        answers.flush()


def _forked(asked: dict[str, Any]) -> str:
    """The answer of a process that is forked for it."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.write(writing, _answer(asked).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        answer = file.read()
    _, status = os.waitpid(process, 0)
    return answer or json.dumps({"error": f"the process ended with status {os.waitstatus_to_exitcode(status)}"})


def _answer(asked: dict[str, Any]) -> str:
    """Measure, in this process."""
    import torch

    from postlude.checking.run import wants_gradients
    from postlude.checking.state import State
    from postlude.loading import load

    try:
        os.environ.update(asked["variables"])
        torch.set_num_threads(asked["threads"])
        assert asked["side"] in SIDES
        assert asked["side"] != EAGER
        example = load(asked["target"])
        state = State(example.function)
        settings = Settings(**asked["settings"])
        training = wants_gradients(example.function, example.inputs, state)
        compiled = settings.compile(asked["side"], example.function)
        return json.dumps({"seconds": first_call(lambda: Runner(compiled, example.inputs[0], state, training))})
    except Exception as error:
        lines = str(error).strip().splitlines()
        return json.dumps({"error": f"{type(error).__name__}: {lines[0] if lines else ''}"})


if __name__ == "__main__":
    _serve()
