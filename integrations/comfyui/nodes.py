"""ComfyUI nodes: Load, Accelerate, Generate, Edit, Stages, Compute mask."""

from __future__ import annotations

from collections.abc import Callable

import comfy.model_management
import torch
from comfy_api.latest import ComfyAPISync, io

import nextscale
from nextscale.errors import SettingError
from nextscale.methods import method_names
from nextscale.methods.registry import resolve_method

from .values import Loaded, as_comfy, darkened, mask_as_comfy, profile_method, read_prompts, read_size, stages_as_comfy

CATEGORY = "nextscale"
ASPECTS = ("model's own", "1:1", "4:3", "3:2", "16:9", "2:1", "3:4", "2:3", "9:16", "1:2")
DTYPES = ("default", "float32", "bfloat16", "float16")
SEEDS = 2**32  # browsers represent these numbers exactly

Pipeline = io.Custom("NEXTSCALE_PIPELINE")
Generated = io.Custom("NEXTSCALE_RESULT")


def model_names() -> list[str]:
    """Returns the models with released weights."""
    return [name for name, spec in nextscale.MODELS.items() if spec.weights is not None]


class NextScaleLoad(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="NextScaleLoad",
            display_name="Load (nextscale)",
            category=CATEGORY,
            description="Loads a next-scale model by name and downloads missing files.",
            inputs=[
                io.Combo.Input("model", options=model_names(), default="nano"),
                io.Combo.Input("dtype", options=list(DTYPES), default="default", tooltip="bfloat16 on a GPU, float32 on the CPU"),
                io.Boolean.Input("download", default=True, tooltip="Download missing files; off: fail and list them"),
                io.Boolean.Input("offload_text", default=False, tooltip="Keep the text encoder in CPU memory while it is not used"),
                io.String.Input("folder", default="", optional=True, tooltip="Folder written by save_pretrained, instead of the model"),
            ],
            outputs=[Pipeline.Output("pipeline", display_name="pipeline")],
        )

    @classmethod
    def execute(cls, model: str, dtype: str, download: bool, offload_text: bool, folder: str = "") -> io.NodeOutput:
        precision = None if dtype == "default" else getattr(torch, dtype)
        loaded = nextscale.Pipeline.from_pretrained(folder or model, dtype=precision, download=download, offload_text=offload_text)
        return io.NodeOutput(Loaded(loaded))


class NextScaleAccelerate(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="NextScaleAccelerate",
            display_name="Accelerate (nextscale)",
            category=CATEGORY,
            description="Adds a training-free acceleration method. Chain several nodes to combine methods.",
            inputs=[
                Pipeline.Input("pipeline"),
                io.Combo.Input("method", options=[*method_names(), "profile"], default="stagevar"),
                io.String.Input("settings", default="", tooltip="Such as last=2 for skip, or tau=0.6 for sparsevar"),
                io.String.Input("profile", default="", optional=True, tooltip="File of a tuning profile, for the method 'profile'"),
                io.Int.Input("point", default=0, min=0, max=1000, optional=True, tooltip="Index of the point in the profile"),
            ],
            outputs=[Pipeline.Output("accelerated", display_name="pipeline")],
        )

    @classmethod
    def execute(cls, pipeline: Loaded, method: str, settings: str, profile: str = "", point: int = 0) -> io.NodeOutput:
        settings = settings.strip()
        if method == "profile":
            if settings:
                raise SettingError(f"settings must be empty with the method profile; got {settings!r}. Points have their own settings.")
            method = profile_method(pipeline.pipeline, profile, point)
        accelerated = pipeline.accelerated(f"{method}:{settings}" if settings else method)
        resolve_method(accelerated.methods)  # raises its errors here and not in Generate
        return io.NodeOutput(accelerated)


def shown_stages(stages: int | None, preview: bool) -> Callable[[nextscale.Preview], None]:
    """Returns what shows each stage; `stages` is their number, None where the image decides it."""
    progress = ComfyAPISync().execution

    def on_stage(shown: nextscale.Preview) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        picture, stage = shown.images()[0] if preview else None, shown.done.stage
        most = stages or (stage.index + (1 if stage.last else 2))
        progress.set_progress(value=stage.index + 1, max_value=most, preview_image=picture)

    return on_stage


def told(output: nextscale.Output) -> str:
    report = output.report
    return f"{report.model}, {report.method}: {report.seconds:.2f} s, {report.cost_share:.0%} of the MACs of dense generation"


class NextScaleGenerate(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="NextScaleGenerate",
            display_name="Generate (nextscale)",
            category=CATEGORY,
            description="Generates images from a prompt, with a preview after each stage.",
            inputs=[
                Pipeline.Input("pipeline"),
                io.String.Input(
                    "prompt", multiline=True, default="a 3D icon of a red apple", tooltip="Prompt; for class models, a class number"
                ),
                io.String.Input("negative", multiline=True, default="", tooltip="Negative prompt"),
                io.Int.Input("seed", default=0, min=0, max=SEEDS, control_after_generate=True, tooltip="Image i uses seed + i"),
                io.Int.Input("images", default=1, min=1, max=64),
                io.Combo.Input("aspect", options=list(ASPECTS), default=ASPECTS[0]),
                io.String.Input(
                    "size", default="", tooltip="WIDTHxHEIGHT, the side of a square, or a budget such as 0.25M; empty: the model's default"
                ),
                io.Float.Input("guidance", default=-1.0, min=-1.0, max=50.0, step=0.1, tooltip="-1: the model's default"),
                io.Boolean.Input("preview", default=True, tooltip="Decode and show every stage"),
                io.Boolean.Input(
                    "compute_mask", default=False, tooltip="Record where the network ran, for the node Compute mask (slower on a GPU)"
                ),
            ],
            outputs=[
                io.Image.Output("image", display_name="image"),
                Generated.Output("result", display_name="result"),
                io.String.Output("report", display_name="report"),
            ],
        )

    @classmethod
    def execute(
        cls,
        pipeline: Loaded,
        prompt: str,
        negative: str,
        seed: int,
        images: int,
        aspect: str,
        size: str,
        guidance: float,
        preview: bool,
        compute_mask: bool,
    ) -> io.NodeOutput:
        model, chosen_aspect = pipeline.pipeline, None if aspect == ASPECTS[0] else aspect
        schedule = model.settings.schedules.choose(read_size(size), chosen_aspect)
        output = model(
            read_prompts(model, "prompt", prompt, images),
            seed=seed,
            negative=read_prompts(model, "negative", negative, images) if negative.strip() else None,
            size=schedule,
            guidance=None if guidance < 0 else guidance,
            method=pipeline.methods,
            compute_mask=compute_mask,
            keep_stages=True,
            on_stage=shown_stages(len(schedule), preview),
        )
        return io.NodeOutput(as_comfy(output.pixels), output, told(output))


class NextScaleEdit(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="NextScaleEdit",
            display_name="Edit (nextscale)",
            category=CATEGORY,
            description="Changes images inside a mask, or all over without one. Pixels outside the mask stay as they are.",
            inputs=[
                Pipeline.Input("pipeline"),
                io.Image.Input("image"),
                io.Mask.Input("mask", optional=True, tooltip="White changes; empty, or none: everything"),
                io.String.Input("prompt", multiline=True, default="a 3D icon of a red apple", tooltip="For class models a class number"),
                io.Int.Input("seed", default=0, min=0, max=SEEDS, control_after_generate=True, tooltip="Image i takes seed + i"),
                io.Float.Input("strength", default=0.0, min=0.0, max=1.0, step=0.05, tooltip="Share of changed stages; 0: by the mask"),
                io.Int.Input("grow", default=0, min=0, max=256, tooltip="Pixels by which the mask grows"),
                io.Boolean.Input("hide", default=True, tooltip="Fill the hole from its surroundings; off: keep its coarse color"),
                io.Boolean.Input("preview", default=True, tooltip="Decode and show every stage"),
            ],
            outputs=[
                io.Image.Output("edited", display_name="image"),
                Generated.Output("result", display_name="result"),
                io.String.Output("report", display_name="report"),
            ],
        )

    @classmethod
    def execute(
        cls,
        pipeline: Loaded,
        image: torch.Tensor,
        prompt: str,
        seed: int,
        strength: float,
        grow: int,
        hide: bool,
        preview: bool,
        mask: torch.Tensor | None = None,
    ) -> io.NodeOutput:
        model = pipeline.pipeline
        mask = mask if mask is not None and mask.any() else None  # ComfyUI gives an image without alpha a mask of zeros
        fill = None if mask is None else "surroundings" if hide else "original"
        output = model.edit(
            2 * image.permute(0, 3, 1, 2) - 1,
            read_prompts(model, "prompt", prompt, len(image)),
            mask=None if mask is None else mask[:, None],
            strength=strength or None,
            options=nextscale.EditOptions(grow=grow, fill=fill),
            seed=seed,
            method=pipeline.methods,
            keep_stages=True,
            on_stage=shown_stages(None, preview),
        )
        return io.NodeOutput(as_comfy(output.pixels), output, told(output))


class NextScaleStages(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="NextScaleStages",
            display_name="Stages (nextscale)",
            category=CATEGORY,
            description="Decodes the image after every stage, as one batch.",
            inputs=[Generated.Input("result")],
            outputs=[io.Image.Output("stages", display_name="stages")],
        )

    @classmethod
    def execute(cls, result: nextscale.Output) -> io.NodeOutput:
        return io.NodeOutput(stages_as_comfy(result))


class NextScaleComputeMask(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="NextScaleComputeMask",
            display_name="Compute mask (nextscale)",
            category=CATEGORY,
            description="Shows the share of the network that ran in every part of the image. The picture is dark where less ran.",
            inputs=[Generated.Input("result"), io.Int.Input("stage", default=-1, min=-32, max=31, tooltip="-1 is the last")],
            outputs=[io.Mask.Output("mask", display_name="mask"), io.Image.Output("picture", display_name="picture")],
        )

    @classmethod
    def execute(cls, result: nextscale.Output, stage: int) -> io.NodeOutput:
        mask = mask_as_comfy(result, stage)
        return io.NodeOutput(mask, darkened(as_comfy(result.pixels), mask))


NODES = (NextScaleLoad, NextScaleAccelerate, NextScaleGenerate, NextScaleEdit, NextScaleStages, NextScaleComputeMask)
