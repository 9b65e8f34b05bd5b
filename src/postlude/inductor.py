"""How TorchInductor compiles ``postlude::region``: an extern kernel whose results Inductor allocates and reuses.

The generated wrapper looks a program's kernel up once, when its module is imported, and then calls it with operands and
results as plain arguments, so a call costs no dispatcher, no schema and no list. Where the wrapper is C++ (ahead-of-time
compilation, `cpp_wrapper`) or belongs to a control-flow branch, the op goes through the dispatcher as any custom op does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V

from postlude import dependent_launch
from postlude.op import MAX_RESULTS, overload

#: Key in a node's `meta`: the operands that may be packed ahead of time, and whether they are constants for good.
FROZEN = "postlude_frozen"


class RegionResult(ir.MultiOutput):
    """One result: a buffer that Inductor allocates before the call."""

    def should_allocate(self) -> bool:
        """Inductor allocates."""
        return True

    def codegen(self, wrapper: Any) -> None:
        """The call has filled the buffer: nothing to generate."""


class RegionKernel(ir.ExternKernel):
    """The call of one Region's kernel."""

    results: list[RegionResult]

    def __init__(
        self, op: torch._ops.OpOverload, program: str, operands: Sequence[ir.IRNode], frozen: tuple[tuple[int, ...], bool]
    ) -> None:
        device = operands[0].get_device()
        assert device is not None
        super().__init__(None, ir.MultiOutputLayout(device=device), list(operands), (program,), op_overload=op)
        self.program = program
        self.frozen = frozen
        self.name = V.graph.register_buffer(self)
        V.graph.register_operation(self)

    def should_allocate(self) -> bool:
        """The node itself stands for no memory."""
        return False

    def codegen(self, wrapper: Any) -> None:
        """Allocate the results, then call: ``buf7 = region_0(arg0, buf3, buf8)``."""
        self.codegen_comment(wrapper)
        for result in self.results:
            wrapper.codegen_allocation(result)
        operands: Sequence[Any] = self.inputs
        arguments = [operand.codegen_reference() for operand in operands]
        arguments += [result.get_name() for result in self.results]
        device = self.get_device()
        assert device is not None
        handle = _handle(wrapper, device.type, self.program, self.frozen)
        wrapper.writeline(f"{self.get_name()} = {handle}({', '.join(arguments)})")


def _handle(wrapper: Any, device: str, program: str, frozen: tuple[tuple[int, ...], bool]) -> str:
    """Name of the module-level variable that holds the program's kernel."""
    handles: dict[object, str] = wrapper.__dict__.setdefault("_postlude_handles", {})
    key = (device, program, frozen)
    if key not in handles:
        handles[key] = f"region_{len(handles)}"
        if len(handles) == 1:
            wrapper.header.writeline("from postlude.runtime import kernel as _postlude_kernel")
        wrapper.header.writeline(f'{handles[key]} = _postlude_kernel("{device}", "{program}", *{frozen!r})')
    return handles[key]


def _lower(op: torch._ops.OpOverload, program: str, operands: Sequence[Any]) -> Any:
    dependent_launch.mark(V.graph)
    if V.graph.cpp_wrapper or V.graph.fx_wrapper or not _is_root(V.graph):
        return fallback_handler(op, add_to_fallback_set=False)(program, operands)
    node: Any = V.graph.current_node
    fakes = [argument.meta["val"] for argument in node.args[1]]
    for operand in operands:
        # A view of a value that is not in memory yet: write the value once, whoever else reads it, not once for each view.
        operand.realize()
    kernel_inputs = [
        ir.ExternKernel.require_exact_strides(operand, fake.stride()) if fake.ndim else operand
        for operand, fake in zip(operands, fakes, strict=True)
    ]
    kernel_inputs = [ir.ExternKernel.realize_input(operand) for operand in kernel_inputs]
    kernel = RegionKernel(op, program, kernel_inputs, node.meta.get(FROZEN, ((), False)))
    value = node.meta["val"]
    values = value if isinstance(value, tuple) else (value,)
    kernel.results = [
        RegionResult(
            ir.FixedLayout(
                device=fake.device,
                dtype=fake.dtype,
                size=[_expression(size) for size in fake.shape],
                stride=[_expression(stride) for stride in fake.stride()],
            ),
            kernel,
            [(tuple, index)],
        )
        for index, fake in enumerate(values)
    ]
    boxes = [ir.TensorBox.create(result) for result in kernel.results]
    return tuple(boxes) if isinstance(value, tuple) else boxes[0]


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _is_root(graph: Any) -> bool:
    """Whether the graph's wrapper has a header of its own (a branch of `cond` has not)."""
    return type(graph).__name__ == "GraphLowering"


def register() -> None:
    """Tell Inductor about every overload of the op; once per process."""
    dependent_launch.install()
    for count in range(1, MAX_RESULTS + 1):
        op = overload(count)

        def lower(program: str, operands: Sequence[Any], op: torch._ops.OpOverload = op) -> Any:
            return _lower(op, program, operands)

        register_lowering(op, type_promotion_kind=None)(lower)
