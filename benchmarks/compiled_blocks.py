"""A run of blocks of Infinity at one stage: with our kernels, captured, and in plain torch through torch.compile."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.cache import DenseLayerCache, StageMemory, Workspace
from nextscale.lab.bench.requests import request_prompts
from nextscale.models import Infinity
from nextscale.models.attention import unit_vectors
from nextscale.models.base import PromptInputs
from nextscale.models.blocks import ModulatedBlock, run_in_order
from nextscale.models.env import Env
from nextscale.models.modulation import Modulation
from nextscale.models.rope import PairRope
from nextscale.models.text_context import TextBuffer, TextInputs
from nextscale.pipeline import Pipeline
from nextscale.sampling import ImageRng
from nextscale.stage import Schedule, Stage, Tokens

from .captured import captured_ms
from .results import measure

BLOCKS = 2  # 230 MB of weights, several times the second cache; compiling takes longer with more
TOKENS = (16, 256)  # of the stages
MODES = ("max-autotune-no-cudagraphs", "reduce-overhead")
BOUND = 0.05  # relative error between two ways in bfloat16


class Held(NamedTuple):
    """What a block reads besides hidden states and weights."""

    modulation: Modulation
    temperature: Tensor  # [H, 1]
    keys: Tensor  # [R, T, H, D] with room for the stage
    values: Tensor
    text_keys: Tensor
    text_values: Tensor
    text_mask: Tensor


def plain_block(block: ModulatedBlock, held: Held, rotation: tuple[Tensor, Tensor], start: int, x: Tensor) -> Tensor:
    """The block in plain torch, without complex numbers, which the compiler does not take."""
    m, (rows, tokens, _), own, text = held.modulation, x.shape, block.attention, block.text_attention
    normed = torch.addcmul(m.attention_shift, block.norm(x), m.attention_scale)
    qkv = own.qkv(normed).view(rows, tokens, 3, own.heads, own.head_dim)
    even, odd = unit_vectors(qkv[:, :, :2].float()).unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = (part[:, None, None] for part in rotation)  # [N, 1, 1, D / 2]
    q, k = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1).flatten(-2).unbind(2)
    end = start + tokens
    held.keys[:, start:end].copy_(k)
    held.values[:, start:end].copy_(qkv[:, :, 2])
    attended = attention((q * held.temperature).to(x.dtype), held.keys[:, :end], held.values[:, :end], None, own.scale)
    x = torch.addcmul(x, m.attention_gain, own.proj(attended))
    q = text.q(block.text_norm(x)).view(rows, tokens, own.heads, own.head_dim)
    x = x + text.proj(attention(q, held.text_keys, held.text_values, held.text_mask, text.scale))
    normed = torch.addcmul(m.feed_forward_shift, block.norm(x), m.feed_forward_scale)
    hidden = F.gelu(block.feed_forward.fc1(normed), approximate="tanh")
    return torch.addcmul(x, m.feed_forward_gain, block.feed_forward.fc2(hidden))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
    return out.transpose(1, 2).flatten(2)


def plain_blocks(blocks: Sequence[ModulatedBlock], held: Sequence[Held], rotation: tuple[Tensor, Tensor], start: int, x: Tensor) -> Tensor:
    for block, own in zip(blocks, held, strict=True):
        x = plain_block(block, own, rotation, start, x)
    return x


class Stretch:
    """Some blocks of a model before one of its stages, with the stages before it in the cache."""

    def __init__(self, pipe: Pipeline, blocks: int) -> None:
        assert isinstance(pipe.model, Infinity)
        self.model = pipe.model
        self.schedule = pipe.settings.schedules.choose(None, None)
        self.blocks = self.model.modulated[:blocks]
        self.env = captured_env(pipe, self.schedule)
        self.generator = torch.Generator(self.model.device).manual_seed(0)

    def states(self, stage: Stage) -> Tensor:
        """Hidden states of a stage for two rows."""
        shape = (2, stage.cells, self.model.config.dim)
        return torch.randn(shape, generator=self.generator, device=self.model.device).to(self.model.dtype)

    def advance(self, stage: Stage) -> None:
        run_in_order(self.blocks, self.states(stage), Tokens(stage), self.env)

    def ours(self, stage: Stage, x: Tensor) -> Tensor:
        """The blocks as they run in a request; the cache stays where it is."""
        env = replace(self.env, cache=[copy.copy(cache) for cache in self.env.cache])
        return run_in_order(self.blocks, x, Tokens(stage), env)

    def plain(self, stage: Stage) -> Callable[[Tensor], Tensor]:
        """The same as a function for the compiler, with keys and values of its own."""
        cond, rope = self.env.cond, self.env.cond.rope
        assert cond.text is not None and cond.text.mask is not None and isinstance(rope, PairRope)
        angles = torch.view_as_real(rope.table(stage)).float()
        held = []
        for block in self.blocks:
            cache, temperature = self.env.cache[block.layer], cond.temperatures[block.layer]
            assert isinstance(cache, DenseLayerCache) and temperature is not None
            keys, values = (store[:, : stage.start + stage.cells].clone() for store in (cache.keys, cache.values))
            for store in (keys, values):
                torch._dynamo.mark_static_address(store)  # written in place, which graphs of the compiler allow only then
            held.append(Held(cond.modulation[block.layer], temperature, keys, values, *cond.text.keys_values[block.layer], cond.text.mask))
        rotation = angles[..., 0].contiguous(), angles[..., 1].contiguous()
        return partial(plain_blocks, self.blocks, held, rotation, stage.start)


def captured_env(pipe: Pipeline, schedule: Schedule) -> Env:
    """What the stages of one guided image share in a captured request."""
    model, rows = pipe.model, 2
    inputs = model.prompt_inputs(request_prompts(pipe, 1, 0), True, schedule)
    assert isinstance(inputs.text, TextInputs)
    lengths = torch.tensor(inputs.text.lengths, dtype=torch.int32, device=model.device)
    text = TextBuffer(inputs.text.rows, lengths, inputs.text.lengths[0])
    cond = model.condition_from(PromptInputs(text=text), model.schedule_tables(schedule))
    spec = model.cache_spec(schedule, rows)
    workspace = Workspace(spec)
    caches = [DenseLayerCache(spec.layer(number), workspace) for number in range(len(model.blocks))]
    return Env(1, cond, caches, StageMemory(), "both", ImageRng([0], model.device), captured=True)


def compiled_times(pipe: Pipeline, blocks: int = BLOCKS) -> Iterator[dict[str, Any]]:
    stretch = Stretch(pipe, blocks)
    for stage in stretch.schedule:
        if stage.cells in TOKENS:
            config = {"model": pipe.name, "case": f"{stage.cells} tokens", "blocks": len(stretch.blocks), "dtype": "bfloat16"}
            yield measure("compile", config, partial(stage_times, stretch, stage))
        if stage.cells >= max(TOKENS):
            return
        stretch.advance(stage)


def stage_times(stretch: Stretch, stage: Stage) -> dict[str, Any]:
    """Milliseconds of every way, captured, and the seconds that compiling took."""
    x, plain = stretch.states(stage), stretch.plain(stage)
    expected = stretch.ours(stage, x)
    found: dict[str, Any] = {"ours_ms": round(captured_ms(lambda: stretch.ours(stage, x)), 4)}
    for mode in MODES:
        torch._dynamo.reset()
        compiled = torch.compile(plain, mode=mode, fullgraph=True)
        begun = time.perf_counter()
        out = compiled(x)
        torch.cuda.synchronize()
        found[f"{mode}_compile_s"] = round(time.perf_counter() - begun, 1)
        error = ((out.double() - expected.double()).norm() / expected.double().norm()).item()
        if not error < BOUND:
            raise ArithmeticError(f"{mode} differs from ours by {error:.2e}")
        found[f"{mode}_ms"] = round((replayed_ms if mode == "reduce-overhead" else captured_ms)(partial(compiled, x)), 4)
    found["plain_ms"] = round(captured_ms(partial(plain, x)), 4)
    return found


def replayed_ms(run: Callable[[], Any]) -> float:
    """Median time of calls that replay a graph of their own, the host's part included."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=20, rep=100, return_mode="median"))
