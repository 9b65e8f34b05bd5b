"""Schemes: what is done to a layer. A table."""

from dataclasses import dataclass

from postlude.errors import QuantizationError
from postlude.quant.formats import FORMATS, Format, format_named


@dataclass(frozen=True)
class Scheme:
    """The format of weights, and that of activations, which are quantised at each call; None leaves them as they are.

    Attributes:
        weight: name of a format.
        activation: name of a format, or None.
    """

    weight: str
    activation: str | None = None

    def __post_init__(self) -> None:
        for name in (self.weight, self.activation):
            if name is not None:
                format_named(name)

    @property
    def formats(self) -> tuple[Format, ...]:
        """Its formats."""
        return tuple(FORMATS[name] for name in (self.weight, self.activation) if name is not None)


#: Schemes by name.
SCHEMES: dict[str, Scheme] = {
    "fp8-weight": Scheme("fp8_e4m3_row"),
    "nvfp4-weight": Scheme("nvfp4"),
    "int8-weight": Scheme("int8_row"),
    "int4-weight": Scheme("int4_32"),
    "fp8": Scheme("fp8_e4m3_row", "fp8_e4m3_row"),
    "mxfp8": Scheme("mxfp8_e4m3", "mxfp8_e4m3"),
    "nvfp4": Scheme("nvfp4", "nvfp4"),
}


def scheme_named(scheme: str | Scheme) -> Scheme:
    """The scheme of this name, or the scheme itself.

    Raises:
        QuantizationError: there is none.
    """
    if isinstance(scheme, Scheme):
        return scheme
    if scheme not in SCHEMES:
        raise QuantizationError(f"there is no scheme {scheme!r}", f"one of {', '.join(SCHEMES)}", "Or give a Scheme of your own")
    return SCHEMES[scheme]
