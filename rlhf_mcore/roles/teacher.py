"""Teachers for distillation: frozen models, or the policy itself.

The policy teaches itself with other prompts, or as an average of its past weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.observability.throughput import ModelFlops
from rlhf_mcore.parallel.rows import merge_rows
from rlhf_mcore.parallel.top_tokens import top_tokens
from rlhf_mcore.roles.model import RoleModel
from rlhf_mcore.roles.policy import logprobs_of
from rlhf_mcore.types import TEACHER_LOGPROBS, TEACHER_TOP, Microbatch, Prompt, TrainBatch

OTHERS = ""  # key for data sources without a separate teacher
# Map the prompts of rows to the token ids that the teacher reads instead.
Context = Callable[[Sequence[Prompt]], list[list[int]]]


@dataclass(slots=True)
class Average:
    """A running average of the actor's weights.

    Before each step except the first, the new average is ``decay`` times the old one plus 1 - ``decay`` times the
    actor.
    """

    model: RoleModel
    actor: RoleModel
    decay: float

    def follow(self) -> None:
        """Update the average with the actor's current weights. Local."""
        self.model.blend(self.actor, 1 - self.decay)


@dataclass(slots=True)
class Teacher:
    """Compute the teacher's results that a student is compared with at each sampled token.

    Attributes:
        models: teachers by data source; ``OTHERS`` is the teacher of all other sources.
        temperature: temperature of both distributions.
        vocab_size: the student's. Top tokens and their probabilities are computed among these tokens only.
        top_k: number of top tokens per distribution; None: compute only the sampled token's logprob, over the
            teacher's whole vocabulary.
        context: returns the teacher's own prompts; None: the teacher reads the student's prompts.
        average: the running average, if one of the models is one.
    """

    models: Mapping[str, RoleModel]
    temperature: float
    vocab_size: int
    top_k: int | None = None
    context: Context | None = None
    average: Average | None = None

    @property
    def field(self) -> str:
        """Return the name of the token field that :meth:`compute` fills."""
        return TEACHER_LOGPROBS if self.top_k is None else TEACHER_TOP

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the field for one token."""
        return () if self.top_k is None else (2, self.top_k + 1)

    @property
    def work(self) -> tuple[str, ModelFlops] | None:
        """Return the phase of :meth:`compute` and its FLOPs. Return None if the FLOPs depend on the rows.

        They do if the teacher has its own prompts, or if there are several teachers.
        """
        flops = next(iter(self.models.values())).flops
        return None if self.context is not None or len(self.models) > 1 or flops is None else (self.field, flops)

    def compute(self, batch: TrainBatch) -> Tensor:
        """Compute the field [N, *shape] fp32 for the tokens in the loss mask, zero elsewhere.

        Collective over the world.
        """
        if self.average is not None and batch.policy_version > 0:
            self.average.follow()
        if self.context is None and len(self.models) == 1:
            return self._pass(next(iter(self.models.values())), batch)
        found = torch.zeros(len(batch.token_ids), *self.shape)
        for source, model in self.models.items():
            rows = [row for row, name in enumerate(self._sources(batch)) if name == source]
            if rows:
                part, places = take_rows(batch, rows, self.context)
                found[places] = self._pass(model, part)[part.loss_mask]
        return found

    def _sources(self, batch: TrainBatch) -> list[str]:
        """Return the key of ``models`` for each row of the step."""
        assert batch.prompts is not None, "responses were sampled"
        names = [prompt.data_source if prompt.data_source in self.models else OTHERS for prompt in batch.prompts]
        return [names[group] for group in batch.group_ids.tolist()]

    def _pass(self, model: RoleModel, batch: TrainBatch) -> Tensor:
        if self.top_k is None:
            return logprobs_of(model, batch, self.temperature)

        def top(outputs: Tensor, microbatch: Microbatch) -> Tensor:
            assert model.model is not None and self.top_k is not None
            return top_of_outputs(model.model, outputs, microbatch, self.top_k, self.vocab_size, self.temperature)

        return model.per_token(batch, top, {"loss_mask": batch.loss_mask}, shape=self.shape)


def take_rows(batch: TrainBatch, rows: Sequence[int], context: Context | None = None) -> tuple[TrainBatch, Tensor]:
    """Return some rows of a batch (ascending) as a new batch, and the old positions of its loss-mask tokens.

    The new batch contains only the fields of a forward pass. ``context``: gives the rows other prompts, with other
    lengths. Collective over the world.
    """
    new = {row: number for number, row in enumerate(rows)}
    own = [row for row in batch.rows.tolist() if row in new]
    lengths = batch.lengths[batch.rows]
    starts: dict[int, int] = dict(zip(batch.rows.tolist(), (lengths.cumsum(0) - lengths).tolist(), strict=True))
    places = [torch.arange(starts[row], starts[row] + int(batch.lengths[row])) for row in own]
    ids, masks = [batch.token_ids[of_row] for of_row in places], [batch.loss_mask[of_row] for of_row in places]
    chosen = [of_row[mask] for of_row, mask in zip(places, masks, strict=True)]
    if context is not None:
        assert batch.prompts is not None, "responses were sampled"
        prompts = [batch.prompts[int(batch.group_ids[row])] for row in own]
        changed = zip(prompts, context(prompts), ids, masks, strict=True)
        pairs = [_with_prompt(torch.tensor(to, dtype=i.dtype), i, m, len(p.prompt_ids)) for p, to, i, m in changed]
        ids, masks = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    kept = torch.tensor(rows)
    lengths = torch.zeros(len(rows), dtype=torch.int64)
    lengths[[new[row] for row in own]] = torch.tensor([len(of_row) for of_row in ids], dtype=torch.int64)
    mask = torch.cat([batch.loss_mask[:0], *masks])
    part = TrainBatch(
        lengths=merge_rows(lengths),
        num_sampled=batch.num_sampled[kept],
        scores=batch.scores[kept],
        truncated=batch.truncated[kept],
        group_ids=batch.group_ids[kept],
        owners=batch.owners[kept],
        rows=torch.tensor([new[row] for row in own], dtype=torch.int64),
        token_ids=torch.cat([batch.token_ids[:0], *ids]),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(len(mask)),
        sequences={new[row]: sizes for row, sizes in batch.sequences.items() if row in new},
        images={new[row]: digests for row, digests in batch.images.items() if row in new},
    )
    return part, torch.cat([torch.zeros(0, dtype=torch.int64), *chosen])


def _with_prompt(prompt: Tensor, ids: Tensor, mask: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Replace the first ``length`` tokens of a row by another prompt, and return the new tokens and mask."""
    assert not mask[:length].any(), "the prompt is not sampled"
    return torch.cat([prompt, ids[length:]]), torch.cat([torch.zeros(len(prompt), dtype=torch.bool), mask[length:]])


def top_of_outputs(
    model: MegatronModel, outputs: Tensor, microbatch: Microbatch, count: int, vocab_size: int, temperature: float
) -> Tensor:
    """Compute the ``count`` most probable next tokens among the first ``vocab_size``.

    The result is zero at positions with a loss mask of zero.

    ``outputs``: outputs of the last stage for a placed microbatch. Returns [b, T, 2, count + 1] fp32, see
    :func:`top_tokens`.
    """
    hidden, weight, added = model.output_layer(outputs, microbatch.placed)
    found = top_tokens(
        hidden,
        weight,
        count,
        vocab_size=vocab_size,
        temperature=temperature,
        group=model.groups.collection.tp,
        chunk_tokens=model.logit_chunk_tokens,
        added=added,
        cap=model.spec.logit_cap,
    )
    return model.in_shape(microbatch, microbatch.placed, found)
