"""A backbone outside of the package: class-conditional, sizes of any schedule, weights under other names in published files."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from nextscale import Pipeline, RampGuidance, Sampling
from nextscale.canvas import Canvas, to_rows
from nextscale.checkpoints import Layout, Rule
from nextscale.models.base import Conditioning, NextScaleModel, PromptInputs, logit_scales
from nextscale.models.blocks import BlockConfig, build_blocks, plain_norm
from nextscale.pipeline import Settings
from nextscale.schedules import SquareSchedules
from nextscale.text.prompts import ClassReader
from nextscale.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class PebbleConfig:
    depth: int = 3
    dim: int = 64
    heads: int = 4
    classes: int = 10
    codes: int = 32
    channels: int = 8  # of the latent
    levels: int = 8  # stages that the model knows
    patch: int = 16  # pixels along a side of a token

    @property
    def block(self):
        return BlockConfig(self.dim, self.heads, hidden_dim=4 * self.dim)


class Pebble(NextScaleModel):
    family = "pebble"
    layout = Layout(rules=(Rule(r"class_embed\.(.*)", (r"labels.\1",)), Rule(r"blocks\.(\d+)\.(.*)", (r"layers.\1.\2",))))

    def __init__(self, config: PebbleConfig):
        super().__init__()
        self.config, self.block_config, self.levels = config, config.block, config.levels
        self.class_embed = nn.Embedding(config.classes + 1, config.dim)  # the last row means "no class"
        self.level_embed = nn.Embedding(config.levels, config.dim)
        self.place_embed = nn.Linear(2, config.dim)
        self.word_embed = nn.Linear(config.channels, config.dim)
        self.blocks = build_blocks(config.depth, config.block)
        self.head_norm = plain_norm(config.dim)
        self.head = nn.Linear(config.dim, config.codes)

    def prompt_inputs(self, prompts, guided, schedule, negative=None):
        """Returns rows of the prompts, and if guided then as many negative rows."""
        self.check_schedule(schedule)
        labels = prompts.numbers.to(self.device)
        if guided:
            no_class = torch.full_like(labels, self.config.classes)
            labels = torch.cat([labels, no_class if negative is None else negative.numbers.to(self.device)])
        return PromptInputs((labels,))

    def condition_from(self, inputs, tables):
        (labels,) = inputs.rows
        return Conditioning(start=self.class_embed(labels)[:, None], logit_scales=logit_scales(self.stack))

    def positions(self, stage):
        y, x = ((torch.arange(side, device=self.device) + 0.5) / side for side in stage.size)
        places = torch.cartesian_prod(y, x)  # [cells, 2], cells in raster order
        return self.place_embed(places.to(self.dtype)) + self.level_embed.weight[stage.index]


class PebbleTokenizer(Tokenizer):
    layout = Layout(prefix="vae.")
    float32 = ("codebook",)  # full precision, whatever the dtype of the rest

    def __init__(self, config: PebbleConfig):
        super().__init__()
        self.config = config
        self.codes, self.pixels_per_token = config.codes, config.patch
        self.codebook = nn.Parameter(torch.empty(config.codes, config.channels))
        self.encoder = nn.Conv2d(3, config.channels, config.patch, stride=config.patch)
        self.decoder = nn.ConvTranspose2d(config.channels, 3, config.patch, stride=config.patch)

    def canvas(self, schedule, batch):
        return PebbleCanvas(self, schedule, batch)

    def features(self, images):
        return self.encoder(images.to(self.encoder.weight.dtype)).float()

    def nearest(self, grid, stage):
        return torch.cdist(to_rows(grid), self.codebook).argmin(dim=-1)

    def decode(self, latent):
        return self.decoder(latent.to(self.decoder.weight.dtype)).float()


class PebbleCanvas(Canvas):
    """Sum over all stages, at the final size."""

    def __init__(self, tokenizer, schedule, batch):
        self.tokenizer, self.schedule = tokenizer, schedule
        self.latent = torch.zeros(batch, tokenizer.codebook.shape[1], *schedule.grid, device=tokenizer.device)

    def input(self, stage):
        return None if stage.index == 0 else to_rows(F.interpolate(self.latent, size=stage.size, mode="area"))

    def vectors(self, codes):
        return self.tokenizer.codebook[codes]

    def write(self, grid, stage):  # [B, Z, h, w], zero where a method left a token out
        self.latent = self.latent + F.interpolate(grid, size=self.schedule.grid, mode="nearest")

    def skip(self, stage):
        """Leaves the latent unchanged."""


SETTINGS = Settings(SquareSchedules(((1, 2, 3, 4), (1, 2, 4, 8))), RampGuidance(strength=2.0), Sampling(top_k=16))


def pebble_pipeline(model: Pebble, tokenizer: PebbleTokenizer) -> Pipeline:
    return Pipeline(model, tokenizer, ClassReader(model.config.classes), SETTINGS, "pebble")
