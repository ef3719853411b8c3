"""Make a small world of pictures and a tiny model that looks at them carelessly.

    python tools/make_images.py --out images [--family qwen2_5_vl | qwen3_vl] [--seed 0]

writes ``OUT/model`` (a Hugging Face directory: a vision tower and a language model, fp32, with the quickstart's tokenizer, an image
processor and a chat template), ``OUT/train.parquet`` and ``OUT/eval.parquet``. Their column ``images`` contains the pictures.

A picture has one or two rows of three cells of 28 by 28 pixels. Some cells contain a shape: a red, green, blue or yellow circle,
square or triangle. A prompt is a picture and a question about it: the number of shapes of a kind, the colour of a shape, or its
column. A response is ``#### 2``, ``#### red`` or ``#### left`` and the end token.

The fit begins with descriptions, two letters for each cell (``rc`` is a red circle, ``--`` is empty), because a description teaches
several times as much about a picture as an answer. Then it continues as in the quickstart: a pupil first gives right answers, and in
the last quarter gives wrong answers with probability ``MISTAKES`` (one more, the next colour, the mirrored column). The model can
therefore recognise the picture, but prefers wrong answers. The reward teaches it to prefer right answers.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from make_quickstart import END, MARK, Fit, learning_rate, make_tokenizer, progress

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

CELL, PATCH = 28, 14  # pixels; a cell is one token
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (235, 200, 40)}
KINDS = ("circle", "square", "triangle")
COLUMNS = ("left", "middle", "right")
MISTAKES = 0.7
DESCRIBES_UNTIL, CARELESS_FROM = 0.25, 0.78  # shares of the fit
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """A shape in a cell of the grid."""

    kind: str
    colour: str
    row: int
    column: int


@dataclass(frozen=True)
class Problem:
    """A picture of ``rows`` by three cells, and a question about it with its answer and a wrong one."""

    shapes: tuple[Shape, ...]
    rows: int
    question: str
    answer: str
    mistaken: str

    def picture(self) -> Image:
        """Render the picture."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (len(COLUMNS) * CELL, self.rows * CELL), (255, 255, 255))
        draw = ImageDraw.Draw(image)
        for shape in self.shapes:
            left, top = shape.column * CELL + 3, shape.row * CELL + 3
            right, bottom = left + CELL - 7, top + CELL - 7
            colour = COLOURS[shape.colour]
            if shape.kind == "circle":
                draw.ellipse((left, top, right, bottom), fill=colour)
            elif shape.kind == "square":
                draw.rectangle((left, top, right, bottom), fill=colour)
            else:
                draw.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=colour)
        return image

    def description(self) -> str:
        """Return the content of each cell: the first letters of colour and kind, or "--"."""
        held = {(shape.row, shape.column): shape.colour[0] + shape.kind[0] for shape in self.shapes}
        return "".join(held.get((row, column), "--") for row in range(self.rows) for column in range(len(COLUMNS)))


def make_problem(rng: random.Random) -> Problem:
    """Return a random picture with a question."""
    rows = rng.choice((1, 2))
    cells = [(row, column) for row in range(rows) for column in range(len(COLUMNS))]
    places = rng.sample(cells, rng.randint(1, len(cells)))
    shapes = [Shape(rng.choice(KINDS), rng.choice(tuple(COLOURS)), *place) for place in sorted(places)]
    alone = [shape for shape in shapes if [other.kind for other in shapes].count(shape.kind) == 1]
    asked = rng.choice(("count", "colour", "column")) if alone else "count"
    if asked == "count":
        kind = rng.choice(KINDS)
        number = sum(shape.kind == kind for shape in shapes)
        return Problem(tuple(shapes), rows, f"how many {kind}s?", str(number), str(number + 1))
    shape, colours = rng.choice(alone), tuple(COLOURS)
    if asked == "colour":
        wrong = colours[(colours.index(shape.colour) + 1) % len(colours)]
        return Problem(tuple(shapes), rows, f"colour of the {shape.kind}?", shape.colour, wrong)
    wrong = COLUMNS[1 if shape.column == 0 else 0] if shape.column != 1 else COLUMNS[2]
    return Problem(tuple(shapes), rows, f"column of the {shape.kind}?", COLUMNS[shape.column], wrong)


def make_problems(seed: int, num_train: int, num_eval: int) -> tuple[list[Problem], list[Problem]]:
    """Train and held-out problems, all of them different."""
    rng, problems = random.Random(seed), dict[Problem, None]()
    while len(problems) < num_train + num_eval:
        problems[make_problem(rng)] = None
    return list(problems)[num_eval:], list(problems)[:num_eval]


def make_picture_tokenizer() -> PreTrainedTokenizerFast:
    """Make the quickstart's tokenizer with the tokens of pictures and a template that writes them."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION)}, replace_extra_special_tokens=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, family: str, seed: int, num_layers: int = 2) -> PreTrainedModel:
    """Make a Qwen2.5-VL, a Qwen3-VL or a Qwen3.5 with random weights, fp32, 0.7 million parameters at two layers."""
    import torch
    import transformers
    from transformers import GenerationConfig

    from rlhf_mcore.platform.cpu_libraries import declare_image_operators

    declare_image_operators()
    torch.manual_seed(seed)
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION))
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.06,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]},
    }
    tower: dict[str, Any] = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 128,
        "initializer_range": 0.06,
    }
    if family == "qwen2_5_vl":
        tower |= {"fullatt_block_indexes": [1], "window_size": 4 * PATCH}
        config_class, model_class = transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration
    else:
        tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        text |= {"head_dim": 32}
        text["rope_parameters"] |= {"mrope_interleaved": True}
        config_class, model_class = transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration
    config = config_class(
        text_config=text,
        vision_config=tower,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
        dtype=torch.float32,
    )
    model = model_class(config)
    model.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    return model


def write_processor(folder: Path, family: str) -> None:
    """Write the files of the image processor: pictures are as large as they are, up to 64 cells."""
    size = {"shortest_edge": CELL**2, "longest_edge": 64 * CELL**2}
    common = {
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    common |= {"size": size, "processor_class": "Qwen2_5_VLProcessor" if family == "qwen2_5_vl" else "Qwen3VLProcessor"}
    videos = "Qwen2VLVideoProcessor" if family == "qwen2_5_vl" else "Qwen3VLVideoProcessor"
    for name, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessorFast"}),
        ("video_preprocessor_config.json", {"video_processor_type": videos}),
    ):
        (folder / name).write_text(json.dumps(kind | common, indent=2) + "\n", encoding="ascii")


def messages(problem: Problem) -> list[dict[str, str]]:
    """Write the prompt as the data set stores it."""
    return [{"role": "user", "content": f"<image>{problem.question}"}]


def response(answer: str) -> str:
    """Write an answer as the model is to write it."""
    return f"{MARK} {answer}"


@dataclass
class Examples:
    """Problems as the fit reads them: tokens of prompts, and of right and of mistaken answers, and pixels of pictures."""

    prompts: list[list[int]]
    correct: list[list[int]]
    mistaken: list[list[int]]
    pixels: list[Tensor]
    grids: Tensor

    def batch(self, rows: Sequence[int], careless: Sequence[bool], model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the arguments of a forward pass with a loss on answers."""
        import torch

        answers = [(self.mistaken if wrong else self.correct)[row] for row, wrong in zip(rows, careless, strict=True)]
        tokens = [torch.tensor(self.prompts[row] + answer) for row, answer in zip(rows, answers, strict=True)]
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(tokens, batch_first=True, padding_value=model.generation_config.pad_token_id)
        labels = [
            torch.tensor([-100] * len(self.prompts[row]) + answer) for row, answer in zip(rows, answers, strict=True)
        ]
        return {
            "input_ids": ids,
            "attention_mask": pad([torch.ones_like(row) for row in tokens], batch_first=True),
            "labels": pad(labels, batch_first=True, padding_value=-100),
            "pixel_values": torch.cat([self.pixels[row] for row in rows]),
            "image_grid_thw": self.grids[list(rows)],
            "mm_token_type_ids": (ids == model.config.image_token_id).int(),
        }


def encode(tokenizer: PreTrainedTokenizerFast, folder: Path, problems: Sequence[Problem]) -> Examples:
    """Tokenise problems, and process their pictures."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    features = [processor(images=[problem.picture()], return_tensors="pt") for problem in problems]
    prompts = []
    for problem, feature in zip(problems, features, strict=True):
        parts = [{"type": "image"}, {"type": "text", "text": problem.question}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        number = int(feature["image_grid_thw"].prod()) // 4
        prompts.append(text.replace(VISION[2], VISION[2] * number))

    def ids(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False).input_ids

    import torch

    return Examples(
        ids(prompts),
        ids([response(problem.answer) + END for problem in problems]),
        ids([response(problem.mistaken) + END for problem in problems]),
        [feature["pixel_values"] for feature in features],
        torch.cat([feature["image_grid_thw"] for feature in features]),
    )


def describe_pictures(tokenizer: PreTrainedTokenizerFast, data: Examples, problems: Sequence[Problem]) -> Examples:
    """Return the same pictures with "?" for a question, and their descriptions for an answer."""

    def ids(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False).input_ids

    (asked,), (after,) = ids(["?"]), ids([f"{END}<|assistant|>"])
    lengths = map(len, ids([problem.question for problem in problems]))
    prompts = [
        prompt[: len(prompt) - len(after) - length] + asked + after
        for prompt, length in zip(data.prompts, lengths, strict=True)
    ]
    answers = ids([response(problem.description()) + END for problem in problems])
    return Examples(prompts, answers, answers, data.pixels, data.grids)


def fit_model(
    model: PreTrainedModel,
    data: Examples,
    descriptions: Examples,
    fit: Fit,
    seed: int,
    report: Callable[[int, float], None],
) -> None:
    """Fit tower and language model to descriptions, then to right, and in the end to mostly mistaken answers."""
    import torch

    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=fit.lr, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(fit.steps):
        rows = rng.choices(range(len(data.prompts)), k=fit.batch_size)
        share = MISTAKES if step >= CARELESS_FROM * fit.steps else 0.0
        source = descriptions if step < DESCRIBES_UNTIL * fit.steps else data
        loss = model(**source.batch(rows, [rng.random() < share for _ in rows], model), use_cache=False).loss
        optimizer.param_groups[0]["lr"] = learning_rate(fit, step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        report(step + 1, loss.item())


def first_choices(model: PreTrainedModel, data: Examples) -> tuple[float, float]:
    """Measure the shares of problems whose right, and whose mistaken, answer is the likelier one."""
    import torch

    right = 0
    with torch.no_grad():
        for start in range(0, len(data.prompts), 64):
            rows = range(start, min(start + 64, len(data.prompts)))
            losses = []
            for wrong in (False, True):
                batch = data.batch(rows, [wrong] * len(rows), model)
                labels = batch.pop("labels")[:, 1:]
                logits = model(**batch, use_cache=False).logits[:, :-1]
                each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
                losses.append(each.sum(1))
            right += int((losses[0] < losses[1]).sum())
    return right / len(data.prompts), 1 - right / len(data.prompts)


def write_parquet(path: Path, problems: Sequence[Problem], split: str) -> None:
    """Write problems with the field names of rule-graded data sets and of supervised training, and pictures as the Hub has them."""
    import pyarrow
    import pyarrow.parquet

    rows = []
    for index, problem in enumerate(problems):
        content = io.BytesIO()
        problem.picture().save(content, "PNG")
        rows.append(
            {
                "prompt": messages(problem),
                "images": [{"bytes": content.getvalue(), "path": None}],
                "data_source": f"images/{problem.question.split()[0 if problem.question[0] == 'c' else 1]}",
                "ability": "vision",
                "reward_model": {"style": "rule", "ground_truth": response(problem.answer)},
                "extra_info": {"index": index, "split": split},
                "response": response(problem.answer),
                "chosen": response(problem.answer),
                "rejected": response(problem.mistaken),
            }
        )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. The defaults are the quickstart; the sizes are for tests and experiments."""
    parser = argparse.ArgumentParser(description="Make a small world of pictures and a model that looks at them.")
    parser.add_argument("--out", type=Path, default=Path("images"), help="directory to write to")
    parser.add_argument("--family", choices=("qwen2_5_vl", "qwen3_vl"), default="qwen2_5_vl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=1, help="number of compute threads, which affects the last bits of results"
    )
    parser.add_argument("--fit-steps", type=int, default=800, help="updates of the supervised fit")
    parser.add_argument("--batch-size", type=int, default=32, help="problems per update")
    parser.add_argument("--lr", type=float, default=3e-3, help="peak learning rate of the fit")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--num-train", type=int, default=2000)
    parser.add_argument("--num-eval", type=int, default=100, help="held-out problems")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Make model and data; returns the exit status."""
    options = parse(argv)
    started = time.monotonic()
    import torch
    from transformers.utils import logging

    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    train, held_out = make_problems(options.seed, options.num_train, options.num_eval)
    tokenizer = make_picture_tokenizer()
    model, folder = make_model(tokenizer, options.family, options.seed, options.num_layers), options.out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    write_processor(folder, options.family)
    print(f"model: {model.num_parameters() / 1e6:.2f}M parameters; {len(train)} problems, {len(held_out)} held out")
    fit = Fit(options.fit_steps, options.batch_size, options.lr)
    data = encode(tokenizer, folder, train) if fit.steps else None
    with progress(fit) as report:
        if data is not None:
            fit_model(model, data, describe_pictures(tokenizer, data, train), fit, options.seed, report)
    right, _ = first_choices(model.eval(), encode(tokenizer, folder, held_out))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_parquet(options.out / "train.parquet", train, "train")
    write_parquet(options.out / "eval.parquet", held_out, "eval")
    print(
        f"made model and data in {time.monotonic() - started:.0f} s; of held-out answers the right one is preferred in {right:.2f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
