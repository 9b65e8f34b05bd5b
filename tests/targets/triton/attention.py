"""Regions of attention as capture writes them."""

from postlude.ir import Region, parse

SOFTMAX = (
    "%inf = const -inf; %zero = const 0.0; %one = const 1.0; %p = reduce max n %s; %e = eq %inf, %p;"
    " %t = where %e, %zero, %p; %d = sub %s, %t; %x = exp %d; %sum = reduce sum n %x;"
    " %safe = where %e, %one, %sum; %i = reciprocal %safe; %w = mul %x, %i; %out = contract %w, %v : f32;"
)
MASKS = {
    "none": ("", "%c = const 0.125; %s = mul %acc, %c;"),
    "truth values": (
        "%mask = operand [b, m, n] bool;",
        "%c = const 0.125; %0 = mul %acc, %c; %hidden = const -inf; %s = where %mask, %0, %hidden;",
    ),
    "a bias per key": ("%mask = operand [n] {0};", "%c = const 0.125; %0 = mul %acc, %c; %s = add %0, %mask;"),
    "a soft cap": ("", "%c = const 0.02; %0 = mul %acc, %c; %1 = tanh %0; %cap = const 5.0; %s = mul %1, %cap;"),
}


def region(dtype: str, mask: str = "none", epilogue: str = "yield [b, m, o] {0} %out") -> Region:
    operand, change = MASKS[mask]
    text = (
        "region(b, m, n, o, k); %q = operand [b, m, k] {0}; %k = operand [b, n, k] {0}; %v = operand [b, n, o] {0};"
        f" {operand} %acc = contract %q, %k : f32; {change} {SOFTMAX} {epilogue}"
    )
    # Axes of columns are named n, n1, ...
    return parse(text.replace("{0}", dtype).replace("[b, m, o]", "[b, m, n1]").replace(", o", ", n1"))
