"""Capture: from a graph of ATen ops to Regions. Decides what is legal to fuse; what pays is `select`'s to say."""

from postlude.capture.capture import Captured, capture, count_gemms
from postlude.capture.grow import Settings

__all__ = ["Captured", "Settings", "capture", "count_gemms"]
