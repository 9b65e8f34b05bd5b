"""Compile time: of the first call, with all caches empty and with the caches that another process has filled.

Where the model can be loaded by a name (TARGET of the command line), each measurement is a process of its own, which is what
a user waits for. An object that is only in this process is compiled in it, in empty folders: what a process does once, importing
Inductor and asking the compiler what it is, is then not part of the first time, nor are loaded kernels of the second.

`python -m postlude.checking.startup` is that process: it prints the seconds as its last line.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

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


def in_a_process(target: str, side: str, settings: Settings, threads: int, variables: dict[str, str]) -> float:
    """Seconds of the first call in a new process.

    Raises:
        OSError: the process failed; the message is the last line that it wrote.
    """
    request = json.dumps({"target": target, "side": side, "settings": asdict(settings), "threads": threads})
    done = subprocess.run(
        [sys.executable, "-m", "postlude.checking.startup", request],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return float(done.stdout.strip().splitlines()[-1])


def first_call(make: Callable[[], Runner]) -> float:
    """Seconds of the first call of what `make` returns, in this process."""
    call = make().timed()
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _main(request: str) -> None:
    asked = json.loads(request)
    import torch
    from torch._inductor import compile_fx  # noqa: F401  what a process imports once is not compile time

    from postlude.checking.run import wants_gradients
    from postlude.checking.state import State
    from postlude.loading import load

    torch.set_num_threads(asked["threads"])
    assert asked["side"] in SIDES
    assert asked["side"] != EAGER
    example = load(asked["target"])
    state = State(example.function)
    settings = Settings(**asked["settings"])
    training = wants_gradients(example.function, example.inputs, state)
    print(first_call(lambda: Runner(settings.compile(asked["side"], example.function), example.inputs[0], state, training)))


if __name__ == "__main__":
    _main(sys.argv[1])
