"""An engine that consists of external vLLM servers. The first rank sends requests, and all ranks gather the weights together."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from safetensors.torch import save_file

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import Fields, shorten
from rlhf_mcore.parallel.collectives import on_every_rank
from rlhf_mcore.protocols import EngineRank
from rlhf_mcore.readers.model_files import read_config, read_geometry
from rlhf_mcore.redaction import without_secrets
from rlhf_mcore.rollout.engine import AnsweringEngine, EngineModel, ExpectedTensors, new_token_limits
from rlhf_mcore.rollout.server.client import MAX_BYTES, Client, ServerFailed, token_of
from rlhf_mcore.types import MAX_LOGPROB, Completion, Request

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.config.schema import RolloutConfig

_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
SHARD_BYTES = 4 * 2**30  # size of a weight file
_TOKEN_BYTES = 1024  # allowed answer bytes per token and logprob; vLLM uses about a fifth of it
_FLOAT = 3e38  # limit for logprobs, which are stored in fp32
REQUEST_TIMES = 60  # the timeout of a request, as a multiple of rollout.engine_timeout_s


class ServerEngine(AnsweringEngine):
    """All servers as one engine, which the first rank leads.

    A request is sent to the server with the fewest requests in flight. If a server fails, it gets no requests until the next weight
    load, and its requests are sent to other servers, with the same seeds. Every answer names the weights that sampled it. If these
    are the weights of another trainer, or of a restarted server, the server counts as failed.
    """

    def __init__(self, cfg: RolloutConfig, model: EngineModel) -> None:
        """Check every server.

        Raises:
            ConfigError: a server is not healthy, cannot reload weights, or does not fit the run; raised on every rank.
        """
        super().__init__(model, EngineRank(0, 1, is_lead=dist.get_rank() == 0))
        assert cfg.server.weights_dir is not None, "config.validate asks for it"
        self._expected = (
            ExpectedTensors.of_directory(model.model_dir)
            if model.shapes is None
            else ExpectedTensors.of_shapes(model.shapes)
        )
        self._urls = [url.rstrip("/") for url in cfg.server.urls]
        self._run = f"rlhf_mcore-{secrets.token_hex(8)}"  # unique, so that weights of other trainers are detected
        self._folder = Path(cfg.server.weights_dir).absolute() / self._run
        self._timeout_s = REQUEST_TIMES * cfg.engine_timeout_s
        self._room = asyncio.Semaphore(cfg.sequences * len(self._urls))
        self._well: dict[str, int] = {}  # number of requests in flight for each healthy server
        self._num_in_flight = 0
        self._client: Client | None = None
        self._model_dir = model.model_dir
        self._vocab_size = _vocab_size(model.model_dir)
        self._needed = {"logprobs_mode": "processed_logprobs", "dtype": _DTYPES[model.dtype]}
        on_every_rank(partial(self._meet, cfg.server.token_env))

    def _meet(self, token_env: str | None) -> None:
        if not self.rank.is_lead:
            return
        self._check_folder()
        self._client = Client(token_of(token_env), self._timeout_s)
        try:
            for url in self._urls:
                self._client.wait(self._check(url))
        except BaseException:
            self._client.close()
            self._client = None
            raise

    def _check_folder(self) -> None:
        """Check that the directory for weights is writable.

        Raises:
            ConfigError: it is not.
        """
        place = self._folder.parent
        try:
            place.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
        except OSError as error:
            raise ConfigError(
                f"rollout.server.weights_dir={place}: {error.strerror}; name a directory that the trainer can write and "
                "servers can read"
            ) from error

    async def _check(self, url: str) -> None:
        """Check that a server is healthy, can reload weights, and has the settings that this run needs.

        Raises:
            ConfigError: it does not.
        """
        assert self._client is not None
        try:
            for path in ("health", "weight_info"):
                await self._client.ask("GET", f"{url}/{path}")
            info = await self._client.ask("GET", f"{url}/server_info?config_format=json")
        except ServerFailed as error:
            raise ConfigError(
                f"rollout.server.urls: {error}; start the server with VLLM_SERVER_DEV_MODE=1 and the options "
                "of docs/scale/external-servers.md"
            ) from error
        where = f"rollout.server.urls: {without_secrets(url)}"
        if not isinstance(info, dict):
            raise ConfigError(
                f"{where}/server_info answers {shorten(info)}, not a JSON object; start vLLM's own server"
            )
        fields = Fields(
            info, f"{where}/server_info", "start the server with the options of docs/scale/external-servers.md"
        )
        declared = fields.object("vllm_config").object("model_config")
        self._check_sizes(where, Path(declared.text("model", default="")))
        for name, value in self._needed.items():
            if (found := declared.text(name, default="")) != value:
                raise ConfigError(
                    f"{where} has {name}={shorten(found)}, this run needs {value}; start the server with "
                    f"--{name.replace('_', '-')} {value.removeprefix('torch.')}"
                )
        if (longest := declared.integer("max_model_len", default=0)) < self._max_model_len:
            raise ConfigError(
                f"{where} has max_model_len={longest}, less than "
                f"rollout.max_model_len={self._max_model_len}; start the server with --max-model-len {self._max_model_len}"
            )

    def _check_sizes(self, where: str, served: Path) -> None:
        """Check that a server runs this run's model, if its model directory exists on this machine.

        Loading this run's weights would break a server with another model.
        """
        if (served / "config.json").is_file() and read_geometry(served) != read_geometry(self._model_dir):
            raise ConfigError(
                f"{where} serves {served}, whose sizes differ from model.path={self._model_dir}; start the "
                "server with the configuration of model.path"
            )

    async def answer(self, request: Request) -> Completion:
        """Return the completion of a request. If the caller is cancelled, the connection is closed, so the server stops sampling.

        Raises:
            RuntimeError: the weights are not usable, or all servers failed.
            ValueError: the prompt is empty, or fills ``max_model_len``.
        """
        self.require_weights()
        [limit] = new_token_limits([request], self._max_model_len)
        assert self._client is not None, "only the lead rank samples"
        self._num_in_flight += 1
        try:
            label = f"{self._run}-{self.policy_version}"
            return await asyncio.wrap_future(self._client.begin(self._ask_any(request, limit, label)))
        except ServerFailed as error:
            raise RuntimeError(f"the servers of rollout.server.urls stopped sampling: {error}") from error
        finally:
            self._num_in_flight -= 1

    async def _ask_any(self, request: Request, limit: int, label: str) -> Completion:
        """Send a request to the server with the fewest requests. If that server fails, send it to another.

        Raises:
            ServerFailed: all servers failed.
        """
        problem = ServerFailed("no server is left")
        async with self._room:
            while self._well:
                url = min(self._well, key=self._well.__getitem__)
                self._well[url] += 1
                try:
                    return await self._ask_for(url, request, limit, label)
                except Exception as error:
                    self._well.pop(url, None)
                    reason = f"{url} answers with an invalid response: {type(error).__name__} {error}"
                    problem = error if isinstance(error, ServerFailed) else ServerFailed(reason)
                finally:
                    if url in self._well:
                        self._well[url] -= 1
        raise problem

    async def _ask_for(self, url: str, request: Request, limit: int, label: str) -> Completion:
        assert self._client is not None
        sampling = {
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "top_k": request.sampling.top_k,
            "max_tokens": limit,
            "seed": request.seed,
            "stop_token_ids": self._stops,
            "logprobs": 0,  # only the logprob of the sampled token
            "detokenize": False,
        }
        body = {"token_ids": list(map(int, request.prompt_ids)), "sampling_params": sampling, "cache_salt": label}
        max_bytes = MAX_BYTES + _TOKEN_BYTES * limit
        answer = await self._client.ask("POST", f"{url}/inference/v1/generate", body, max_bytes)
        bounds = AnswerBounds(label, limit, self._vocab_size)
        return completion_of(answer, request, url, bounds, self.policy_version)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Write the weights to the shared directory, and make all servers load them. Collective.

        Raises:
            RuntimeError: requests are in flight, or no server loaded the weights; raised on every rank.
        """
        if self._num_in_flight:
            raise RuntimeError(
                f"{self._num_in_flight} requests are in flight; servers load weights only between requests"
            )
        self.begin_load()
        folder = self._folder / str(version)
        writer = ShardWriter(folder) if self.rank.is_lead else None
        for name, tensor in self._expected.check_each(weights):  # all ranks iterate, because gathering is collective
            if writer is not None:
                writer.add(name, tensor)
        on_every_rank(partial(self._bring, writer, version))
        self.commit_load(version)

    def _bring(self, writer: ShardWriter | None, version: int) -> None:
        if writer is None:
            return
        assert self._client is not None
        writer.close()
        problems = self._client.wait(self._replace_all(str(writer.folder), f"{self._run}-{version}"))
        self._well = {url: 0 for url, problem in problems.items() if problem is None}
        shutil.rmtree(writer.folder)
        if not self._well:
            raise RuntimeError(
                f"no server loaded the weights: {'; '.join(map(str, problems.values()))}; if a server runs another "
                "model than model.path, start it again with the configuration of model.path"
            )

    async def _replace_all(self, folder: str, label: str) -> dict[str, Exception | None]:
        results = await asyncio.gather(
            *(self._replace(url, folder, label) for url in self._urls), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result
        return dict(zip(self._urls, results, strict=True))  # type: ignore[arg-type]

    async def _replace(self, url: str, folder: str, label: str) -> None:
        """Replace the weights of a server. The server is paused during the load, and resumed even if the load fails.

        Raises:
            ServerFailed: the load failed. The message contains the state of the server.
        """
        assert self._client is not None
        ask = self._client.ask
        await ask("POST", f"{url}/pause?mode=abort")
        reload = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        try:
            await ask("POST", f"{url}/collective_rpc", reload)
            await ask("POST", f"{url}/update_weight_version", {"new_version": label})
            await ask("POST", f"{url}/reset_prefix_cache")
            await ask("POST", f"{url}/resume")
        except ServerFailed as error:
            raise ServerFailed(f"{error}; {await self._resume(url, f'{label}-incomplete')}") from error

    async def _resume(self, url: str, label: str) -> str:
        """Resume a server whose load failed, perhaps in part. Returns a description of its state for the error message."""
        assert self._client is not None
        ask = self._client.ask
        try:
            with suppress(ServerFailed):
                await ask("POST", f"{url}/update_weight_version", {"new_version": label})
                await ask("POST", f"{url}/reset_prefix_cache")
            await ask("POST", f"{url}/resume")
        except ServerFailed:
            return f"it is still paused, until POST {url}/resume"
        return f"it is resumed, and its weights, some of which may be replaced, are called {label}"

    def close(self) -> None:
        """Close the client. The servers continue with the last weights."""
        self.abandon("it was closed")
        if self._client is not None:
            self._client.close()
            shutil.rmtree(self._folder, ignore_errors=True)


class ShardWriter:
    """Writes tensors to a folder, in files of about ``shard_bytes``."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        folder.mkdir(parents=True)
        self.folder, self._shard_bytes = folder, shard_bytes
        self._held: dict[str, Tensor] = {}
        self._size = self._count = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self._held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._size += tensor.nbytes
        if self._size >= self._shard_bytes:
            self.close()

    def close(self) -> None:
        """Write the tensors that are not written yet."""
        if self._held:
            self._count += 1
            save_file(self._held, self.folder / f"model-{self._count:05}.safetensors")
            self._held, self._size = {}, 0


@dataclass(frozen=True, slots=True)
class AnswerBounds:
    """Expected values of an answer: the name of the weights that sampled it, the maximum tokens, and the vocabulary size."""

    label: str
    max_tokens: int
    vocab_size: int


def completion_of(answer: Any, request: Request, url: str, bounds: AnswerBounds, version: int) -> Completion:
    """Convert an answer of ``/inference/v1/generate`` to a completion.

    Raises:
        ServerFailed: the answer is malformed, has a value out of range, was sampled from other weights, or is not finished.
    """
    try:
        [choice] = Fields(answer if isinstance(answer, dict) else {}, "its answer", "").objects("choices")
        tokens = choice.integers("token_ids", 0, bounds.vocab_size - 1)
        finish_reason = choice.text("finish_reason")
        drawn_by = {span.text("version") for span in choice.objects("weight_versions")}
        content = choice.object("logprobs").objects("content")
        logprobs = [entry.number("logprob", -_FLOAT, MAX_LOGPROB) for entry in content]
    except ValueError as error:
        raise ServerFailed(f"{url} answers with an invalid response: {error}") from error
    if len(tokens) > bounds.max_tokens:
        raise ServerFailed(
            f"{url} answers with {len(tokens)} tokens, more than the requested maximum of {bounds.max_tokens}"
        )
    if drawn_by != {bounds.label}:
        raise ServerFailed(
            f"{url} sampled from the weights {', '.join(sorted(drawn_by))} instead of this run's {bounds.label}"
        )
    if finish_reason not in ("stop", "length") or not tokens or len(tokens) != len(logprobs):
        raise ServerFailed(f"{url} ended a response of {len(tokens)} tokens early: {finish_reason}")
    return Completion(
        request.request_id,
        np.array(tokens, np.int32),
        np.array(logprobs, np.float32),
        ((0, version),),
        finish_reason,
    )


def _vocab_size(model_dir: str) -> int:
    """Return the vocabulary size of a model; 2**31, which accepts every int32 id, if config.json does not declare it."""
    config = read_config(model_dir, model_dir)
    own = config.object("text_config", default=None) or config
    return own.integer("vocab_size", 1, default=2**31)
