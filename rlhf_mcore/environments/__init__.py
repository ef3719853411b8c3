"""Environments, which answer the policy between its turns, and the episodes that the two produce.

An environment is a class in a user's file (``environment.function: path/to/file.py:Class``). Each episode gets a new instance::

    class Environment:
        def __init__(self, **options): ...            # environment.options
        def reset(self, row, seed): ...               # -> first observation, or None
        def step(self, action): ...                   # -> observation, reward, done
        def close(self): ...                          # optional

``row`` contains ``prompt_id``, ``prompt`` (its text), ``ground_truth``, ``extra_info`` and ``data_source``. ``seed`` is the same
for all responses to a prompt in a step. ``action`` is the text of the policy's turn, without special tokens.

An observation is a text (sent as a user message), a message ``{"role", "content"}``, a list of messages, or None. Names of special
tokens in it are encoded as text, unless the class sets ``special_tokens = True``. ``reward`` is a finite number; None counts as 0.
If the methods are ``async def``, a process runs many episodes concurrently.

Worker processes (``worker``) call the class; ``sessions`` starts, stops and replaces them. If a process is lost, its episodes are
replayed from the seed and the actions so far. An environment must therefore derive all its randomness from ``seed``.
"""
