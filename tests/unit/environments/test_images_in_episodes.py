"""Images in episodes, from prompts, environments and agents: their tokens, their digests, and the images of each request."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.data.episodes import decode_trajectories, encode_trajectories
from rlhf_mcore.data.image_rows import ImageReader
from rlhf_mcore.data.images import ImageStore
from rlhf_mcore.environments.agents.client_values import message_of
from rlhf_mcore.environments.agents.conversation import Conversation
from rlhf_mcore.environments.agents.dialects import RequestError
from rlhf_mcore.environments.agents.endpoint import Endpoint
from rlhf_mcore.environments.agents.episode import AgentRollout, AgentRules
from rlhf_mcore.environments.agents.images import RequestImages
from rlhf_mcore.environments.environment import EnvironmentRollout
from rlhf_mcore.environments.function import FunctionRollout, InProcessSessions
from rlhf_mcore.environments.sessions import Sessions
from rlhf_mcore.environments.tools import Tools
from rlhf_mcore.environments.turn_text import TurnText
from rlhf_mcore.environments.worker import messages_of_observation
from rlhf_mcore.readers.user_functions import OwnFunction
from rlhf_mcore.rewards.pool import WorkerLimits
from rlhf_mcore.sampling.rollouts import RolloutLimits, RolloutSetup
from rlhf_mcore.types import Job, Prompt, Sampling, Trajectory
from tests.unit.environments.conftest import SPECIAL, Scripted, character_tokenizer, play_jobs
from tests.unit.environments.test_agents import Clients, post

# An image is "(" one token for each of its 28 by 28 pixels ")".
TEMPLATE = (
    "{% for message in messages %}{{ '<' + message.role + '>' }}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ '(<pad>)' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{{ '<end>' }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PAD = len(SPECIAL)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
GALLERY = """
import base64

class Gallery:
    \"\"\"Shows what it is asked for: "wide", "raw" bytes, the prompt's own, a "bad" one, or its text with the name of a token.\"\"\"

    def reset(self, row, seed):
        self.row = row
        if row["ground_truth"] is not None:
            return {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "path": row["ground_truth"]}]}

    def step(self, action):
        source = {"own": self.row.get("images", [""])[0], "raw": open("wide.png", "rb").read(), "bad": "absent.png"}
        if action == "bye" or action == "name":
            return "a<pad>b", 1, action == "bye"
        image = {"type": "image", "image": source.get(action, "wide.png")}
        return {"role": "tool", "content": [{"type": "text", "text": "x"}, image, {"type": "text", "text": "y"}]}, 0, False
"""


def png(width: int, height: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, width)).save(content, "PNG")
    return content.getvalue()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return character_tokenizer([*SPECIAL, "<pad>"], "<end>", TEMPLATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gallery")
    (folder / "gallery.py").write_text(GALLERY)
    (folder / "wide.png").write_bytes(png(84, 28))
    config = {"model_type": "qwen2_5_vl", "image_token_id": PAD, "vision_config": {"spatial_merge_size": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    size = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}
    rest = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": size}
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | rest))
    return folder


@pytest.fixture(scope="module")
def sessions(folder: Path) -> Iterator[Sessions]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        sessions = Sessions("gallery.py:Gallery", {}, WorkerLimits(workers=1))
        yield sessions
        sessions.close_all()


@pytest.fixture
def reader(folder: Path, tmp_path: Path) -> ImageReader:
    return ImageReader(ImageStore(tmp_path / "images" / "patches"), str(folder), DataConfig(max_images=3), (0, 1))


class Played:
    """An episode of the turns ``says`` with a prompt that shows an image of two tokens, and the engine that sampled it."""

    def __init__(
        self,
        says: list[str],
        sessions: Sessions,
        tokenizer: PreTrainedTokenizerBase,
        reader: ImageReader,
        first: str | None = None,
    ) -> None:
        self.own = reader.take([png(56, 28)], Path(), "row 0")
        text = "<user>(<pad>)hi<end>\n<assistant>"
        ids = reader.expand(tokenizer(text, add_special_tokens=False)["input_ids"], self.own, "row 0")
        prompt = Prompt("p", 0, ids, text, ground_truth=first, images=self.own)
        self.engine = Scripted(tokenizer, lambda text, seed: says[text.count("<assistant>") - 1])
        setup = RolloutSetup(EnvironmentRollout(sessions, TurnText(tokenizer), images=reader), RolloutLimits(5, 200))
        self.prompt = prompt
        self.found: Trajectory
        [self.found] = play_jobs(self.engine, setup, [Job(0, prompt, 0, Sampling(max_new_tokens=20, seed=5), 1)])


def test_observations_show_images_behind_those_of_the_prompt(
    sessions: Sessions, tokenizer: PreTrainedTokenizerBase, reader: ImageReader, folder: Path
) -> None:
    played = Played(["wide", "raw", "bye"], sessions, tokenizer, reader)
    shown = "<tool>x(<pad><pad><pad>)y<end>\n<assistant>"
    assert tokenizer.decode(played.found.token_ids) == (
        f"<user>(<pad><pad>)hi<end>\n<assistant>wide<end>\n{shown}raw<end>\n{shown}bye<end>"
    )
    [own], wide = played.own, played.found.prompt.images[1]
    assert played.found.prompt.images == (own, wide, wide)
    assert [request.images for request in played.engine.requests] == [(own,), (own, wide), (own, wide, wide)]
    assert reader._store.content(wide) == (folder / "wide.png").read_bytes()
    assert [turn.text for turn in played.found.turns[1:]] == ["wide", "x<image>y", "raw", "x<image>y", "bye"]
    again = decode_trajectories(encode_trajectories({0: [played.found]}), {0: played.prompt})
    assert again[0][0].prompt.images == (own, wide, wide)


def test_a_rollout_function_adds_images_to_those_of_the_prompt(
    tokenizer: PreTrainedTokenizerBase, reader: ImageReader, folder: Path, tmp_path: Path
) -> None:
    errors = []

    async def look(policy: Any, prompt: Any, ctx: Any) -> float:
        turn = await policy.sample(prompt.tokens)
        parts = [{"type": "text", "text": "x"}, {"type": "image", "path": "wide.png"}]
        shown = ctx.tokenize_messages([{"role": "tool", "content": parts}], turn)
        tokens = [*prompt.tokens, *turn.tokens, *shown]
        for images in ([], ["absent.png"]):
            try:
                await policy.sample(tokens, images=images)
            except ValueError as error:
                errors.append(str(error))
        second = await policy.sample(tokens, images=[folder / "wide.png"])
        await policy.sample([*tokens, *second.tokens, *ctx.tokenize("z")])
        await policy.sample(ctx.tokenize_messages([{"role": "user", "content": parts}]), images=[prompt.images[0]])
        return 1.0

    tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = {
        "function": OwnFunction(look),
        "tokenizer": str(tmp_path / "tokenizer"),
        "template": "auto",
        "keep": False,
    }
    rollout = FunctionRollout(InProcessSessions("f", options), TurnText(tokenizer), images=reader)
    own = reader.take([png(56, 28)], Path(), "row 0")
    text = "<user>(<pad>)hi<end>\n<assistant>"
    prompt = Prompt(
        "p", 0, reader.expand(tokenizer(text, add_special_tokens=False)["input_ids"], own, "row"), text, images=own
    )
    engine = Scripted(tokenizer, lambda text, seed: "said")
    setup = RolloutSetup(rollout, RolloutLimits(5, 200))
    [found] = play_jobs(engine, setup, [Job(0, prompt, 0, Sampling(max_new_tokens=20, seed=5), 1)])
    assert [("image tokens" in error, "absent.png" in error) for error in errors] == [(True, False), (False, True)]
    wide = found.prompt.images[1]
    assert reader._store.content(wide) == (folder / "wide.png").read_bytes()
    assert [request.images for request in engine.requests] == [own, (*own, wide), (*own, wide), own]
    first = (
        "<user>(<pad><pad>)hi<end>\n<assistant>said<end>\n<tool>x(<pad><pad><pad>)<end>\n<assistant>said<end>zsaid<end>"
    )
    second = "<user>x(<pad><pad>)<end>\n<assistant>said<end>"
    assert tokenizer.decode(found.token_ids) == first + second
    assert found.sequence_images == ((*own, wide), own) and found.num_sampled == 4 * len("saidx")


def test_an_environment_may_show_an_image_of_the_prompt_again(
    sessions: Sessions, tokenizer: PreTrainedTokenizerBase, reader: ImageReader
) -> None:
    played = Played(["own", "bye"], sessions, tokenizer, reader)
    assert played.found.prompt.images == played.own * 2


def test_a_first_observation_shows_an_image(
    sessions: Sessions, tokenizer: PreTrainedTokenizerBase, reader: ImageReader
) -> None:
    played = Played(["bye"], sessions, tokenizer, reader, first="wide.png")
    assert tokenizer.decode(played.found.prompt.prompt_ids) == (
        "<user>(<pad><pad>)hi<end>\n<user>see(<pad><pad><pad>)<end>\n<assistant>"
    )
    assert len(played.found.prompt.images) == len(played.engine.requests[0].images) == 2


def test_the_name_of_the_token_in_a_text_is_text(
    sessions: Sessions, tokenizer: PreTrainedTokenizerBase, reader: ImageReader
) -> None:
    played = Played(["name", "bye"], sessions, tokenizer, reader)
    assert (played.found.token_ids == PAD).sum() == 2 and played.found.prompt.images == played.own


def test_behind_a_token_that_the_policy_has_drawn_no_image_is_shown(
    sessions: Sessions, tokenizer: PreTrainedTokenizerBase, reader: ImageReader
) -> None:
    played = Played(["<pad>", "bye"], sessions, tokenizer, reader)
    assert played.found.finish_reason == "length" and played.found.prompt.images == played.own
    assert played.found.token_ids.tolist().count(PAD) == 3


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (["bad"], ["absent.png: no such file", "image 1"]),
        (["wide"] * 3, ["4 images, more than data.max_images=3"]),
    ],
)
def test_an_image_that_cannot_be_used_is_the_environments_mistake(
    sessions: Sessions, tokenizer: PreTrainedTokenizerBase, reader: ImageReader, says: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        Played([*says, "bye"], sessions, tokenizer, reader)
    assert all(word in str(caught.value) for word in ["gallery.py:Gallery", "prompt 'p'", *words]), caught.value


def test_parts_of_observations_and_of_tools() -> None:
    shown = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    whole = {"role": "tool", "content": "a<image>", "texts": ["a", ""], "images": ["data:image/png;base64,AA=="]}
    assert messages_of_observation({"role": "tool", "content": shown}) == [whole]
    raw = messages_of_observation({"role": "user", "content": [{"type": "image", "image": b"\1"}]})
    assert raw is not None and base64.b64decode(raw[0]["images"][0].partition(",")[2]) == b"\1"
    assert messages_of_observation({"role": "user", "content": [{"type": "text", "text": "b"}]}) == [
        {"role": "user", "content": "b"}
    ]
    assert messages_of_observation({"role": "user", "content": [{"type": "video"}]}) is None
    tools = Tools(tools=[])
    tools._tools = {"look": lambda where: shown if where == "up" else [1, 2]}
    messages, _, done = tools.step("<tool>look up</tool><tool>look down</tool>")
    assert [message["content"] for message in messages] == [shown, "[1, 2]"] and not done


# ---------------------------------------------------------------------------------------------------------------- agents
def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def shows(*parts: str | bytes, role: str = "user") -> dict[str, Any]:
    """A message of OpenAI's chat API: texts, and pictures as data URLs."""
    return {
        "role": role,
        "content": [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": data_url(part), "detail": "high"}}
            for part in parts
        ],
    }


SMALL, WIDE = png(56, 28), png(84, 28)  # two and three tokens


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    served = Endpoint("127.0.0.1")
    yield served
    served.close_all()


class Asking:
    """An agent, and an engine whose turns are letters of ``says``. ``play`` gets a way to ask and the task."""

    def __init__(
        self,
        endpoint: Endpoint,
        tokenizer: PreTrainedTokenizerBase,
        reader: ImageReader | None,
        play: Callable[[Callable[..., Any], dict[str, Any]], Any],
        says: str = "abcdef",
        prompt: Prompt | None = None,
    ) -> None:
        turns = iter({"#": "x<pad>y"}.get(letter, letter) for letter in says)
        self.engine, self.answers = Scripted(tokenizer, lambda text, seed: next(turns)), list[tuple[int, Any]]()

        def agent(base_url: str, api_key: str) -> float:
            def ask(*messages: dict[str, Any], path: str = "chat/completions", **body: Any) -> Any:
                asked = body or {"messages": list(messages)}
                self.answers.append(post(base_url, path, json.dumps(asked).encode(), api_key))
                return self.answers[-1][1].get("choices", [{}])[0].get("message")

            play(ask, sessions.row)
            return 1.0

        sessions: Any = Clients(agent)
        talk = Conversation(tokenizer, images=None if reader is None else RequestImages(reader))
        rollout = AgentRollout(sessions, endpoint, talk, AgentRules())
        setup = RolloutSetup(rollout, RolloutLimits(9, max_total=400), in_order=False)
        job = Job(0, prompt or Prompt("p", 0, [1], "q"), 0, Sampling(max_new_tokens=20, seed=5), 1)
        self.found: Trajectory
        [self.found] = play_jobs(self.engine, setup, [job])

    @property
    def refusals(self) -> list[str]:
        return [answer["error"]["message"] for status, answer in self.answers if status == 400]


def test_images_of_a_conversation_are_one_sequence_and_each_is_shown_to_the_turns_behind_it(
    endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase, reader: ImageReader
) -> None:
    """The history repeats the same images, so its tokens are continued unchanged. A token's name in a text is text."""

    def play(ask: Callable[..., Any], task: Any) -> None:
        first = shows("see <pad>", SMALL, "?")
        said = ask(first)
        ask(first, said, shows(WIDE, SMALL, role="tool"))

    played = Asking(endpoint, tokenizer, reader, play)
    [small] = reader.take([SMALL], Path(), "here")
    [wide] = reader.take([WIDE], Path(), "here")
    shown = tokenizer.decode(played.found.token_ids)
    assert shown == (
        "<user>see <pad>(<pad><pad>)?<end>\n<assistant>a<end>\n<tool>(<pad><pad><pad>)(<pad><pad>)<end>\n<assistant>b<end>"
    )
    assert (played.found.token_ids == PAD).sum() == 7 and not played.found.sequences  # only of images
    assert [request.images for request in played.engine.requests] == [(small,), (small, wide, small)]
    assert played.found.prompt.images == (small, wide, small) and not played.found.sequence_images
    first, second = (list(request.prompt_ids) for request in played.engine.requests)
    assert second[: len(first)] == first
    assert played.found.prompt.text == "<user>see <pad>(<pad>)?<end>\n<assistant>"
    assert [turn.text for turn in played.found.turns[1:]] == ["a", "<end>\n<tool>(<pad>)(<pad>)<end>\n<assistant>", "b"]
    assert reader._store.content(wide) == WIDE


def test_the_same_words_of_another_image_are_a_branch_with_images_of_its_own(
    endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase, reader: ImageReader
) -> None:
    """Both pictures have the same number of tokens, so the tokens do not distinguish them."""
    other = png(56, 29)

    def play(ask: Callable[..., Any], task: Any) -> None:
        for picture in (SMALL, other):
            said = ask(shows(picture, "?"))
        ask(shows(other, "?"), said, {"role": "user", "content": "and?"})

    played = Asking(endpoint, tokenizer, reader, play)
    [small] = reader.take([SMALL], Path(), "here")
    [second] = reader.take([other], Path(), "here")
    assert [request.images for request in played.engine.requests] == [(small,), (second,), (second,)]
    assert played.found.sequence_images == ((small,), (second,)) and played.found.prompt.images == (small, second)
    assert len(played.found.sequences) == 2 and played.found.num_sampled == 6
    again = decode_trajectories(encode_trajectories({0: [played.found]}), {0: played.found.prompt})[0][0]
    assert again.sequence_images == ((small,), (second,))


def test_anthropics_parts_are_images_too(
    endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase, reader: ImageReader
) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(WIDE).decode()}
    image = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [image]}

    def play(ask: Callable[..., Any], task: Any) -> None:
        ask(path="messages", messages=[{"role": "user", "content": [result, image, {"type": "text", "text": "?"}]}])

    played = Asking(endpoint, tokenizer, reader, play)
    [wide] = reader.take([WIDE], Path(), "here")
    assert [status for status, _ in played.answers] == [200]
    assert [request.images for request in played.engine.requests] == [(wide, wide)]
    first = tokenizer.decode(played.engine.requests[0].prompt_ids)
    assert first == "<tool>(<pad><pad><pad>)<end>\n<user>(<pad><pad><pad>)?<end>\n<assistant>"


def test_an_image_that_cannot_be_used_is_refused_by_name(
    endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase, reader: ImageReader
) -> None:
    for url, reason in [
        ("http://example.com/a.png", "'http://example.com/a.png', which is not an image data URL"),
        ("https://example.com/a.png", "which is not an image data URL"),
        (
            "file:///etc/hostname",
            "'file:///etc/hostname', which is not an image data URL; the endpoint reads no URLs and files",
        ),
        ("wide.png", "'wide.png', which is not an image data URL; the endpoint reads no URLs and files"),
        ("data:text/plain;base64,AA==", "which is not an image data URL"),
        ("data:image/png,AA", "not an image data URL"),
        ("data:image/png;base64,!", "is not base64"),
        (data_url(b"no picture"), "the messages, image 1: it cannot be read"),
        (data_url(WIDE[:60]), "the messages, image 1: it cannot be read"),
    ]:

        def play(ask: Callable[..., Any], task: Any, url: str = url) -> None:
            ask({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})
            ask(*[shows("x")])

        played = Asking(endpoint, tokenizer, reader, play)
        [message] = played.refusals
        assert reason in message and "\n" not in message
        assert len(played.engine.requests) == 1 and not played.found.prompt.images


def test_too_many_images_and_those_of_a_model_that_sees_none_are_refused(
    endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase, reader: ImageReader
) -> None:
    def play(ask: Callable[..., Any], task: Any) -> None:
        ask(shows(*[SMALL] * 4))
        ask(shows("x"))

    [message] = Asking(endpoint, tokenizer, reader, play).refusals
    assert "4 images, more than data.max_images=3" in message
    [message] = Asking(endpoint, tokenizer, None, play).refusals
    assert message == "messages have images, but the model reads no images"


def test_behind_a_token_that_the_policy_has_drawn_an_agent_is_shown_no_image(
    endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase, reader: ImageReader
) -> None:
    """The policy has met a limit, whatever the agent does with the refusal: this one gives its reward."""

    def play(ask: Callable[..., Any], task: Any) -> None:
        said = ask(shows(SMALL))
        ask(shows(SMALL), said, shows("go on"))
        ask(shows(SMALL), said, shows(WIDE))

    played = Asking(endpoint, tokenizer, reader, play, says="#a")
    [message] = played.refusals
    assert message == "the conversation has an image token without an image, so no image can follow it"
    assert played.found.finish_reason == "length" and len(played.engine.requests) == 2
    assert [len(request.images) for request in played.engine.requests] == [1, 1]


def test_a_task_shows_the_images_of_its_prompt_as_a_client_sends_them(
    endpoint: Endpoint, tokenizer: PreTrainedTokenizerBase, reader: ImageReader
) -> None:
    tasks = list[dict[str, Any]]()

    def play(ask: Callable[..., Any], task: Any) -> None:
        tasks.append(task)
        ask(*task["messages"])

    digests = reader.take([SMALL, WIDE], Path(), "row 0")
    messages = [{"role": "user", "content": "a<image><image>b"}, {"role": "user", "content": "c"}]
    prompt = Prompt("p", 0, [1], "text", messages=messages, images=digests)
    played = Asking(endpoint, tokenizer, reader, play, prompt=prompt)
    assert [request.images for request in played.engine.requests] == [digests]
    [task] = tasks
    assert [part["type"] for part in task["messages"][0]["content"]] == ["text", "image_url", "image_url", "text"]
    assert (
        task["messages"][0]["content"][1]["image_url"]["url"] == data_url(SMALL) and task["messages"][1] == messages[1]
    )
    assert [Path(file).read_bytes() for file in task["images"]] == [SMALL, WIDE]


def test_without_a_template_messages_are_refused_and_texts_are_continued(endpoint: Endpoint) -> None:
    def play(ask: Callable[..., Any], task: Any) -> None:
        assert task["messages"] is None
        ask(shows("x"))
        ask(path="completions", prompt=task["prompt"])

    plain = character_tokenizer([*SPECIAL, "<pad>"], "<end>", "")
    plain.chat_template = None
    played = Asking(endpoint, plain, None, play)
    [message] = played.refusals
    assert (
        message == "the tokenizer has no chat template, so messages are not supported; use /v1/completions with a text"
    )
    assert plain.decode(played.found.token_ids) == "qa<end>"


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_an_image_in_another_message_is_refused_by_where_images_may_be(role: str) -> None:
    with pytest.raises(
        RequestError, match=r"messages\[0\] has a part of type 'image_url', .* images in messages of users and tools"
    ):
        message_of(role, [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}], "messages[0]")
