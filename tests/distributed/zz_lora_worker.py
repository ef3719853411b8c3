# ruff: noqa
import torch.distributed as dist
from tests.distributed import lora_worker as w
from tests.distributed.lora_worker import *

ATT = ("q_proj", "k_proj", "v_proj", "o_proj")
CASES = {
    "glm4_moe_lite": (("all-linear",), ("tp2_sp_ep2_etp1_dp2", "ep2_dp4")),
    "minimax_m2": (ATT, ("tp2_sp_ep2_etp1_dp2", "pp2_ep2_dp2")),
    "olmoe": (ATT, ("tp2_sp_dp2", "ep2_dp4")),
    "seed_oss": (("all-linear",), ("tp2_dp2", "pp2_dp2")),
    "olmo3": (("all-linear",), ("tp2_dp2_sp", "cp2_dp2")),
    "ernie4_5": (("all-linear",), ("tp2_pp2", "cp2_dp2")),
    "smollm3": (("all-linear",), ("tp2_pp2", "tp2_sp_cp2")),
}
w.SIZES.update({n: AdapterSizes(3, 12.0, t) for n, (t, _) in CASES.items()})
w.OF_PEFT = (*w.OF_PEFT, "minimax_m2", "olmoe", "seed_oss", "olmo3", "ernie4_5", "smollm3")


def main(directory):
    platform, groups, findings = start(), {}, {}
    for name, (_, layouts) in CASES.items():
        path = directory / name
        found = findings[name] = {"oracle": {}, "updates": {}}
        if dist.get_rank() == 0:
            models.make(name, path)
            found["oracle"] = oracle(name, path, "grown")
        dist.barrier()
        for layout in layouts:
            made = (moe_groups_of if layout in MOE_LAYOUTS else groups_of)(layout, groups)
            found["updates"][layout] = update(name, path, made, platform, "grown")
    finish(findings, directory)
