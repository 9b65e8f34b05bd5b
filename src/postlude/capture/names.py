"""What a person calls a GEMM: the path of the module that it comes from."""

import re

from torch.fx import Node

#: How Dynamo starts the path of a module: the variable that holds the model.
_ROOT = re.compile(r"^L\['[^']*'\]\.?|^[LG]\.")


def name_of(node: Node) -> str:
    """``layers.3.mlp.up_proj``, ``backward of layers.3.mlp.up_proj``, or the graph's own name where no module made the node."""
    for key, prefix in (("nn_module_stack", ""), ("fwd_nn_module_stack", "backward of ")):
        if stack := node.meta.get(key):
            path = _ROOT.sub("", str(list(stack.values())[-1][0]))
            # Dynamo writes "layers.3" as "layers.modules.3" or "layers._modules['3']" on some versions.
            path = re.sub(r"\._modules\['([^']*)'\]|\['([^']*)'\]", lambda m: f".{m[1] or m[2]}", path)
            if path:
                return prefix + path
    return node.name


def joined(names: list[str]) -> str:
    """Several paths as one, what they share written once: ``layers.0.attention.{query, key, value}``."""
    first, *rest = names
    shared = first.rpartition(".")[0]
    if rest and shared and all(name.rpartition(".")[0] == shared for name in rest):
        return f"{shared}.{{{', '.join(name.rpartition('.')[2] for name in names)}}}"
    return " + ".join(names)


def pattern(names: list[str]) -> str:
    """Names of equal Regions as one: numbers in which they differ become ``*``."""
    different = list(dict.fromkeys(names))
    columns = list(zip(*(name.split(".") for name in different), strict=False))
    shared = ".".join(column[0] if len(set(column)) == 1 else "*" for column in columns)
    if all(re.fullmatch(re.escape(shared).replace(r"\*", r"\d+"), name) for name in different):
        return shared
    return f"{different[0]}, ..."
