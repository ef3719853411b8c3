"""Run and update a Megatron model under a parallel layout, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from rlhf_mcore.config.schema import OptimizerConfig
from rlhf_mcore.geometry import LocalParameter
from rlhf_mcore.mcore.groups import ModelGroups, StageMessages, SumOfParts, use_groups
from rlhf_mcore.mcore.indexed_attention import IndexedAttention, indexers
from rlhf_mcore.mcore.inputs import PassInputs
from rlhf_mcore.mcore.mixture import move_expert_biases, routers
from rlhf_mcore.mcore.model_spec import ModelSpec
from rlhf_mcore.mcore.mtp import mtp_loss, sum_embedding_gradients
from rlhf_mcore.mcore.optimizer import Optimizer, StepOutcome
from rlhf_mcore.mcore.overrides import Overrides, copies_of_pass
from rlhf_mcore.mcore.weights import adapter_parameters, local_parameters, unwrap, weight_storage
from rlhf_mcore.parallel.collectives import reduce_sums
from rlhf_mcore.parallel.context import gather_context
from rlhf_mcore.parallel.logprobs import TokenLogprobs, linear_logprobs
from rlhf_mcore.parallel.top_tokens import TeacherTopTokens
from rlhf_mcore.platform import Platform
from rlhf_mcore.residency.ledger import GRADIENTS, KINDS, OPTIMIZER, WEIGHTS
from rlhf_mcore.residency.parts import Gradients, MovablePart
from rlhf_mcore.residency.sharing import DeviceSharing, Movable
from rlhf_mcore.types import TEACHER_TOP, Microbatch

if TYPE_CHECKING:
    from rlhf_mcore.algorithms.kl import Divergence
    from rlhf_mcore.mcore.lora import Adapters
    from rlhf_mcore.mcore.mixture import Router
    from rlhf_mcore.mcore.momentum import Locate
    from rlhf_mcore.mcore.mtp import MTPLearning
    from rlhf_mcore.mcore.route_replay import Routing
    from rlhf_mcore.mcore.vision import ModelVision

Metrics = dict[str, Tensor]
# Both functions run on the last pipeline stage only. They receive the model's outputs for one microbatch.
OutputFunction = Callable[[Tensor, Microbatch], Tensor]
LossFunction = Callable[[Tensor, Microbatch], tuple[Tensor, Metrics]]


@dataclass(slots=True)
class LossSums:
    """The weighted loss of a microbatch and the sums for its metrics, all detached."""

    loss: Tensor
    metrics: Metrics
    mtp: tuple[Tensor, Tensor] | None = None  # summed negative log-likelihood and count of the MTP-predicted tokens


@dataclass(slots=True)
class MegatronModel:
    """The chunks of a model on this rank (one, or ``vpp`` of them) and everything needed to run them.

    Megatron's schedules run ``chunks``. The chunks of a trained model are wrapped in DDP.
    """

    spec: ModelSpec
    config: TransformerConfig
    groups: ModelGroups
    platform: Platform
    chunks: list[torch.nn.Module]
    aux_loss_coef: float = 0.0  # coefficient of the load-balancing loss of a trained MoE model
    expert_bias_rate: float = 0.0  # change of an expert's bias per update
    optimizer: Optimizer | None = None
    overrides: Overrides = field(default_factory=Overrides)
    logit_chunk_tokens: int | None = None
    _has_stale_weights: bool = False  # with overlap_param_gather: an update is not gathered yet
    movable: Movable = field(default_factory=Movable)  # the parts that are offloaded between uses
    mtp: MTPLearning | None = None  # set if MTP layers are trained
    indexer: str = "frozen"  # training of indexers: frozen, warm_up or sparse
    adapters: Adapters | None = None  # set if adapters are trained instead of the weights
    vision: ModelVision | None = None  # set if the model reads images
    routing: Routing | None = None  # set if the run replays the routers' choice of experts

    @property
    def is_last_stage(self) -> bool:
        return self.groups.pp_rank == self.groups.layout.pp - 1

    @property
    def _inputs(self) -> PassInputs:
        return PassInputs(self.groups, self.platform, bool(self.aux_loss_coef or self.expert_bias_rate), self.vision)

    def local_parameters(self) -> list[LocalParameter]:
        """List every tensor of the model on this rank. See :func:`rlhf_mcore.mcore.weights.local_parameters`."""
        return local_parameters(self.chunks, self.groups.layout)

    def adapter_parameters(self) -> list[LocalParameter]:
        """List the trained parameters of a model with adapters on this rank: A, B and a scalar head.

        Without adapters: [].
        """
        return adapter_parameters(self.chunks, self.groups.layout) if self.adapters is not None else []

    def adapters_off(self) -> AbstractContextManager[None]:
        """Run the model without its adapters within this block."""
        return self.adapters.off() if self.adapters is not None else nullcontext()

    def _routers(self, chunks: Iterable[torch.nn.Module] | None = None) -> Iterator[Router]:
        """Return the routers of all layers except MTP layers, in all chunks if ``chunks`` is None.

        A dense model has none, and its iterator loads no MoE code.
        """
        if self.spec.geometry.experts is None:
            return iter(())
        return routers(self.chunks if chunks is None else chunks)

    def add_optimizer(self, cfg: OptimizerConfig, locate: Locate = lambda *_: []) -> None:
        """Create the optimizer. Collective over the model's ranks.

        Load the weights first, because the optimizer copies them to its master weights.
        """
        alone = (self.mtp is not None and self.mtp.alone) or self.indexer == "sparse"
        self.optimizer = Optimizer(
            self.chunks, self.config, self.groups, self.platform, cfg, self.overrides, self.movable, locate, alone
        )

    def share(self, sharing: DeviceSharing, name: str, kinds: Collection[str], *, by_layer: bool = False) -> None:
        """Keep the parts of ``kinds`` on the device only while they are used.

        Args:
            sharing: decides when parts are moved.
            name: the model's name in the ledger.
            kinds: kinds of parts: weights, gradients, optimizer state.
            by_layer: in a pass, copy the layers of a frozen model to the device one at a time, for every microbatch.
        """
        self.movable.sharing = sharing
        if not kinds:
            return
        if GRADIENTS in kinds:
            self.movable.add(GRADIENTS, Gradients(f"{name} {GRADIENTS}", self.chunks, self.platform))
        if OPTIMIZER in kinds:
            assert self.optimizer is not None
            part = MovablePart(f"{name} {OPTIMIZER}", self.optimizer.device_state(), self.platform)
            self.movable.add(OPTIMIZER, part)
        if WEIGHTS in kinds:
            for chunk in self.chunks if by_layer else ():
                assert not isinstance(chunk, DistributedDataParallel), "its weights are in one buffer"
                self.movable.add_layers(name, unwrap(chunk).decoder.layers)
            tensors = [tensor for chunk in self.chunks for tensor in weight_storage(chunk)]
            rest = [tensor for tensor in tensors if not any(part.holds(tensor) for part in self.movable.layers)]
            lingers = self.optimizer is not None  # a frozen model is used only once per step
            self.movable.add(WEIGHTS, MovablePart(f"{name} {WEIGHTS}", rest, self.platform, lingers=lingers))

    def release(self) -> None:
        """Break the references that keep the model alive.

        Megatron holds them in C++ hooks and in caches of methods.
        """
        self.config.grad_scale_func = None  # a method of the optimizer
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel):
                chunk.grad_accs.clear()
            for parameter in chunk.parameters():
                vars(parameter).pop("main_param", None)
            for module in chunk.modules():
                if hasattr(cached := type(module).forward, "cache_clear"):
                    cached.cache_clear()

    def updating(self) -> AbstractContextManager[None]:
        """Keep the parts that an update reads or changes on the device within this block."""
        return self.movable.use(*KINDS, writes=True)

    def forward(self, microbatches: Sequence[Microbatch], function: OutputFunction) -> list[Tensor]:
        """Run the microbatches without gradients and return one result of ``function`` per microbatch, on the host.

        The list is empty except on the last pipeline stage. Collective over the model's ranks.
        """

        def collect(microbatch: Microbatch, outputs: Tensor, non_loss_data: bool = True) -> Tensor:
            return function(outputs, microbatch).cpu()

        for chunk in self.chunks:
            chunk.eval()
        with self.movable.passing(), torch.no_grad():
            return self._run(microbatches, collect, forward_only=True)

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: LossFunction) -> list[LossSums]:
        """Accumulate gradients of the summed losses and reduce them over ranks. Collective over the model's ranks.

        ``loss(outputs, microbatch)`` returns a scalar that is already weighted by the global count, and detached
        metrics.

        Returns:
            The sums of each microbatch; empty except on the last pipeline stage.
        """

        def compute(microbatch: Microbatch, outputs: Tensor) -> tuple[Tensor, Tensor, LossSums]:
            value, metrics = loss(outputs, microbatch)
            # The schedule divides and scales the returned tensor in place, so record a copy.
            sums = LossSums(value.detach().clone(), metrics)
            if self.mtp is not None:
                rows = self._inputs.in_rows(microbatch)
                if microbatch.tree is not None:
                    outputs = outputs.index_select(1, microbatch.placed["sources"])
                added, sums.mtp = mtp_loss(self, outputs, rows, self._inputs.packed_sequences(rows), self.mtp)
                value = value + added
            return value, torch.zeros([], dtype=torch.int), sums

        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()  # type: ignore[operator]
        for router in self._routers():
            router.begin()
            device = self.platform.device()
            router.assigned = torch.zeros(router.num_experts, device=device) if self.expert_bias_rate else None
        if self.aux_loss_coef or self.indexer != "frozen":
            # These losses are means over the tokens of the update. Their sums start at zero.
            local = {"tokens": float(sum(sum(m.lengths) for m in microbatches))}
            num_tokens = max(reduce_sums(local, self.groups.collection.dp)["tokens"], 1.0)
            for router in self._routers():
                router.balance_weight = self.aux_loss_coef / num_tokens
                router.balance_sum = 0.0
            for attention in self._indexers():
                attention.loss_weight = 1.0 / num_tokens
                attention.loss_sum = torch.zeros(())
        with self._gathering_weights():
            return self._run(microbatches, compute, forward_only=False)

    @contextmanager
    def _gathering_weights(self) -> Iterator[None]:
        """Gather updated weights within this block, when the layers that need them run (overlap_param_gather)."""
        if not self._has_stale_weights:
            yield
            return
        for chunk in self.chunks:
            chunk.enable_forward_pre_hook()  # type: ignore[operator]
        yield
        for chunk in self.chunks:
            chunk.disable_forward_pre_hook(param_sync=False)  # type: ignore[operator]
        self._has_stale_weights = False

    def gather_weights(self) -> None:
        """Gather now the updated weights that the next update would gather. Collective over the model's ranks."""
        if self._has_stale_weights:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)  # type: ignore[operator]
            self._has_stale_weights = False

    def step(self, lr: float) -> StepOutcome:
        """Update the weights with the accumulated gradient.

        See :meth:`Optimizer.step` and :meth:`gather_weights`.
        """
        assert self.optimizer is not None
        self.movable.ready(OPTIMIZER)
        outcome = self.optimizer.step(lr)
        self._has_stale_weights |= outcome.updated and self.overrides.wants("overlap_param_gather")
        if outcome.updated and self.expert_bias_rate:
            move_expert_biases(self._routers(), self.expert_bias_rate, self.groups.collection.tp_dp_cp)
        return outcome

    def _indexers(self) -> Iterator[IndexedAttention]:
        return iter(()) if self.indexer == "frozen" else indexers(self.chunks)

    def indexer_loss(self) -> float:
        """Return the loss of the indexers in the last update, a mean over tokens and layers. Collective over the model's ranks."""
        sums_of_layers = [attention.loss_weight * attention.loss_sum for attention in self._indexers()]
        local = {"loss": float(torch.stack(sums_of_layers).sum()), "layers": float(len(sums_of_layers))}
        group = self.groups.collection.intra_dist_opt
        sums, ranks_per_layer = reduce_sums(local, group), group.size() // self.groups.layout.pp
        return sums["loss"] / self.groups.layout.tp / (sums["layers"] / ranks_per_layer)

    def load_balance(self) -> float:
        """Return the load-balancing loss of the last update.

        It is the coefficient times the sum over layers of the token mean. Collective over the model's ranks.
        """
        terms = [(r.balance_weight, r.balance_sum) for r in self._routers() if isinstance(r.balance_sum, Tensor)]
        sums = torch.stack([value for _, value in terms]).tolist() if terms else []
        local = sum(weight * value for (weight, _), value in zip(terms, sums, strict=True))
        return reduce_sums({"balance": local}, self.groups.collection.intra_dist_opt)["balance"]

    def logprobs_and_entropy(
        self,
        outputs: Tensor,
        microbatch: Microbatch,
        temperature: float,
        *,
        with_entropy: bool = True,
        output_weight: Tensor | None = None,
        divergence: Divergence | None = None,
    ) -> TokenLogprobs:
        """Compute the logprobs of the next tokens, fp32, in the shape of ``microbatch.token_ids``.

        Optional results are the entropies (``with_entropy``), the log of the support's mass (if the microbatch
        contains a ``support``) and the divergence from the teacher's distributions (``divergence``). Tokens whose
        ``weights`` or ``loss_mask`` is zero have no logits. All their results are zero.

        Args:
            outputs: outputs of this model's last stage.
            microbatch: the microbatch that produced them.
            temperature: sampling temperature.
            with_entropy: compute entropies too.
            output_weight: weight of the output layer; None: the model's.
            divergence: divergence from the teacher to compute.
        """
        placed = microbatch.placed or self._inputs.derive(microbatch)
        hidden, weight, added = self.output_layer(outputs, placed, output_weight)
        compared = None
        if divergence is not None:
            compared = TeacherTopTokens.of(placed[TEACHER_TOP].to(hidden.device), divergence)
        computed = linear_logprobs(
            hidden,
            weight,
            placed["targets"].to(hidden.device),
            vocab_size=self.spec.geometry.vocab_size,
            temperature=temperature,
            group=self.groups.collection.tp,
            chunk_tokens=self.logit_chunk_tokens,
            with_entropy=with_entropy,
            support=self._inputs.subsets(microbatch),
            compared=compared,
            main_grad=getattr(weight, "main_grad", None),  # Megatron accumulates microbatches here in fp32
            added=added,
            cap=self.spec.logit_cap,
        )
        whole = partial(self.in_shape, microbatch, placed)
        return TokenLogprobs(whole(computed.logprobs), *(x if x is None else whole(x) for x in computed[1:]))

    def output_layer(
        self, outputs: Tensor, placed: Mapping[str, Tensor], output_weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Return the inputs of the logits: hidden states, output weight, and the term that adapters add.

        Hidden states [n, h] are for the tokens with logits. ``placed`` is the result of ``PassInputs.derive`` for the
        microbatch.
        """
        chunk, adapters = unwrap(self.chunks[-1]), self.adapters if output_weight is None else None
        if (weight := output_weight) is None:
            tied = chunk.share_embeddings_and_output_weights
            weight = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight
        hidden = outputs.reshape(-1, outputs.size(-1))
        if (places := placed.get("hidden_at", placed.get("counted"))) is not None:
            hidden = hidden.index_select(0, places.to(hidden.device))
        return hidden, weight, adapters.of_logits(chunk.output_layer, hidden) if adapters is not None else None

    def in_shape(self, microbatch: Microbatch, placed: Mapping[str, Tensor], values: Tensor) -> Tensor:
        """Scatter values [n, ...] of this rank's tokens with logits into the shape of ``microbatch.token_ids``.

        Other tokens get zero.
        """
        (height, width), cp = microbatch.token_ids.shape, self.groups.layout.cp
        shape = (height, width // cp if microbatch.tree is None else width)
        if (places := placed.get("counted")) is not None:
            filled = values.new_zeros(shape[0] * shape[1], *values.shape[1:])
            values = filled.index_copy(0, places.to(values.device), values)
        values = values.view(*shape, *values.shape[1:])
        if microbatch.tree is None or cp == 1:
            return self._whole(microbatch, values)
        whole: Tensor = SumOfParts.apply(values, self.groups.collection.cp)
        return whole

    def _whole(self, microbatch: Microbatch, values: Tensor) -> Tensor:
        """Gather [b, T, ...] from all context-parallel ranks, so that they compute the same loss.

        The gradient of a rank covers only its own tokens.
        """
        if self.groups.layout.cp == 1:
            return values
        order = (microbatch.placed or self._inputs.derive(microbatch))["order"].to(values.device)
        whole = gather_context(values.transpose(0, 1), order, self.groups.collection.cp, sums_gradient=False)
        return whole.transpose(0, 1)

    def _run(
        self, microbatches: Sequence[Microbatch], on_outputs: Callable[..., Any], *, forward_only: bool
    ) -> list[Any]:
        layout, pgs = self.groups.layout, self.groups.collection
        self.config.finalize_model_grads_func = partial(_finalize, self.mtp is not None, self.vision)
        schedule = get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vpp)
        communicator = None
        if layout.pp > 1:
            communicator = StageMessages(self.groups, self.config, microbatches)
        step: Any = partial(self._forward_step, on_outputs)
        if self.routing is not None:
            step = self.routing.steps(step, microbatches, self._inputs, learns=not forward_only)
        reading = nullcontext() if self.vision is None else self.vision.reading(microbatches)
        copies: AbstractContextManager[None] = nullcontext()
        if self.overrides.wants("fp8"):
            copies = copies_of_pass(self.chunks)
        with self._inputs.place(microbatches), use_groups(self.groups, self.platform), reading, copies:
            return schedule(
                forward_step_func=step,
                data_iterator=[iter(microbatches) for _ in self.chunks],
                model=list(self.chunks),
                num_microbatches=len(microbatches),
                seq_length=max(m.width for m in microbatches),
                micro_batch_size=microbatches[0].token_ids.size(0),
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
                p2p_communicator=communicator,
                pg_collection=pgs,
            )

    def _forward_step(
        self, on_outputs: Callable[..., Any], iterator: Iterator[Microbatch], chunk: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        microbatch = next(iterator)
        if self.vision is not None:
            self.vision.enter(microbatch)
        padding = microbatch.placed.get("padding")
        if padding is not None and self.config.sequence_parallel and not unwrap(chunk).pre_process:
            # Megatron shards the padding mask on the first stage, with the embeddings, but not on later stages.
            padding = padding.chunk(self.groups.layout.tp, dim=1)[self.groups.tp_rank].contiguous()
        uses = microbatch.placed.get("uses")
        if uses is not None:
            uses = uses.flatten()
            if self.config.sequence_parallel:
                uses = uses.chunk(self.groups.layout.tp)[self.groups.tp_rank]
        with ExitStack() as running:
            for router in self._routers([chunk]) if self._inputs.with_padding else ():
                running.enter_context(router.enter(uses))
            output = chunk(
                input_ids=microbatch.placed["token_ids"],
                position_ids=microbatch.placed["position_ids"],
                # image numbers from vision.py; core_attention.py reads them
                attention_mask=microbatch.placed.get("image_blocks"),
                packed_seq_params=self._inputs.packed_sequences(microbatch),
                padding_mask=padding,
            )
        if self.spec.geometry.head != "lm" and unwrap(chunk).post_process:
            output = self._in_rows(microbatch, output)
        return output, partial(on_outputs, microbatch)

    def _in_rows(self, microbatch: Microbatch, outputs: Tensor) -> Tensor:
        """Convert the outputs [b, T, 1] of a scalar head to the row layout.

        The result contains the tokens of all context-parallel ranks.
        """
        if self.groups.layout.cp > 1:
            outputs = self._whole(microbatch, outputs.squeeze(-1)).unsqueeze(-1)
        return outputs if microbatch.tree is None else outputs.index_select(1, microbatch.placed["sources"])


def _finalize(
    copies_embedding: bool,
    vision: ModelVision | None,
    chunks: list[torch.nn.Module],
    num_tokens: Tensor | None = None,
    **kwargs: Any,
) -> None:
    """Reduce gradients.

    The token count is not passed to Megatron, because the losses are already divided by the global count.
    """
    if vision is not None:
        vision.backward()
    finalize_model_grads(chunks, None, **kwargs)
    if copies_embedding:
        sum_embedding_gradients(chunks, kwargs["pg_collection"].embd)


def scalar_outputs(outputs: Tensor, microbatch: Microbatch) -> Tensor:
    """Return the output of a scalar head at each position, fp32 in the shape of ``microbatch.token_ids``."""
    return outputs.squeeze(-1)


_RNG_PREFIX = "megatron."


def rng_tracker_states() -> dict[str, Tensor]:
    """Return the states (uint8, by name) of Megatron's generators that differ between tensor-parallel ranks."""
    return {_RNG_PREFIX + name: state for name, state in get_cuda_rng_tracker().get_states().items()}


def set_rng_tracker_states(states: Mapping[str, Tensor]) -> None:
    """Restore the states from :func:`rng_tracker_states`. Other names are ignored."""
    mine = {name.removeprefix(_RNG_PREFIX): state for name, state in states.items() if name.startswith(_RNG_PREFIX)}
    get_cuda_rng_tracker().set_states(mine)
