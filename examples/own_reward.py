"""Your own reward function: ``reward.function=examples/own_reward.py:grade``. It runs in worker processes with a time limit.

.venv/bin/rlhf-mcore reward-test configs/quickstart/grpo.yaml reward.function=examples/own_reward.py:grade
.venv/bin/rlhf-mcore train configs/quickstart/grpo.yaml experiment=own-reward reward.function=examples/own_reward.py:grade
"""

from __future__ import annotations

import re
from typing import Any

ANSWER = re.compile(r"#### (-?\d+)")


def grade(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> dict[str, float]:
    """Return 1 for the right number, 0.5 for a number that is off by at most 2, and 0.1 for any other number in the right form.

    ``score`` is the reward. The other values are metrics (``reward/form_mean``) and are stored with each response in ``rollouts/``.
    """
    found = ANSWER.fullmatch(solution_str.strip())
    error = abs(int(found[1]) - int(ground_truth)) if found else None
    score = 0.0 if error is None else 1.0 if error == 0 else 0.5 if error <= 2 else 0.1
    return {"score": score, "form": float(error is not None), "close": float(error is not None and error <= 2)}
