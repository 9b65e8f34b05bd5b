"""What one kernel of a device can hold. Growth ends where a Region would need more."""

from dataclasses import dataclass

from postlude.capture.gemm import FEW_QUERIES


@dataclass(frozen=True)
class Reach:
    """Limits of a device's kernels.

    Attributes:
        whole_rows: a kernel may reduce over a row and use the result for the same row, since one thread owns whole rows.
            Where a row is spread over many tiles, such a Region would need two kernels: there a reduction, and what is computed
            from it alone, may be a result.
        lefts: the products of a group may have different left sides.
        columns: a kernel may add the rows, for each column: a result as well. On a CPU those of one product, not of a batch.
        queries: of so many queries attention is one kernel all the same.
        prologues: a kernel of one row may compute the norm of that row before it multiplies. (With whole rows, a norm belongs
            to the kernel that computes its input.)
        tiles: most whole tiles from outside that a Region computes others from (inflow.py): where a kernel owns tiles, each takes
            shared memory from the mainloop. None: any number.
        deferred: a norm between products may become a factor of each row, behind the second product (norms.py).
    """

    whole_rows: bool
    columns: bool
    lefts: bool = False
    queries: int = FEW_QUERIES
    prologues: bool = False
    tiles: int | None = None
    deferred: bool = False


#: By device type.
REACH = {"cpu": Reach(whole_rows=True, columns=True, lefts=True)}

#: All other devices: kernels that own tiles.
TILES = Reach(whole_rows=False, columns=True, prologues=True, tiles=3, deferred=True)


def reach_of(device_type: str) -> Reach:
    """The limits for a type of device."""
    return REACH.get(device_type, TILES)
