"""Reject completions that are not valid for training."""

from __future__ import annotations

import numpy as np

from rlhf_mcore.types import MAX_LOGPROB, ROUTES, Completion, Request

REMEDY = "Nothing of this step was trained on; start the run again (trainer.max_restarts does so by itself)"


class LostTrajectory(RuntimeError):
    """Engines did not return exactly the requested responses. The step was not trained on."""


def check_completion(request: Request, completion: Completion) -> None:
    """Reject a completion that is not valid for training.

    Raises:
        RuntimeError: there is no token, the numbers of logprobs and tokens differ, or the request is unfinished. Also if a logprob
            is NaN, infinite or positive, if a requested route is missing, or if a requested support is missing or does not contain
            its token. The message names the prompt.
    """
    tokens, logprobs, where = completion.token_ids, completion.logprobs, request.name
    if not len(tokens):
        raise RuntimeError(f"the engine returned no token for {where}")
    if len(logprobs) != len(tokens):
        raise RuntimeError(f"the engine returned {len(logprobs)} logprobs for {len(tokens)} tokens ({where})")
    wrong = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > MAX_LOGPROB))
    if len(wrong):
        raise RuntimeError(f"the engine returned logprob {logprobs[wrong[0]]} at token {wrong[0]} of {where}")
    if request.sampling.records_support:
        _check_support(completion, where)
    if request.sampling.records_routes:
        routes = completion.fields.get(ROUTES)
        if not isinstance(routes, np.ndarray) or not routes[-len(tokens) :].all():
            raise RuntimeError(f"the engine did not record the experts that all tokens of {where} went to")
    if completion.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"the engine gave up with finish_reason={completion.finish_reason!r} for {where}")


def _check_support(completion: Completion, where: str) -> None:
    support, tokens = completion.support, completion.token_ids
    if support is None or len(support.counts) != len(tokens):
        count = "none" if support is None else f"those of {len(support.counts)} tokens"
        raise RuntimeError(
            f"the engine did not record the tokens that top_p and top_k kept: {count} for {len(tokens)} tokens "
            f"({where}); set rollout.sampling.top_p=1 and top_k=-1"
        )
    is_own = support.values == tokens.repeat(support.counts)
    owners = np.arange(len(tokens)).repeat(support.counts)
    lacking = np.flatnonzero(np.bincount(owners[is_own], minlength=len(tokens)) != 1)
    if len(lacking):
        raise RuntimeError(f"the engine recorded a support without the sampled token, at token {lacking[0]} of {where}")
