"""What adapters take, by hand: the weights without gradients, masters or moments, and these of A and B alone."""

from __future__ import annotations

from dataclasses import replace

from rlhf_mcore.config.schema import Config
from rlhf_mcore.geometry import AdapterSizes, GroupedSizes, ModelGeometry
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.counts import num_parameters
from rlhf_mcore.planning.inputs import PlannedRole
from rlhf_mcore.planning.sync import later_bytes
from rlhf_mcore.planning.weights import checkpoint_bytes, state_bytes

# Per layer: queries, keys and values 128 x 64, output 64 x 64, gate and up 256 x 64, down 64 x 128, four norms.
MODEL = ModelGeometry("qwen3", 2, 64, GroupedSizes(4, 2, 16), 128, 128, True)
LAYER = (128 + 64 + 256 + 128) * 64 + 2 * 64 + 2 * 16
# Of rank 8: A of three, one, two and one matrices, and their Bs.
ADAPTERS = 8 * ((3 + 1 + 2) * 64 + 128) + 8 * (128 + 64 + 256 + 64)


def role(
    targets: tuple[str, ...] = ("all-linear",),
    tp: int = 1,
    world_size: int = 1,
    dtype: str = "bf16",
    *,
    use_dora: bool = False,
) -> PlannedRole:
    layout = ParallelLayout(world_size, tp=tp)
    adapters = replace(MODEL, adapter=AdapterSizes(8, 16.0, targets, use_dora=use_dora))
    return PlannedRole("actor", MODEL, layout, True, dtype, adapters=adapters)


def test_weights_have_no_gradients_and_no_state() -> None:
    planned = role()
    assert planned.adapters is not None and num_parameters(planned.adapters) == 2 * ADAPTERS
    numel = 2 * LAYER + 128 * 64 + 64
    state = state_bytes(planned, 0)
    assert state.weights == 2 * numel + 2 * 2 * ADAPTERS
    assert (state.gradients, state.masters, state.moments) == (4 * 2 * ADAPTERS, 4 * 2 * ADAPTERS, 8 * 2 * ADAPTERS)
    assert checkpoint_bytes(planned) == 2 * ADAPTERS * (2 + 4 + 8)


def test_ranks_share_what_is_split() -> None:
    """Of two ranks each has whole As of what is split by rows, half of the A of what is split by columns, and half or all of B."""
    a = 8 * ((3 + 2) * 64 + (64 + 128) // 2)
    b = 8 * ((128 + 256) // 2 + 64 + 64)
    assert state_bytes(role(tp=2, world_size=2, dtype="fp32"), 1).gradients == 4 * 2 * (a + b)


def test_magnitudes_are_counted_one_for_each_output() -> None:
    """Of two ranks each has half of those of layers whose outputs are split, and all of the others."""
    outputs = (128 + 256, 64 + 64)
    with_and_without = [role(use_dora=use_dora) for use_dora in (True, False)]
    more, less = (state_bytes(planned, 0) for planned in with_and_without)
    assert more.moments - less.moments == 8 * 2 * sum(outputs)
    assert checkpoint_bytes(with_and_without[0]) - checkpoint_bytes(with_and_without[1]) == (2 + 4 + 8) * 2 * sum(
        outputs
    )
    more, less = (state_bytes(role(tp=2, world_size=2, use_dora=use_dora), 0) for use_dora in (True, False))
    assert more.gradients - less.gradients == 4 * 2 * (outputs[0] // 2 + outputs[1])


def test_data_parallel_ranks_share_the_state() -> None:
    states = [state_bytes(role(world_size=2), rank) for rank in (0, 1)]
    assert sum(state.moments for state in states) == 8 * 2 * ADAPTERS
    assert {state.gradients for state in states} == {4 * 2 * ADAPTERS}


def test_both_ends_have_parts_of_the_padded_vocabulary() -> None:
    """127 words on two ranks are 64 each; each rank has A of the embedding and of the output layer whole."""
    planned = role(("embed_tokens", "lm_head"), tp=2, world_size=2)
    untied = replace(MODEL, tied_embeddings=False, vocab_size=127)
    planned = replace(planned, geometry=untied, adapters=replace(untied, adapter=planned.adapters.adapter))
    assert state_bytes(planned, 1).gradients == 4 * 2 * 8 * (64 + 64)
    assert checkpoint_bytes(planned) == 2 * 8 * (64 + 127) * (2 + 4 + 8)


def test_layers_may_differ() -> None:
    state = state_bytes(role(("model.layers.1.self_attn.o_proj",)), 0)
    assert state.gradients == 4 * 8 * (64 + 64)


def test_a_scalar_head_is_trained_whole_beside_adapters_and_counted_once() -> None:
    """64 weights and a bias, on the last of two stages; Megatron fills its buffer up to a multiple of 128 elements."""
    value = replace(MODEL, head="token", tied_embeddings=False)
    adapters = replace(value, adapter=AdapterSizes(8, 16.0, ("all-linear",)))
    planned = PlannedRole("critic", value, ParallelLayout(2, pp=2), True, "bf16", adapters=adapters)
    first, last = state_bytes(planned, 0), state_bytes(planned, 1)
    assert (first.gradients, last.gradients) == (4 * ADAPTERS, 4 * (ADAPTERS + 128))
    assert first.weights == 2 * (LAYER + 128 * 64 + ADAPTERS)
    assert last.weights == 2 * (LAYER + 64 + ADAPTERS + 128)
    assert checkpoint_bytes(planned) == (2 * ADAPTERS + 65) * (2 + 4 + 8)


def test_engines_need_at_later_syncs_what_adapters_change() -> None:
    """A and B alone where an engine adds them itself; else the whole matrices of the layers, which is all but the norms."""
    cfg = Config()
    cfg.actor.lora.rank = 8
    assert later_bytes(cfg, role()) == 2 * 2 * ADAPTERS
    cfg.actor.lora.sync = "merge"
    assert later_bytes(cfg, role()) == 2 * 2 * (128 + 64 + 256 + 128) * 64
    assert later_bytes(cfg, replace(role(), adapters=None)) is None
