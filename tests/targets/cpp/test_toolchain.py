"""Which compiler, which instruction set."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from postlude.errors import CompilerFailed, CompilerNotFound
from postlude.targets.cpp import toolchain
from postlude.targets.cpp.toolchain import AMX_BF16, AVX2, AVX512, AVX512_BF16, ISAS, PORTABLE, Compiler


@pytest.fixture
def compiler() -> Compiler:
    try:
        return toolchain.compiler()
    except CompilerNotFound as error:
        pytest.skip(str(error))


def script(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_identity_tells_compilers_apart(compiler: Compiler) -> None:
    assert compiler.version in compiler.identity
    assert compiler.command[0] in compiler.identity
    assert compiler.target


def test_cxx_is_obeyed(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = script(tmp_path, "my c++", f'exec {compiler.command[0]} "$@"')
    monkeypatch.setenv("CXX", f"'{wrapper}' -DWRAPPED=1")
    found = toolchain.compiler()
    assert found.command == (str(wrapper), "-DWRAPPED=1")
    assert "WRAPPED 1" in found.run(["-dM", "-E", "-x", "c++", os.devnull]).stdout


def test_cxx_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerNotFound, match=r"no-such-compiler.*apt install g"):
        toolchain.compiler()


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    with pytest.raises(CompilerNotFound, match="set the environment variable CXX"):
        toolchain.compiler()


def test_a_broken_compiler_is_passed_over(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    script(tmp_path, "g++", "exit 1")
    script(tmp_path, "clang++", f'exec {compiler.command[0]} "$@"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert toolchain.compiler().command == (str(tmp_path / "clang++"),)


@pytest.mark.parametrize("isa", ISAS, ids=str)
def test_every_isa_compiles(compiler: Compiler, isa: toolchain.Isa, tmp_path: Path) -> None:
    if "x86_64" not in compiler.target and isa is not PORTABLE:
        pytest.skip("not an x86-64 compiler")
    usable = toolchain.usable(isa, compiler)
    assert ISAS.index(usable) >= ISAS.index(isa)
    source = tmp_path / "empty.cpp"
    source.write_text("int main() { return 0; }")
    done = compiler.run([*compiler.flags, *usable.flags, str(source), "-o", str(tmp_path / "empty")])
    assert done.returncode == 0, done.stderr


def test_a_compiler_without_the_flags_gets_a_lower_isa(compiler: Compiler, tmp_path: Path) -> None:
    old = script(tmp_path, "old", f'case "$*" in *avx512bf16*) exit 1;; esac\nexec {compiler.command[0]} "$@"')
    if "x86_64" not in compiler.target:
        pytest.skip("not an x86-64 compiler")
    assert toolchain.usable(AVX512_BF16, Compiler((str(old),), "old", "x86_64", openmp=True, gcc=True)) is AVX512


def test_a_compiler_without_amx_gets_the_vectors(compiler: Compiler, tmp_path: Path) -> None:
    old = script(tmp_path, "old", f'case "$*" in *mamx*) exit 1;; esac\nexec {compiler.command[0]} "$@"')
    if "x86_64" not in compiler.target or toolchain.usable(AVX512_BF16, compiler) is not AVX512_BF16:
        pytest.skip("not a compiler that knows avx512_bf16")
    assert toolchain.usable(AMX_BF16, Compiler((str(old),), "without amx", "x86_64", openmp=True, gcc=True)) is AVX512_BF16


def test_amx_needs_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = AMX_BF16.needs
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(toolchain, "_cpuinfo", lambda: flags)
    for permitted, isa in ((True, AMX_BF16), (False, AVX512_BF16)):
        monkeypatch.setattr(toolchain, "tiles_permitted", lambda permitted=permitted: permitted)
        toolchain.cpu_features.cache_clear()
        try:
            assert toolchain.detect() is isa
            assert bool(toolchain.refused_features()) is not permitted
        finally:
            toolchain.cpu_features.cache_clear()


def test_a_compiler_that_compiles_nothing(tmp_path: Path) -> None:
    broken = Compiler((str(script(tmp_path, "broken", "echo no licence >&2; exit 1")),), "1", "x86_64", openmp=True, gcc=True)
    with pytest.raises(CompilerFailed, match="no licence"):
        toolchain.usable(AVX2, broken)
    with pytest.raises(CompilerFailed):
        Compiler((str(tmp_path / "missing"),), "1", "x86_64", openmp=False, gcc=False).run(["--version"])


@pytest.mark.parametrize(
    ("features", "isa"),
    [
        ("", PORTABLE),
        ("sse4_2 avx", PORTABLE),
        ("avx2 fma", PORTABLE),
        ("avx2 fma f16c bmi1 bmi2", AVX2),
        ("avx2 fma f16c bmi1 bmi2 avx512f avx512bw avx512dq avx512vl", AVX512),
        ("avx2 fma f16c bmi1 bmi2 avx512f avx512bw avx512dq avx512vl avx512_bf16 amx_bf16", AVX512_BF16),
        ("avx2 fma f16c bmi1 bmi2 avx512f avx512bw avx512dq avx512vl avx512_bf16 amx_bf16 amx_tile", AMX_BF16),
        ("avx2 fma f16c bmi1 bmi2 avx512f", AVX2),
    ],
)
def test_detect(features: str, isa: toolchain.Isa) -> None:
    assert toolchain.detect(frozenset(features.split())) is isa


def test_cpuinfo_of_unlike_cores() -> None:
    text = "processor : 0\nflags\t\t: fma avx2 avx512f\n\nprocessor : 1\nflags\t\t: fma avx2\n"
    assert toolchain.parse_cpuinfo(text) == {"fma", "avx2"}
    assert toolchain.parse_cpuinfo("nothing") == frozenset()


def test_features_from_sysctl_and_macros() -> None:
    assert {"avx2", "sse4_2"} <= toolchain.parse_sysctl("FPU SSE4.2\nAVX2 BMI1")
    macros = "#define __AVX2__ 1\n#define __BMI__ 1\n#define __AVX512BF16__ 1\n#define __x86_64 1\n"
    assert {"avx2", "bmi1", "avx512_bf16"} <= toolchain.parse_macros(macros)


def test_macros_agree_with_cpuinfo(compiler: Compiler) -> None:
    if "x86_64" not in compiler.target or not Path("/proc/cpuinfo").exists():
        pytest.skip("needs Linux on x86-64")
    macros = toolchain.parse_macros(compiler.run(["-march=native", "-dM", "-E", "-x", "c++", os.devnull]).stdout)
    assert toolchain.detect(macros) is toolchain.detect(toolchain.cpu_features())


def test_isa_by_name() -> None:
    assert toolchain.isa_named("avx2") is AVX2
    with pytest.raises(ValueError, match="avx512, avx2, portable"):
        toolchain.isa_named("sse9")


def test_messages_are_english(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    done = compiler.run(["-fsyntax-only", "-x", "c++", "-"], stdin="int x = y;")
    assert isinstance(done, subprocess.CompletedProcess)
    assert ": error:" in done.stderr
