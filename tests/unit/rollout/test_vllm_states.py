"""Check the allowed order of calls to a vLLM engine, with a stand-in for vLLM. tests/e2e uses the real one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from rlhf_mcore.config.schema import RolloutConfig, RolloutLayoutConfig
from rlhf_mcore.protocols import EngineRank
from rlhf_mcore.rollout.engine import EngineModel, ExpectedTensors, InFlight, VersionedWeights
from rlhf_mcore.rollout.vllm.engine import VLLMEngine
from rlhf_mcore.rollout.vllm.limits import problem_of
from rlhf_mcore.rollout.vllm.token_records import record_where_wanted
from rlhf_mcore.types import Request, Sampling

REQUEST = Request(0, "prompt 'p', sample 0", [5, 6, 7], Sampling(), seed=3)


class LLM:
    """A vLLM that records its calls and reports every reload as complete.

    It samples a token per request, or returns ``outputs``.
    """

    def __init__(self, *, resets: bool = True) -> None:
        self.told: list[Any] = []
        self.resets = resets
        self.request_counter = SimpleNamespace(counter=40)  # requests of earlier calls
        self.outputs: list[Any] | None = None
        self.waiting: list[Any] = []
        self.llm_engine = self

    def sleep(self, level: int) -> None:
        self.told.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.told.append(("wake", *tags))

    def enqueue(self, prompts: Any, params: Any, use_tqdm: bool) -> list[str]:
        first = self.request_counter.counter
        self.request_counter.counter += len(prompts)
        self.waiting = [output(first + place, prompt["prompt_token_ids"], 9) for place, prompt in enumerate(prompts)]
        return [f"{first + place}-random" for place in range(len(prompts))]

    def step(self) -> list[Any]:
        return self.waiting if self.outputs is None else self.outputs

    def abort_request(self, handles: list[str], internal: bool) -> None:
        self.told.append(("abort", *handles))

    def collective_rpc(self, method: Any, args: Any = ()) -> list[Any]:
        weights: Iterable[tuple[str, Tensor]] = args[0]
        self.told.append(("reload", [name for name, _ in weights]))
        return [[]]

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        self.told.append("reset running" if reset_running_requests else "reset")
        return self.resets


def engine(llm: LLM) -> VLLMEngine:
    """Return an engine on CUDA in the state after its start."""
    made = object.__new__(VLLMEngine)
    VersionedWeights.__init__(made)
    made._llm, made._can_sleep, made._asleep = llm, True, set()
    made._expected = ExpectedTensors.of_shapes({})
    made.rank, made._max_model_len, made._stops = EngineRank(), 128, [2]
    made._at_publish, made._in_flight, made._finished, made._by_number = "continue", {}, [], {}
    made._num_ranks, made._tokens_of_finished, made._records = 1, 0, False
    made._adapter_shapes, made._named, made._images = None, {}, None
    return made


def test_fault_21_a_wake_without_a_sync_leaves_nothing_to_generate_with() -> None:
    llm = LLM()
    which = engine(llm)
    which.load_weights(iter(()), version=3)
    which.require_weights()
    which.sleep()
    for refused in (lambda: which.load_weights(iter(()), version=4), lambda: which.begin(4).__enter__()):
        with pytest.raises(RuntimeError, match=r"sleeps: call wake\(\)"):
            refused()
    which.wake()
    with pytest.raises(RuntimeError, match=r"cannot generate: its weights were discarded by sleep"):
        which.require_weights()
    assert which.policy_version == -1
    which.load_weights(iter(()), version=4)
    which.require_weights()
    assert which.policy_version == 4
    assert llm.told == [("reload", []), "reset", ("sleep", 2), ("wake", "weights", "kv_cache"), ("reload", []), "reset"]


def test_the_cache_is_allocated_when_the_weights_have_come() -> None:
    llm = LLM()
    which = engine(llm)
    which.sleep()
    which.wake(("weights",))
    which.load_weights(iter(()), version=4)
    with pytest.raises(RuntimeError, match=r"sleeps: call wake\(\) before it generates"):
        which.generate([REQUEST])
    which.wake(("kv_cache",))
    which.wake()  # everything is awake
    assert which.generate([REQUEST])[0].token_ids.tolist() == [9]
    assert llm.told == [("sleep", 2), ("wake", "weights"), ("reload", []), "reset", ("wake", "kv_cache")]


def test_a_light_sleep_keeps_the_weights() -> None:
    which = engine(LLM())
    which.load_weights(iter(()), version=4)
    which.sleep(level=1)
    with pytest.raises(RuntimeError, match="sleeps"):
        which.generate([REQUEST])
    which.wake()
    assert which.policy_version == 4 and which.generate([REQUEST])[0].token_ids.tolist() == [9]


def test_on_cuda_nothing_is_recorded_for_requests_that_do_not_ask_for_it() -> None:
    """Otherwise vLLM would keep the whole vocabulary for every token of a greedy evaluation."""
    runner = SimpleNamespace(sampler=SimpleNamespace(return_sampling_mask=True))
    states = {name: SimpleNamespace(sampling_mask_chunks=[name]) for name in ("training", "evaluation")}
    llm_engine = SimpleNamespace(output_processor=SimpleNamespace(request_states=states))
    recording = replace(REQUEST, sampling=Sampling(top_p=0.9, records_support=True))
    evaluation = InFlight(REQUEST, [(0, 0)], "evaluation")
    record_where_wanted(llm_engine, runner, {1: InFlight(recording, [(0, 0)], "training"), 2: evaluation})
    assert runner.sampler.return_sampling_mask is True
    assert [state.sampling_mask_chunks for state in states.values()] == [["training"], []]
    record_where_wanted(llm_engine, runner, {2: evaluation})
    assert runner.sampler.return_sampling_mask is False


def output(number: int, prompt_ids: list[int], token: int) -> SimpleNamespace:
    """Build an output like vLLM, with the number that it gave the request."""
    logprobs = [{token: SimpleNamespace(logprob=-0.5)}]
    drawn = SimpleNamespace(token_ids=[token], logprobs=logprobs, finish_reason="length")
    request = {"request_id": str(number), "prompt_token_ids": prompt_ids, "num_cached_tokens": 0}
    return SimpleNamespace(**request, outputs=[drawn], finished=True)


def test_fault_25_outputs_of_vllm_are_matched_by_its_own_numbers() -> None:
    llm = LLM()
    which = engine(llm)
    which.load_weights(iter(()), version=4)
    requests = [replace(REQUEST, request_id=7), replace(REQUEST, request_id=5, prompt_ids=[9, 9], name="prompt 'q'")]
    llm.outputs = [output(41, [9, 9], 11), output(40, [5, 6, 7], 10)]
    drawn = which.generate(requests)
    assert [(c.request_id, c.token_ids.tolist(), c.versions) for c in drawn] == [
        (7, [10], ((0, 4),)),
        (5, [11], ((0, 4),)),
    ]
    assert drawn[0].logprobs.tolist() == [-0.5]
    llm.outputs = [output(43, [5, 6, 7], 10)]
    with pytest.raises(RuntimeError, match="the engine answered a prompt that differs from prompt 'q'"):
        which.generate(requests)
    assert llm.told[-1] == ("abort", "42-random", "43-random")  # a failed call leaves no state
    llm.outputs = [output(43, [5, 6, 7], 10)]
    with pytest.raises(RuntimeError, match="the engine answered an unknown request"):
        which.generate(requests)


def test_fault_22_new_weights_never_meet_the_old_prefix_cache() -> None:
    which = engine(LLM(resets=False))
    with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
        which.load_weights(iter(()), version=5)
    with pytest.raises(RuntimeError, match="cannot generate: the last load of weights did not finish"):
        which.require_weights()


@pytest.mark.parametrize(
    ("sequences", "budget", "expected"),
    [(256, None, (256, None)), (256, 64, (64, 64)), (5000, None, (5000, 16384)), (20000, None, (20000, 20000))],
)
def test_a_pass_has_room_for_a_token_of_every_sequence(
    sequences: int, budget: int | None, expected: tuple[int, int | None]
) -> None:
    made = engine(LLM())
    made._on_cuda = False
    cfg = RolloutConfig(max_num_seqs=sequences, max_num_batched_tokens=budget)
    options = made._options(cfg, EngineModel("model", "model", "fp32", 128, seed=0))
    assert (options["max_num_seqs"], options.get("max_num_batched_tokens")) == expected


@pytest.mark.parametrize(
    ("quantization", "on_cuda", "method", "left"),
    [
        ("fp8", True, "fp8", "modules_to_not_convert"),
        ("int8", True, "compressed-tensors", "ignore"),
        ("fp8", False, None, ""),
        (None, True, None, ""),
    ],
)
def test_engines_are_built_for_8_bits_where_they_multiply_with_them(
    quantization: str | None, on_cuda: bool, method: str | None, left: str
) -> None:
    """vLLM reads the settings, with whole experts, from config.json. The files' own quantisation is ignored."""
    made = engine(LLM())
    made._on_cuda = on_cuda
    names = ("self_attn.q_proj", "self_attn.q_norm", "mlp.gate", "mlp.experts.0.down_proj")
    layers = [f"model.layers.{layer}.{name}" for layer in range(2) for name in names]
    made._expected = ExpectedTensors.of_shapes({f"{name}.weight": (128, 128) for name in [*layers, "lm_head"]})
    cfg = RolloutConfig(quantization=quantization, layout=RolloutLayoutConfig(tp=2, pp=2, ep=2))
    options = made._options(cfg, EngineModel("model", "model", "bf16", 128, seed=0))
    told = options["hf_overrides"](SimpleNamespace(quantization_config={"quant_method": "mxfp4"}))
    assert options["enable_expert_parallel"] and options["pipeline_parallel_size"] == 2
    config = getattr(told, "quantization_config", None)
    if method is None:
        assert config is None
    else:
        ends = ("self_attn.q_norm", "mlp.gate")
        others = [f"model.layers.{layer}.{name}" for layer in range(2) for name in ends]
        assert config["quant_method"] == method and config[left] == [*others, "lm_head"]


@pytest.mark.parametrize("external", [0, 10 * 2**30])
def test_a_device_without_room_for_an_engine_is_told_in_our_words(external: int) -> None:
    """vLLM itself raises the error, because its wording may change."""
    from vllm.v1.worker.utils import request_memory

    memory: Any = SimpleNamespace(total_memory=80 * 2**30, free_memory=20 * 2**30, device_="cuda:0")
    cache: Any = SimpleNamespace(gpu_memory_utilization=0.6)
    with pytest.raises(ValueError) as raised:
        request_memory(memory, cache, external)
    problem = problem_of(str(raised.value), {}, RolloutConfig(gpu_memory_utilization=0.6), on_cuda=True)
    assert problem is not None and problem.startswith(
        "rollout.gpu_memory_utilization=0.6: an engine needs that share of its device (80.0 GiB), but only 20.0 GiB are free at its "
        "start; lower it"
    )
