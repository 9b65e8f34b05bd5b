"""Regions that begin with a norm."""

from postlude.ir import Region, parse

NORM = (
    "%sq = mul %x, %x; %sum = reduce sum k %sq; %size = extent k; %mean = div %sum, %size; %eps = const 1e-05;"
    " %shifted = add %mean, %eps; %r = rsqrt %shifted; %y = mul %x, %r; %z = mul %y, %g;"
)
HEAD = "%x = operand [m, k] {0}; %g = operand [k] {0}; %w = operand [n, k] {0};"
PROGRAMS = {
    "linear": f"region(m, n, k); {HEAD} {NORM} %acc = contract %z, %w : f32; yield [m, n] {{0}} %acc",
    "swiglu": (
        f"region(m, n, k); {HEAD} %u = operand [n, k] {{0}}; {NORM} %acc = contract %z, %w : f32; %s = sigmoid %acc;"
        " %a = mul %acc, %s; %acc1 = contract %z, %u : f32; %b = mul %a, %acc1; yield [m, n] {0} %b"
    ),
    "q, k, v": (
        f"region(m, n, n1, n2, k); {HEAD} %u = operand [n1, k] {{0}}; %v = operand [n2, k] {{0}}; %b = operand [n1] {{0}}; {NORM}"
        " %q = contract %z, %w : f32; %a = contract %z, %u : f32; %c = add %a, %b; %d = contract %z, %v : f32;"
        " yield [m, n] {0} %q; yield [m, n1] {0} %c; yield [m, n2] {0} %d"
    ),
    # What is summed is not 0 where nothing is.
    "another": (
        "region(m, n, k); %x = operand [m, k] {0}; %w = operand [n, k] {0}; %e = exp %x; %sum = reduce sum k %e;"
        " %i = reciprocal %sum; %y = mul %e, %i; %acc = contract %y, %w : f32; yield [m, n] {0} %acc"
    ),
    # Of 0, which stands in for what lies beyond k, it is infinite.
    "inverse": (
        "region(m, n, k); %x = operand [m, k] {0}; %w = operand [n, k] {0}; %i = reciprocal %x; %sum = reduce sum k %x;"
        " %y = mul %i, %sum; %acc = contract %y, %w : f32; yield [m, n] {0} %acc"
    ),
}


def region(name: str, dtype: str = "f32") -> Region:
    return parse(PROGRAMS[name].replace("{0}", dtype))
