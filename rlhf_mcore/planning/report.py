"""Format a plan as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import TextWrapper

from rlhf_mcore.planning.inputs import GIB
from rlhf_mcore.planning.plan import RolePlan, RunPlan

COLUMNS = 80


def as_text(plan: RunPlan) -> str:
    """Format the plan for a terminal."""
    return "\n".join([*_head(plan), "", *_roles(plan), "", *_memory(plan), "", *_traffic(plan), "", *_time(plan)])


def refusal(plan: RunPlan) -> str:
    """List the phases that do not fit, with their biggest parts."""
    lines = []
    for phase in plan.phases:
        if phase.total > phase.available:
            parts = ", ".join(f"{name} {gib(size)}" for name, size in phase.biggest())
            needed = f"{phase.phase} needs {gib(phase.total)} of {gib(phase.available)} GiB on rank {phase.rank}"
            lines.append(f"{needed}; its biggest parts: {parts}")
        if phase.problem:
            lines.append(f"{phase.phase}: {phase.problem}")
    return "\n".join(lines)


def out_of_memory(plan: RunPlan, phase: str, outside: int | None, error: Exception) -> str:
    """Compare a device that ran out of memory with its plan. ``outside``: bytes used outside torch, if known."""
    lines = [f"the device is out of memory in phase {phase or 'start'}: {str(error).strip()}"]
    if outside is not None:
        reserve = gib(plan.phases[0].parts["reserve"])
        lines.append(
            f"outside torch (CUDA, NCCL, other processes): {gib(outside)} GiB; the plan reserves {reserve} GiB"
        )
    lines += [
        "this run was planned as follows (rlhf-mcore plan; --run DIR plans with the measured memory outside torch):"
    ]
    remedies = "trainer.max_tokens_per_microbatch, rollout.gpu_memory_utilization, actor.offload and actor.recompute"
    return "\n".join(
        [*lines, *_memory(plan), f"settings that lower it: {remedies} (docs/operations/troubleshooting.md)"]
    )


def gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def size_text(size: float) -> str:
    """Return a size with its unit."""
    return f"{gib(size)} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    return [line(header), *map(line, rows)]


def _head(plan: RunPlan) -> Iterator[str]:
    gpu, verdict = plan.gpu, "fits" if plan.fits else "does not fit"
    spans = f" (each on {plan.engine_nodes} nodes)" if plan.engine_nodes > 1 else ""
    apart = f" and {plan.engine_devices} for engines{spans}" if plan.engine_devices else ""
    yield f"{plan.world_size}{apart} x {gpu.name} ({gib(gpu.memory_bytes)} GiB each, {gpu.per_node} a node), {plan.dtype}: {verdict}"


def _roles(plan: RunPlan) -> list[str]:
    cut = [
        (
            role.name,
            f"{role.parameters / 1e9:.2f} B" if role.parameters >= 1e8 else f"{role.parameters / 1e6:.2f} M",
            _layout(role),
            role.recompute if role.trained else "-",
            f"{role.cut.num_microbatches} of {plan.work.microbatch_tokens}",
            f"{role.cut.bubble:.0%}",
        )
        for role in plan.roles
    ]
    states = [(role.name, role.state) for role in plan.roles]
    sizes = [(name, *map(gib, (one.weights, one.gradients, one.masters, one.moments))) for name, one in states]
    lines = table(("model", "parameters", "layout", "recompute", "microbatches", "bubble"), cut)
    lines += ["", *table(("on the first rank (GiB)", "weights", "grads", "masters", "moments"), sizes)]
    if plan.roles[0].computed_share < 1.0:
        lines += _wrap(f"(shared prefixes are computed once: {plan.roles[0].computed_share:.0%} of the tokens)", 1)
    away = [f"{role.name}: {', '.join(role.offload)}" for role in plan.roles if role.offload]
    return [*lines, *_wrap(f"(on the device only while they are used: {'; '.join(away)})", 1)] if away else lines


def _layout(role: RolePlan) -> str:
    shown = [name for name in ("tp", "pp", "dp") if role.layout[name]]
    shown += [name for name in ("vpp", "cp", "ep") if (role.layout[name] or 1) > 1]
    return " ".join(f"{name}{role.layout[name]}" for name in shown)


def _memory(plan: RunPlan) -> list[str]:
    rows = [(p.phase, gib(p.total), gib(p.available), str(p.rank)) for p in plan.phases]
    head, *lines = table(("memory (GiB)", "needed", "there", "rank"), rows)
    width, text = max(map(len, (head, *lines))) + 2, [f"{head}  biggest parts"]
    for line, phase in zip(lines, plan.phases, strict=True):
        parts = ", ".join(f"{name} {gib(size)}" for name, size in phase.biggest())
        sign = "" if phase.fits else "  <-- does not fit"
        text += _wrap(f"{line.ljust(width)}{parts}{sign}", width)
    return text


def _traffic(plan: RunPlan) -> Iterator[str]:
    sync = plan.sync
    if sync is not None:
        way = "between nodes" if sync.crosses_nodes else "within nodes"
        yield from _wrap(f"sync        at most {gib(sync.received)} GiB to each engine rank, {way}")
    if plan.later_sync_bytes is not None:
        yield f"later syncs {size_text(plan.later_sync_bytes)} to each engine: adapted weights only"
    saved = sum(role.checkpoint_bytes for role in plan.roles)
    hosted = f", optimizer state {gib(plan.hosted_bytes)} GiB" if plan.hosted_bytes else ""
    yield from _wrap(f"checkpoint  {gib(saved)} GiB; host memory per rank: pinned {gib(plan.pinned_bytes)} GiB{hosted}")
    load, rate = plan.load, plan.gpu.storage_bytes_per_s / 1e9
    yield from _wrap(
        f"load        {size_text(load.node_bytes)} of model files per node: about {load.seconds:.0f} s at {rate:g} GB/s"
    )
    if plan.route_bytes:
        size = size_text(plan.route_bytes * plan.work.tokens)
        yield from _wrap(f"routes      {plan.route_bytes} bytes per token, {size} per step over all hosts")
    if not plan.kv_tokens:
        return
    longest = plan.work.prompt_tokens + plan.work.response_tokens + plan.state_tokens
    sequences = f"about {plan.kv_tokens / longest:.0f} sequences of the expected length"
    yield from _wrap(f"cache       {plan.kv_tokens} tokens per engine: {sequences}")


def _time(plan: RunPlan) -> list[str]:
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in plan.seconds.items())
    ahead = ", generation meanwhile" if plan.samples_ahead else ""
    lines = _wrap(f"step        about {plan.step_s:.1f} s ({parts}{ahead}); an estimate, good for comparing layouts")
    return lines + [line for text in plan.warnings for line in _wrap(f"warning     {text}")]


def _wrap(text: str, indent: int = 12) -> list[str]:
    """Wrap a line for a terminal with 80 columns, and indent continuation lines."""
    words = TextWrapper(COLUMNS, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return words.wrap(text)
