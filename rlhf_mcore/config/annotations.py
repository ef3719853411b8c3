"""Check plain values of a configuration against the annotations in another package's source, without importing it."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

Definition = ast.expr | ast.ClassDef


def accepts(node: ast.expr, value: Any, find: Callable[[str], Definition | None] | None = None) -> bool:
    """Return whether a plain value fits an annotation. Torch dtypes are given as texts (``fp32``), Enum members as their names.

    Args:
        node: the annotation.
        find: returns the definition of a named type, an alias or a class. A name without a definition accepts every value.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return accepts(ast.parse(node.value, mode="eval").body, value, find)
    if isinstance(node, ast.Constant):
        return value is None
    if isinstance(node, ast.BinOp):
        return accepts(node.left, value, find) or accepts(node.right, value, find)
    if isinstance(node, ast.Subscript):
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        match ast.unparse(node.value).rpartition(".")[2].lower():
            case "optional":
                return value is None or accepts(items[0], value, find)
            case "union":
                return any(accepts(item, value, find) for item in items)
            case "literal":
                return any(isinstance(item, ast.Constant) and item.value == value for item in items)
            case "list":
                return isinstance(value, list) and all(accepts(items[0], item, find) for item in value)
            case "tuple":
                is_one_each = isinstance(value, list) and len(items) == len(value)
                return is_one_each and all(accepts(*pair, find) for pair in zip(items, value, strict=True))
            case "dict":
                return isinstance(value, dict) and all(accepts(items[1], item, find) for item in value.values())
        return False
    match name := ast.unparse(node):
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        case "str" | "AttnBackend":
            return isinstance(value, str)
        case "torch.dtype":
            return value in ("fp32", "bf16", "fp16")
        case "list":
            return isinstance(value, list)
        case "dict":
            return isinstance(value, dict)
        case "Any":
            return True
    if find is None:
        return False
    definition = find(name)
    if isinstance(definition, ast.ClassDef):
        is_enum = any("Enum" in ast.unparse(base) for base in definition.bases)
        return isinstance(value, str | int if is_enum else dict)
    return definition is None or accepts(definition, value, find)
