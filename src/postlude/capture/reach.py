"""What one kernel of a device can hold. Growth ends where a Region would need more."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reach:
    """Limits of a device's kernels.

    Attributes:
        whole_rows: a kernel may reduce over a row and use the result for the same row, since one thread owns whole rows.
            Where a row is spread over many tiles, such a Region would need two kernels: there a reduction, and what is computed
            from it alone, may be a result.
        columns: a kernel may add the rows, for each column: a result as well.
    """

    whole_rows: bool
    columns: bool


#: By device type.
REACH = {"cpu": Reach(whole_rows=True, columns=False)}

#: All other devices: kernels that own tiles.
TILES = Reach(whole_rows=False, columns=True)


def reach_of(device_type: str) -> Reach:
    """The limits for a type of device."""
    return REACH.get(device_type, TILES)
