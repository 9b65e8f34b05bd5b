"""The content-addressed cache of compiled objects, below the user's cache folder.

    <root>/v1/objects/<2 hex>/<key>/     one entry: its files and `manifest.json` with the sha256 of each
    <root>/v1/building/<random>/         an entry that is being made; becomes an entry by one rename
    <root>/v1/locks/<key>                held (flock) by the process that builds this key

Rules, each for a reason:

- A key is a hash of everything that went in, so an entry never changes and nobody needs to invalidate it.
- An entry appears whole, by the rename of a folder, or not at all: a process killed at any moment leaves only litter in
  `building`, which `prune` removes when it is old.
- Every file is hashed before it is handed out. What does not match its manifest is removed and built again. Files are data or
  shared objects; nothing is ever unpickled.
- Shared objects run in this process, so the folders are ours and 0700, and a root that belongs to somebody else or that others
  can write to is refused. Then, as with a read-only or full disk, new entries go to a private temporary folder that lives as
  long as the process, and one warning says so. Entries of our own on a read-only disk are still used.
- Many processes that need the same key at once: one holds the lock and builds, the others wait. The kernel drops the lock of a
  process that dies; a holder that hangs is waited for `LOCK_PATIENCE` seconds, after which building twice is harmless, since
  whoever renames second finds the entry there and takes it.
"""

import atexit
import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

try:
    import fcntl
except ImportError:  # Windows: processes race, harmlessly
    fcntl = None  # type: ignore[assignment]

_LAYOUT = "v1"
_MANIFEST = "manifest.json"

#: Seconds to wait for another process that builds the same key. A kernel takes about one.
LOCK_PATIENCE = 120.0

#: Entries are pruned, least recently used first, when they take more than this. A kernel is about 100 kB.
DEFAULT_LIMIT = 1 << 30

#: Seconds after which what lies in `building` belongs to no living process.
_LITTER_AGE = 3600.0

#: Seconds between two updates of an entry's time of last use: not every start should write.
_TOUCH_INTERVAL = 3600.0

#: The disk does not take what we write, through no fault of the entry.
_DISK_ERRORS = frozenset(
    {errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.EDQUOT, errno.EIO, errno.ENOENT, errno.ENOTEMPTY}
)


class CacheWarning(UserWarning):
    """The cache folder can't be used; compiled kernels are kept for this process only."""


class _FolderRefusedError(OSError):
    """The folder exists and must not be used."""


def _make_private(folder: Path) -> None:
    """Create `folder` with mode 0700, or make sure that an existing one is ours alone to write."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:
        raise _FolderRefusedError(f"{folder} is not a folder") from error
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        # A link is as good as the folder it names: check that one, and the link's own owner.
        if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
            raise _FolderRefusedError(f"{folder} is a link that belongs to another user")
        status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise _FolderRefusedError(f"{folder} is not a folder")
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid != os.geteuid():
        raise _FolderRefusedError(f"{folder} belongs to another user (uid {status.st_uid})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _FolderRefusedError(f"{folder} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}; make it 0700)")


def _remove_own(folder: Path, owner: int) -> None:
    """Remove a temporary folder at exit, in the process that made it and not in its forked children."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Cache:
    """A cache below one folder. Safe under threads and processes."""

    def __init__(self, root: Path, *, limit: int = DEFAULT_LIMIT) -> None:
        self.root = Path(root)
        self.limit = limit
        self._folder = self.root / _LAYOUT
        self._read_only: Path | None = None  # entries to read besides those in _folder
        self._ready = False
        self._lock = threading.RLock()
        self._puts = 0

    # Folders ---------------------------------------------------------------------------------------------------------

    def _prepare(self) -> Path:
        """The folder to use, created and checked; the private one once the real one has failed."""
        with self._lock:
            if not self._ready:
                try:
                    if not self.root.is_absolute():
                        raise _FolderRefusedError(f"{self.root} is not absolute (has this user no home folder?)")
                    for folder in (self.root, self._folder, *(self._folder / n for n in ("objects", "building", "locks"))):
                        _make_private(folder)
                    self._ready = True
                    if not os.access(self._folder / "building", os.W_OK):
                        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self.root))
                except OSError as error:
                    self._move_to_private(error)
            return self._folder

    def _move_to_private(self, reason: OSError) -> None:
        with self._lock:
            folder = Path(tempfile.mkdtemp(prefix="postlude-"))
            atexit.register(_remove_own, folder, os.getpid())
            for name in ("objects", "building", "locks"):
                (folder / name).mkdir(mode=0o700)
            if self._ready:  # the real folder is ours; it only takes nothing new
                self._read_only = self._folder
            self._folder = folder
            self._ready = True
        why = str(reason) if isinstance(reason, _FolderRefusedError) else f"{reason.strerror or reason} ({self.root})"
        warnings.warn(
            f"The cache folder can't be used: {why}. Kernels compiled by this process are kept in {folder} until it ends."
            " Make the folder writable for you alone, or name another one in POSTLUDE_CACHE_DIR.",
            CacheWarning,
            stacklevel=2,
        )

    @property
    def private(self) -> bool:
        """Whether entries are kept for this process only."""
        return self._ready and self._folder != self.root / _LAYOUT

    def scratch(self, name: str) -> Path:
        """A folder beside the entries, for files that a person may want to look at."""
        folder = self._prepare() / name
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _entry(self, key: str, folder: Path | None = None) -> Path:
        return (folder or self._folder) / "objects" / key[:2] / key

    def unlock_after_fork(self) -> None:
        """Called in the child of a fork."""
        self._lock = threading.RLock()

    # Entries ---------------------------------------------------------------------------------------------------------

    def get(self, key: str) -> Path | None:
        """The folder of an entry whose every file is as it was written, or None."""
        self._prepare()
        entry = self._entry(key)
        if _is_whole(entry, key):
            self._touch(entry / _MANIFEST)
            return entry
        if entry.exists():
            self.remove(key)
        if self._read_only and _is_whole(baked := self._entry(key, self._read_only), key):
            return baked
        return None

    @staticmethod
    def _touch(manifest: Path) -> None:
        with suppress(OSError):
            if time.time() - manifest.stat().st_mtime > _TOUCH_INTERVAL:
                os.utime(manifest)

    def get_or_build(self, key: str, build: Callable[[Path], None]) -> Path:
        """The folder of the entry `key`; where there is none, `build(folder)` writes its files into an empty folder.

        Of all processes and threads that ask for a key at one time, one builds. What `build` raises is passed on and leaves
        nothing behind.
        """
        if entry := self.get(key):
            return entry
        try:
            return self._build_locked(key, build)
        except OSError as error:
            if self.private or error.errno not in _DISK_ERRORS:
                raise
            if error.errno == errno.ENOENT and not self._folder.exists():
                self._ready = False  # somebody cleared the user's caches: make the folders again
            else:
                self._move_to_private(error)
            return self._build_locked(key, build)

    def _build_locked(self, key: str, build: Callable[[Path], None]) -> Path:
        self._prepare()
        with self._locked(key):
            if entry := self.get(key):  # somebody built it while we waited
                return entry
            entry = self._build(key, build)
        self._puts += 1
        if self._puts % 64 == 1:
            self.prune()
        return entry

    def _build(self, key: str, build: Callable[[Path], None]) -> Path:
        folder = self._prepare() / "building" / f"{key[:16]}-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        try:
            build(folder)
            files = {path.name: _digest(path) for path in sorted(folder.iterdir())}
            (folder / _MANIFEST).write_text(json.dumps({"key": key, "files": files}))
            entry = self._entry(key)
            entry.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                folder.rename(entry)
            except OSError:
                # Lost a race that the lock did not prevent (no locks on this file system, or a holder that hung).
                if not self.get(key):
                    folder.rename(entry)
            return entry
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Hold the lock of `key`, or give up waiting: the lock saves work, correctness does not rest on it."""
        path = self._folder / "locks" / key
        deadline = time.monotonic() + LOCK_PATIENCE
        descriptor = None
        while fcntl is not None:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                while not _try_lock(descriptor) and time.monotonic() < deadline:
                    time.sleep(0.01)
                # The last holder removes the file: make sure that we have locked the one which is there.
                if time.monotonic() >= deadline or os.fstat(descriptor).st_ino == path.stat().st_ino:
                    break
            except FileNotFoundError:
                if descriptor is None:  # the folder is gone, not the file
                    raise
            except OSError as error:
                if descriptor is None and error.errno in _DISK_ERRORS:
                    raise
                break  # a file system without locks
            if descriptor is not None:
                os.close(descriptor)
                descriptor = None
        try:
            yield
        finally:
            if descriptor is not None:
                with suppress(OSError):
                    path.unlink()
                with suppress(OSError):
                    # Closing would not do: a process forked meanwhile has the descriptor too, and would keep the lock.
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def remove(self, key: str) -> None:
        """Remove an entry, so that no reader ever sees half of it."""
        self._discard(self._entry(key))

    def _discard(self, entry: Path) -> None:
        grave = self._folder / "building" / f"removed-{secrets.token_hex(8)}"
        try:
            entry.rename(grave)
        except OSError:
            grave = entry
        if grave.is_dir() and not grave.is_symlink():
            shutil.rmtree(grave, ignore_errors=True)
        else:
            with suppress(OSError):
                grave.unlink()

    # Size ------------------------------------------------------------------------------------------------------------

    def entries(self) -> list[tuple[Path, int, float]]:
        """Every entry: its folder, its bytes, the time of its last use (to the hour)."""
        self._prepare()
        found = []
        for entry in (self._folder / "objects").glob("*/*"):
            with suppress(OSError):
                size = sum(path.stat().st_size for path in entry.iterdir())
                found.append((entry, size, (entry / _MANIFEST).stat().st_mtime))
        return found

    def size(self) -> int:
        """Bytes of all entries."""
        return sum(size for _, size, _ in self.entries())

    def prune(self, limit: int | None = None) -> int:
        """Bring the cache below its limit, least recently used entries first; returns the number of entries removed.

        Goes down to four fifths of the limit, so that a full cache is not pruned at each new entry. An object that a process has
        loaded lives on in that process.
        """
        limit = self.limit if limit is None else limit
        self._sweep()
        entries = sorted(self.entries(), key=lambda entry: entry[2])
        total = sum(size for _, size, _ in entries)
        removed = 0
        if total > limit:
            for entry, size, _ in entries:
                if total <= limit * 4 // 5:
                    break
                self._discard(entry)
                total -= size
                removed += 1
        return removed

    def _sweep(self) -> None:
        """Remove what killed processes left behind."""
        for name in ("building", "locks", "failed"):
            with suppress(OSError):
                for path in (self._folder / name).iterdir():
                    with suppress(OSError):
                        if time.time() - path.lstat().st_mtime < _LITTER_AGE:
                            continue
                        if path.is_dir():
                            shutil.rmtree(path, ignore_errors=True)
                        else:
                            path.unlink()

    def clear(self) -> int:
        """Remove every entry; returns how many there were."""
        entries = self.entries()
        for entry, _, _ in entries:
            self._discard(entry)
        return len(entries)


def _is_whole(entry: Path, key: str) -> bool:
    """Whether an entry is there with every file as it was written."""
    try:
        manifest = json.loads((entry / _MANIFEST).read_bytes())
        return manifest["key"] == key and all(_digest(entry / name) == digest for name, digest in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


_caches: dict[Path, Cache] = {}
_caches_lock = threading.Lock()


def _after_fork() -> None:
    """Other threads may have held the locks at the fork; they do not exist in the child."""
    global _caches_lock
    _caches_lock = threading.Lock()
    for cache in _caches.values():
        cache.unlock_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def folder() -> Path:
    """The cache folder: POSTLUDE_CACHE_DIR, else `postlude` in the user's cache folder."""
    return named_path("POSTLUDE_CACHE_DIR") or platformdirs.user_cache_path("postlude")


def named_path(variable: str) -> Path | None:
    """The absolute path that an environment variable names; None where it is not set, or empty.

    As in a shell, a ``~`` that stands for no known home is part of the name.
    """
    return Path(os.path.expanduser(named)).absolute() if (named := os.environ.get(variable)) else None


def default(root: Path | str | None = None) -> Cache:
    """The cache below `root` (default: `folder()`), one object per folder and process."""
    path = folder() if root is None else Path(os.path.expanduser(root)).absolute()
    with _caches_lock:
        if path not in _caches:
            _caches[path] = Cache(path)
        return _caches[path]
