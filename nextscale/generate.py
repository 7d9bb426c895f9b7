"""The stage loop: next-scale generation, coarse to fine."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from .cache import ComputedCells, StageMemory, Workspace
from .cache.attention import attention_backend
from .canvas import Canvas
from .device import Timer
from .errors import NonFiniteLogits, SettingError
from .guidance import ResolvedGuidance
from .methods.method import DENSE, MethodRun, RunSetup, StagePlan, TokenCounts, restored_by, run_of, selected_by
from .methods.token_ops import pick
from .models.base import HeadInputs, NextScaleModel
from .models.blocks import Block, run_in_order
from .models.context import Conditioning, ForwardContext
from .planning.memory import reserved_cache
from .prefix import checked_codes, fits_one_pass, read_in_one_pass, require_known
from .request import Request, Revise
from .stage import Stage, Tokens


@dataclass(frozen=True)
class StageOutput:
    """Output of a stage. Skipped stages have no logits and no codes."""

    stage: Stage
    canvas: Canvas
    rows: int = 0
    num_tokens: float = 0  # tokens per row that ran through the blocks, the mean if rows are packed
    counts: Tensor | None = None  # [B], tokens of each image without padding; None: all
    tokens: Tokens | None = None  # the cells of the codes
    logits: Tensor | None = None  # guided, with temperature; [B, N, V] or [B, N, bits, 2]
    ids: Tensor | None = None  # as sampled
    codes: Tensor | None = None  # as put on the canvas
    residual: Tensor | None = None  # [B, N, Z], HART's addition to the codes of the last stage, for tokens with hidden states
    plan: StagePlan = DENSE
    compute_mask: Tensor | None = None  # [B, cells], share of the network that ran for every cell; None: all of it, or not requested
    known_counts: tuple[int, ...] | None = None  # `counts`, if the host has read them

    @property
    def skipped(self) -> bool:
        return self.tokens is None

    def without_logits(self) -> StageOutput:
        """Returns a copy without the logits, which are large."""
        return self if self.logits is None else replace(self, logits=None)


@dataclass(eq=False)
class StageState:
    """State that changes from stage to stage."""

    run: MethodRun
    ctx: ForwardContext
    canvas: Canvas
    timer: Timer
    constants: Sequence[object] = ()  # objects that captured graphs must keep
    ragged: bool = False  # images have kept different numbers of keys: later stages pack their rows too
    unread: tuple[Tensor | None, ...] = ()  # inputs of given stages that the network has not read yet

    def fork(self) -> StageState:
        """Returns a copy with the same tensors, so that a stage can be captured several times from here."""
        ctx = replace(self.ctx, cond=self.ctx.cond.copy(), cache=[copy.copy(cache) for cache in self.ctx.cache])
        ctx.memory = self.ctx.memory.copy()
        return replace(self, run=copy.copy(self.run), ctx=ctx, canvas=copy.copy(self.canvas))

    def tensors(self) -> list[Tensor]:
        """Returns the tensors that later stages read or that depend on the token counts. All forks share the memory of keys and values."""
        lengths = [cache.lengths for cache in self.ctx.cache if cache.lengths is not None]
        return [self.canvas.latent, *self.run.state(), *lengths]


def begin(model: NextScaleModel, cond: Conditioning, canvas: Canvas, request: Request, timer: Timer) -> StageState:
    """Returns the state before the first stage. Raises SettingError if the method does not fit the request."""
    method, plans, rows = request.method, request.plans, cond.start.shape[0]
    setup = RunSetup(model, request.schedule, request.batch, request.method_rng, plans, rows > request.batch)
    run = run_of(method, setup)
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
    return StageState(run, ctx, canvas, timer, setup.constants)


def count_tokens(state: StageState, request: Request, stage: Stage) -> Tensor | None:
    """Returns the number of tokens of each image [B] if the method chooses it now. A stage with given codes computes all cells."""
    counts = state.run.count(stage, state.canvas)
    return None if stage.index < len(request.prefix_codes) else counts


def packs(request: Request, planned: StagePlan) -> bool:
    """Returns True if images with different token counts are packed. A single image is not.

    Spans and caches of methods choose among the tokens of a row, and need padded rows.
    """
    return request.batch > 1 and not planned.spans and "cache" not in request.method.exclusive


def run_stage(
    model: NextScaleModel, request: Request, state: StageState, stage: Stage, counts: TokenCounts | None
) -> tuple[StageOutput, Tensor | None]:
    """Runs a stage. Returns its output, and a flag that is True if all numbers are finite; None if the stage is skipped."""
    run, ctx, canvas, batch, guidance = state.run, state.ctx, state.canvas, request.batch, request.guidance
    plan = run.plan(stage, request.plans[stage.index], counts)
    if plan.skip:
        plan.check(len(model.blocks), guidance.layers)
        canvas.skip(stage)
        return StageOutput(stage, canvas, plan=plan), None
    if counts is not None and plan.num_tokens is not None:
        state.ragged |= counts.fewest < counts.most
        if state.ragged and packs(request, plan):  # also after a stage of equal counts: keys are read by lengths
            plan = replace(plan, packed=counts.total)
    plan.check(len(model.blocks), guidance.layers)
    ctx.keep(plan.cfg_branches)
    if stage.index < len(request.prefix_codes):
        return put_given(model, request, state, plan, stage), None
    if state.unread:
        unread, state.unread = state.unread, ()
        read_in_one_pass(model, ctx, request.schedule.stages[: len(unread)], unread)
    x, tokens = entering(model.embed(canvas.input(stage), stage, ctx), stage, run, plan, request)
    try:
        plan.check_num_tokens(tokens)
    except ValueError as error:
        raise SettingError(f"{request.method.label}: {error}. `select_tokens` must keep the planned number.") from error
    own = None if tokens.count is None else tokens.count[:batch]
    x, tokens = model.with_text(x, tokens, ctx)
    rows, entered = tokens.rows_of(x), x.shape[0] * x.shape[1]
    with attention_backend(entered, x.device, ctx.captured):
        x, tokens = tokens.on_grid(run_blocks(model, x, tokens, ctx, plan, guidance, run))
    hidden = HeadInputs(x, tokens.rows(slice(0, batch)), canvas, ctx, request)
    guided = guidance.on_logits(model.logits(x, tokens, ctx), stage, tokens.branch_size(batch))
    out, tokens, source = restored_by(run, request.sampling.prepare(tokens.unpack(guided), stage), hidden.tokens)
    with state.timer.time("sampling", stage.index):
        ids, codes = model.choose(hidden, out, tokens)
    if request.revise is not None:
        codes = revised(model, request.revise, codes, tokens)
    canvas.add(codes, tokens)
    residual = None
    if stage.last and model.adds_residual:
        hidden = hidden if source is None else replace(hidden, x=propagated(hidden, source), tokens=tokens)
        settled = tokens.move(ids if codes.is_floating_point() else codes, hidden.tokens)
        with state.timer.time("residual", stage.index):
            residual = model.residual(hidden, settled)
        canvas.add_residual(residual, hidden.tokens)
    finite = torch.stack([all_finite(out), *hidden.finite]).all() if hidden.finite else all_finite(out)
    plan, mask = as_measured(plan, ctx), computed_shares(model, ctx)
    tokens, num_tokens = tokens.unpacked(), per_row(entered, rows)
    return StageOutput(stage, canvas, rows, num_tokens, own, tokens, out, ids, codes, residual, plan, mask), finite


def entering(x: Tensor, stage: Stage, run: MethodRun, plan: StagePlan, request: Request) -> tuple[Tensor, Tokens]:
    """Returns the hidden states and tokens that enter the first block, packed if the plan says so. x [R, cells, C]."""
    tokens, batch = selected_by(run, x, Tokens(stage)), request.batch
    if tokens.index is None:
        return x, tokens
    if len(tokens.index) not in (batch, len(x)):
        raise SettingError(
            f"{request.method.label}: `select_tokens` must choose cells for each of the {batch} images or {len(x)} rows (guidance adds one"
            f" per image); got {len(tokens.index)}. Score x[: setup.batch]."
        )
    branches = x.shape[0] // tokens.index.shape[0]
    if plan.packed is not None:
        tokens = tokens.packed(batch, plan.packed)
    tokens = tokens.repeat(branches)  # both rows of a guided pair keep the same cells
    return tokens.gather(x) if tokens.packing is None else tokens.packing.gather(x), tokens


def propagated(hidden: HeadInputs, source: Tensor) -> Tensor:
    """Returns hidden states [R, M, C] in which each token has the state of its source [B, M].

    HART's diffusion completes the code that each cell has sampled for itself: with the sources' residuals latents of random weights are 12
    to 28 % further from dense generation.
    """
    x = hidden.tokens.unpack(hidden.x)
    return pick(x, source.repeat(x.shape[0] // source.shape[0], 1))


def all_finite(x: Tensor) -> Tensor:
    """Returns a scalar tensor that is True if all values are finite. Takes three kernel launches (`isfinite` takes four)."""
    return (x * 0 == 0).all()


def per_row(tokens: int, rows: int) -> float:
    """Returns the mean over the rows, an int if possible."""
    return tokens / rows if tokens % rows else tokens // rows


def put_given(model: NextScaleModel, request: Request, state: StageState, plan: StagePlan, stage: Stage) -> StageOutput:
    """Puts the codes of a given stage on the canvas. The network reads all its cells, now or in one pass with other given stages."""
    run, ctx, canvas, guidance = state.run, state.ctx, state.canvas, request.guidance
    shown, codes, rows = canvas.input(stage), request.prefix_codes[stage.index], ctx.cond.start.shape[0]
    plan, watched = replace(plan, num_tokens=None), "tokens" in request.method.exclusive
    dense = not guidance.layers and not watched and all(one == DENSE for one in request.plans[: len(request.prefix_codes)])
    if dense and fits_one_pass(model, ctx):
        state.unread = (*state.unread, shown)
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
    """Returns the share of the sublayers that ran for every cell, [B, cells]; None if it was not counted."""
    return None if ctx.computed is None else ctx.computed.take(sum(block.num_sublayers for block in model.stack))


def as_measured(plan: StagePlan, ctx: ForwardContext) -> StagePlan:
    """Returns the plan with the token counts that its spans found at run time."""
    measured, ctx.measured = ctx.measured, {}
    return replace(plan, spans=tuple(measured.get(span.layers, span) for span in plan.spans)) if measured else plan


def revised(model: NextScaleModel, revise: Revise, codes: Tensor, tokens: Tokens) -> Tensor:
    """Returns the codes of `tokens` as changed by `revise`, which gets the stage's whole grid."""
    stage = tokens.stage
    name, shown = f"what revise returns for stage {stage.index}", tokens.move(codes, Tokens(stage))
    changed = checked_codes(name, revise(stage, shown), model, stage, len(shown))
    changed = Tokens(stage).move(changed, tokens)  # values for other cells are ignored
    require_known([changed], name, model)
    return changed


def run_blocks(
    model: NextScaleModel, x: Tensor, tokens: Tokens, ctx: ForwardContext, plan: StagePlan, guidance: ResolvedGuidance, run: MethodRun
) -> Tensor:
    """Runs all blocks in order; a plan's spans run groups of them."""
    blocks = model.stack
    spans = {span.layers.start: span for span in plan.spans}
    for start, stop in pairwise(boundaries(len(blocks), plan, guidance)):
        segment = blocks[start:stop]
        with reporting(segment, x, tokens, ctx):
            if start in spans:
                shape, x = x.shape, spans[start](segment, x, tokens, ctx)
                if x.shape != shape:
                    raise SettingError(
                        f"the span {spans[start].key} must return [rows, tokens, channels] {[*shape]} as it got; got {[*x.shape]}. Guided"
                        " requests have two rows per image."
                    )
            elif start in plan.observed:
                x = observed(blocks[start], x, tokens, ctx, run)
            else:
                x = run_in_order(segment, x, tokens, ctx)
        if stop - 1 in guidance.layers:
            x = guidance.on_hidden(x, tokens.stage, tokens.branch_size(ctx.batch))
    return x


@contextmanager
def reporting(segment: Sequence[Block], x: Tensor, tokens: Tokens, ctx: ForwardContext) -> Iterator[None]:
    """Counts the sublayers of a segment as computed for all tokens that enter, unless a span has reported its own count."""
    if ctx.computed is None:
        yield
        return
    ctx.computed.reported = False
    yield
    if not ctx.computed.reported:
        ctx.computed.add(tokens, x, sum(block.num_sublayers for block in segment))


def boundaries(depth: int, plan: StagePlan, guidance: ResolvedGuidance) -> list[int]:
    """Returns the block numbers at which segments end: around spans and observed blocks, and after guided ones.

    If one cfg branch runs alone, a span may contain guided blocks.
    """
    spans = {edge for span in plan.spans for edge in (span.layers.start, span.layers.stop)}
    observed = {edge for layer in plan.observed for edge in (layer, layer + 1)}
    guided = {layer + 1 for layer in guidance.layers} if plan.cfg_branches == "both" else set()
    return sorted({0, depth} | spans | observed | guided)


def observed(block: Block, x: Tensor, tokens: Tokens, ctx: ForwardContext, run: MethodRun) -> Tensor:
    """Returns the block's output, and shows it to the method with its input."""
    out = block(x, tokens, ctx)
    run.observe(block.layer, x, out, tokens)
    return out


def require_finite(failed: Sequence[int], stages: int) -> None:
    """Raises NonFiniteLogits if a stage has failed."""
    if failed:
        raise NonFiniteLogits(
            f"the network's output was NaN or infinite at stage {failed[0]} of {stages}. In float16 this is overflow:"
            " load the model with dtype=torch.bfloat16 or float32, or lower a large `guidance`. Otherwise the weights file is damaged or"
            " belongs to another model."
        )
