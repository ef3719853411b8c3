"""Trace a vLLM rank's weights in Hugging Face coordinates, by recording vLLM's own weight loaders.

No table of models is needed. For its layerwise reload vLLM keeps the layout in which every parameter was loaded.
The trace puts the parameters into that layout on the meta device and passes meta tensors with Hugging Face names
to ``model.load_weights``. It records every write into a parameter instead of executing it. Strides and offsets of
meta tensors are real, so both sides of a ``copy_`` give a rectangle of a checkpoint tensor and its place.

The trace also tests whether a write to the live tensor reaches the kernels: see :func:`trace`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_mcore.bridge.map.pieces import Interval, Piece, Rectangle
from rlhf_mcore.bridge.map.strided import View, copied_pieces, covered_rectangles, find_padding
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.protocols import ADAPTER_SLOTS

if TYPE_CHECKING:
    from torch import Tensor, nn

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class EngineParameter:
    """A tensor of a vLLM rank in its loading layout, which is contiguous.

    ``padding`` lists the elements that no Hugging Face tensor fills; they must be zero. ``repacked`` is the reason
    why the live tensor cannot be written directly, or "" if it can. ``aliases`` are other names of the same tensor
    (tied lm_head).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    padding: tuple[Interval, ...] = ()
    repacked: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Name of the module that owns this parameter."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class EngineMap:
    """All tensors of a vLLM rank, in layer order.

    ``unused`` names the Hugging Face tensors that this rank does not need. ``derived`` names the parameters that
    vLLM computes from others after loading; a sync does not write them.
    """

    parameters: tuple[EngineParameter, ...]
    unused: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()

    @property
    def direct(self) -> tuple[EngineParameter, ...]:
        """Parameters whose live tensor has the loading layout and is read by the kernels."""
        return tuple(parameter for parameter in self.parameters if not parameter.repacked)

    @property
    def repacked(self) -> tuple[tuple[EngineParameter, ...], ...]:
        """Parameters that need vLLM's layerwise reload, grouped by layer in layer order; see ``engine.reloading``."""
        groups: dict[str, list[EngineParameter]] = {}
        for parameter in self.parameters:
            if parameter.repacked:
                groups.setdefault(parameter.module, []).append(parameter)
        return tuple(tuple(group) for group in groups.values())

    @property
    def together(self) -> list[list[str]]:
        """Groups of Hugging Face names that a sync must send together: the tensors of each repacked layer."""
        return [sorted({piece.hf_name for p in layer for piece in p.pieces}) for layer in self.repacked]

    def views(self, model: nn.Module) -> dict[str, Tensor]:
        """Return flat views of the live direct parameters. Offsets and strides of pieces apply to these views.

        Raises:
            RuntimeError: a tensor no longer has the traced layout.
        """
        live = _tensors(model)
        flat = {}
        for parameter in self.direct:
            tensor = live[parameter.name]
            if not _is_laid_out(tensor, parameter.shape, parameter.dtype):
                raise RuntimeError(f"engine parameter {parameter.name} has changed its layout: trace the model again")
            flat[parameter.name] = tensor.data.view(-1)
        return flat


def trace(model: nn.Module, hf_shapes: Mapping[str, tuple[int, ...]], *, probe: bool = True) -> EngineMap:
    """Trace the live model of a vLLM rank. The result is deterministic.

    A trace takes milliseconds to a second, and needs no memory and no communication. A parameter is direct if two
    conditions hold: its live tensor is contiguous in its loading shape and dtype, and its layer computes with that
    tensor. The second condition is tested: write a pattern, run the layer's kernel, restore the old values. So the
    model must be idle meanwhile, and its weights must be finite (dummy weights are fine).

    Args:
        model: the model in vLLM's worker.
        hf_shapes: every tensor of the checkpoint format; tied tensors once or under both names.
        probe: False skips the kernel test and checks the layout only. Use False before vLLM has processed the
            weights, because layers cannot compute until then.

    Raises:
        ValueError: the loaders wrote an element twice, or left elements unwritten that are not padding.
        ConfigError: a loader computes elements, so a sync cannot write them from a checkpoint.
    """
    recorder = _record(model, hf_shapes)
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters: list[EngineParameter] = []
    used: set[str] = set()
    derived: list[str] = []
    for names, tensor in _tensors_with_names(model):
        pieces, layout = recorder.of(names)
        if not pieces and not isinstance(tensor, torch.nn.Parameter):
            continue  # a buffer that checkpoints do not contain
        if not pieces and _is_derived(modules, names[0]):
            derived.append(names[0])
            continue
        used.update(piece.hf_name for piece in pieces)
        quantised = _why_quantised(modules[names[0].rpartition(".")[0]])
        is_checked = not ((opaque := recorder.opaque(names)) or quantised or recorder.has_zeros.intersection(names))
        padding = _padding(names, layout, pieces, modules, is_checked)
        if opaque and padding and not quantised:
            raise ConfigError(
                f"rollout.engine=vllm: the source of {names[0]} is unknown ({opaque}); set bridge.method=gather"
            )
        reason = opaque or _why_repacked(tensor, layout) or _why_copied(modules, names, probe)
        shape = tuple(layout.shape)
        parameters.append(EngineParameter(names[0], shape, layout.dtype, tuple(pieces), padding, reason, names[1:]))
    unused = tuple(name for name in hf_shapes if name not in used)
    return EngineMap(tuple(_with_siblings(parameters, modules)), unused, tuple(derived))


def _with_siblings(parameters: list[EngineParameter], modules: dict[str, nn.Module]) -> Iterator[EngineParameter]:
    """Mark the other parameters of a repacked parameter's layer.

    A layer is reloaded whole, so they cannot be written directly.
    """
    reloaded = {parameter.module for parameter in parameters if parameter.repacked}
    for parameter in parameters:
        attribute = parameter.name.rpartition(".")[2]
        if (
            not parameter.repacked
            and parameter.module in reloaded
            and attribute in recorded_layout(modules[parameter.module])
        ):
            yield replace(parameter, repacked="another parameter of its layer is repacked")
        else:
            yield parameter


def _padding(
    names: tuple[str, ...], layout: Tensor, pieces: list[Piece], modules: dict[str, nn.Module], is_checked: bool
) -> tuple[Interval, ...]:
    """Return the elements that no piece fills.

    For a checked parameter, vLLM must declare the same number of padding elements.
    """
    shape = tuple(layout.shape)
    try:
        padding = find_padding(shape, tuple([box for piece in pieces for box in covered_rectangles(piece, shape)]))
    except ValueError as error:
        raise ValueError(f"engine parameter {names[0]}: {error}") from error
    missing = sum(end - begin for begin, end in padding)
    if is_checked and missing != _declared_padding(names, layout, modules):
        raise ValueError(
            f"vLLM's loaders left {missing} elements of {names[0]} {shape} unwritten. Does the checkpoint format name "
            "all tensors of this architecture?"
        )
    return padding


def _declared_padding(names: tuple[str, ...], layout: Tensor, modules: dict[str, nn.Module]) -> int:
    """Count the elements that vLLM declares as padding: vocabulary rows, or the padding that a weight's creator declares."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    module = modules[names[0].rpartition(".")[0]]
    if isinstance(module, VocabParallelEmbedding):
        rows = layout.shape[0] - module.shard_indices.num_org_elements
        return rows * (layout.numel() // layout.shape[0])
    return layout.numel() - getattr(layout, "weight_loader_numel", layout.numel())


# ------------------------------------------------------------------------------------------------ recording the loaders


class Recorder(TorchDispatchMode):
    """Record the loaders' writes into the engine's tensors instead of executing them."""

    def __init__(self, sources: dict[str, Tensor], destinations: dict[str, Tensor]):
        super().__init__()
        self._sources = {_storage(tensor): name for name, tensor in sources.items()}
        self._hf_shapes = {name: tuple(tensor.shape) for name, tensor in sources.items()}
        self._destinations = {_storage(tensor): name for name, tensor in destinations.items()}
        self._layouts = destinations
        self._pieces: dict[str, dict[Rectangle, Piece]] = {name: {} for name in destinations}
        self._opaque: dict[str, str] = {}
        self._item: Tensor | None = None  # a source element read by .item(), which a later fill_ writes
        self._emptied: set[int] = set()  # sources that a loader set to zero because another rank holds them
        self.has_zeros: set[str] = set()  # destinations written from emptied sources

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False.

        No code is compiled here, and torch's guard against compilation would take a third of the time.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default and _storage(args[0]) in self._sources:
            self._item = args[0]
            return 0.0
        if func is _aten.clone.default and _storage(args[0]) in self._sources:
            return args[0]  # the loader makes the source contiguous; this moves no element
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and _storage(args[0]) in self._sources:
            del self._sources[_storage(args[0])]  # the loader changed it, so it no longer equals the checkpoint
            if func is _aten.zero_.default:
                self._emptied.add(_storage(args[0]))
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor) and _storage(args[0]) in self._destinations:
            self._write(func, args)
            return args[0]
        return func(*args, **(kwargs or {}))

    def _write(self, func: Any, args: Any) -> None:
        name = self._destinations[_storage(args[0])]
        if func is _aten.copy_.default and _storage(args[1]) in self._sources:
            self._copy(name, args[0], args[1])
        elif func is _aten.copy_.default and _storage(args[1]) in self._emptied:
            self.has_zeros.add(name)
        elif func in (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default):
            if self._item is not None:
                self._copy(name, args[0], self._item)
                self._item = None
        else:
            self._opaque[name] = f"its loader writes it by {func}, from computed values"

    def _copy(self, name: str, destination: Tensor, source: Tensor) -> None:
        hf_name = self._sources[_storage(source)]
        source = source.expand(destination.shape)
        base = self._layouts[name].storage_offset()
        target = View(int(destination.storage_offset() - base), tuple(destination.shape), destination.stride())
        origin = View(int(source.storage_offset()), tuple(source.shape), source.stride())
        for piece in copied_pieces(hf_name, self._hf_shapes[hf_name], origin, target):
            for box in covered_rectangles(piece, tuple(self._layouts[name].shape)):
                self._pieces[name][box] = piece  # if two writes hit the same place, the last one counts

    def of(self, names: tuple[str, ...]) -> tuple[list[Piece], Tensor]:
        """Return pieces (sorted by offset) and layout for the first of a tensor's names that was written."""
        written = next((name for name in names if self._pieces[name]), names[0])
        unique = {(piece.offset, piece.start, piece.hf_name): piece for piece in self._pieces[written].values()}
        return [unique[key] for key in sorted(unique)], self._layouts[written]

    def opaque(self, names: tuple[str, ...]) -> str:
        return next((self._opaque[name] for name in names if name in self._opaque), "")


def _record(model: Any, hf_shapes: Mapping[str, tuple[int, ...]]) -> Recorder:
    dtype = torch.get_default_dtype()
    sources = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in hf_shapes.items()}
    with torch.no_grad(), _loading_layout(model) as layouts:
        recorder = Recorder(sources, layouts)
        with recorder:
            model.load_weights(iter(sources.items()))
    return recorder


@contextmanager
def _loading_layout(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Replace the parameters by meta tensors in the loading layout that vLLM has recorded.

    Yield all tensors by all their names. vLLM does not record biases, because it reloads them in place; their
    layout is the live layout. After a first reload vLLM leaves its deferring loaders on the parameters, so they
    are removed here.
    """
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
    from vllm.model_executor.model_loader.reload.meta import restore_layer_refs, to_meta_tensor

    live = [(module, dict(module._parameters)) for module in model.modules()]
    try:
        for module, parameters in live:
            recorded = recorded_layout(module)
            for name, parameter in parameters.items():
                if parameter is not None:
                    layout = restore_layer_refs(to_meta_tensor(recorded.get(name, parameter)), module)
                    if isinstance(loader := getattr(layout, "weight_loader", None), partial):
                        loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]  # vLLM expects a name
                    layout.weight_loader = _get_original_loader(layout)
                    module._parameters[name] = layout
        yield _tensors(model)
    finally:
        for module, parameters in live:
            module._parameters.clear()
            module._parameters.update(parameters)


def recorded_layout(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters as vLLM creates them for a reload, on the meta device."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    parameters, _ = get_layerwise_info(module).restore_metadata
    return parameters


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Collect parameters, buffers and adapter slots by all their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
        **getattr(model, ADAPTER_SLOTS, {}),
    }


def _tensors_with_names(model: nn.Module) -> list[tuple[tuple[str, ...], Tensor]]:
    """List every tensor with all of its names, in layer order."""
    names_by_id: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in _tensors(model).items():
        names_by_id.setdefault(id(tensor), ([], tensor))[0].append(name)
    return [(tuple(names), tensor) for names, tensor in names_by_id.values()]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# ------------------------------------------------------------------------------------- does a write reach the kernels?


def _is_laid_out(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return tuple(tensor.shape) == shape and tensor.dtype == dtype and tensor.is_contiguous() and not tensor.is_meta


def _why_repacked(tensor: Tensor, layout: Tensor) -> str:
    if not layout.is_contiguous():
        return "it is loaded in a layout that is not contiguous"
    if _is_laid_out(tensor, tuple(layout.shape), layout.dtype):
        return ""
    return f"loaded as {layout.dtype} {tuple(layout.shape)}, it now is {tensor.dtype} {tuple(tensor.shape)}"


def _why_copied(modules: dict[str, nn.Module], names: tuple[str, ...], probe: bool) -> str:
    """Explain why the kernels do not read a tensor in its loading layout, or return "".

    Test every layer that shares it.
    """
    for name in names if probe else ():
        owner, _, attribute = name.rpartition(".")
        if reason := _why_processed_above(modules, owner) or _why_layer_copies(modules[owner], attribute):
            return reason
    return ""


def _why_processed_above(modules: dict[str, nn.Module], owner: str) -> str:
    """Explain that an enclosing module processes weights.

    It may store results computed from inner parameters (MLA does).
    """
    while True:
        module = modules[owner]
        if hasattr(module, "process_weights_after_loading"):
            return f"{type(module).__name__} processes its weights after loading"
        if not owner:
            return ""
        owner = owner.rpartition(".")[0]


def _is_derived(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Return whether a parameter is computed from others after loading (latent attention absorbs a projection).

    vLLM's loaders do not know it, because it did not exist when vLLM recorded the loading layout. Processing its
    module again (see ``engine.reloading``) computes it again.
    """
    owner, _, attribute = name.rpartition(".")
    module = modules[owner]
    return hasattr(module, "process_weights_after_loading") and attribute not in recorded_layout(module)


def _why_layer_copies(module: nn.Module, attribute: str) -> str:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = getattr(module, "quant_method", None)
    if method is None:
        return ""
    if reason := _why_quantised(module):
        return reason
    layer = type(module).__name__
    if any(isinstance(value, torch.Tensor) for value in vars(module).values()):
        return f"{layer} holds tensors in addition to its parameters"
    if isinstance(method, UnquantizedFusedMoEMethod):
        # The router's bias per expert belongs to this module, too. It is not packed.
        is_read = not attribute.startswith(("w13_", "w2_")) or _experts_are_read(module)
        return "" if is_read else f"{layer} has packed its experts"
    # A convolution layer only owns its kernel tensor; another layer reads it.
    if attribute != "weight" or module.get_parameter(attribute).dim() == 3 or _matrix_is_read(module):
        return ""
    return f"{layer} multiplies with a packed copy"


def _why_quantised(module: nn.Module) -> str:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    plain = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
    method = getattr(module, "quant_method", None)
    return "" if method is None or isinstance(method, plain) else f"{type(method).__name__} processes it after loading"


@torch.no_grad()
def _matrix_is_read(module: Any) -> bool:
    """Write the first and last columns, then multiply with their unit vectors. Small integers keep the result exact."""
    weight = module.weight.data
    rows, columns = weight.shape
    ends = [0, columns - 1]
    units = weight.new_zeros(2, columns)
    units[range(2), ends] = 1
    pattern = (torch.arange(2 * rows, device=weight.device) % 61 + 1).view(2, rows).to(weight.dtype)
    if columns == 1:
        pattern[0] = pattern[1]
    before = weight[:, ends].clone()
    weight[:, ends] = pattern.t()
    try:
        product = module.quant_method.apply(module, units, None)
    finally:
        weight[:, ends] = before
    return torch.equal(product.to(pattern.dtype), pattern)


@torch.no_grad()
def _experts_are_read(layer: Any) -> bool:
    """Write the first local expert as its loader would, then compare the kernel with the formula of a gated MLP."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
    from vllm.model_executor.layers.fused_moe.prepare_finalize import MoEPrepareAndFinalizeNoDPEPModular

    method = layer.quant_method
    if method.is_monolithic or layer.activation != MoEActivation.SILU or method.moe_kernel is None:
        return False
    if method.moe_kernel.fused_experts.activation_format() != FusedMoEActivationFormat.Standard:
        return False  # its tokens arrive sorted by expert, from other ranks
    w13, w2 = layer.w13_weight.data[0], layer.w2_weight.data[0]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, w13.shape[1], generator=generator).to(w13)
    before = w13.clone(), w2.clone()
    for weight in (w13, w2):
        weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5)
    gate, up = (hidden @ w13.t()).float().chunk(2, dim=-1)
    expected = (torch.nn.functional.silu(gate) * up).to(w2) @ w2.t()
    slot = 0 if layer.expert_map is None else int((layer.expert_map == 0).nonzero()[0])
    chosen = torch.full((1, 1), slot, dtype=torch.int32, device=w13.device)
    kernel = method.moe_kernel.impl
    usual, kernel.prepare_finalize = kernel.prepare_finalize, MoEPrepareAndFinalizeNoDPEPModular()  # no other ranks
    try:
        result = method.apply(layer, hidden, torch.ones_like(chosen, dtype=torch.float32), chosen, None, None)
    finally:
        kernel.prepare_finalize = usual
        w13.copy_(before[0])
        w2.copy_(before[1])
    return bool((result - expected).norm() < 0.05 * expected.norm())
