"""A rollout function for a game of two players with one policy. One player describes a word, the other guesses it.

Each player has its own conversation. Both are branches of one rollout, and the policy learns from both. Run it with
``rollout.function=examples/two_players.py:rollout`` and ``reward.rules=[]`` on rows whose ground truth is a word.
"""

from __future__ import annotations

from typing import Any

DESCRIBE = "Describe the word {word!r} in one sentence. Do not use the word."
GUESS = "Which word does this sentence describe? Answer with one word.\n{hint}"
MAX_TRIES = 2


async def rollout(policy: Any, prompt: Any, ctx: Any) -> float:
    """Play a game. Both players get 1 for a correct guess, and less for each wrong guess."""
    word = str(prompt.answer)
    describer = ctx.tokenize_messages([{"role": "user", "content": DESCRIBE.format(word=word)}])
    hint = await policy.sample(describer)
    if word.lower() in hint.text.lower():
        return 0.0
    guesser = ctx.tokenize_messages([{"role": "user", "content": GUESS.format(hint=hint.text)}])
    for missed in range(MAX_TRIES):
        guess = await policy.sample(guesser)
        if guess.text.strip().lower() == word.lower():
            return 1.0 - missed / MAX_TRIES
        guesser += guess.tokens + ctx.tokenize_messages([{"role": "user", "content": "No."}], after=guess)
    return 0.0
