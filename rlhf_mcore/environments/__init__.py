"""Environments: what answers the policy between its turns, and the episodes that come of it.

An environment is a class of a user's file (``environment.function: path/to/file.py:Class``). One instance is made for each episode::

    class Environment:
        def __init__(self, **options): ...            # environment.options
        def reset(self, row, seed): ...               # -> first observation, or None
        def step(self, action): ...                   # -> observation, reward, done
        def close(self): ...                          # may be missing

``row`` has ``prompt_id``, ``prompt`` (its text), ``ground_truth``, ``extra_info`` and ``data_source``; ``seed`` is the same for all
responses to a prompt in a step. ``action`` is what the policy has written in its turn, without special tokens. An observation is a
text (a message of the user), a message ``{"role", "content"}``, a list of them, or None. What stands in it for a special token of the
model is text, unless the class has ``special_tokens = True``. ``reward`` is a finite number, or None,
which counts as 0. Methods may be ``async def``: then a process has many episodes at a time.

The class is called in worker processes (``worker``), which ``sessions`` starts, ends and replaces. An episode whose process was
lost is played again, from its seed and the actions so far: what an environment draws has to follow from ``seed``.
"""
