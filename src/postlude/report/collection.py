"""Where those listen who want to know what capture did to each graph, as it is compiled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock

from postlude.capture import Captured

#: Called with what became of a graph's GEMMs, and whether it is one of inference.
Listener = Callable[[list[Captured], bool], None]


@dataclass
class Collection:
    """What was captured while the collection was open, one list per graph."""

    graphs: list[tuple[list[Captured], bool]] = field(default_factory=list)


_listeners: list[Listener] = []
_lock = Lock()


def collect(captured: list[Captured], is_inference: bool) -> None:
    """Tell every listener of one graph's captured Regions."""
    with _lock:
        listeners = list(_listeners)
    for listener in listeners:
        listener(captured, is_inference)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Have `listener` told of what capture does in any thread until the block ends."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


@contextmanager
def collecting() -> Iterator[Collection]:
    """Collect what capture does in any thread until the block ends."""
    collection = Collection()
    with listening(lambda captured, is_inference: collection.graphs.append((captured, is_inference))):
        yield collection
