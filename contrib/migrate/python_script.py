"""Read the arguments of TRL's ``GRPOConfig`` and ``GRPOTrainer`` from the syntax tree of a script. The script is not run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlhf_mcore.config.errors import ConfigError

_POSITIONAL = {
    "GRPOConfig": ("output_dir",),
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
}
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_MAX_DEPTH = 20  # limit for nested expressions and chains of assigned names
_MAX_NUMBER = 2**63


class _NotInScript(Exception):
    """A value is known only when the script runs."""


@dataclass(slots=True)
class PythonScript:
    """Arguments of a script. ``values``: keyword -> value. ``computed``: keyword -> expression that only a run can evaluate."""

    values: dict[str, Any] = field(default_factory=dict)
    computed: dict[str, str] = field(default_factory=dict)


def read_python(text: str, name: str) -> PythonScript:
    """Collect the arguments of the calls of GRPOConfig and GRPOTrainer. If a keyword occurs several times, the last value counts.

    Raises:
        ConfigError: the text is not Python, or contains no such call.
    """
    try:
        tree = ast.parse(text)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) in _POSITIONAL]
        assigned = _assignments(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"{name}: not a Python script ({str(error) or 'nested too deep'}); correct the file"
        ) from error
    if not calls:
        raise ConfigError(
            f"{name}: calls neither GRPOConfig nor GRPOTrainer; if it reads its options from the command line, give the "
            "launch script with `trl grpo --...`"
        )
    script = PythonScript()
    for call in calls:
        for key, node in _keywords(call):
            try:
                script.values[key] = _Values(assigned, names_functions=key == "reward_funcs").of(node)
                script.computed.pop(key, None)
            except _NotInScript:
                script.values.pop(key, None)
                script.computed[key] = ast.unparse(node)
    script.values.pop("args", None)
    script.computed.pop("args", None)  # the GRPOConfig itself
    return script


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _assignments(tree: ast.Module) -> dict[str, ast.expr]:
    """Map every plain name to its last assigned value, in any scope."""
    pairs = [(node.targets[0], node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    return {target.id: value for target, value in pairs if isinstance(target, ast.Name)}


def _keywords(call: ast.Call) -> list[tuple[str, ast.expr]]:
    given = zip(_POSITIONAL[_name(call.func)], call.args, strict=False)
    return [*given] + [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None]


@dataclass(frozen=True, slots=True)
class _Values:
    """Evaluates expressions of constants and of names with constant values.

    ``names_functions``: evaluate a name without assignment to itself, as the name of a function.
    """

    assigned: Mapping[str, ast.expr]
    names_functions: bool

    def of(self, node: ast.expr, depth: int = 0) -> Any:
        """Evaluate ``node``.

        Raises:
            _NotInScript: only a run can evaluate it.
        """
        if depth > _MAX_DEPTH:
            raise _NotInScript
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.List | ast.Tuple):
            return [self.of(item, depth + 1) for item in node.elts]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._number(node.operand, depth)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            try:
                return _OPERATORS[type(node.op)](self._number(node.left, depth), self._number(node.right, depth))
            except ArithmeticError as error:
                raise _NotInScript from error
        if isinstance(node, ast.Name) and node.id in self.assigned:
            return self.of(self.assigned[node.id], depth + 1)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):  # dataset["train"]
            return self.of(node.value, depth + 1)
        if isinstance(node, ast.Call):
            return self._of_call(node, depth)
        if isinstance(node, ast.Name | ast.Attribute) and self.names_functions:
            return _name(node)
        raise _NotInScript

    def _number(self, node: ast.expr, depth: int) -> Any:
        value = self.of(node, depth + 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _MAX_NUMBER:
            raise _NotInScript
        return value

    def _of_call(self, node: ast.Call, depth: int) -> Any:
        """Evaluate a loading call to the name of its data set, files or model, and LoraConfig to its keywords."""
        function = _name(node.func)
        files = [keyword.value for keyword in node.keywords if keyword.arg == "data_files"]
        if function == "load_dataset" and files:
            named = self.of(files[0], depth + 1)
            return ",".join(map(str, named)) if isinstance(named, list) else named
        if function in ("load_dataset", "from_pretrained") and node.args:
            return self.of(node.args[0], depth + 1)
        if function == "LoraConfig":  # without task_type, which may be an enumeration member
            keywords = {word.arg: word.value for word in node.keywords if word.arg not in (None, "task_type")}
            return {str(name): self.of(value, depth + 1) for name, value in keywords.items()}
        if isinstance(node.func, ast.Attribute) and function in ("map", "filter", "select", "shuffle"):
            return self.of(node.func.value, depth + 1)
        raise _NotInScript
