"""Break each rule of NCCL on purpose, on four ranks over gloo and with a separate group per rule."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.bridge.run import transports
from rlhf_mcore.bridge.run.transports import GroupLinks
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.parallel.joint_group import connect_device
from tests.distributed.bridge_groups_worker import held_of, parameters_of
from tests.distributed.nccl_rules import BrokenRule, current_rules
from tests.distributed.setting import finish, start
from tests.unit.bridge.geometry import GEOMETRY, hf_tensors


def refusal(action: Callable[[], Any]) -> str:
    """Return the message of a broken rule without the name of the group, or "" if no rule is broken."""
    try:
        action()
    except BrokenRule as error:
        return re.sub(r"group \w+", "the group", str(error))
    return ""


def message(group: Any, peer: int, tensor: torch.Tensor, *, sends: bool) -> list[Any]:
    operation = dist.isend if sends else dist.irecv
    return dist.batch_isend_irecv([dist.P2POp(operation, tensor, group=group, group_peer=peer)])


class Coordinator:
    """A stand-in for vLLM's GroupCoordinator, with its groups and names of arguments."""

    def __init__(self, group_ranks: list[list[int]], local_rank: int, torch_distributed_backend: str) -> None:
        for ranks in group_ranks:
            self.device_group = dist.new_group(ranks, backend=torch_distributed_backend)
            self.cpu_group = dist.new_group(ranks, backend="gloo")


class Broken:
    """Every method breaks a rule on a separate group and returns the message on this rank."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.rank = directory, dist.get_rank()

    def group(self, is_connected: bool = True, **options: Any) -> Any:
        group = dist.new_group([0, 1, 2, 3], timeout=timedelta(seconds=20), **options)
        if is_connected:
            connect_device(group)
        return group

    def in_turn(self, first: Callable[[], Any], second: Callable[[], Any]) -> str:
        """Rank 0 runs the first action, and then rank 1 the second."""
        told = refusal(first) if self.rank == 0 else ""
        all_gather_json(None)
        return refusal(second) if self.rank == 1 else told

    def a_batch_of_a_part_comes_first(self) -> str:
        group = self.group(is_connected=False)
        return (
            refusal(lambda: message(group, 1 - self.rank, torch.ones(2), sends=not self.rank)) if self.rank < 2 else ""
        )

    def a_batch_of_all_comes_first(self) -> str:
        group = self.group(is_connected=False)
        works: list[Any] = []
        peer, sends = self.rank ^ 1, self.rank % 2 == 0
        told = refusal(lambda: works.extend(message(group, peer, torch.ones(2), sends=sends)))
        for work in works:
            work.wait()
        return told

    def sizes_of_a_message_differ(self) -> str:
        group = self.group()
        return self.in_turn(
            lambda: message(group, 1, torch.ones(4), sends=True), lambda: message(group, 0, torch.ones(3), sends=False)
        )

    def dtypes_of_a_message_differ(self) -> str:
        group = self.group()
        other = torch.ones(4, dtype=torch.bfloat16)
        return self.in_turn(
            lambda: message(group, 1, torch.ones(4), sends=True), lambda: message(group, 0, other, sends=False)
        )

    def tags_tell_messages_apart(self) -> str:
        """gloo delivers messages by tag. NCCL would write two numbers to the memory of one."""
        group = self.group()

        def two(operation: Any, peer: int, numbers: tuple[int, int]) -> None:
            for number in numbers:
                dist.batch_isend_irecv(
                    [dist.P2POp(operation, torch.ones(number), group=group, group_peer=peer, tag=number)]
                )

        return self.in_turn(lambda: two(dist.isend, 1, (1, 2)), lambda: two(dist.irecv, 0, (2, 1)))

    def a_message_crosses_a_collective(self) -> str:
        group = self.group()

        def first() -> None:
            message(group, 1, torch.ones(1), sends=True)

        def second() -> None:
            dist.all_reduce(torch.ones(1), group=group, async_op=True)
            message(group, 0, torch.ones(1), sends=False)

        return self.in_turn(first, second)

    def unbatched_messages_cross(self) -> str:
        """Both ranks share a communicator, send first, and wait for each other."""
        group = self.group()
        return self.in_turn(
            lambda: dist.isend(torch.ones(1), group=group, group_dst=1),
            lambda: dist.isend(torch.ones(1), group=group, group_dst=0),
        )

    def sizes_of_a_collective_differ(self) -> str:
        group = self.group()
        return self.in_turn(
            lambda: dist.all_reduce(torch.ones(4), group=group, async_op=True),
            lambda: dist.all_reduce(torch.ones(5), group=group, async_op=True),
        )

    def collectives_come_in_another_order(self) -> str:
        group = self.group()
        return self.in_turn(
            lambda: dist.all_reduce(torch.ones(4), group=group, async_op=True),
            lambda: dist.broadcast(torch.ones(4), group=group, group_src=0, async_op=True),
        )

    def a_batch_is_large(self) -> str:
        group = self.group()
        operation = dist.P2POp(dist.isend, torch.ones(1), group=group, group_peer=self.rank ^ 1)
        return refusal(lambda: dist.batch_isend_irecv([operation] * 257))

    def two_threads_use_a_group(self) -> str:
        group, has_begun, may_end = self.group(), threading.Event(), threading.Event()

        def use() -> None:
            dist.all_reduce(torch.ones(1), group=group)
            has_begun.set()
            may_end.wait(60)

        with mock.patch.object(current_rules()._groups[group], "thread", None):
            thread = threading.Thread(target=use, name="saving")
            thread.start()
            has_begun.wait(60)
            told = refusal(lambda: dist.all_reduce(torch.ones(1), group=group))
        may_end.set()
        thread.join()
        return told

    def a_tensor_of_the_host_enters_a_group_of_devices(self) -> str:
        group = self.group(backend="nccl")
        return refusal(lambda: all_gather_json(1, group))

    def a_tensor_of_a_device_enters_a_group_of_the_host(self) -> str:
        group = self.group(is_connected=False, backend="gloo")
        return refusal(lambda: dist.all_reduce(torch.ones(1), group=group))

    def an_engine_uses_its_groups(self) -> str:
        engine = self.engine()
        dist.all_reduce(torch.ones(1), group=engine.device_group)
        return refusal(lambda: dist.all_reduce(torch.ones(1), group=engine.cpu_group))

    def an_engine_has_a_tensor_of_the_host_in_its_group_of_devices(self) -> str:
        engine = self.engine()
        return refusal(lambda: all_gather_json(1, engine.device_group))

    def engine(self) -> Coordinator:
        with mock.patch.object(Coordinator, "__init__", Coordinator.__init__):
            current_rules().take_for_cuda(Coordinator)
            return Coordinator([[0, 1, 2, 3]], 0, "gloo")

    def a_sent_tensor_is_changed(self) -> str:
        group, tensor = self.group(), torch.ones(3)
        works = message(group, self.rank ^ 1, tensor, sends=self.rank % 2 == 0)
        if self.rank % 2 == 0:
            tensor.zero_()
        return refusal(works[0].wait)

    def a_received_tensor_is_read_before_the_wait(self) -> list[Any]:
        """Until the wait, the bytes of a message and of a sum are garbage."""
        group, tensor, total = self.group(), torch.ones(1, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)
        works = message(group, self.rank ^ 1, tensor + 1 if self.rank % 2 == 0 else tensor, sends=self.rank % 2 == 0)
        all_gather_json(None)
        early = [int(tensor)]
        works[0].wait()
        work = dist.all_reduce(total, group=group, async_op=True)
        early += [int(total)]
        work.wait()
        return [*early, int(tensor), int(total)]

    def a_save_of_the_transports_that_did_not_connect(self) -> str:
        return self.save(connects=False)

    def a_save(self) -> str:
        return self.save(connects=True)

    def save(self, connects: bool) -> str:
        """Two replicas of the model are saved to one file, so that some ranks send no message."""
        group = self.group(is_connected=False)
        hf = {name: tensor.float() for name, tensor in hf_tensors(GEOMETRY).items()}
        model = self.directory / f"model{self.rank}{connects}"
        model.mkdir()
        (model / "config.json").write_text("{}")
        with (
            mock.patch.object(GroupLinks, "share", lambda *_: None),
            mock.patch.object(transports, "connect_device", connect_device if connects else lambda group: None),
        ):
            parameters = parameters_of(group, held_of(group, hf))
            exporter = Exporter(parameters, GEOMETRY, [str(model)], group, bucket_bytes=1 << 20)
            return refusal(lambda: exporter.write(model))


def main(directory: Path) -> None:
    start()
    rules = current_rules()
    broken = Broken(directory)
    found = {}
    with mock.patch.object(rules, "patience_s", 1.0):
        for name in vars(Broken):
            if name not in ("group", "in_turn", "save", "engine") and not name.startswith("__"):
                found[name] = getattr(broken, name)()
                all_gather_json(None)
    every = all_gather_json(found)
    finish({name: [mine[name] for mine in every] for name in found}, directory)
