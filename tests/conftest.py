"""What must be settled before any test imports Triton: without a GPU, its kernels run in Triton's interpreter.

Triton reads the variable when a kernel is defined, its own library's kernels included, so it can't be set later.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
