"""Follow a Dockerfile in a sandbox, as far as possible. ``FROM`` always means this machine's system and Python."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.containers.task import Task

_NOTHING = {"FROM", "LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "SHELL", "ARG"}


def without_docker(task: Task) -> Task:
    """Convert the Dockerfile in the context of a task to files, variables, commands and a working directory.

    Raises:
        ConfigError: the Dockerfile has several stages, or an instruction that requires Docker.
    """
    workdir, env, files, setup = "/", dict(task.env), dict[str, bytes](), list[str]()
    text = task.context["Dockerfile"].decode(errors="replace")
    if len(re.findall(r"(?im)^\s*FROM\s", text)) > 1:
        raise ConfigError("a Dockerfile with several stages needs environment.container.kind=docker or podman")
    for name, rest in _instructions(text):
        if name == "WORKDIR":
            workdir = posixpath.join(workdir, rest)
            setup.append(f"mkdir -p {shlex.quote(workdir)}")
        elif name == "ENV":
            env |= _variables(rest)
        elif name in ("COPY", "ADD"):
            files |= _copy(rest, workdir, task.context)
        elif name == "RUN":
            setup.append(f"cd {shlex.quote(workdir)} && {rest}")
        elif name not in _NOTHING:
            raise ConfigError(f"a Dockerfile with {name} needs environment.container.kind=docker or podman")
    if workdir == "/":
        workdir = "/app"
    return replace(
        task,
        context={},
        workdir=task.workdir or workdir,
        env=env,
        files={**files, **task.files},
        setup=(*setup, *task.setup),
    )


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\s*\n", " ", "\n".join(lines)).splitlines():
        name, _, rest = line.strip().partition(" ")
        if name:
            yield name.upper(), rest.strip()


def _variables(rest: str) -> dict[str, str]:
    if "=" not in rest.partition(" ")[0]:
        name, _, value = rest.partition(" ")
        return {name: value.strip()}
    return dict(each.split("=", 1) for each in shlex.split(rest) if "=" in each)


def _copy(rest: str, workdir: str, context: Mapping[str, bytes]) -> dict[str, bytes]:
    if rest.startswith("--") or "://" in rest:
        raise ConfigError(f"COPY {rest} needs environment.container.kind=docker or podman")
    parts = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    *sources, target = parts
    to = posixpath.join(workdir, target)
    found: dict[str, bytes] = {}
    for source in sources:
        name = posixpath.normpath(source).lstrip("/")
        if name in context:
            into = target.endswith(("/", ".")) or len(sources) > 1
            found[posixpath.normpath(posixpath.join(to, posixpath.basename(name)) if into else to)] = context[name]
            continue
        prefix = "" if name == "." else f"{name}/"
        below = {path: data for path, data in context.items() if path.startswith(prefix)}
        if not below:
            raise ConfigError(f"COPY {rest}: {source} is not in the directory of the Dockerfile")
        found |= {
            posixpath.normpath(posixpath.join(to, path.removeprefix(prefix))): data for path, data in below.items()
        }
    return found
