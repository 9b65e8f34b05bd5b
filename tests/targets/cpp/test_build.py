"""Source to shared object."""

import ctypes
import dataclasses
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from postlude import cache
from postlude.cache import CacheWarning
from postlude.errors import CompilerNotFound, KernelBuildError, KernelLoadError
from postlude.targets.cpp import build, toolchain


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    try:
        toolchain.compiler()
    except CompilerNotFound as error:
        pytest.skip(str(error))
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def source(value: int) -> str:
    return f'extern "C" int value() {{ return {value}; }}\n'


def value(path: Path) -> int:
    return int(build.load_library(path).value())


def test_build() -> None:
    path = build.build(source(3))
    assert value(path) == 3
    assert build.build(source(3)) == path
    assert (path.parent / build.SOURCE).read_text() == source(3)


def test_build_many_keeps_order() -> None:
    paths = build.build_many([source(number) for number in range(5)])
    assert [value(path) for path in paths] == list(range(5))


def test_equal_sources_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    original = build._compile

    def counting(folder: Path, name: str, *rest: object) -> None:
        compiled.append(name)
        original(folder, name, *rest)

    monkeypatch.setattr(build, "_compile", counting)
    futures = [build.submit(source(11)) for _ in range(5)]
    assert len({future.result() for future in futures}) == 1
    build.build_many([source(11)] * 3)
    assert len(compiled) == 1


def test_corrupt_object_is_built_again() -> None:
    path = build.build(source(4))
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    build._pending.clear()  # as in another process
    assert value(build.build(source(4))) == 4


def test_pruned_object_is_built_again() -> None:
    path = build.build(source(5))
    cache.default().clear()
    assert not path.exists()
    assert value(build.build(source(5))) == 5


def test_key_covers_what_goes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = toolchain.compiler()
    keys = {build.key_of("a", compiler, ["-O2"]), build.key_of("b", compiler, ["-O2"]), build.key_of("a", compiler, ["-O3"])}
    monkeypatch.setattr(build, "ABI_VERSION", build.ABI_VERSION + 1)
    keys.add(build.key_of("a", compiler, ["-O2"]))
    monkeypatch.setattr(build, "include_digest", lambda: "another")
    keys.add(build.key_of("a", compiler, ["-O2"]))
    assert len(keys) == 5


def test_isa_is_forced() -> None:
    macro = "#ifdef __AVX2__\n#define V 2\n#else\n#define V 0\n#endif\n" + 'extern "C" int value() { return V; }\n'
    assert value(build.build(macro, isa=toolchain.PORTABLE)) == 0
    if toolchain.detect() is not toolchain.PORTABLE:
        assert value(build.build(macro, isa=toolchain.AVX2)) == 2


def test_error_shows_the_first_lines_and_keeps_the_source() -> None:
    broken = 'extern "C" int value() { return undeclared_thing; }\n'
    with pytest.raises(KernelBuildError, match=r"(?s)undeclared_thing.*kept in") as caught:
        build.build(broken)
    assert Path(caught.value.source).read_text() == broken
    with pytest.raises(KernelBuildError):  # and again, not a stale future
        build.build(broken)
    assert build.build_many([source(1), source(2)])


def test_a_compiler_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources may include omp.h all the same: then there is one thread."""
    serial = dataclasses.replace(toolchain.compiler(), openmp=False)
    monkeypatch.setattr(toolchain, "compiler", lambda: serial)
    team = """
    #include <omp.h>
    extern "C" int value() {
      int n = 0;
    #pragma omp parallel num_threads(2)
      n += 10 + omp_get_thread_num() + omp_in_parallel() + omp_get_num_threads() + omp_get_max_threads();
      return n;
    }
    """
    assert value(build.build(team)) == 12


def test_first_errors() -> None:
    output = "In file included from a.h:1:\na.h:3:1: error: one\n  3 | x\na.h: note: this\n" + "b.cpp:1: error: more\n" * 20
    assert build.first_errors(output).splitlines()[0] == "a.h:3:1: error: one"
    assert len(build.first_errors(output).splitlines()) == 8
    assert build.first_errors("ld returned 1") == "ld returned 1"
    assert build.first_errors("") == "(the compiler printed nothing)"


def test_full_disk_is_not_taken_for_a_broken_source(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    """The compiler fails in the cache folder, where writing fails too; the private folder serves."""
    compiler = type(toolchain.compiler())
    run, write = compiler.run, Path.write_bytes

    def full_run(self: toolchain.Compiler, arguments: list[str], **options: str) -> object:
        if str(empty_cache) in arguments[-1]:
            return subprocess.CompletedProcess(arguments, 1, "", "error: no room")
        return run(self, arguments, **options)

    def full_write(self: Path, data: bytes) -> int:
        if self.is_relative_to(empty_cache):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return write(self, data)

    monkeypatch.setattr(compiler, "run", full_run)
    monkeypatch.setattr(Path, "write_bytes", full_write)
    with pytest.warns(CacheWarning, match="No space left"):
        path = build.build(source(6))
    assert value(path) == 6
    assert not path.is_relative_to(empty_cache)


def test_not_a_library(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_bytes(b"no")
    with pytest.raises(KernelLoadError, match=r"x\.so"):
        build.load_library(tmp_path / "x.so")


def test_no_compiler_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerNotFound):
        build.submit(source(7))


def _cold_start(log: str, start: float) -> None:
    original = build._compile

    def counting(folder: Path, *rest: object) -> None:
        with open(log, "a") as file:
            file.write("x")
        original(folder, *rest)

    build._compile = counting
    time.sleep(max(0.0, start - time.time()))
    paths = build.build_many([source(number) for number in range(3)])
    assert [value(path) for path in paths] == [0, 1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_eight_processes_on_an_empty_cache(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # eight imports of torch would take most of a minute
    arguments = (str(tmp_path / "log"), time.time() + 0.5)
    processes = [context.Process(target=_cold_start, args=arguments) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    assert (tmp_path / "log").read_text() == "xxx"


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
def test_killed_during_a_build(tmp_path: Path) -> None:
    """Kill -9 while the compiler runs: the next process builds."""
    slow = tmp_path / "slow"
    slow.write_text(
        f'#!/bin/sh\ncase "$*" in *-o*kernel.so) touch {tmp_path}/started; sleep 30;; esac\n'
        f'exec {toolchain.compiler().command[0]} "$@"\n'
    )
    slow.chmod(0o700)
    code = f"""
        import os
        os.environ["CXX"] = {str(slow)!r}
        from postlude.targets.cpp import build
        build.build({source(8)!r})
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], start_new_session=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert value(build.build(source(8))) == 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_fork_while_compiling() -> None:
    """The child has no compiling threads and must not wait for what they had in hand."""
    futures = [build.submit(source(number)) for number in range(20, 24)]
    child = os.fork()
    if child == 0:
        try:
            code = 0 if [value(path) for path in build.build_many([source(20), source(30)])] == [20, 30] else 2
        except BaseException:
            code = 1
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [value(future.result()) for future in futures] == [20, 21, 22, 23]


def test_many_threads() -> None:
    results: list[int] = []

    def work(number: int) -> None:
        results.append(value(build.build(source(number % 3))))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted([0, 1, 2] * 4)


def test_exit_does_not_wait_for_kernels_nobody_called(tmp_path: Path) -> None:
    code = f"""
        from postlude.targets.cpp import build
        for number in range(200):
            build.submit({source(0)!r} + "// " + str(number))
    """
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
    assert time.monotonic() - start < 10


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    monkeypatch.setattr(build, "PATIENCE", 0.0)
    monkeypatch.setattr(build, "_show", lambda futures, _: shown.append(len(futures)))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    build.build_many([source(number) for number in range(40, 43)])
    assert shown == [3]


def test_progress_line_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    futures = {build.submit(source(number)) for number in range(50, 52)}
    build._show(futures)
    assert all(future.done() for future in futures)


def test_micro_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the usual cache: this one takes seconds to compile
    table = build.micro_table()
    assert ctypes.c_void_p(table).value == table
    assert build.micro_table() == table
