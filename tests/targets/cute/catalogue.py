"""Regions that stand for what the target can express, small enough to compile one by one."""

from postlude.ir import Region, parse, verify

_HEAD = "region(m, n, k); %x = operand [m, k] bf16; %w = operand [n, k] bf16;"

_PROGRAMS = {
    "plain": f"{_HEAD} %acc = contract %x, %w : f32; yield [m, n] bf16 %acc",
    "gelu_erf": f"{_HEAD} %row = operand [n] bf16; %0 = const 0.5; %acc = contract %x, %w : f32; %1 = add %acc, %row;"
    " %2 = mul %0, %1; %3 = const 0.7071067811865476; %4 = mul %3, %1; %5 = erf %4; %6 = const 1.0; %7 = add %5, %6;"
    " %8 = mul %2, %7; yield [m, n] bf16 %8",
    "gelu_tanh": f"{_HEAD} %row = operand [n] bf16; %0 = const 0.5; %acc = contract %x, %w : f32; %1 = add %acc, %row;"
    " %2 = mul %0, %1; %3 = const 1.0; %4 = mul %1, %1; %5 = mul %4, %1; %6 = const 0.044715; %7 = mul %5, %6; %8 = add %7, %1;"
    " %9 = const 0.7978845608028654; %10 = mul %8, %9; %11 = tanh %10; %12 = add %3, %11; %13 = mul %2, %12;"
    " yield [m, n] bf16 %13",
    # Every kind of operand, several results of several types, one transposed, and a size that the program uses.
    "everything": f"{_HEAD} %row = operand [n] f32; %tile = operand [m, n] f32; %col = operand [m] bf16;"
    " %scalar = operand [] bf16; %acc = contract %x, %w : f32; %0 = add %acc, %row; %1 = mul %0, %col; %2 = mul %1, %scalar;"
    " %3 = add %2, %tile;"
    " %4 = const 0.0; %5 = gt %3, %4; %6 = neg %3; %7 = where %5, %3, %6; %8 = extent n; %9 = mul %7, %8; %10 = round_to bf16 %9;"
    " yield [m, n] bf16 %7; yield [m, n] f32 %10; yield [m, n] bf16 %0 order 1 0",
    "swiglu": f"{_HEAD} %w1 = operand [n, k] bf16; %row = operand [n] bf16; %acc = contract %x, %w : f32;"
    " %acc1 = contract %x, %w1 : f32; %0 = const 1.0; %1 = neg %acc; %2 = exp %1; %3 = add %0, %2; %4 = div %acc, %3;"
    " %5 = round_to bf16 %4; %6 = add %acc1, %row; %7 = mul %6, %5; yield [m, n] bf16 %7; yield [m, n] bf16 %acc",
    "projections": "region(m, n, n1, k); %x = operand [m, k] f16; %w = operand [n, k] f16; %w1 = operand [k, n1] f16;"
    " %acc = contract %x, %w : f32; %acc1 = contract %x, %w1 : f32; yield [m, n] f16 %acc; yield [m, n1] f16 %acc1",
    "batched": "region(b, m, n, k); %x = operand [b, m, k] bf16; %w = operand [b, k, n] bf16; %row = operand [b, n] bf16;"
    " %tile = operand [b, m, n] bf16; %acc = contract %x, %w : f32; %0 = add %acc, %row; %1 = relu %0; %2 = add %1, %tile;"
    " yield [b, m, n] bf16 %2",
    # What deferred normalisation and gradients of biases need: totals of rows and columns, as they are and computed with.
    "totals": f"{_HEAD} %row = operand [n] bf16; %tile = operand [m, n] bf16; %col = operand [m] f32; %bias = operand [n] bf16;"
    " %acc = contract %x, %w : f32; %0 = add %acc, %row; %1 = exp %0; %2 = add %1, %tile; %3 = mul %2, %2; %4 = reduce sum n %3;"
    " %5 = extent n; %6 = div %4, %5; %7 = const 1e-05; %8 = add %6, %7; %9 = rsqrt %8; %10 = reduce max n %2;"
    " %11 = add %10, %col; %12 = reduce min n %0; %13 = reduce sum m %2; %14 = reduce sum m %3; %15 = add %14, %bias;"
    " yield [m, n] bf16 %2; yield [m] f32 %9; yield [m] bf16 %11; yield [m] f32 %12; yield [n] f32 %13; yield [n] bf16 %15",
    "column_totals": f"{_HEAD} %tile = operand [m, n] bf16; %acc = contract %x, %w : f32; %0 = const 0.0; %1 = le %tile, %0;"
    " %2 = where %1, %0, %acc; %3 = reduce sum m %2; yield [m, n] bf16 %2; yield [n] bf16 %3",
    "row_totals": f"{_HEAD} %acc = contract %x, %w : f32; %0 = exp %acc; %1 = reduce sum n %0; yield [m] f32 %1",
    "paired": f"{_HEAD} %w1 = operand [n, k] bf16; %tile = operand [m, n] bf16; %mask = operand [m, n] bool;"
    " %acc = contract %x, %w : f32; %acc1 = contract %x, %w1 : f32; %0 = sigmoid %acc; %1 = mul %0, %acc; %2 = mul %1, %acc1;"
    " %3 = extent n; %4 = div %2, %3; %5 = where %mask, %2, %4; %6 = add %5, %tile; %7 = mul %6, %6; %8 = reduce sum n %7;"
    " %9 = div %8, %3; %10 = reduce sum m %6; %11 = reduce max n %6;"
    " yield [m, n] bf16 %6; yield [m] f32 %9; yield [n] bf16 %10; yield [m] f32 %11",
    # Backward: GELU's derivative with the gradient of its bias, and both gradients of a SwiGLU, of what forward has saved.
    "dgelu": f"{_HEAD} %tile = operand [m, n] bf16; %0 = const 0.5; %1 = const 1.0; %2 = const 0.7071067811865476;"
    " %3 = mul %2, %tile; %4 = erf %3; %5 = add %1, %4; %6 = mul %0, %5; %7 = const -0.5; %8 = mul %tile, %tile; %9 = mul %7, %8;"
    " %10 = exp %9; %11 = const 0.3989422804014327; %12 = mul %10, %11; %13 = mul %12, %tile; %14 = add %6, %13;"
    " %acc = contract %x, %w : f32; %15 = mul %acc, %14; %16 = round_to bf16 %15; %17 = reduce sum m %16; yield [m, n] bf16 %15;"
    " yield [n] bf16 %17",
    "dswiglu": f"{_HEAD} %tile = operand [m, n] bf16; %tile1 = operand [m, n] bf16; %acc = contract %x, %w : f32; %0 = const 1.0;"
    " %1 = neg %tile; %2 = exp %1; %3 = add %0, %2; %4 = div %tile, %3; %5 = round_to bf16 %4; %6 = mul %acc, %5;"
    " %7 = mul %acc, %tile1; %8 = reciprocal %3; %9 = mul %0, %8; %10 = mul %7, %9; %11 = sub %0, %9; %12 = mul %11, %tile;"
    " %13 = add %0, %12; %14 = mul %10, %13; yield [m, n] bf16 %6; yield [m, n] bf16 %14",
    # A deferred norm: what the product before it gives, and a gated pair behind it.
    "norm_before": f"{_HEAD} %tile = operand [m, n] bf16; %row = operand [n] bf16; %acc = contract %x, %w : f32;"
    " %0 = add %acc, %tile; %1 = const 1.52587890625e-05; %2 = mul %0, %1; %3 = mul %2, %row; %4 = mul %0, %0;"
    " %5 = reduce sum n %4; %6 = extent n; %7 = div %5, %6; %8 = const 1e-06; %9 = add %7, %8;"
    " %10 = rsqrt %9; %11 = const 65536.0; %12 = mul %10, %11; yield [m, n] bf16 %0; yield [m, n] bf16 %3; yield [m] f32 %12",
    "norm_behind": f"{_HEAD} %w1 = operand [n, k] bf16; %col = operand [m] f32; %acc = contract %x, %w : f32;"
    " %0 = mul %acc, %col; %acc1 = contract %x, %w1 : f32; %1 = mul %acc1, %col; %2 = const 1.0; %3 = neg %0; %4 = exp %3;"
    " %5 = add %2, %4; %6 = div %0, %5; %7 = round_to bf16 %6; %8 = mul %1, %7; yield [m, n] bf16 %8",
    "truths": f"{_HEAD} %mask = operand [m, n] bool; %keep = operand [m] bool; %some = operand [n] bool; %row = operand [n] bf16;"
    " %acc = contract %x, %w : f32; %0 = add %acc, %row; %1 = const 0.0; %2 = where %mask, %0, %1; %3 = logical_and %keep, %some;"
    " %4 = where %3, %2, %row; %5 = gt %4, %1; yield [m, n] bf16 %4; yield [m, n] bool %5",
    "heads": "region(b, m, n, k); %x = operand [b, m, k] bf16; %w = operand [b, n, k] bf16; %tile = operand [b, m, n] bf16;"
    " %acc = contract %x, %w : f32; %0 = add %acc, %tile; %1 = reduce sum n %0; %2 = reduce sum m %0;"
    " yield [b, m, n] bf16 %0 order 0 2 1 3; yield [b, m, n] f32 %acc; yield [b, m] f32 %1; yield [b, n] f32 %2",
}

#: Name -> Region.
CATALOGUE: dict[str, Region] = {name: parse(program) for name, program in _PROGRAMS.items()}

for _region in CATALOGUE.values():
    verify(_region)
