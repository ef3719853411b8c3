"""Whether an engine's weights may be used, and whether the tensors of a load are the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_SHOWN = 5  # names listed in a message


class VersionedWeights:
    """The version of an engine's weights, or the reason why there are none that may be used.

    A load is a transaction: the weights are unusable from ``begin_load`` until ``commit_load``, whatever happens in
    between. ``policy_version`` is -1 before the first load, during one and after one that failed.
    """

    def __init__(self) -> None:
        self.policy_version = -1
        self._problem: str | None = "no weights were ever loaded"

    def begin_load(self) -> None:
        """The weights from before are gone."""
        self.abandon("the last load of weights did not finish")

    def abandon(self, problem: str) -> None:
        """Declare the weights unusable."""
        self.policy_version = -1
        self._problem = problem

    def commit_load(self, version: int) -> None:
        """A whole load has ended."""
        assert version >= 0, f"policy versions count from 0, got {version}"
        self.policy_version = version
        self._problem = None

    def require_weights(self) -> None:
        """Raises RuntimeError with the reason if there is nothing to generate with."""
        if self._problem is not None:
            raise RuntimeError(
                f"the rollout engine cannot generate: {self._problem}; call load_weights with every tensor"
            )


@dataclass(slots=True)
class ExpectedTensors:
    """The tensors that make a model whole, under Hugging Face names.

    ``shapes`` has every name a checkpoint may use. ``groups`` has the names that share one tensor (tied embeddings):
    one of a group is enough.
    """

    shapes: dict[str, tuple[int, ...]]
    groups: list[set[str]] = field(default_factory=list)

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, tuple[int, ...]]) -> ExpectedTensors:
        """Every tensor of a checkpoint, each once."""
        return cls(dict(shapes), [{name} for name in shapes])

    @classmethod
    def of_model(cls, model: torch.nn.Module) -> ExpectedTensors:
        """Read from a transformers model; one on the meta device will do."""
        state = model.state_dict(keep_vars=True)
        groups: dict[int, set[str]] = {}
        for name, tensor in state.items():
            groups.setdefault(id(tensor), set()).add(name)
        return cls({name: tuple(tensor.shape) for name, tensor in state.items()}, list(groups.values()))

    @classmethod
    def of_directory(cls, model_dir: str) -> ExpectedTensors:
        """Read from config.json by building the model on the meta device: no memory, no weights file needed."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            return cls.of_model(AutoModelForCausalLM.from_config(config, trust_remote_code=False))

    def checked(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass ``weights`` through; every tensor of the model must come exactly once, in its full shape.

        Raises:
            ValueError: an unknown, repeated or wrongly shaped tensor when it comes; at the end, those that never came.
        """
        seen: set[str] = set()
        for name, tensor in weights:
            self._check(name, tensor, seen)
            seen.add(name)
            yield name, tensor
        missing = sorted(min(group) for group in self.groups if not group & seen)
        if missing:
            rest = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            shown = ", ".join(missing[:_SHOWN]) + rest
            raise ValueError(f"{len(missing)} tensors of the model were not handed to the engine: {shown}")

    def _check(self, name: str, tensor: Tensor, seen: set[str]) -> None:
        shape = self.shapes.get(name)
        if shape is None:
            raise ValueError(f"tensor {name!r} is not part of the rollout engine's model")
        if name in seen:
            raise ValueError(f"tensor {name!r} was handed to the rollout engine twice")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, the rollout engine's model needs {shape}"
            )
