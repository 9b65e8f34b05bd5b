"""Where `explain` listens: what capture did to each graph while it was compiled."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from postlude.capture import Captured


@dataclass
class Collection:
    """What was captured while the collection was open, one list per graph."""

    graphs: list[tuple[list[Captured], bool]] = field(default_factory=list)


_open: list[Collection] = []
_lock = Lock()


def collect(captured: list[Captured], is_inference: bool) -> None:
    """Hand one graph's captured Regions to every open collection."""
    with _lock:
        for collection in _open:
            collection.graphs.append((captured, is_inference))


@contextmanager
def collecting() -> Iterator[Collection]:
    """Collect what capture does in any thread until the block ends."""
    collection = Collection()
    with _lock:
        _open.append(collection)
    try:
        yield collection
    finally:
        with _lock:
            _open.remove(collection)
