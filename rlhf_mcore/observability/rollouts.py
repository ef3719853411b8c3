"""The responses of a step, for people to read and for the report to browse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_mcore.observability.files import json_line, write_atomically
from rlhf_mcore.types import Score, Trajectory


def write_rollouts(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """One JSON line per record, in the given order. The file appears whole or not at all."""
    write_atomically(path, b"".join(map(json_line, records)))


def rollout_record(trajectory: Trajectory, score: Score, step: int) -> dict[str, Any]:
    """What is kept of a trajectory."""
    return {
        "step": step,
        "prompt_id": trajectory.prompt.prompt_id,
        "sample": trajectory.sample,
        "prompt": trajectory.prompt.text,
        "response": trajectory.response_text,
        "ground_truth": trajectory.prompt.ground_truth,
        "score": score.value,
        "parts": score.parts,
        "failure": score.failure,
        "num_tokens": trajectory.num_sampled,
        "finish_reason": trajectory.finish_reason,
        "policy_version": trajectory.policy_version,
    }
