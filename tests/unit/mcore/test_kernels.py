"""Call CUDA kernels as their libraries document. Stand-ins with the same signatures compute in torch, token by token."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from rlhf_mcore import expected_kernels
from rlhf_mcore.config.schema import RecomputeConfig
from rlhf_mcore.mcore import kernels, recurrence
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.core_attention import SDPACoreAttention
from rlhf_mcore.mcore.delta_net import DeltaKernels, GatedDeltaNet, share_heads
from rlhf_mcore.mcore.groups import build_groups
from rlhf_mcore.mcore.kernels import live_kernels, use_fast_kernels
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.mcore.packed import PackedSequences
from rlhf_mcore.mcore.weights import unwrap
from rlhf_mcore.parallel.context import local_places, order_of_ranks
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import current_platform
from tests.distributed.models import make

SIZES = (8, 4, 12)


def packing(sizes: tuple[int, ...] = SIZES, order: Tensor | None = None) -> PackedSequences:
    borders = torch.tensor([0, *sizes]).cumsum(0).int()
    return PackedSequences.of(borders, torch.cat([torch.arange(size) for size in sizes]), sizes, order)


# ------------------------------------------------------------------------------------------------------------- attention
def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Attend with torch's documented signature and checks (flash_api.cpp).

    As in FlashAttention 2.1, the last query sees the last key.
    """
    assert cu_seq_k is not None and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert cu_seq_q.is_contiguous() and cu_seq_k.is_contiguous() and len(cu_seq_q) == len(cu_seq_k)
    assert query.dtype == key.dtype == value.dtype and query.size(2) % 8 == 0
    assert key.shape == value.shape == (int(cu_seq_k[-1]), key.size(1), query.size(2)) and len(query) == cu_seq_q[-1]
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert enable_gqa or query.size(1) == key.size(1)
    assert isinstance(window_size, tuple) and window_size[1] == 0
    scale, parts = query.size(-1) ** -0.5 if scale is None else scale, []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        assert q1 - q0 <= max_q and k1 - k0 <= max_k
        q, repeats = query[q0:q1], query.size(1) // key.size(1)
        k, v = (x[k0:k1].repeat_interleave(repeats, dim=1) for x in (key, value))
        last = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)  # the last key that each query sees
        place = torch.arange(k1 - k0)[None]
        hidden = place > last
        if window_size[0] >= 0:
            hidden |= place < last - window_size[0]
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v))
    return torch.cat(parts)


def test_the_stand_in_has_the_signature_of_torch() -> None:
    theirs, ours = (inspect.signature(each).parameters.values() for each in (varlen_attn, varlen))
    assert [(p.name, p.kind, p.default) for p in theirs] == [(p.name, p.kind, p.default) for p in ours]


def varlen_of_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *borders: Any,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Attend like torch 2.11, which does not support ``enable_gqa``."""
    assert query.size(1) == key.size(1)
    return varlen(query, key, value, *borders, scale=scale, window_size=window_size)


def attention_config(**changes: Any) -> Any:
    settings: dict[str, Any] = dict(
        params_dtype=torch.bfloat16,
        deterministic_mode=False,
        window_size=None,
        window_attn_skip_freq=None,
        softmax_type="vanilla",
        multi_latent_attention=False,
        kv_channels=8,
        linear_key_head_dim=None,
        mamba_num_heads=None,
        num_moe_experts=None,
        num_attention_heads=4,
        tensor_model_parallel_size=1,
    )
    return SimpleNamespace(**(settings | changes))


@pytest.mark.parametrize(("cp", "rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("window", [None, 3, 100])
@pytest.mark.parametrize(("heads", "groups", "scale"), [(4, 2, None), (3, 3, 0.7)])
def test_one_kernel_is_the_loop_over_sequences_in_value_and_gradient(
    cp: int,
    rank: int,
    window: int | None,
    heads: int,
    groups: int,
    scale: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The tokens of the other ranks are known, and the gather returns all of them.
    monkeypatch.setattr("rlhf_mcore.mcore.core_attention.gather_context", lambda x, order, group, sums_gradient: x)
    group = SimpleNamespace(size=lambda: cp, rank=lambda: rank)
    config = attention_config(window_size=None if window is None else (window - 1, 0))
    order = order_of_ranks(SIZES, cp) if cp > 1 else None
    own = local_places(SIZES, rank, cp) if cp > 1 else torch.arange(sum(SIZES))
    results = []
    for kernel in (None, varlen, partial(kernels._varlen_with_all_heads, varlen_of_2_11)):
        torch.manual_seed(0)
        inputs = [torch.randn(sum(SIZES), n, 8, dtype=torch.float64) for n in (heads, groups, groups)]
        inputs[0] = inputs[0][own]
        inputs = [x.requires_grad_() for x in inputs]
        core = SDPACoreAttention(
            config,
            1,
            AttnMaskType.causal,
            scale,
            pg_collection=SimpleNamespace(cp=group),  # type: ignore[arg-type]
        )
        core.varlen = kernel
        described = packing(order=order)
        out = core(*inputs, None, packed_seq_params=described)
        assert out.shape == (sum(SIZES) // cp, heads * 8)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out))
        results.append([out.detach(), *(x.grad for x in inputs)])
        assert core(*inputs, None, packed_seq_params=described).equal(out)  # a second layer
    for expected, *values in zip(*results, strict=True):
        for value in values:
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_what_chunks_see() -> None:
    borders, seen_borders, seen = packing((4, 8)).seen_by_chunks(1, 2)
    assert borders.tolist() == [0, 1, 2, 4, 6]
    assert seen_borders.tolist() == [
        0,
        2,
        5,
        9,
        15,
    ]  # for four tokens up to the second and third; for eight, twice as many
    assert seen.tolist() == [0, 1, 0, 1, 2, 4, 5, 6, 7, 4, 5, 6, 7, 8, 9]
    assert borders.dtype == seen_borders.dtype == torch.int32


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ({}, True),
        ({"kv_channels": 256}, True),
        ({"kv_channels": 224}, False),  # some GPUs have no backward kernel
        ({"kv_channels": 36}, False),
        ({"params_dtype": torch.float32}, False),
        ({"deterministic_mode": True}, False),
        ({"softmax_type": "learnable"}, False),
        ({"multi_latent_attention": True}, False),
    ],
)
def test_torchs_attention_is_used_where_it_computes_the_models(changes: dict[str, Any], used: bool) -> None:
    config = attention_config(**changes)
    core = SDPACoreAttention(config, 1, AttnMaskType.causal)
    use_fast_kernels([core], config)
    assert core.varlen is (varlen_attn if used else None)


@pytest.mark.usefixtures("gpu")
def test_each_layer_gets_a_kernel_for_its_heads() -> None:
    cores = [SDPACoreAttention(attention_config(kv_channels=d), 1, AttnMaskType.causal) for d in (256, 512)]
    use_fast_kernels(cores, attention_config(kv_channels=256))
    assert [core.varlen for core in cores] == [varlen_attn, None]


@pytest.mark.usefixtures("gpu")
def test_an_older_gpu_or_torch_keeps_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    config = attention_config()
    core = SDPACoreAttention(config, 1, AttnMaskType.causal)
    for owner, name, value in (
        (torch.cuda, "get_device_capability", lambda: (7, 5)),
        (torch.backends.cuda, "is_flash_attention_available", lambda: False),
        (sys.modules["torch.nn.attention.varlen"], "varlen_attn", lambda query, key, value, is_causal=False: query),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            use_fast_kernels([core], config)
            assert core.varlen is None
    use_fast_kernels([core], config)
    assert core.varlen is varlen_attn
    monkeypatch.setattr(sys.modules["torch.nn.attention.varlen"], "varlen_attn", varlen_of_2_11)
    use_fast_kernels([core], config)
    assert isinstance(core.varlen, partial) and core.varlen.args == (varlen_of_2_11,)


@pytest.mark.parametrize(
    ("capability", "triton", "has_tilelang", "right"),
    [
        ((9, 0), "3.6.0", False, False),
        ((9, 0), "3.6.0", True, True),
        ((9, 0), "3.3.1", False, True),
        ((9, 0), "3.7.1", False, True),
        ((8, 0), "3.6.0", False, True),
        ((10, 0), "3.6.0", False, True),
    ],
)
def test_wrong_gradients_of_the_recurrence_are_not_taken(
    capability: tuple[int, int], triton: str, has_tilelang: bool, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(expected_kernels, "version", {"triton": triton}.__getitem__)
    installed = {"triton", "fla", *(["tilelang"] if has_tilelang else [])}
    monkeypatch.setattr(expected_kernels, "find_spec", lambda name: name if name in installed else None)
    assert expected_kernels.computes_delta_gradients() is right
    named = expected_kernels.expected_kernels(has_gpu=True)["gated delta nets"]  # the doctor's words
    assert named == ("flash-linear-attention" if right else "torch")


class Attention(torch.autograd.Function):
    """A stand-in for CUDA kernels that records torch's deterministic mode, which decides whether sums have a fixed order."""

    modes: list[tuple[str, int]]

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        Attention.modes.append(("forward", torch.get_deterministic_debug_mode()))
        with torch.enable_grad():
            ctx.inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            ctx.out = PLAIN(*ctx.inputs, **options)
        out: Tensor = ctx.out.detach()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        Attention.modes.append(("backward", torch.get_deterministic_debug_mode()))
        return *torch.autograd.grad(ctx.out, ctx.inputs, *grads), None


PLAIN = F.scaled_dot_product_attention
STRICT, WARNS = 2, 1  # torch.get_deterministic_debug_mode()


@pytest.mark.parametrize("recomputed", [None, True, False], ids=["kept", "recomputed", "recomputed by hooks"])
@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
def test_deterministic_attention_is_torchs_in_strict_mode_in_both_passes(
    softmax_type: str, recomputed: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Attention, "modes", [], raising=False)
    config = attention_config(deterministic_mode=True, softmax_type=softmax_type, params_dtype=torch.float32)
    core = SDPACoreAttention(config, 1, AttnMaskType.causal)
    if core.softmax_offset is not None:
        torch.nn.init.normal_(core.softmax_offset)
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        inputs = [torch.randn(sum(SIZES), n, 8, requires_grad=True) for n in (4, 2, 2)]
        passed = lambda *x: core(*x, None, packed_seq_params=packing()).exp()  # noqa: E731
        with warning_only():
            out = passed(*inputs) if recomputed is None else checkpoint(passed, *inputs, use_reentrant=recomputed)
            learned = [*inputs, *core.parameters()]
            for parameter in core.parameters():
                parameter.grad = None
            out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
            assert torch.get_deterministic_debug_mode() == WARNS
        results.append([out.detach(), *(x.grad for x in learned)])
        use_fast_kernels([core], config)
        monkeypatch.setattr(
            F, "scaled_dot_product_attention", lambda q, k, v, **options: Attention.apply(q, k, v, options)
        )
    for found, expected in zip(*results, strict=True):
        assert found is not None and found.equal(expected) and found.any()
    assert set(Attention.modes) == {("forward", STRICT), ("backward", STRICT)}
    Attention.modes.clear()
    with torch.no_grad(), warning_only():
        assert passed(*inputs).equal(results[0][0])
    assert set(Attention.modes) == {("forward", STRICT)}


@contextmanager
def warning_only() -> Iterator[None]:
    """Set the mode like ``CudaPlatform.megatron_region``."""
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


# ------------------------------------------------------------------------------------------------------ gated delta nets
def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Convolve with the signature of flash-linear-attention 0.5.2: ``x`` [B, T, D], ``weight`` [D, W]."""
    assert weight is not None and activation == "silu" and not kwargs
    assert x.size(2) == len(weight)

    def convolve(row: Tensor) -> Tensor:
        padded = F.pad(row.T, (weight.size(1) - 1, 0))[None]
        return F.silu(F.conv1d(padded, weight[:, None], groups=len(weight))[0].T)

    return _by_sequence(convolve, cu_seqlens, x), None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the recurrence token by token, with the signature of flash-linear-attention 0.5.2: [B, T, H, ...], ``g``
    in log space.
    """
    assert use_qk_l2norm_in_kernel and not use_beta_sigmoid_in_kernel and not kwargs
    assert q.shape == k.shape and q.shape[:3] == v.shape[:3] == g.shape == beta.shape and q.size(2) > 0
    scale = q.size(-1) ** -0.5 if scale is None else scale

    def recur(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        state, out = q.new_zeros(q.size(1), q.size(2), v.size(2)), []
        for t in range(len(q)):
            state = state * g[t].exp()[:, None, None]
            wrong = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * wrong)
            out.append(torch.einsum("hkv,hk->hv", state, q[t] * scale))
        return torch.stack(out)

    return _by_sequence(recur, cu_seqlens, q, k, v, g, beta), None


def _by_sequence(function: Any, borders: Tensor | None, *rows: Tensor) -> Tensor:
    if borders is None:
        return torch.stack([function(*row) for row in zip(*rows, strict=True)])
    assert len(rows[0]) == 1 and borders.dtype == torch.int32
    return torch.cat([function(*(x[0, a:b] for x in rows)) for a, b in pairwise(borders.tolist())])[None]


KERNELS = DeltaKernels(causal_conv1d, chunk_gated_delta_rule)


@pytest.fixture(scope="module")
def model(world: None, tmp_path_factory: pytest.TempPathFactory) -> MegatronModel:
    path = tmp_path_factory.mktemp("delta")
    make("qwen3_5_moe_text", path)
    groups = build_groups(ParallelLayout(1))
    assert groups is not None
    options = BuildOptions("fp32", "local", RecomputeConfig(), True, False, 0)
    return build_model(load_spec(path), groups, current_platform(), options)


@pytest.fixture
def net(model: MegatronModel) -> Iterator[GatedDeltaNet]:
    found = next(x for x in unwrap(model.chunks[0]).modules() if isinstance(x, GatedDeltaNet))
    kept = {name: getattr(found, name) for name in ("_cp", "_mine")}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.normal_(std=0.5, generator=generator)
    yield found
    found.fla = None
    for name, value in kept.items():
        setattr(found, name, value)


def assert_equal_with_kernels(net: GatedDeltaNet, hidden: Tensor, packed: PackedSequences | None) -> None:
    """Compare a net with kernels and without them: outputs, and gradients of inputs and weights."""
    results = []
    for of_fla in (None, KERNELS):
        net.fla, x = of_fla, hidden.clone().requires_grad_()
        parameters = dict(net.named_parameters())
        out = net(x, None, packed)[0]
        weights = torch.linspace(-1, 1, out.numel()).view_as(out)
        grads = torch.autograd.grad(out, [x, *parameters.values()], weights)
        results.append({"out": out, "input": grads[0]} | dict(zip(parameters, grads[1:], strict=True)))
    for name, expected in results[0].items():
        assert expected.abs().max() > 0, name
        torch.testing.assert_close(
            results[1][name], expected, rtol=2e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("packs", [True, False])
def test_a_net_by_kernels_is_that_of_torch_in_value_and_gradient(net: GatedDeltaNet, packs: bool) -> None:
    hidden = torch.randn(24, 1, net.in_proj.weight.size(1), generator=torch.Generator().manual_seed(1))
    assert_equal_with_kernels(net, hidden if packs else hidden.view(12, 2, -1), packing() if packs else None)


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_heads_that_ranks_share_go_to_the_kernels(
    net: GatedDeltaNet, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks share six value heads and two key heads. Each rank computes its heads for the tokens of all ranks."""
    net._cp = SimpleNamespace(size=lambda: 4, rank=lambda: rank)
    shares = share_heads(net.keys, net.values, 4)
    monkeypatch.setattr(net, "_shares", shares)
    net._mine = shares[rank]
    assert len({len(share.values) for share in shares}) == 2
    # Stand-ins for the exchange. Only tokens of this rank exist, and other ranks' heads return nothing.
    begin = lambda widths: sum(widths[:rank])  # noqa: E731
    monkeypatch.setattr(
        recurrence, "to_parts", lambda x, widths, sizes, group: x[..., begin(widths) : begin(widths) + widths[rank]]
    )
    monkeypatch.setattr(
        recurrence,
        "to_tokens",
        lambda x, widths, sizes, group: F.pad(x, (begin(widths), sum(widths) - begin(widths) - widths[rank])),
    )
    hidden = torch.randn(24, 1, net.in_proj.weight.size(1), generator=torch.Generator().manual_seed(1))
    assert_equal_with_kernels(net, hidden, packing())


def test_a_rank_without_heads_calls_no_kernel(net: GatedDeltaNet, monkeypatch: pytest.MonkeyPatch) -> None:
    net._cp = SimpleNamespace(size=lambda: 8, rank=lambda: 0)
    shares = share_heads(net.keys, net.values, 8)
    monkeypatch.setattr(net, "_shares", shares)
    net._mine, net.fla = shares[0], KERNELS
    assert not net._mine.values
    monkeypatch.setattr(recurrence, "to_parts", lambda x, widths, sizes, group: x[..., : widths[0]])
    monkeypatch.setattr(recurrence, "to_tokens", lambda x, widths, sizes, group: F.pad(x, (0, sum(widths))))
    packed = packing(order=torch.arange(24))  # as if this rank had the tokens of all ranks, as above
    assert net(torch.randn(24, 1, net.in_proj.weight.size(1)), None, packed)[0].eq(0).all()


@pytest.mark.usefixtures("gpu")
def test_kernels_are_used_where_they_are_installed_and_the_doctor_tells(
    model: MegatronModel, net: GatedDeltaNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert live_kernels(model)["gated delta nets"] == "torch" and live_kernels(model)["attention"] == "torch SDPA"
    modules = list(unwrap(model.chunks[0]).modules())
    monkeypatch.setattr(model.config, "params_dtype", torch.bfloat16)
    use_fast_kernels(modules, model.config)
    assert net.fla is None
    assert live_kernels(model)["attention"] == expected_kernels.expected_kernels(has_gpu=True)["attention"]
    for name in ("fla", "fla.modules", "fla.modules.convolution", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["fla.modules.convolution"], "causal_conv1d", causal_conv1d, raising=False)
    rules = sys.modules["fla.ops.gated_delta_rule"]
    monkeypatch.setattr(rules, "chunk_gated_delta_rule", chunk_gated_delta_rule, raising=False)
    use_fast_kernels(modules, model.config)
    assert net.fla == KERNELS
    assert live_kernels(model)["gated delta nets"] == "flash-linear-attention"
    monkeypatch.setattr(rules, "chunk_gated_delta_rule", lambda q, k, v, g, beta, cu_seqlens=None: None)  # before 0.4.2
    use_fast_kernels(modules, model.config)
    assert net.fla is None
    for module in modules:
        if isinstance(module, SDPACoreAttention):
            module.varlen = None
