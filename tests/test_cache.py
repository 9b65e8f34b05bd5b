"""The cache must never hand out what was not put in, and never get in the way."""

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from postlude import cache
from postlude.cache import Cache, CacheWarning

KEY = "ab" * 32
OTHER = "cd" * 32

posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
not_root = pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="permissions do not bind root")


def writes(content: bytes, name: str = "object") -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return build


def never(folder: Path) -> None:
    raise AssertionError("built although it was there")


@pytest.fixture(autouse=True)
def private_folders_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps private temporary folders of a test below its own folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_builds_once(tmp_path: Path) -> None:
    store = Cache(tmp_path / "cache")
    assert store.get(KEY) is None
    entry = store.get_or_build(KEY, writes(b"one"))
    assert (entry / "object").read_bytes() == b"one"
    assert store.get_or_build(KEY, never) == entry
    assert Cache(tmp_path / "cache").get_or_build(KEY, never) == entry


@posix
def test_folders_are_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        entry = Cache(tmp_path / "cache").get_or_build(KEY, writes(b"one"))
    finally:
        os.umask(old)
    folder = entry
    while folder != tmp_path:
        assert folder.stat().st_mode & 0o777 == 0o700, folder
        folder = folder.parent


@pytest.mark.parametrize("content", [b"", b"on", b"two", b"one and more"])
def test_corrupt_file_is_rebuilt(tmp_path: Path, content: bytes) -> None:
    store = Cache(tmp_path / "cache")
    entry = store.get_or_build(KEY, writes(b"one"))
    (entry / "object").write_bytes(content)
    assert store.get(KEY) is None
    assert (store.get_or_build(KEY, writes(b"one")) / "object").read_bytes() == b"one"


@pytest.mark.parametrize("manifest", [b"", b"{", b"[]", b"null", b'{"key": 1}', b'{"key": "x", "files": {}}', b"\xff\xfe"])
def test_corrupt_manifest_is_rebuilt(tmp_path: Path, manifest: bytes) -> None:
    store = Cache(tmp_path / "cache")
    entry = store.get_or_build(KEY, writes(b"one"))
    (entry / "manifest.json").write_bytes(manifest)
    assert (store.get_or_build(KEY, writes(b"new")) / "object").read_bytes() == b"new"


def test_missing_pieces_are_rebuilt(tmp_path: Path) -> None:
    store = Cache(tmp_path / "cache")
    for name in ("object", "manifest.json"):
        (store.get_or_build(KEY, writes(b"one")) / name).unlink()
        assert (store.get_or_build(KEY, writes(b"new")) / "object").read_bytes() == b"new"
        store.remove(KEY)


def test_entry_of_another_key_is_not_taken(tmp_path: Path) -> None:
    store = Cache(tmp_path / "cache")
    entry = store.get_or_build(KEY, writes(b"one"))
    moved = entry.parents[1] / OTHER[:2] / OTHER
    moved.parent.mkdir(mode=0o700)
    entry.rename(moved)
    assert (store.get_or_build(OTHER, writes(b"other")) / "object").read_bytes() == b"other"


def test_file_in_place_of_an_entry(tmp_path: Path) -> None:
    store = Cache(tmp_path / "cache")
    entry = store.get_or_build(KEY, writes(b"one"))
    store.remove(KEY)
    entry.write_bytes(b"not a folder")
    assert (store.get_or_build(KEY, writes(b"new")) / "object").read_bytes() == b"new"


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    store = Cache(tmp_path / "cache")

    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        store.get_or_build(KEY, fail)
    assert store.get(KEY) is None
    assert not list((tmp_path / "cache" / "v1" / "building").iterdir())
    assert not list((tmp_path / "cache" / "v1" / "locks").iterdir())


# Folders that can't be used ----------------------------------------------------------------------------------------------


def uses_private_folder(store: Cache, match: str) -> None:
    with pytest.warns(CacheWarning, match=match) as seen:
        entry = store.get_or_build(KEY, writes(b"one"))
    assert len(seen) == 1
    assert store.private
    assert not entry.is_relative_to(store.root)
    assert entry.parents[2].stat().st_mode & 0o077 == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get_or_build(KEY, never) == entry
        store.get_or_build(OTHER, writes(b"other"))


@posix
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_folder_that_others_can_write(tmp_path: Path, mode: int) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)
    uses_private_folder(Cache(tmp_path / "cache"), "written by others")


@posix
def test_inner_folder_that_others_can_write(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    Cache(root).get_or_build(KEY, writes(b"theirs"))
    (root / "v1" / "objects").chmod(0o777)
    uses_private_folder(Cache(root), "written by others")


@posix
def test_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    uses_private_folder(Cache(tmp_path / "cache"), "another user")


def test_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    uses_private_folder(Cache(tmp_path / "cache"), "not a folder|Not a directory")


def test_entries_on_a_read_only_disk_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cache"
    baked = Cache(root).get_or_build(KEY, writes(b"baked"))
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(root))
    store = Cache(root)
    with pytest.warns(CacheWarning, match="Read-only"):
        assert store.get_or_build(KEY, never) == baked
    assert not store.get_or_build(OTHER, writes(b"other")).is_relative_to(root)
    assert store.get_or_build(KEY, never) == baked
    (baked / "object").write_bytes(b"corrupt")
    assert (store.get_or_build(KEY, writes(b"new")) / "object").read_bytes() == b"new"


def test_entries_on_a_full_disk_are_used(tmp_path: Path) -> None:
    store = Cache(tmp_path / "cache")
    entry = store.get_or_build(KEY, writes(b"one"))

    def build(folder: Path) -> None:
        if folder.is_relative_to(store.root):
            raise OSError(errno.ENOSPC, "full")
        (folder / "object").write_bytes(b"other")

    with pytest.warns(CacheWarning):
        store.get_or_build(OTHER, build)
    assert store.get_or_build(KEY, never) == entry


def test_no_home_folder() -> None:
    with pytest.warns(CacheWarning, match="not absolute"):
        assert Cache(Path("~/.cache/postlude")).get(KEY) is None
    assert not Path("~").exists()


def test_entry_that_can_not_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Cache(tmp_path / "cache")
    entry = store.get_or_build(KEY, writes(b"one"))
    (entry / "object").write_bytes(b"corrupt")
    monkeypatch.setattr(Cache, "_discard", lambda self, entry: None)
    with pytest.warns(CacheWarning, match="not empty"):
        assert (store.get_or_build(KEY, writes(b"one")) / "object").read_bytes() == b"one"


@not_root
def test_read_only_folder(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o500)
    uses_private_folder(Cache(tmp_path / "cache"), "Permission denied")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EACCES])
def test_disk_that_takes_nothing(tmp_path: Path, number: int) -> None:
    """A build that hits the disk's limits is done again in the private folder."""
    store = Cache(tmp_path / "cache")
    tried: list[Path] = []

    def build(folder: Path) -> None:
        tried.append(folder)
        if folder.is_relative_to(store.root):
            raise OSError(number, os.strerror(number), str(folder))
        (folder / "object").write_bytes(b"one")

    with pytest.warns(CacheWarning, match=os.strerror(number)):
        entry = store.get_or_build(KEY, build)
    assert (entry / "object").read_bytes() == b"one"
    assert len(tried) == 2


def test_disk_full_everywhere(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    with pytest.warns(CacheWarning), pytest.raises(OSError, match="full"):
        Cache(tmp_path / "cache").get_or_build(KEY, build)


def test_private_folder_goes_with_its_process(private_folders_in: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    code = f"""
        import tempfile, warnings
        tempfile.tempdir = {str(private_folders_in)!r}
        from pathlib import Path
        from postlude.cache import Cache
        warnings.simplefilter("ignore")
        print(Cache(Path({str(tmp_path / "cache")!r})).get_or_build({KEY!r}, lambda folder: (folder / "x").write_text("x")))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.strip().startswith(str(private_folders_in))
    assert not list(private_folders_in.iterdir())


# Many at once ------------------------------------------------------------------------------------------------------------


def test_threads_build_once(tmp_path: Path) -> None:
    store = Cache(tmp_path / "cache")
    builds: list[int] = []

    def build(folder: Path) -> None:
        builds.append(1)
        time.sleep(0.05)
        (folder / "object").write_bytes(b"one")

    threads = [threading.Thread(target=store.get_or_build, args=(KEY, build)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1


def _process(root: Path, log: Path, keys: list[str], start: float) -> None:
    store = Cache(root)
    time.sleep(max(0.0, start - time.time()))

    def build(folder: Path) -> None:
        with log.open("a") as file:
            file.write(folder.name[:16] + "\n")
        time.sleep(0.02)
        (folder / "object").write_bytes(b"x" * 100_000)

    for key in keys:
        assert (store.get_or_build(key, build) / "object").stat().st_size == 100_000


def test_processes_on_an_empty_cache(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    keys = [f"{number:02x}" * 32 for number in range(10)]
    arguments = (tmp_path / "cache", tmp_path / "log", keys, time.time() + 2)
    processes = [context.Process(target=_process, args=arguments) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 8
    built = (tmp_path / "log").read_text().split()
    assert sorted(built) == sorted(key[:16] for key in keys)
    assert not list((tmp_path / "cache" / "v1" / "building").iterdir())


@posix
def test_killed_while_building(tmp_path: Path) -> None:
    """A process that dies with the lock in its hand holds nobody up, and what it left is not taken for an entry."""
    code = f"""
        import time
        from pathlib import Path
        from postlude.cache import Cache
        def build(folder):
            (folder / "object").write_bytes(b"half")
            print("building", flush=True)
            time.sleep(60)
        Cache(Path({str(tmp_path / "cache")!r})).get_or_build({KEY!r}, build)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        process.send_signal(signal.SIGKILL)
        process.wait()
    start = time.monotonic()
    store = Cache(tmp_path / "cache")
    assert (store.get_or_build(KEY, writes(b"one")) / "object").read_bytes() == b"one"
    assert time.monotonic() - start < 5
    litter = list((tmp_path / "cache" / "v1" / "building").iterdir())
    assert len(litter) == 1
    os.utime(litter[0], (0, 0))
    store.prune()
    assert not litter[0].exists()


@posix
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_while_building(tmp_path: Path) -> None:
    """A child forked while the lock was held does not keep it from those who wait."""
    store = Cache(tmp_path / "cache")
    children: list[int] = []

    def build(folder: Path) -> None:
        (folder / "object").write_bytes(b"one")
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        children.append(child)
        waiter.start()
        time.sleep(0.2)

    waiter = threading.Thread(target=store.get_or_build, args=(KEY, never))
    start = time.monotonic()
    try:
        store.get_or_build(KEY, build)
        waiter.join(10)
        assert not waiter.is_alive()
        assert time.monotonic() - start < 10
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@posix
def test_a_holder_that_hangs_is_not_waited_for_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LOCK_PATIENCE", 0.2)
    store = Cache(tmp_path / "cache")
    entered, leave = threading.Event(), threading.Event()

    def hang(folder: Path) -> None:
        (folder / "object").write_bytes(b"one")
        entered.set()
        leave.wait(10)

    thread = threading.Thread(target=store.get_or_build, args=(KEY, hang))
    thread.start()
    entered.wait(10)
    entry = store.get_or_build(KEY, writes(b"one"))
    leave.set()
    thread.join()
    assert (entry / "object").read_bytes() == b"one"
    assert store.get(KEY) == entry
    assert not list((tmp_path / "cache" / "v1" / "building").iterdir())


# Size --------------------------------------------------------------------------------------------------------------------


def test_prune_removes_the_least_recently_used(tmp_path: Path) -> None:
    store = Cache(tmp_path / "cache")
    keys = [f"{number:02x}" * 32 for number in range(10)]
    for age, key in enumerate(keys):
        manifest = store.get_or_build(key, writes(bytes(1000))) / "manifest.json"
        os.utime(manifest, (1e9 + age * 1e4,) * 2)
    assert store.get(keys[0]) is not None  # used now
    each = store.size() // 10
    removed = store.prune(limit=each * 5)
    assert removed == 6
    assert [key for key in keys if store.get(key)] == [keys[0], *keys[7:]]
    assert store.prune(limit=each * 5) == 0


def test_folder_removed_meanwhile(tmp_path: Path) -> None:
    store = Cache(tmp_path / "cache")
    store.get_or_build(KEY, writes(b"one"))
    shutil.rmtree(tmp_path / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.get_or_build(KEY, writes(b"one")).is_relative_to(tmp_path / "cache")


def test_clear(tmp_path: Path) -> None:
    store = Cache(tmp_path / "cache")
    for number in range(3):
        store.get_or_build(f"{number:02x}" * 32, writes(b"x"))
    assert store.clear() == 3
    assert store.size() == 0


def test_folder_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTLUDE_CACHE_DIR", str(tmp_path / "named"))
    assert cache.folder() == tmp_path / "named"
    assert cache.default() is cache.default()
    assert cache.default(tmp_path / "other").root == tmp_path / "other"
    monkeypatch.delenv("POSTLUDE_CACHE_DIR")
    assert cache.folder().name == "postlude"
