# ruff: noqa
import json, os, sys, tempfile, time
from pathlib import Path
from tests.distributed.world import run_world

d = Path(tempfile.mkdtemp())
t = time.time()
run_world("distributed.vision_worker", 4, d, os.environ["MODELS"])
f = json.loads((d / "findings.json").read_text())
for k, c in f.items():
    print(
        k,
        {x: c.get(x) for x in ("packed", "padded", "gather", "saved")},
        [h == p for h, p in c["names"]],
        c["update"],
        c["memory"][0],
    )
print(f"{time.time() - t:.0f}s")
