# ruff: noqa
import json, tempfile, time
from pathlib import Path
from tests.distributed.world import run_world

d = Path(tempfile.mkdtemp())
t = time.time()
run_world("distributed.zz_lora_worker", 4, d)
f = json.loads((d / "findings.json").read_text())
for m, v in f.items():
    for l, c in v["updates"].items():
        o = v["oracle"]
        print(
            m,
            l,
            f"logprobs {c['logprobs']:.1e} ref {c['reference']:.1e} loss {abs(c['metrics']['loss/sft'] - o['loss/sft']):.1e} gradnorm rel {abs(c['metrics']['actor/grad_norm'] / o['actor/grad_norm'] - 1):.1e} after {c['after']!r} base {c['base']!r} moved {c['moved']:.1e}",
        )
print(f"{time.time() - t:.0f}s")
