"""Gives Triton's interpreter what it lacks: the functions of `libdevice`, from torch's double precision."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.targets.triton import interpreter

    interpreter.install()
