"""Training of the bitwise next-scale transformer and its word encoder. Start at `train_model`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from ...checkpoints import write_weights
from ...errors import SettingError
from ...io import to_pil, write_image
from ...loading.load import load_module
from ...loading.presets import NANO
from ...models import Infinity
from ...models.env import Conditioning
from ...models.text_context import Padding
from ...pipeline import Pipeline
from ...schedules import InfinityBook
from ...stage import Schedule
from ...text.prompts import TextReader
from ...text.words import WordEncoder, WordTextEncoder
from ...tokenizers import InfinityTokenizer
from .captions import caption_variants
from .data import Pictures, fingerprint
from .export import MODEL as WEIGHTS
from .export import WORDS
from .forcing import ForcedPass, forced_block, forced_pyramid
from .model_settings import ModelTraining, check_pictures, check_training
from .optim import Optimizers
from .precision import MasterWeights
from .run import Budget, Ema, Run, learning_rate, memory_errors
from .settings import lasting
from .tokenizer import square_schedule

ENCODED_TOGETHER = 64
EVALUATED_TOGETHER = 16  # pictures
SAMPLES, SAMPLE_COLUMNS, LOOKS = 24, 6, 4  # pictures of a sheet; how often one is drawn in a run
FIRST_TEMPERATURE = 4.0
SPREAD = 0.02  # of random weights


def initialise(model: Infinity) -> None:
    """Small random weights; every branch begins as a small correction to its input."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
            nn.init.zeros_(module.bias)
    depth = len(model.blocks)
    for block in model.modulated:
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


class Features:
    """Encoder features of all pictures of one side, several times over, each time shifted, zoomed and mirrored at random."""

    def __init__(self, tokenizer: InfinityTokenizer, pictures: Pictures, variants: int, seed: int) -> None:
        generator = torch.Generator(pictures.pixels.device).manual_seed(seed)
        self.schedule = square_schedule(pictures.side, tokenizer.pixels_per_token)
        self.all = torch.stack([_encoded(tokenizer, pictures, generator if variant else None) for variant in range(variants)])

    def of(self, indices: Tensor, variants: Tensor) -> Tensor:
        """[B, bits, h, w]."""
        return self.all[variants, indices].float()


@torch.inference_mode()
def _encoded(tokenizer: InfinityTokenizer, pictures: Pictures, generator: torch.Generator | None) -> Tensor:
    """[N, bits, h, w], in float16 for half the memory."""
    everything = torch.arange(len(pictures), device=pictures.pixels.device)
    return torch.cat([tokenizer.features(pictures.batch(part, generator)).half() for part in everything.split(ENCODED_TOGETHER)])


class Captions:
    """Ids of several captions of every picture."""

    def __init__(self, encoder: WordTextEncoder, pictures: Pictures, variants: int, seed: int) -> None:
        texts = [text for several in caption_variants(pictures.records, variants, seed) for text in several]
        ids, lengths = encoder.tokenise(texts)
        self.variants, self.longest = variants, ids.shape[1]
        self.ids = ids.view(len(pictures), variants, -1)
        self.lengths = torch.tensor(lengths).view(len(pictures), variants)

    def of(self, indices: Tensor, variants: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [B, T] and lengths [B], on the CPU."""
        return self.ids[indices, variants], self.lengths[indices, variants]


class ModelTrainer:
    """The transformer and the word encoder with everything that changes while they are trained."""

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
            initialise(model)
        else:
            load_module(model, start, device, torch.float32)
            model.requires_grad_(True)
        self.weights = MasterWeights(model.to(device), torch.bfloat16 if device.type == "cuda" else torch.float32, Infinity.float32)
        self.model, self.working = self.weights.module, self.weights.working
        self.average, self.average_words = Ema(self.model, settings.average), Ema(self.words.model, settings.average)
        matrices = [
            parameter
            for parts in (self.model.blocks, self.words.model.layers)
            for name, parameter in parts.named_parameters()
            if parameter.ndim == 2 and "modulation_table" not in name
        ]
        chosen = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in (*self.model.parameters(), *self.words.model.parameters()) if id(parameter) not in chosen]
        self.optimizers = Optimizers(matrices, others, settings.weight_decay)
        self.modules: dict[str, nn.Module] = {
            "model": self.model,
            "words": self.words.model,
            "average": self.average.module,
            "average_words": self.average_words.module,
        }
        self._passes: dict[tuple[int, int], ForcedPass] = {}
        self._run_block = torch.compile(forced_block, dynamic=False) if settings.compile else forced_block
        self._generator = torch.Generator(device)
        self._host_generator = torch.Generator()

    def forced_pass(self, schedule: Schedule, stages: int) -> ForcedPass:
        key = (schedule.tokens, stages)
        if key not in self._passes:
            self._passes[key] = ForcedPass(self.working, schedule, stages, self._run_block)
        return self._passes[key]

    def condition(
        self, ids: Tensor, lengths: Tensor, model: Infinity, words: WordEncoder, width: int, dropped: Tensor | None
    ) -> Conditioning:
        """Of captions ids [B, T] with so many words; where `dropped` [B] is True the learned "no text" stands instead."""
        places = torch.arange(ids.shape[1] + 1)
        real = (places <= lengths[:, None]).flatten().nonzero().squeeze(1).to(self.device)  # the begin token comes before the words
        features = words(ids.to(self.device), (places[:-1] < lengths[:, None]).to(self.device))
        rows = features.flatten(0, 1).index_select(0, real)
        if dropped is not None:
            nothing = model.no_text.float()[real % len(places)]
            rows = torch.where(dropped[real // len(places), None], nothing, rows)
        return model.read(rows, Padding(tuple((1 + lengths).tolist()), self.device, width))

    def step(self, progress: float, step: int, features: Mapping[int, Features], captions: Captions) -> dict[str, Tensor | float]:
        """One step; `step` counts those before. Returns what the curve shows; nothing is read back from the device."""
        settings, batch = self.settings, self.settings.batch_at(progress, step)
        bank = features[batch.side]
        self._generator.manual_seed(settings.seed + 1_000_003 * step)
        host = self._host_generator.manual_seed(settings.seed + step)
        variants, pictures = bank.all.shape[:2]
        indices = torch.randint(pictures, (batch.pictures,), generator=host)
        encodings = torch.randint(variants, (batch.pictures,), generator=host)
        wordings = torch.randint(captions.variants, (batch.pictures,), generator=host)
        dropped = (torch.rand(batch.pictures, generator=host) < settings.no_prompt).to(self.device)
        drawn = bank.of(indices.to(self.device), encodings.to(self.device))
        pyramid = forced_pyramid(self.tokenizer, drawn, bank.schedule, batch.stages, settings.flips, self._generator)
        condition = self.condition(*captions.of(indices, wordings), self.working, self.words.model, captions.longest + 1, dropped)
        forced = self.forced_pass(bank.schedule, batch.stages)
        losses = forced.bit_losses(pyramid, condition)
        loss = (losses * forced.weights).sum()
        loss.backward()
        self.weights.take_gradients()
        rate = learning_rate(progress, step, settings.learning_rate)
        norm = self.optimizers.step(rate, settings.longest_gradient)
        self.weights.publish()
        self.average.update(step)
        self.average_words.update(step)
        kind = f"{batch.side}px_{batch.stages}"
        return {"learning_rate": rate, "gradient": norm, f"loss_{kind}": loss.detach(), f"stages_{kind}": losses.detach()}

    @torch.inference_mode()
    def evaluate(self, features: Mapping[int, Features], captions: Captions) -> dict[str, list[float]]:
        """Held-out loss per bit of every stage, without flips, by the averaged weights: side -> stages."""
        results = {}
        for side, bank in features.items():
            stages = len(bank.schedule)
            forced = ForcedPass(self.average.module, bank.schedule, stages)
            losses, count = torch.zeros(stages, device=self.device), 0
            for indices in torch.arange(bank.all.shape[1]).split(EVALUATED_TOGETHER):
                first = torch.zeros_like(indices)
                pyramid = forced_pyramid(
                    self.tokenizer, bank.of(indices.to(self.device), first.to(self.device)), bank.schedule, stages, 0.0, self._generator
                )
                condition = self.condition(
                    *captions.of(indices, first), self.average.module, self.average_words.module, captions.longest + 1, None
                )
                losses += len(indices) * forced.bit_losses(pyramid, condition)
                count += len(indices)
            results[str(side)] = [round(loss, 4) for loss in (losses / count).tolist()]
        return results

    def pipeline(self) -> Pipeline:
        """Draws with the averaged weights."""
        words = WordTextEncoder(self.words.vocabulary, self.average_words.module)
        settings = replace(NANO.settings, schedules=InfinityBook("0.06M", self.tokenizer.pixels_per_token))
        return Pipeline(self.average.module, self.tokenizer, TextReader(lambda: words), settings, "in training")

    def save(self, folder: Path, dtype: torch.dtype = torch.float16) -> None:
        """The averaged weights, in the form that `nextscale.load` reads."""
        write_weights(self.average.module, folder / WEIGHTS, self.model.layout, dtype)
        WordTextEncoder(self.words.vocabulary, self.average_words.module).save(folder / WORDS, dtype)


def weights_fingerprint(module: nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in module.state_dict().values():
        found.update(tensor.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def sheet_name(side: int) -> str:
    return f"samples-{side}.png"


def samples(pipeline: Pipeline, prompts: list[str], side: int, columns: int = SAMPLE_COLUMNS, seed: int = 0) -> Image.Image:
    images = to_pil(pipeline(prompts, seed=seed, size=square_schedule(side, pipeline.tokenizer.pixels_per_token)).pixels)
    sheet = Image.new("RGB", (columns * side, math.ceil(len(images) / columns) * side), "white")
    for position, image in enumerate(images):
        sheet.paste(image, (position % columns * side, position // columns * side))
    return sheet


def train_model(
    settings: ModelTraining,
    words: WordTextEncoder,
    tokenizer: InfinityTokenizer,
    train: Mapping[int, Pictures],
    held_out: Mapping[int, Pictures],
    folder: Path,
    budget: Budget,
    device: torch.device,
    start: Path | None = None,
) -> None:
    """Leaves the averaged weights, held-out losses and a sheet of samples in `folder`; a run that was interrupted is taken up again.

    train, held_out: the pictures by side, the same ones in the same order at every side. start: weights to begin a new run with; a run
    that is taken up again has its own.
    """
    check_training(settings, tokenizer, words)
    check_pictures(settings, train, held_out)
    smallest = settings.sides[0]
    captions = Captions(words, train[smallest], max(settings.variants[side] for side in train), settings.seed)
    held_captions = Captions(words, held_out[smallest], 1, settings.seed)
    for longest in (captions.longest, held_captions.longest):
        if longest + 1 > (most := settings.model.longest_text):
            raise SettingError(f"a caption has {longest + 1} tokens, the model reads {most}: set model.longest_text higher")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    trainer = ModelTrainer(settings, words, tokenizer, device, start)
    lasts = {
        **lasting(settings),
        "pictures": fingerprint(train),
        "vocabulary": hashlib.sha256(words.vocabulary.text().encode()).hexdigest()[:16],
        "tokenizer": weights_fingerprint(tokenizer),
    }
    run = Run(folder, budget, trainer.modules, trainer.optimizers.all, lasts)
    trainer.weights.publish()  # what a state brought back
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        features = {side: Features(tokenizer, train[side].to(device), settings.variants[side], settings.seed) for side in train}
        held_features = {side: Features(tokenizer, held_out[side].to(device), 1, settings.seed) for side in held_out}
    prompts = [record.caption for record in held_out[smallest].records]
    prompts = prompts[:: max(1, len(prompts) // SAMPLES)][:SAMPLES]
    looks = int(LOOKS * run.progress)  # those that were had before
    with memory_errors("let the phases take fewer pictures at a time"):
        for progress in run.steps():
            run.log(trainer.step(progress, run.step, features, captions))
            if int(LOOKS * progress) > looks:
                looks = int(LOOKS * progress)
                write_image(samples(trainer.pipeline(), prompts, smallest), folder / sheet_name(smallest))
    trainer.save(folder)
    run.finish({"held_out_loss": trainer.evaluate(held_features, held_captions)})
    for side in held_out:
        write_image(samples(trainer.pipeline(), prompts, side), folder / sheet_name(side))
