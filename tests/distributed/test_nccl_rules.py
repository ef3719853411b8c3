"""Check that an operation that breaks an NCCL rule is rejected with the rule's message, including the bridge's former
unconnected save.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.world import World

NOBODY = [""] * 4
OF_A_PART = "the first operation of the group is a batch of messages that ranks {} take no part in"
OF_ONE_KIND = "a tensor of the {} in the group, which is of {} alone"


def second(sequence: str, mine: str, theirs: str) -> list[str]:
    """Return the messages if rank 0 starts one operation and rank 1 another. Only rank 1 reports it."""
    return ["", f"{sequence} of the group: '{mine}' at 1, '{theirs}' at 0", "", ""]


def message(mine: str, theirs: str) -> list[str]:
    return second("message 0-1 0", *(f"torch.{end} collectives" for end in (mine, theirs)))


REFUSED = {
    "a_batch_of_a_part_comes_first": [*[OF_A_PART.format([2, 3])] * 2, "", ""],
    "a_batch_of_all_comes_first": NOBODY,
    "sizes_of_a_message_differ": message("float32 3 after 1", "float32 4 after 1"),
    "dtypes_of_a_message_differ": message("bfloat16 4 after 1", "float32 4 after 1"),
    "tags_tell_messages_apart": message("float32 2 after 1", "float32 1 after 1"),
    "a_message_crosses_a_collective": message("float32 1 after 2", "float32 1 after 1"),
    "unbatched_messages_cross": second("message alone 0-1 0", "1 to 0 torch.float32 1", "0 to 1 torch.float32 1"),
    "sizes_of_a_collective_differ": second(
        "collective 1", "all_reduce torch.float32 5 RedOpType.SUM", "all_reduce torch.float32 4 RedOpType.SUM"
    ),
    "collectives_come_in_another_order": second(
        "collective 1", "broadcast torch.float32 4 root 0", "all_reduce torch.float32 4 RedOpType.SUM"
    ),
    "a_batch_is_large": ["a batch of 257 messages: NCCL takes 256"] * 4,
    "two_threads_use_a_group": ["threads saving and MainThread use the group"] * 4,
    "a_tensor_of_the_host_enters_a_group_of_devices": [OF_ONE_KIND.format("host", "nccl")] * 4,
    "a_tensor_of_a_device_enters_a_group_of_the_host": [OF_ONE_KIND.format("device", "gloo")] * 4,
    "an_engine_uses_its_groups": NOBODY,
    "an_engine_has_a_tensor_of_the_host_in_its_group_of_devices": [OF_ONE_KIND.format("host", "nccl")] * 4,
    "a_sent_tensor_is_changed": ["torch.float32 [3] was changed while it was sent", ""] * 2,
    # Four ranks save one file. Rank 2 already has a copy of rank 0's data, so it exchanges no message.
    "a_save_of_the_transports_that_did_not_connect": [OF_A_PART.format([2]) if rank != 2 else "" for rank in range(4)],
    "a_save": NOBODY,
}


@pytest.fixture(scope="module")
def findings(four_ranks: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("rules")
    return four_ranks.run("nccl_rules_worker", directory)


@pytest.mark.parametrize("broken", REFUSED)
def test_what_breaks_a_rule_is_refused(findings: Any, broken: str) -> None:
    assert findings[broken] == REFUSED[broken]


def test_what_was_not_waited_for_is_garbage(findings: Any) -> None:
    """Before the wait, receivers see 0xA5. Rank 0 sends a 2 to rank 1, rank 2 sends a 2 to rank 3, and all ranks sum ones."""
    early = {rank: [165 if rank % 2 else 1, 165] for rank in range(4)}
    late = {rank: [2 if rank % 2 else 1, 4] for rank in range(4)}
    found = findings["a_received_tensor_is_read_before_the_wait"]
    assert found == [early[rank] + late[rank] for rank in range(4)]


def test_every_rule_that_a_worker_breaks_is_expected(findings: Any) -> None:
    assert set(findings) == {*REFUSED, "a_received_tensor_is_read_before_the_wait"}
