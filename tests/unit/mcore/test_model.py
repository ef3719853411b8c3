"""Compare a real model in a world of one with transformers: names, logprobs and gradients. tests/distributed tests layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
import transformers
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from safetensors.torch import load_file

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.bridge.files.hf_files import HFReader, load
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import OptimizerConfig, RecomputeConfig, TrainerConfig
from rlhf_mcore.data.collate import RowTokens, make_microbatches, restore_last, restore_tokens
from rlhf_mcore.families import architecture_name
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.groups import ModelGroups, build_groups, use_groups
from rlhf_mcore.mcore.model import MegatronModel, Metrics, rng_tracker_states, scalar_outputs, set_rng_tracker_states
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.mcore.momentum import orthogonalize, update_scale
from rlhf_mcore.mcore.weights import _global_name, unwrap
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import Platform, current_platform
from rlhf_mcore.residency.ledger import KINDS, OPTIMIZER
from rlhf_mcore.residency.sharing import DeviceSharing
from rlhf_mcore.roles.role_files import RoleFiles
from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel
from rlhf_mcore.roles.trained_weights import freeze, matrices_of
from rlhf_mcore.types import Microbatch
from tests.distributed.models import make

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a gloo world: the CPU platform only"),
]
TEMPERATURE = 0.8


@pytest.fixture(scope="module")
def groups(world: None) -> ModelGroups:
    made = build_groups(ParallelLayout(1))
    assert made is not None
    return made


def build(
    directory: Path,
    groups: ModelGroups,
    *,
    trainable: bool,
    head: str = "lm",
    frozen: Sequence[str] = (),
    recompute: RecomputeConfig | None = None,
    dtype: str = "fp32",
) -> MegatronModel:
    spec = load_spec(directory, head)
    options = BuildOptions(dtype, "local", recompute or RecomputeConfig(), trainable, False, 0)
    if frozen:
        options = replace(
            options, freeze=partial(freeze, geometry=spec.geometry, layout=groups.layout, patterns=list(frozen))
        )
    model = build_model(spec, groups, current_platform(), options)
    load(model.local_parameters(), spec.geometry, HFReader(directory), fresh_head=spec.has_fresh_head)
    return model


LENGTHS = [7, 2, 5]  # 3, 1 and 2 tokens are prompts


def rows() -> list[torch.Tensor]:
    ids = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 12, 12], dtype=torch.int32)
    return list(ids.split(LENGTHS))


def loss_mask() -> torch.Tensor:
    return torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 0, 1, 1, 1], dtype=torch.bool)


def microbatches(packing: bool) -> list[Microbatch]:
    held = RowTokens([0, 1, 2], LENGTHS, {"token_ids": torch.cat(rows()), "mask": loss_mask()})
    return make_microbatches(held, max_tokens=9, packing=packing)


def expected_logprobs(hf: torch.nn.Module) -> torch.Tensor:
    """Compute logprobs token by token and row by row. The first token of a row has zero."""
    out = []
    for ids in rows():
        log_p = torch.log_softmax(hf(ids[None].long()).logits[0] / TEMPERATURE, dim=-1)
        out.append(torch.stack([log_p.new_zeros(()), *(log_p[t - 1, ids[t]] for t in range(1, len(ids)))]))
    return torch.cat(out)


@pytest.mark.parametrize("name", ["qwen2_yarn", "qwen3_tied", "deepseek_v3_kimi", "deepseek_v32", "glm_moe_dsa"])
def test_logprobs_gradients_and_update_are_those_of_transformers(
    name: str, tmp_path: Path, groups: ModelGroups
) -> None:
    hf = make(name, tmp_path)
    model = build(tmp_path, groups, trainable=True)
    model.add_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0))
    expected = expected_logprobs(hf)

    def logprobs(logits: torch.Tensor, part: Microbatch) -> torch.Tensor:
        return model.logprobs_and_entropy(logits, part, TEMPERATURE)[0]

    for packing in (True, False):
        cut = microbatches(packing)
        assert len(cut) > 1
        found = restore_tokens(model.forward(cut, logprobs), cut, LENGTHS)
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-5)

    def loss(outputs: torch.Tensor, part: Microbatch) -> tuple[torch.Tensor, Metrics]:
        value = (logprobs(outputs, part) * part.fields["mask"]).sum() / 8
        return value, {"count": part.fields["mask"].sum()}

    metrics = model.forward_backward(microbatches(True), loss)
    reference = (expected * loss_mask()).sum() / 8
    assert sum(int(m.metrics["count"]) for m in metrics) == 8
    assert float(sum(m.loss for m in metrics)) == pytest.approx(reference.item(), abs=1e-5)
    reference.backward()
    norm = float(torch.stack([p.grad.norm() for p in hf.parameters() if p.grad is not None]).norm())
    outcome = model.step(lr=0.0)
    assert outcome.updated and outcome.finite and outcome.grad_norm == pytest.approx(norm, rel=1e-4)


def test_a_recomputed_layer_uses_the_keys_that_its_own_indexer_selected(tmp_path: Path, groups: ModelGroups) -> None:
    """Layer 1 is recomputed after layer 2 has selected other keys."""
    hf = make("glm_moe_dsa", tmp_path, index_topk_pattern="FSFS")
    recompute = RecomputeConfig(granularity="full")
    model = build(tmp_path, groups, trainable=True, recompute=recompute)
    model.add_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0))

    def loss(outputs: torch.Tensor, part: Microbatch) -> tuple[torch.Tensor, Metrics]:
        return (model.logprobs_and_entropy(outputs, part, TEMPERATURE)[0] * part.fields["mask"]).sum() / 8, {}

    model.forward_backward(microbatches(True), loss)
    (expected_logprobs(hf) * loss_mask()).sum().div(8).backward()
    norm = float(torch.stack([p.grad.norm() for p in hf.parameters() if p.grad is not None]).norm())
    assert model.step(lr=0.0).grad_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_tied"])
def test_chunks_of_logits_round_no_gradient_of_a_bf16_output_layer(
    name: str, tmp_path: Path, groups: ModelGroups
) -> None:
    """Products of bf16 numbers are exact in fp32, so chunks may only change the order of fp32 sums."""
    make(name, tmp_path)
    model = build(tmp_path, groups, trainable=True, dtype="bf16")
    chunk = unwrap(model.chunks[0])
    tied = chunk.share_embeddings_and_output_weights
    weight = chunk.shared_embedding_or_output_weight() if tied else chunk.output_layer.weight

    def loss(outputs: torch.Tensor, part: Microbatch) -> tuple[torch.Tensor, Metrics]:
        return (model.logprobs_and_entropy(outputs, part, TEMPERATURE)[0] * part.fields["mask"]).sum(), {}

    gradients = []
    for model.logit_chunk_tokens in (None, 1):
        model.forward_backward(microbatches(True), loss)
        gradients.append(weight.main_grad.clone())
    whole, chunked = gradients
    # Each is a sum of products of at most 8 tokens, and of embedding gradients that are equal in both.
    torch.testing.assert_close(
        chunked, whole, rtol=0, atol=8 * torch.finfo(torch.float32).eps * float(whole.abs().max())
    )
    assert not torch.equal(whole, whole.bfloat16().float()), "nothing was rounded to bf16"


FROZEN = ["model.embed_tokens.weight", "model.layers.0.self_attn.[qkv]_proj.*", "*.layers.1.mlp.down_proj.weight"]


@pytest.mark.parametrize("granularity", ["off", "full"])
def test_frozen_weights_stay_and_the_others_learn_as_in_transformers(
    tmp_path: Path, groups: ModelGroups, granularity: str
) -> None:
    hf = make("qwen2_yarn", tmp_path)
    model = build(tmp_path, groups, trainable=True, frozen=FROZEN, recompute=RecomputeConfig(granularity=granularity))
    model.add_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0))
    frozen = {name for name, _ in hf.named_parameters() if any(fnmatchcase(name, pattern) for pattern in FROZEN)}
    assert len(frozen) == 8

    def loss(outputs: torch.Tensor, part: Microbatch) -> tuple[torch.Tensor, Metrics]:
        logprobs = model.logprobs_and_entropy(outputs, part, TEMPERATURE)[0]
        return (logprobs * part.fields["mask"]).sum() / 8, {}

    before = {found.name: found.tensor.clone() for found in model.local_parameters()}
    model.forward_backward(microbatches(True), loss)
    (expected_logprobs(hf) * loss_mask()).sum().div(8).backward()
    learning = [p.grad.norm() for name, p in hf.named_parameters() if p.grad is not None and name not in frozen]
    assert model.step(lr=0.1).grad_norm == pytest.approx(float(torch.stack(learning).norm()), rel=1e-4)
    geometry, shard = model.spec.geometry, groups.layout.shard_of("", 0)
    for found in model.local_parameters():
        names = {piece.hf_name for piece in pieces(found.name, geometry, shard)}
        assert torch.equal(found.tensor, before[found.name]) is bool(names & frozen), found.name
    assert model.optimizer is not None
    state = {name for held in model.optimizer.shards() for name in [held.name]}
    assert len(state) == len(before) - 4  # embeddings, fused weight and bias of q, k and v, and the last


@pytest.mark.parametrize(
    ("frozen", "words"),
    [
        (["model.layers.9.*"], "'model.layers.9.\\*' matches no tensor of the model"),
        (["model.layers.0.self_attn.q_proj.*"], "q_proj.* and .*k_proj.* are one tensor in Megatron"),
        (["*"], "leaves nothing to train"),
    ],
)
def test_what_cannot_be_frozen_is_told_by_name(
    tmp_path: Path, groups: ModelGroups, frozen: list[str], words: str
) -> None:
    make("qwen2_yarn", tmp_path)
    with pytest.raises(ConfigError, match=words):
        build(tmp_path, groups, trainable=True, frozen=frozen)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_fault_23_a_gradient_that_is_not_finite_changes_nothing(
    tmp_path: Path, groups: ModelGroups, value: float
) -> None:
    make("qwen3", tmp_path)
    model = build(tmp_path, groups, trainable=True)
    model.add_optimizer(OptimizerConfig(lr=1e-2, weight_decay=0.1))
    buffer = model.chunks[0].buffers[0].grad_data
    before = {p.name: p.tensor.clone() for p in model.local_parameters()}
    buffer.fill_(0.1)
    buffer[7] = value
    outcome = model.step(lr=1e-2)
    assert not outcome.updated and not outcome.finite and not math.isfinite(outcome.grad_norm)
    assert all(torch.equal(p.tensor, before[p.name]) for p in model.local_parameters())
    assert model.optimizer.scalars()["step"] == 0
    buffer.fill_(0.1)
    assert model.step(lr=1e-2).updated
    assert not any(torch.equal(p.tensor, before[p.name]) for p in model.local_parameters())


def test_muon_steps_the_fp32_masters_of_matrices_and_adamw_the_rest(tmp_path: Path, groups: ModelGroups) -> None:
    make("qwen3", tmp_path)
    model = build(tmp_path, groups, trainable=True, dtype="bf16")
    model.add_optimizer(
        OptimizerConfig(name="muon", lr=0.1, clip_grad=0.0, weight_decay=0.5),
        matrices_of(geometry := model.spec.geometry),
    )
    assert model.optimizer is not None
    held = {shard.name: shard for shard in model.optimizer.shards()}
    layers = {name for name in held if name.startswith("decoder.layers.") and "norm" not in name}
    assert {name for name, shard in held.items() if "momentum" in shard.tensors} == layers
    assert all(held[name].tensors.keys() == {"exp_avg", "exp_avg_sq", "master"} for name in held.keys() - layers)
    gradients = model.chunks[0].buffers[0].grad_data
    gradients.copy_(torch.randn(gradients.shape, generator=torch.Generator().manual_seed(0)))
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    weight = dict(unwrap(model.chunks[0]).named_parameters())[name]
    before, gradient = held[name].tensors["master"].clone(), weight.main_grad.clone().view(-1)
    assert model.step(lr=0.1).updated
    after = held[name].tensors["master"]
    for hf_name in ("q_proj", "k_proj", "v_proj"):
        parts = [p for p in matrices_of(geometry)(name, held[name].shard, 0, after.numel()) if hf_name in p.name]
        was, moved, given = (torch.cat([p.of(flat) for p in parts]) for flat in (before, after, gradient))
        direction = orthogonalize((given + 0.95 * given).bfloat16()) * update_scale(*parts[0].shape)  # Nesterov
        torch.testing.assert_close(moved, was * 0.95 - 0.1 * direction.float())
    assert model.optimizer.unrounded_masters() == [] and model.optimizer.scalars()["step"] == 1


def test_an_update_waits_for_who_still_copies_the_state(tmp_path: Path, groups: ModelGroups) -> None:
    make("qwen3", tmp_path)
    model = build(tmp_path, groups, trainable=True)
    model.add_optimizer(OptimizerConfig(lr=1e-2))
    model.chunks[0].buffers[0].grad_data.fill_(0.1)
    moments = [shard.tensors["exp_avg"] for shard in model.optimizer.shards()]
    may_copy, copies = Event(), []

    def copy() -> None:
        may_copy.wait()
        copies.extend(moment.clone() for moment in moments)

    copied = model.optimizer.read_in_thread(copy)
    update = Thread(target=lambda: model.step(lr=1e-2))
    update.start()
    update.join(0.05)
    assert update.is_alive() and not any(bool(moment.any()) for moment in moments)
    may_copy.set()
    copied.result()
    update.join()
    assert all(bool(moment.any()) for moment in moments), "the update was made"
    assert len(copies) == len(moments) and not any(bool(held.any()) for held in copies), "of what was before it"


@pytest.mark.parametrize("where", ["host", "device", "offloaded"])
def test_a_snapshot_holds_what_was_there_before_the_next_update(
    where: str, tmp_path: Path, groups: ModelGroups, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    cuda = None if where == "host" else request.getfixturevalue("late_cuda")
    make("qwen3", tmp_path)
    model = build(tmp_path, groups, trainable=True)
    model.add_optimizer(cfg := OptimizerConfig(lr=1e-2))
    sharing = DeviceSharing(model.platform)
    if where == "offloaded":
        model.share(sharing, "actor", KINDS)
        with model.movable.use(OPTIMIZER):  # remains from before, as after an update
            pass
    role = TrainedModel(
        groups.layout, model, model.spec, TrainerConfig(), optimizer=cfg, plan=MinibatchPlan(1), name="actor"
    )
    with role.on_device():
        exporter = Exporter(
            model.local_parameters(), model.spec.geometry, [str(tmp_path)], world_group(), bucket_bytes=10_000
        )
    may_copy, in_thread = Event(), type(model.platform).in_thread

    def late(self: Platform, work: Callable[[], None]) -> Future[None]:
        return in_thread(self, lambda: (may_copy.wait(), work())[1])

    monkeypatch.setattr(type(model.platform), "in_thread", late)

    def learn() -> None:
        with model.updating():
            model.chunks[0].buffers[0].grad_data.fill_(0.1)
            model.step(lr=1e-2)

    write = RoleFiles("actor", role, exporter).snapshot()
    pinned = cuda and cuda.pinned_bytes
    next_one = Thread(target=partial(sharing.make_room, 0) if where == "offloaded" else learn)
    next_one.start()
    next_one.join(0.05)
    assert next_one.is_alive(), "what is being copied stays as it is, and where it is"
    may_copy.set()
    next_one.join()
    if where == "offloaded":
        learn()
    write(tmp_path / "saved")
    [state] = (tmp_path / "saved" / "actor").rglob("state-*.safetensors")
    moments = load_file(state)
    assert len(moments) > 20 and not any(bool(moment.any()) for moment in moments.values())
    if where == "device":  # only weights and two moments in fp32
        assert pinned == sum(3 * parameter.tensor.nbytes for parameter in model.local_parameters())
    [was], [saved] = (list(path.glob("*.safetensors")) for path in (tmp_path, tmp_path / "saved" / "actor"))
    before, found = load_file(was), load_file(saved)
    assert found.keys() == before.keys() and all(torch.equal(found[name], before[name]) for name in before)
    live = {found.name: model.movable.current(found.tensor) for found in model.local_parameters()}
    assert not torch.equal(live["decoder.final_layernorm.weight"], before["model.norm.weight"]), "the update was made"


def make_scorer(name: str, head: str, directory: Path) -> torch.nn.Module:
    """Build a transformers model with one label instead of logits, and a head far from zero."""
    language_model = make(name, directory / "language_model")
    kind = getattr(transformers, architecture_name(type(language_model).__name__, head))
    scorer = kind.from_pretrained(directory / "language_model", num_labels=1, pad_token_id=0, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in scorer.score.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    scorer.save_pretrained(directory)
    return scorer.eval()


def noise_of(head: torch.Tensor) -> float:
    """Return the bound on values: 1e-5 for a head row with a norm of about 1, as for logprobs, and proportional to the norm."""
    return 1e-5 * float(head.norm())


def hf_values(hf: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values [N] before each token, and [B] after the last token, row by row."""
    tokens, last = [], []
    for row in rows():
        ids = row[None].long()
        # A sequence classifier returns only the last token's value.
        per_token = type(hf).__name__.endswith("ForTokenClassification")
        values = (hf(ids).logits if per_token else hf.score(hf.model(ids).last_hidden_state))[0, :, 0]
        tokens += [values.new_zeros(1), values[:-1]]
        last.append(values[-1])
    return torch.cat(tokens), torch.stack(last)


@pytest.mark.parametrize(("name", "head"), [("qwen2_yarn", "token"), ("qwen3_tied", "token"), ("llama", "sequence")])
def test_values_gradients_and_update_are_those_of_transformers(
    name: str, head: str, tmp_path: Path, groups: ModelGroups
) -> None:
    hf = make_scorer(name, head, tmp_path)
    model = build(tmp_path, groups, trainable=True, head=head)
    model.add_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0))
    (expected, last), noise = hf_values(hf), noise_of(hf.score.weight)
    for packing in (True, False):
        cut = microbatches(packing)
        said = model.forward(cut, scalar_outputs)
        torch.testing.assert_close(restore_tokens(said, cut, LENGTHS), expected.detach(), rtol=0, atol=noise)
        torch.testing.assert_close(restore_last(said, cut, 3), last.detach(), rtol=0, atol=noise)

    def loss(outputs: torch.Tensor, part: Microbatch) -> tuple[torch.Tensor, Metrics]:
        return ((scalar_outputs(outputs, part) - 1) * part.fields["mask"]).square().sum() / 8, {}

    metrics = model.forward_backward(microbatches(True), loss)
    reference = ((expected - 1) * loss_mask()).square().sum() / 8
    assert float(sum(m.loss for m in metrics)) == pytest.approx(reference.item(), rel=1e-5)
    reference.backward()
    norm = float(torch.stack([p.grad.norm() for p in hf.parameters() if p.grad is not None]).norm())
    outcome = model.step(lr=0.0)
    assert outcome.updated and outcome.grad_norm == pytest.approx(norm, rel=1e-4)


def test_the_last_word_is_the_score_of_transformers(tmp_path: Path, groups: ModelGroups) -> None:
    hf = make_scorer("qwen3", "sequence", tmp_path)
    model = build(tmp_path, groups, trainable=False, head="sequence")
    cut = microbatches(True)
    scores = restore_last(model.forward(cut, scalar_outputs), cut, 3)
    for row, ids in enumerate(rows()):
        with torch.no_grad():
            (expected,) = hf(ids[None].long()).logits[0].tolist()
        assert scores[row].item() == pytest.approx(expected, abs=noise_of(hf.score.weight))


def test_a_critic_begins_at_zero_and_is_saved_as_a_model_of_transformers(tmp_path: Path, groups: ModelGroups) -> None:
    make("qwen3_tied", tmp_path)
    model = build(tmp_path, groups, trainable=True, head="token")
    cut = microbatches(True)
    assert not any(out.any() for out in model.forward(cut, scalar_outputs))
    head = unwrap(model.chunks[0]).output_layer
    with torch.no_grad():
        head.weight.normal_(generator=torch.Generator().manual_seed(5))
        head.bias.fill_(0.25)
    spec = model.spec
    exporter = Exporter(
        model.local_parameters(),
        spec.geometry,
        [str(tmp_path)],
        world_group(),
        bucket_bytes=2**20,
        config_updates=spec.config_updates,
    )
    exporter.write(tmp_path / "critic")
    found = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "critic", dtype=torch.float32)
    assert type(found).__name__ == "Qwen3ForTokenClassification" and found.config.num_labels == 1
    values = restore_tokens(model.forward(cut, scalar_outputs), cut, LENGTHS)
    torch.testing.assert_close(values, hf_values(found.eval())[0].detach(), rtol=0, atol=noise_of(head.weight))
    again = build(tmp_path / "critic", groups, trainable=False, head="token")
    assert not again.spec.has_fresh_head
    for mine, theirs in zip(model.local_parameters(), again.local_parameters(), strict=True):
        assert mine.name == theirs.name and torch.equal(mine.tensor, theirs.tensor)


@pytest.mark.parametrize("head", ["token", "sequence"])
def test_every_parameter_of_a_scorer_has_a_rule_and_every_tensor_an_owner(
    head: str, tmp_path: Path, groups: ModelGroups
) -> None:
    make("qwen3_tied", tmp_path)
    found = build(tmp_path, groups, trainable=False, head=head).local_parameters()
    geometry = load_spec(tmp_path, head).geometry
    held = {piece.hf_name for p in found for piece in pieces(p.name, geometry, p.shard)}
    assert held == set(hf_shapes(geometry))


def test_every_parameter_has_a_rule_and_every_tensor_an_owner(tmp_path: Path, groups: ModelGroups) -> None:
    make("qwen3", tmp_path)
    model = build(tmp_path, groups, trainable=False)
    found = model.local_parameters()
    geometry = model.spec.geometry
    held = {piece.hf_name for p in found for piece in pieces(p.name, geometry, p.shard)}
    assert held == set(hf_shapes(geometry))
    for parameter in found:
        covered = sum(piece.numel for piece in pieces(parameter.name, geometry, parameter.shard))
        assert covered == parameter.tensor.numel()
    assert not any(p.requires_grad for chunk in model.chunks for p in chunk.parameters())


def test_layers_carry_the_number_that_the_layer_knows() -> None:
    # The second stage of an uneven pipeline, whose first layer is the model's fifth.
    numbers = [4, 5, 6]
    assert _global_name("decoder.layers.0.mlp.linear_fc1.weight", numbers) == "decoder.layers.4.mlp.linear_fc1.weight"
    assert _global_name("decoder.layers.2.input_layernorm.weight", numbers) == "decoder.layers.6.input_layernorm.weight"
    assert _global_name("output_layer.weight", numbers) == "output_layer.weight"


def test_globals_of_megatron_are_put_back_also_after_an_exception(
    groups: ModelGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {name: object() for name in vars(parallel_state) if name.endswith(("_PARALLEL_GROUP", "_WITH_CP"))}
    others["_EMBEDDING_GROUP"] = object()
    for name, value in others.items():
        monkeypatch.setattr(parallel_state, name, value)
    cuda = torch.Tensor.cuda
    with pytest.raises(KeyError), use_groups(groups, current_platform()):
        assert parallel_state.get_tensor_model_parallel_group() is groups.collection.tp
        assert parallel_state.get_data_parallel_group() is groups.collection.dp
        raise KeyError
    assert all(getattr(parallel_state, name) is value for name, value in others.items())
    assert torch.Tensor.cuda is cuda


def test_megatrons_generators_continue_where_they_were() -> None:
    current_platform().prepare_megatron()
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model", 3)

    def draw() -> list[float]:
        with tracker.fork("model"):
            return torch.rand(3).tolist()

    draw()
    states = {name: state.clone() for name, state in rng_tracker_states().items()}
    assert set(states) == {"megatron.model"}
    expected = draw()
    assert draw() != expected
    set_rng_tracker_states({**states, "torch.cpu": torch.zeros(1)})
    assert draw() == expected
    tracker.reset()


@pytest.mark.parametrize("packing", [True, False])
def test_branches_of_a_row_do_not_see_each_other_and_have_the_gradient_of_one_sequence(
    packing: bool, tmp_path: Path, groups: ModelGroups
) -> None:
    """A row of two turns is compared with two branches: the first turn alone, and the second after a masked copy of the first."""
    make("qwen3", tmp_path)
    model = build(tmp_path, groups, trainable=True)
    model.add_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0))
    ids = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.int32)
    mask = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    again = torch.cat([torch.zeros(6, dtype=torch.bool), mask[6:]])
    whole = RowTokens([0], [8], {"token_ids": ids, "mask": mask})
    branched = RowTokens(
        [0], [12], {"token_ids": torch.cat([ids[:4], ids]), "mask": torch.cat([mask[:4], again])}, sequences=[[4, 8]]
    )

    def loss(outputs: torch.Tensor, part: Microbatch) -> tuple[torch.Tensor, Metrics]:
        logprobs = model.logprobs_and_entropy(outputs, part, TEMPERATURE)[0]
        return (logprobs * part.fields["mask"]).sum() / 4, {"logprobs": (logprobs.detach() * part.fields["mask"]).sum()}

    results = []
    for tokens in (whole, branched):
        cut = make_microbatches(tokens, max_tokens=16, packing=packing)
        sums = model.forward_backward(cut, loss)
        gradients = {
            p.name: p.tensor.main_grad.clone() for p in model.local_parameters() if hasattr(p.tensor, "main_grad")
        }
        results.append((float(sums[0].loss), gradients, model.step(lr=0.0).grad_norm))
    (loss_of_one, one, norm_of_one), (loss_of_two, two, norm_of_two) = results
    assert loss_of_two == pytest.approx(loss_of_one, abs=1e-6) and norm_of_two == pytest.approx(norm_of_one, rel=1e-5)
    assert norm_of_one > 1e-3 and one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-6)
