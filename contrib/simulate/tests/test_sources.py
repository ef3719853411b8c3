"""Sources of lengths and times for a simulation: distributions, files, records of runs, and the planner."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore_contrib.simulate.lengths import read_lengths
from rlhf_mcore_contrib.simulate.measured import PhaseFit, decode_steps, fit_runs, nonnegative_fit
from tests.messages import expect_error


def test_a_geometric_distribution_has_its_mean_and_its_tail() -> None:
    found = read_lengths("geometric(50,100000)", 100_000)
    assert found.mean == pytest.approx(50, rel=2e-3)
    # P(length <= n) = 1 - (1 - 1/50)^n
    assert float((found.values <= 10).mean()) == pytest.approx(1 - 0.98**10, abs=1e-3)
    assert found.cut == 0


def test_a_lognormal_distribution_has_its_quantiles_and_is_cut() -> None:
    found = read_lengths(" lognormal(5, 0.5, 300)", 512)
    assert float(np.median(found.values)) == pytest.approx(math.exp(5), rel=0.01)
    upper = 0.5 * math.erfc(
        (math.log(299) - 5) / (0.5 * math.sqrt(2))
    )  # lengths above 299 become 300 after rounding up and cutting
    assert float((found.values == 300).mean()) == pytest.approx(upper, abs=1e-3)
    assert found.values.max() == 300 and found.values.min() >= 1


def test_draws_are_the_same_for_all_that_ask() -> None:
    lengths = read_lengths("geometric(50,512)", 512)
    first, again, other = lengths.draw(4, 7), lengths.draw(4, 7), lengths.draw(4, 8)
    assert [first(number) for number in (600, 3)] == [again(600), again(3)]
    assert [first(number) for number in range(8)] != [other(number) for number in range(8)]
    assert np.mean([first(number) for number in range(4000)]) == pytest.approx(lengths.mean, rel=0.05)


def write_parquet(path: Path, **columns: list[Any]) -> None:
    parquet.write_table(pa.table(columns), path)


WRITERS: dict[str, Callable[[Path], None]] = {
    "a.txt": lambda path: path.write_text("3\n\n 5 \n700\n") and None,
    "a.csv": lambda path: path.write_text("3\n5.0\n7e2\n") and None,
    "numbers.jsonl": lambda path: path.write_text("3\n5\n700\n") and None,
    "rollouts.jsonl": lambda path: path.write_text('{"num_tokens": 3}\n{"num_tokens": 5}\n{"length": 700}\n') and None,
    "a.parquet": lambda path: write_parquet(path, other=["x", "y", "z"], response_length=[3, 5, 700]),
}


@pytest.mark.parametrize("name", WRITERS)
def test_lengths_of_a_file_are_cut_at_the_longest_response(name: str, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name)
    found = read_lengths(str(tmp_path / name), 512)
    assert found.values.tolist() == [3, 5, 512]
    assert found.cut == pytest.approx(1 / 3)


WRONG = [
    ("", "no lengths in it"),
    ("12\n-3\n", "line 2: -3 is not a length"),
    ("12\n0\n", "line 2: 0 is not a length"),
    ("1e300\n", "1e300 is not a length"),
    ("9" * 400 + "\n", "is not a length"),
    ("nan\n", "nan is not a length"),
    ("2.5\n", "2.5 is not a length"),
    ("many\n", "many is not a length"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_what_is_no_list_of_lengths_is_refused_by_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_lengths(str(tmp_path / "lengths.txt"), 512)
    assert "lengths.txt" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("absent.txt", "no such file"),
        ("uniform(1,2)", "there is no distribution 'uniform'"),
        ("lognormal(5,1)", r"not of the form lognormal\(mu,sigma,max\)"),
        ("lognormal(5,one,100)", r"not of the form lognormal"),
        ("lognormal(nan,1,100)", r"not of the form lognormal"),
        ("lognormal(5,-1,100)", "sigma its deviation"),
        ("lognormal(500,1,100)", "mu is the mean of the logarithm"),
        ("geometric(0.5,100)", "mean=0.5 must be from 1"),
        ("geometric(50,0)", "max=0 must be from 1 to rollout.sampling.max_new_tokens=512"),
        ("geometric(50,1024)", "max=1024 must be from 1 to rollout.sampling.max_new_tokens=512"),
    ],
)
def test_what_is_no_source_of_lengths_is_refused(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_lengths(source, 512)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match="no readable parquet file"):
        read_lengths(str(tmp_path / "a.parquet"), 512)
    write_parquet(tmp_path / "b.parquet", prompt=["x"])
    with expect_error(ConfigError, field=("num_tokens", "response_length", "length"), value="prompt"):
        read_lengths(str(tmp_path / "b.parquet"), 512)
    write_parquet(tmp_path / "c.parquet", length=[4, None])
    with expect_error(ConfigError, field="row 2", value="None"):
        read_lengths(str(tmp_path / "c.parquet"), 512)
    (tmp_path / "d.jsonl").write_text('{"num_tokens": 3}\n{"score": 1}\n')
    with expect_error(ConfigError, field=("line 2", "num_tokens")):
        read_lengths(str(tmp_path / "d.jsonl"), 512)
    with pytest.raises(ConfigError, match="not a run directory"):
        read_lengths(str(tmp_path), 512)


# ------------------------------------------------------------------------------------------------------------- measured
def test_decode_steps_of_requests_in_their_order() -> None:
    assert decode_steps([2, 5, 4], slots=2) == 6  # the third request starts when the first has ended
    assert decode_steps([2, 5, 4], slots=3) == 5
    assert decode_steps([2, 5, 4], slots=1) == 11


def test_a_fit_finds_what_made_the_times_and_is_never_negative() -> None:
    rng = np.random.default_rng(0)
    work = rng.uniform(1, 100, (60, 3))
    seconds = work @ np.array([0.2, 0.003, 0.0])
    seconds[::4] *= rng.uniform(1.2, 5, 15)  # every fourth step was disturbed
    found, error = nonnegative_fit(work, seconds)
    assert found == pytest.approx([0.2, 0.003, 0.0], abs=1e-4) and error < 1e-4
    found, _ = nonnegative_fit(np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]), np.array([1.0, 3.0, 5.0]))
    assert min(found) >= 0  # the best line is 2 x - 1


STEP_S, SEQUENCE_S, TRAIN_S, TOKEN_S = 0.01, 0.002, 0.5, 0.004


def write_run(path: Path, steps: int = 8, scale: int = 20, **settings: Any) -> list[int]:
    """Write a run with two prompts and two responses each. Times follow from lengths. Returns all lengths after the first step."""
    (path / "rollouts").mkdir(parents=True)
    overrides = {
        "model.path": "model",
        "rollout.sampling.n": 2,
        "trainer.prompts_per_step": 2,
        "trainer.world_size": 1,
    } | settings
    tree: dict[str, Any] = {}
    for key, value in overrides.items():
        *groups, name = key.split(".")
        at = tree
        for group in groups:
            at = at.setdefault(group, {})
        at[name] = value
    (path / "config.yaml").write_text(json.dumps(tree))
    rng, lines, kept = np.random.default_rng(scale), [], []
    for step in range(1, steps + 1):
        lengths = rng.integers(1, scale, 4).tolist()
        generate = max(lengths) * STEP_S + sum(lengths) * SEQUENCE_S
        update = TRAIN_S + sum(lengths) * TOKEN_S
        if step == 1:
            generate, update = 30.0, 40.0  # warms up
        else:
            kept += lengths
        timing = {"generate": generate, "score": 0.1, "update": update, "sync": 0.25, "evaluate": 9.0, "step": 50.0}
        lines.append(json.dumps({"step": step} | {f"timing/{name}_s": value for name, value in timing.items()}))
        rows = [json.dumps({"prompt_id": f"p{n // 2}", "num_tokens": length}) for n, length in enumerate(lengths)]
        (path / "rollouts" / f"step-{step:06d}.jsonl").write_text("\n".join(rows) + "\n")
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return kept


def test_times_of_runs_are_found_in_their_records(tmp_path: Path) -> None:
    lengths = write_run(tmp_path / "short") + write_run(tmp_path / "long", scale=60)
    fit = fit_runs([tmp_path / "short", tmp_path / "long"])
    assert (fit.step_s, fit.sequence_s, fit.prompt_s) == pytest.approx((STEP_S, SEQUENCE_S, 0), abs=1e-6)
    assert (fit.train_step_s, fit.train_token_s, fit.sync_s) == pytest.approx((TRAIN_S + 0.1, TOKEN_S, 0.25))
    assert fit.steps == 14 and fit.error < 1e-6
    assert isinstance(fit, PhaseFit) and len(lengths) == 4 * 14


def write_run_ahead(path: Path, train: float, decode: float, **missing: float) -> None:
    """Write a run with a staleness of 1. For 0.4 s of a step both sides compute, slowed down by ``train`` and ``decode``."""
    write_run(path, steps=1, **{"trainer.max_staleness": 1})
    lengths, both = [30, 20, 10, 40], 0.4
    alone_s, engine_s = TRAIN_S + 0.1 + sum(lengths) * TOKEN_S, max(lengths) * STEP_S + sum(lengths) * SEQUENCE_S
    busy_s = engine_s - both / decode + both
    timing = {"generate": 0.25 * (busy_s - both), "drain": 0.75 * (busy_s - both), "sync": 0.25}
    timing |= {"score": 0.1, "update": alone_s - 0.1 - both / train + both}
    counted = {"steps": max(lengths), "tokens": sum(lengths), "busy_s": busy_s}
    line = {f"timing/{name}_s": value for name, value in timing.items()}
    line |= {f"throughput/engine_{name}": value for name, value in counted.items() if name not in missing}
    early = {"timing/generate_s": 90.0, "timing/update_s": 90.0} | {name: 1 for name in line if "engine" in name}
    steps = [{"step": step} | (early if step <= 4 else line) for step in range(1, 9)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    for step in range(1, 9):
        rows = "".join(json.dumps({"num_tokens": length}) + "\n" for length in lengths)
        (path / "rollouts" / f"step-{step:06d}.jsonl").write_text(rows)


def test_a_run_that_samples_ahead_shows_how_much_trainer_and_engines_slow_each_other(tmp_path: Path) -> None:
    write_run(tmp_path / "short") and write_run(tmp_path / "long", scale=60)
    write_run_ahead(tmp_path / "ahead", 1.25, 1.1)
    alone = fit_runs([tmp_path / "short", tmp_path / "long"])
    fit = fit_runs([tmp_path / "ahead", tmp_path / "short", tmp_path / "long"])
    assert alone.contention is None and fit.contention is not None
    assert (fit.contention.train, fit.contention.decode) == pytest.approx((1.25, 1.1), rel=1e-3)
    assert replace(fit, contention=None) == alone and fit.source == str(tmp_path / "short")
    write_run_ahead(tmp_path / "older", 1.25, 1.1, busy_s=0.0)
    with pytest.raises(ConfigError, match="does not contain the engines' work"):
        fit_runs([tmp_path / "short", tmp_path / "older"])


def test_rollouts_of_a_run_are_lengths(tmp_path: Path) -> None:
    kept = write_run(tmp_path / "run")
    for source in ("run", "run/rollouts"):
        found = read_lengths(str(tmp_path / source), 512)
        assert Counter(found.values[:-4].tolist()) == Counter(kept)  # the last values belong to the first step
        assert found.per_prompt == 2


def test_responses_to_a_prompt_are_drawn_together(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    rows = [{"prompt_id": f"p{number // 2}", "num_tokens": 1 + number} for number in range(100)]
    (tmp_path / "rollouts" / "step-000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lengths = read_lengths(str(tmp_path), 512)
    pairs = [lengths.draw(2, 0)(number) for number in range(200)]
    assert all(first % 2 == 1 and second == first + 1 for first, second in pairs) and len(set(map(tuple, pairs))) > 40
    assert any(
        second != first + 1 for first, second, _ in map(lengths.draw(3, 0), range(200))
    )  # with another number of samples, lengths come from any prompt


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainer.max_staleness": 1}, "add --run with the directory of a synchronous run"),
        ({"algorithm.kind": "sft"}, "algorithm.kind=sft generates nothing"),
        ({"rollout.max_num_sequences": 4}, "max_num_sequences"),
    ],
)
def test_runs_that_tell_nothing_of_generation_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_run(tmp_path / "run", **change)
    with pytest.raises(ConfigError, match=message):
        fit_runs([tmp_path / "run"])


def test_runs_without_records_are_refused(tmp_path: Path) -> None:
    with expect_error(ConfigError, field="metrics.jsonl"):
        fit_runs([tmp_path])
    write_run(tmp_path / "run", steps=1)
    with expect_error(ConfigError, field="step", value=1):
        fit_runs([tmp_path / "run"])
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n{"step"\n')
    with expect_error(ConfigError, field=("metrics.jsonl", "line 2")):
        fit_runs([tmp_path / "run"])
