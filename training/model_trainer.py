"""Training state of the transformer and its word encoder: weights, averages, optimizers, and one step."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from nextscale.checkpoints import write_weights
from nextscale.loading.load import load_module
from nextscale.loading.presets import NANO
from nextscale.models import Infinity
from nextscale.models.context import Conditioning
from nextscale.models.text_context import TextContext
from nextscale.pipeline import Pipeline
from nextscale.schedules import INFINITY_SIZES, InfinitySchedules
from nextscale.stage import Schedule
from nextscale.text.prompts import TextReader
from nextscale.text.words import WordEncoder, WordTextEncoder
from nextscale.tokenizers import InfinityTokenizer

from .data import Pictures
from .export import MODEL as WEIGHTS
from .export import WORDS
from .forcing import BlockParts, ForcedPass, forced_block, forced_pyramid
from .model_settings import ModelTraining
from .optim import MasterWeights, Optimizers
from .run import Average, learning_rate
from .scenes import Scenes
from .tokenizer_settings import schedule_of

EVALUATED_TOGETHER = 16  # pictures
FIRST_TEMPERATURE = 4.0
SPREAD = 0.02  # standard deviation of random weights


def initialize(model: Infinity) -> None:
    """Fills a model with small random weights. Each sublayer begins as a small correction to its input."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
            nn.init.zeros_(module.bias)
    depth = len(model.blocks)
    for block in model.stack:
        assert block.attention.log_temperature is not None
        nn.init.constant_(block.attention.log_temperature, math.log(FIRST_TEMPERATURE))
        nn.init.zeros_(block.modulation_table)
        block.modulation_table.data[:2] = 1 / math.sqrt(2 * depth)  # the two gains; scales and shifts begin at none
        block.text_attention.proj.weight.data.mul_(1 / math.sqrt(2 * depth))
    for parameter in (model.no_text, model.pos_start, model.level_embed.weight, model.text_pool.query):
        nn.init.normal_(parameter, std=1.0 if parameter is model.no_text else SPREAD)
    for linear in (model.shared_modulation, model.head_ada):
        nn.init.normal_(linear.weight, std=SPREAD / 4)
    nn.init.normal_(model.head.weight, std=SPREAD)


class ModelTrainer:
    """The transformer and the word encoder with their training state."""

    def __init__(
        self,
        settings: ModelTraining,
        words: WordTextEncoder,
        tokenizer: InfinityTokenizer,
        device: torch.device,
        start: Path | None = None,
    ) -> None:
        torch.manual_seed(settings.seed)
        self.settings, self.device = settings, device
        self.tokenizer = tokenizer.to(device).eval().requires_grad_(False)
        self.words = words.to(device)
        model = Infinity(settings.model)
        if start is None:
            initialize(model)
        else:
            load_module(model, start, device, torch.float32)
            model.requires_grad_(True)
        self.weights = MasterWeights(model.to(device), torch.bfloat16 if device.type == "cuda" else torch.float32, Infinity.float32)
        self.model, self.working = self.weights.module, self.weights.working
        self.average, self.average_words = Average(self.model, settings.average), Average(self.words.model, settings.average)
        matrices, others = self._parameters()
        self.optimizers = Optimizers(matrices, others, settings.weight_decay)
        self.modules: dict[str, nn.Module] = {
            "model": self.model,
            "words": self.words.model,
            "average": self.average.module,
            "average_words": self.average_words.module,
        }
        self._passes: dict[tuple[Schedule, int], ForcedPass] = {}
        self._run_block = partial(forced_block, parts=BlockParts.compiled()) if settings.compile else forced_block
        self._generator = torch.Generator(device)

    def _parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Returns the matrices of the blocks, which Muon trains, and all other parameters."""
        matrices = [
            parameter
            for parts in (self.model.blocks, self.words.model.layers)
            for name, parameter in parts.named_parameters()
            if parameter.ndim == 2 and "modulation_table" not in name
        ]
        chosen = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in (*self.model.parameters(), *self.words.model.parameters()) if id(parameter) not in chosen]
        return matrices, others

    def forced_pass(self, schedule: Schedule, stages: int) -> ForcedPass:
        key = (schedule, stages)
        if key not in self._passes:
            self._passes[key] = ForcedPass(self.working, schedule, stages, self._run_block)
        return self._passes[key]

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Returns encoder features [B, bits, h, w] of pictures [B, 3, H, W] in [-1, 1]."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return self.tokenizer.features(images)

    def read(self, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Returns ids [B, T] and lengths [B] of captions, on the host. T is constant. Composed captions that are longer are truncated."""
        longest = min(self.settings.model.longest_text, self.words.model.config.longest) - 1
        rows = [self.words.vocabulary.split(caption)[:longest] for caption in captions]
        return torch.tensor([row + [0] * (longest - len(row)) for row in rows]), torch.tensor([len(row) for row in rows])

    def condition(self, ids: Tensor, lengths: Tensor, model: Infinity, words: WordEncoder, dropped: Tensor | None) -> Conditioning:
        """Returns the conditioning of captions, ids [B, T] and lengths [B].

        Where `dropped` [B] is True the learned "no text" takes the place of the caption.
        """
        places = torch.arange(ids.shape[1] + 1)
        real = (places <= lengths[:, None]).flatten().nonzero().squeeze(1).to(self.device)  # the begin token comes before the words
        features = words(ids.to(self.device), (places[:-1] < lengths[:, None]).to(self.device))
        rows = features.flatten(0, 1).index_select(0, real)
        if dropped is not None:
            nothing = model.no_text.float()[real % len(places)]
            rows = torch.where(dropped[real // len(places), None], nothing, rows)
        return model.read(rows, TextContext.of(tuple((1 + lengths).tolist()), self.device, len(places)))

    def step(self, progress: float, step: int, scenes: Scenes) -> dict[str, Tensor | float]:
        """Makes one step. Returns values for the curve without waiting for the device. step: number of steps so far."""
        settings, batch = self.settings, self.settings.batch_at(progress, step)
        seed = settings.seed + 1_000_003 * step
        self._generator.manual_seed(seed)
        schedule = schedule_of(self._template(random.Random(seed)), batch.side, self.tokenizer.pixels_per_token)
        height, width = (cells * self.tokenizer.pixels_per_token for cells in schedule.grid)
        plan = scenes.plan((height, width), batch.pictures, seed)
        dropped = torch.rand(batch.pictures, device=self.device, generator=self._generator) < settings.no_prompt
        pyramid = forced_pyramid(self.tokenizer, self.features(scenes.draw(plan)), schedule, batch.stages, settings.flips, self._generator)
        condition = self.condition(*self.read(plan.captions), self.working, self.words.model, dropped)
        forced = self.forced_pass(schedule, batch.stages)
        losses, right = forced.bit_losses(pyramid, condition)
        loss = (losses * forced.weights).sum()
        loss.backward()
        self.weights.take_gradients()
        rate = learning_rate(progress, step, settings.learning_rate)
        norm = self.optimizers.step(rate, settings.longest_gradient)
        self.weights.publish()
        self.average.update(step)
        self.average_words.update(step)
        kind = f"{batch.side}px_{batch.stages}"
        about: dict[str, Tensor | float] = {"learning_rate": rate, "gradient": norm, "pictures": batch.pictures}
        return about | {f"loss_{kind}": loss.detach(), f"stages_{kind}": losses.detach(), f"accuracy_{kind}": right}

    def _template(self, chance: random.Random) -> float:
        """Draws an aspect ratio: the square with the share of the mix, all others with equal shares."""
        others = [template for template in INFINITY_SIZES if template != 1.0]
        return 1.0 if chance.random() < self.settings.mix.squares else chance.choice(others)

    @torch.inference_mode()
    def evaluate(self, pictures: Mapping[int, Pictures]) -> dict[str, dict[str, list[float]]]:
        """Returns held-out loss per bit and bit accuracy of the averaged weights, without flips, by side and stage."""
        found = {str(side): self._held_out(of_side) for side, of_side in pictures.items()}
        return {name: {side: values[place] for side, values in found.items()} for place, name in enumerate(("loss", "accuracy"))}

    def _held_out(self, pictures: Pictures) -> tuple[list[float], list[float]]:
        schedule = schedule_of(1.0, pictures.side, self.tokenizer.pixels_per_token)
        model, words = self.average.module, self.average_words.module
        forced = ForcedPass(model, schedule, len(schedule))
        sums = torch.zeros(2, len(schedule), device=self.device)
        for indices in torch.arange(len(pictures)).split(EVALUATED_TOGETHER):
            features = self.features(pictures.batch(indices.to(pictures.pixels.device)).to(self.device))
            pyramid = forced_pyramid(self.tokenizer, features, schedule, len(schedule), 0.0, self._generator)
            captions = [pictures.records[index].caption for index in indices.tolist()]
            found = forced.bit_losses(pyramid, self.condition(*self.read(captions), model, words, None))
            sums += len(indices) * torch.stack(found)
        losses, right = (sums / len(pictures)).tolist()
        return [round(value, 4) for value in losses], [round(value, 4) for value in right]

    def pipeline(self) -> Pipeline:
        """Returns a pipeline with the averaged weights."""
        words = WordTextEncoder(self.words.vocabulary, self.average_words.module)
        settings = replace(NANO.settings, schedules=InfinitySchedules("0.06M", self.tokenizer.pixels_per_token))
        return Pipeline(self.average.module, self.tokenizer, TextReader(lambda: words), settings, "in training")

    def save(self, folder: Path, dtype: torch.dtype = torch.float16) -> None:
        """Writes the averaged weights as `nextscale.load` reads them."""
        write_weights(self.average.module, folder / WEIGHTS, self.model.layout, dtype)
        WordTextEncoder(self.words.vocabulary, self.average_words.module).save(folder / WORDS, dtype)
