"""Products over one element, on a GPU: a multiplication of a column and a row, which Inductor computes where it is needed.

Rotary embeddings multiply positions and frequencies so. As a GEMM that is a kernel of its own, and others that write its operands
to memory first, for a few numbers.
"""

import torch
from torch.fx import Graph

from postlude.capture.sizes import is_dense, same

aten = torch.ops.aten

#: Ops without a bias.
PRODUCTS = (aten.mm.default, aten.bmm.default)

#: Type of the devices where that pays.
DEVICE = "cuda"


def expand_outer_products(graph: Graph) -> int:
    """Write products over one element as multiplications; returns how many there were. The graph is changed in place."""
    changed = 0
    for target in PRODUCTS:
        for node in graph.find_nodes(op="call_function", target=target):
            left, right = node.args
            value = node.meta["val"]
            one = left.meta["val"].shape[-1]
            if value.device.type != DEVICE or not value.dtype.is_floating_point or not same(one, 1):
                continue
            if not is_dense(value.stride(), value.shape, range(value.ndim)):
                continue
            with graph.inserting_before(node):
                product = graph.call_function(aten.mul.Tensor, (left, right))
                # A sum starts at 0, which makes 0 of -0.
                total = graph.call_function(aten.add.Tensor, (product, 0.0))
                # Rows lie one after the other, however the operands lie.
                dense = graph.call_function(aten.clone.default, (total,), {"memory_format": torch.contiguous_format})
            for made in (product, total, dense):
                made.meta = {**node.meta}
            node.replace_all_uses_with(dense)
            graph.erase_node(node)
            changed += 1
    return changed
