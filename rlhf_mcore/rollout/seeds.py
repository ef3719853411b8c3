"""The seed of one sampled response."""

from __future__ import annotations

import hashlib
import struct

_SEED_BITS = 63  # torch.Generator and vLLM both take any non-negative int64


def request_seed(seed: int, step: int, prompt_index: int, sample: int) -> int:
    """The seed that response ``sample`` to the prompt in row ``prompt_index`` is drawn with at ``step``.

    It is the first 63 bits of BLAKE2b over the four numbers (little-endian int64, in the order of the arguments), so
    it is the same on every machine and Python version, and responses of neighbouring prompts, samples or steps are
    unrelated. Samples are counted over all occurrences of the row in the step. Nothing else enters it: a rollout depends
    neither on the engine that ran it nor on its neighbours in a batch.

    Raises:
        struct.error: an argument does not fit in a signed 64-bit integer.
    """
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, prompt_index, sample), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)
