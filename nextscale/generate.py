"""The stage loop: next-scale generation, coarse to fine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .cache import ComputedCells, StageMemory, Workspace
from .cache.attention import attention_backend
from .canvas import Canvas
from .errors import NonFiniteLogits, SettingError
from .guidance import ResolvedGuidance
from .methods.method import DENSE, Method, MethodRun, RunSetup, StagePlan, TokenCounts
from .models.base import HeadInputs, NextScaleModel
from .models.blocks import Block, run_in_order
from .models.context import Conditioning, ForwardContext
from .parts import Part, joined
from .planning.memory import reserved_cache
from .prefix import checked_codes, fits_one_pass, read_in_one_pass, require_known
from .request import Request, Revise, as_sampled
from .stage import Stage, Tokens


@dataclass(frozen=True)
class StageOutput:
    """Shown after every stage. Skipped stages have no logits and no codes."""

    stage: Stage
    canvas: Canvas
    rows: int = 0
    num_tokens: float = 0  # tokens per row that ran through the blocks, the mean where rows are packed
    counts: Tensor | None = None  # [B], those of each image without the padding; None: all of them
    tokens: Tokens | None = None  # what the codes stand for
    logits: Tensor | None = None  # guided, with temperature; [B, N, V] or [B, N, bits, 2]
    ids: Tensor | None = None  # as sampled
    codes: Tensor | None = None  # as put on the canvas
    residual: Tensor | None = None  # [B, N, Z], what the last stage added to its codes, of those tokens that have hidden states
    plan: StagePlan = DENSE
    compute_mask: Tensor | None = None  # [B, cells], share of the network that was run for every cell; None: all of it, or not asked for
    known_counts: tuple[int, ...] | None = None  # `counts`, where the host has read them
    plans: tuple[StagePlan, ...] | None = None  # of every image, where they go on apart from each other; None: `plan` is that of all

    @property
    def skipped(self) -> bool:
        return self.tokens is None

    def without_logits(self) -> StageOutput:
        """The same without its logits, which are large, for those who keep it."""
        return self if self.logits is None else replace(self, logits=None)


@torch.inference_mode()
def generate(
    model: NextScaleModel,
    cond: Conditioning,
    canvas: Canvas,
    request: Request,
    watch: Callable[[StageOutput], None],
) -> dict[int, Tensor]:
    """Generates a batch of images on `canvas`; returns for every stage that ran whether all that it computed is finite."""
    parts = [Part(request, canvas, *begin(model, cond, request))]
    finite: dict[int, Tensor] = {}
    for stage in request.schedule:
        parts = [one for part in parts for one in part.routed(stage)]
        results = [run_part(model, part, stage) for part in parts]
        good = [one for _, one in results if one is not None]
        if good:
            finite[stage.index] = torch.stack(good).all()
        watch(results[0][0] if len(parts) == 1 else join(parts, [done for done, _ in results], canvas, request.batch))
    return finite


def run_part(model: NextScaleModel, part: Part, stage: Stage) -> tuple[StageOutput, Tensor | None]:
    """What `run_stage` returns, with the plan that the run makes when the stage comes."""
    request, canvas, run = part.request, part.canvas, part.run
    known = settle_counts(run, stage, canvas) if request.method.data_dependent else None
    plan = run.plan(request.plans[stage.index], stage, canvas)
    done, finite = run_stage(model, canvas, request, run, plan, part.ctx, stage)
    return replace(done, known_counts=known), finite


def join(parts: Sequence[Part], done: Sequence[StageOutput], canvas: Canvas, batch: int) -> StageOutput:
    """What several parts of a batch have done, as one, with the canvas of all; images that did not run have zeros for codes."""
    latent = joined([(part, part.canvas.latent) for part in parts], batch)
    assert latent is not None
    canvas.latent = latent
    made = {
        name: joined([(part, getattr(one, name)) for part, one in zip(parts, done, strict=True)], batch)
        for name in ("ids", "codes", "residual", "compute_mask")
    }
    return together([part.images or () for part in parts], done, canvas, made)


def together(groups: Sequence[tuple[int, ...]], done: Sequence[StageOutput], canvas: Canvas, made: Mapping[str, Any]) -> StageOutput:
    """What groups of images have done in a stage, as one. `canvas` and `made`, its tensors by name, are of the whole batch."""
    of_images = {image: one.plan for images, one in zip(groups, done, strict=True) for image in images}
    plans = tuple(of_images[image] for image in sorted(of_images)) if len(groups) > 1 else None
    ran = [one for one in done if not one.skipped]
    if not ran:
        return StageOutput(done[0].stage, canvas, plan=done[0].plan, plans=plans)
    rows = sum(one.rows for one in ran)
    return replace(ran[0], canvas=canvas, rows=rows, logits=None, known_counts=None, plans=plans, **made)


def begin(model: NextScaleModel, cond: Conditioning, request: Request) -> tuple[MethodRun, ForwardContext]:
    """A run of the request's method and what the stages share; the method refuses what it cannot run."""
    method, plans, rows = request.method, request.plans, cond.start.shape[0]
    setup = RunSetup(model, request.schedule, request.batch, request.method_rng, plans, rows > request.batch, method.own_cache)
    run = method.start(replace(setup, given=len(request.given)))
    spec = reserved_cache(model, request.schedule, plans, request.batch, rows)
    workspace = Workspace(spec)
    ctx = ForwardContext(
        request.batch,
        cond,
        [run.layer_cache(spec.layer(number), workspace) for number in range(len(model.blocks))],
        StageMemory(),
        "both" if rows > request.batch else "cond",
        request.method_rng,
        computed=ComputedCells(request.batch) if request.compute_mask else None,
        captured=request.captured,
        data_dependent=method.data_dependent,
    )
    return run, ctx


def settle_counts(run: MethodRun, stage: Stage, canvas: Canvas) -> tuple[int, ...] | None:
    """Reads how many tokens the stage runs for each image where that is data-dependent: the only thing that the host reads in a stage."""
    counts = run.count_tokens(stage, canvas)
    if counts is None:
        return None
    numbers = tuple(counts.tolist())
    run.set_counts(TokenCounts(min(numbers), max(numbers), sum(numbers)))
    return numbers


def run_stage(
    model: NextScaleModel, canvas: Canvas, request: Request, run: MethodRun, plan: StagePlan, ctx: ForwardContext, stage: Stage
) -> tuple[StageOutput, Tensor | None]:
    """What was sampled, and whether all that was computed is finite; None where the stage is skipped."""
    batch, guidance = request.batch, request.guidance
    plan.check(len(model.blocks), guidance.layers)
    if plan.skip:
        canvas.skip(stage)
        return StageOutput(stage, canvas, plan=plan), None
    ctx.keep(plan.cfg_branches)
    if stage.index < len(request.given):
        return put_given(model, canvas, request, run, plan, ctx, stage), None
    if ctx.seen:
        seen, ctx.seen = ctx.seen, ()
        read_in_one_pass(model, ctx, request.schedule.stages[: len(seen)], seen)
    x, tokens = run.reduce(model.embed(canvas.input(stage), stage, ctx), Tokens(stage))
    plan.check_num_tokens(tokens)
    counts = None if tokens.count is None else tokens.count[:batch]
    x, tokens = model.with_text(x, tokens, ctx)
    rows, entered = tokens.rows_of(x), x.shape[0] * x.shape[1]
    with attention_backend(entered, x.device, ctx.captured):
        x, tokens = tokens.on_grid(run_blocks(model, x, tokens, ctx, plan, guidance, run))
    hidden = HeadInputs(x, tokens.rows(slice(0, batch)), canvas, ctx, request)
    guided = guidance.on_logits(model.logits(x, tokens, ctx), stage, tokens.branch_size(batch))
    out, tokens = run.restore(request.sampling.prepare(tokens.unpack(guided), stage), hidden.tokens)
    with request.clock.time("sampling", stage.index):
        ids, codes = model.choose(hidden, out, tokens)
    if request.revise is not as_sampled:
        codes = revised(model, request.revise, codes, tokens)
    canvas.add(codes, tokens)
    residual = None
    if stage.last and model.adds_residual:
        x, completed = run.restore_hidden(hidden.x, hidden.tokens)
        settled = tokens.move(ids if codes.is_floating_point() else codes, completed)
        with request.clock.time("residual", stage.index):
            residual = model.residual(replace(hidden, x=x, tokens=completed), settled)
        canvas.add_residual(residual, completed)
    finite = torch.stack([all_finite(out), *hidden.finite]).all() if hidden.finite else all_finite(out)
    plan, mask = as_measured(plan, ctx), computed_shares(model, ctx)
    tokens, num_tokens = tokens.unpacked(), per_row(entered, rows)
    return StageOutput(stage, canvas, rows, num_tokens, counts, tokens, out, ids, codes, residual, plan, mask), finite


def all_finite(x: Tensor) -> Tensor:
    """Whether all numbers are finite, as a scalar on the device: three launches, where `isfinite` alone takes four."""
    return (x * 0 == 0).all()


def per_row(tokens: int, rows: int) -> float:
    """The mean of all rows, a whole number where it is one."""
    return tokens / rows if tokens % rows else tokens // rows


def put_given(
    model: NextScaleModel, canvas: Canvas, request: Request, run: MethodRun, plan: StagePlan, ctx: ForwardContext, stage: Stage
) -> StageOutput:
    """Puts the codes of a given stage on the canvas. The network reads all its cells, now or in one pass with other given stages."""
    shown, codes, rows = canvas.input(stage), request.given[stage.index], ctx.cond.start.shape[0]
    plan, guidance, watched = replace(plan, num_tokens=None, packed=None), request.guidance, request.method.reduces_stages
    dense = not guidance.layers and not watched and all(one == DENSE for one in request.plans[: len(request.given)])
    if dense and fits_one_pass(model, ctx):
        ctx.seen = (*ctx.seen, shown)
    else:
        x, tokens = model.with_text(model.embed(shown, stage, ctx), Tokens(stage), ctx)
        x, tokens = tokens.on_grid(run_blocks(model, x, tokens, ctx, plan, guidance, run))
        if watched:  # methods that reduce later stages compare logits
            logits = guidance.on_logits(model.logits(x, tokens, ctx), stage, tokens.branch_size(request.batch))
            run.restore(request.sampling.prepare(logits, stage), Tokens(stage))
    model.pass_noise(stage, ctx, request)
    canvas.add(codes, Tokens(stage))
    num_tokens = stage.cells + (model.text_prefix if stage.index == 0 else 0)
    plan, mask = as_measured(plan, ctx), computed_shares(model, ctx)
    return StageOutput(stage, canvas, rows, num_tokens, tokens=Tokens(stage), ids=codes, codes=codes, plan=plan, compute_mask=mask)


def computed_shares(model: NextScaleModel, ctx: ForwardContext) -> Tensor | None:
    """Returns the share of the sublayers that this stage has computed for every cell, [B, cells]; None if it was not counted."""
    return None if ctx.computed is None else ctx.computed.take(sum(block.num_sublayers for block in model.stack))


def as_measured(plan: StagePlan, ctx: ForwardContext) -> StagePlan:
    """The plan with the numbers of tokens that its spans have found while they ran."""
    measured, ctx.measured = ctx.measured, {}
    return replace(plan, spans=tuple(measured.get(span.layers, span) for span in plan.spans)) if measured else plan


def check_plans(plans: Sequence[StagePlan], depth: int, guidance: ResolvedGuidance) -> None:
    """SettingError for what would otherwise be found only at its stage."""
    for plan in plans:
        try:
            plan.check(depth, guidance.layers)
        except ValueError as error:
            raise SettingError(f"the method does not fit this request: {error}") from error


def check_cache(model: NextScaleModel, method: Method) -> None:
    """SettingError where the method keeps keys and values its own way and the model wants them in few bits."""
    if model.kv_dtype is not None and method.own_cache:
        raise SettingError(
            f"{method.label} keeps keys and values its own way, and this model keeps them as {model.kv_dtype}: load it without kv_dtype, or"
            " choose another method"
        )


def revised(model: NextScaleModel, revise: Revise, codes: Tensor, tokens: Tokens) -> Tensor:
    """Returns what the caller makes of the codes of `tokens`, which it sees on the stage's whole grid."""
    stage = tokens.stage
    name, shown = f"what revise returns for stage {stage.index}", tokens.move(codes, Tokens(stage))
    changed = checked_codes(name, revise(stage, shown), model, stage, len(shown))
    changed = Tokens(stage).move(changed, tokens)  # what is returned for other cells is ignored
    require_known([changed], name, model)
    return changed


def run_blocks(
    model: NextScaleModel, x: Tensor, tokens: Tokens, ctx: ForwardContext, plan: StagePlan, guidance: ResolvedGuidance, run: MethodRun
) -> Tensor:
    """All blocks in order; a plan's spans run groups of them their own way."""
    blocks = model.stack
    spans = {span.layers.start: span for span in plan.spans}
    for start, stop in pairwise(boundaries(len(blocks), plan, guidance)):
        segment = blocks[start:stop]
        with reporting(segment, x, tokens, ctx):
            if start in spans:
                x = spans[start](segment, x, tokens, ctx)
            elif start in plan.observed:
                x = observed(blocks[start], x, tokens, ctx, run)
            else:
                x = run_in_order(segment, x, tokens, ctx)
        if stop - 1 in guidance.layers:
            x = guidance.on_hidden(x, tokens.stage, tokens.branch_size(ctx.batch))
    return x


@contextmanager
def reporting(segment: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Iterator[None]:
    """Counts the sublayers of a segment as computed for all tokens that enter, unless a span has reported what it computed."""
    if ctx.computed is None:
        yield
        return
    ctx.computed.reported = False
    yield
    if not ctx.computed.reported:
        ctx.computed.add(tokens, x, sum(block.num_sublayers for block in segment))


def boundaries(depth: int, plan: StagePlan, guidance: ResolvedGuidance) -> list[int]:
    """Numbers of blocks after which hidden states are asked for: around spans and observed blocks, and after guided ones.

    Where one cfg branch runs alone, a span may hide blocks after which both would be guided.
    """
    spans = {edge for span in plan.spans for edge in (span.layers.start, span.layers.stop)}
    observed = {edge for layer in plan.observed for edge in (layer, layer + 1)}
    guided = {layer + 1 for layer in guidance.layers} if plan.cfg_branches == "both" else set()
    return sorted({0, depth} | spans | observed | guided)


def observed(block: Block, x: Tensor, tokens: Tokens, ctx: ForwardContext, run: MethodRun) -> Tensor:
    """The block's output, which the method sees beside its input."""
    out = block(x, tokens, ctx)
    run.observe(block.layer, x, out, tokens)
    return out


def require_finite(failed: Sequence[int], stages: int) -> None:
    """`failed`: stages whose numbers were not."""
    if failed:
        raise NonFiniteLogits(
            f"the network's output was NaN or infinite at stage {failed[0]} of {stages}. In float16 this is overflow:"
            " load the model with dtype=torch.bfloat16 or float32, or lower a large `guidance`. Otherwise the weights file is damaged or"
            " belongs to another model."
        )
