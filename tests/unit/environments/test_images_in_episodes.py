"""Images of a prompt in an environment, and those that it answers with: tokens, digests, what a turn is asked with."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.data.image_rows import ImageReader
from rlhf_mcore.data.images import ImageStore
from rlhf_mcore.data.trajectory_files import decode_trajectories, encode_trajectories
from rlhf_mcore.environments.episodes import EpisodeLimits, Episodes
from rlhf_mcore.environments.generator import EpisodeGenerator
from rlhf_mcore.environments.sessions import Sessions
from rlhf_mcore.environments.tools import Tools
from rlhf_mcore.environments.turn_text import TurnText
from rlhf_mcore.environments.worker import messages_of_observation
from rlhf_mcore.protocols import EngineRank
from rlhf_mcore.rewards.items import WorkerLimits
from rlhf_mcore.trainer.rollouts import RolloutWorker, episode_request
from rlhf_mcore.types import Prompt, Sampling, Trajectory
from tests.unit.environments.conftest import SPECIAL, Scripted, character_tokenizer

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
    """An episode of the turns ``says`` with a prompt that shows an image of two tokens, and the engine that drew it."""

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
        episodes = Episodes(sessions, TurnText(tokenizer), EpisodeLimits(5, 200), images=reader)
        worker = RolloutWorker(EpisodeGenerator(self.engine, episodes), EngineRank(), lambda rows: [], episode_request)
        self.prompt = prompt
        self.found: Trajectory
        [self.found] = worker.generate([prompt], Sampling(n=1, max_new_tokens=20, seed=5), step=1)


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
