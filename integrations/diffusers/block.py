"""Block of diffusers' modular pipelines that generates images with nextscale.

pipe = ModularPipeline.from_pretrained("integrations/diffusers", trust_remote_code=True)
pipe.load_components()
images = pipe(prompt="a 3D icon of a red apple", seed=7, output="images")
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.modular_pipelines import ComponentSpec, InputParam, ModularPipeline, ModularPipelineBlocks, OutputParam, PipelineState
from PIL import Image

import nextscale
from nextscale.validation import is_int

COMPONENT = "next_scale"
DEFAULT_MODEL = "nano"


class NextScalePipeline:
    """Component that loads a nextscale pipeline by model name or from a folder written by `save_pretrained`."""

    @classmethod
    def from_pretrained(
        cls, source: str, subfolder: str | None = None, variant: str | None = None, revision: str | None = None, **options: Any
    ) -> nextscale.Pipeline:
        """Loads a pipeline. options: arguments of `nextscale.load`. Subfolders, variants and revisions do not exist here."""
        given = {"subfolder": subfolder, "variant": variant, "revision": revision}
        if unused := [name for name, value in given.items() if value]:
            raise nextscale.NextscaleError(f"{', '.join(unused)}: not supported by nextscale. Give the name of a model or its folder.")
        return nextscale.Pipeline.from_pretrained(source, **options)


class NextScaleBlock(ModularPipelineBlocks):
    """Block from prompts or class numbers to images."""

    model_name = "nextscale"

    @property
    def description(self) -> str:
        return "Generates images with a next-scale model: VAR, FlexVAR, Infinity, HART, STAR or nano."

    @property
    def expected_components(self) -> list[ComponentSpec]:
        return [
            ComponentSpec(
                COMPONENT,
                type_hint=NextScalePipeline,
                description="A nextscale pipeline",
                pretrained_model_name_or_path=DEFAULT_MODEL,
            )
        ]

    @property
    def inputs(self) -> list[InputParam]:
        return [
            InputParam("prompt", required=True, description="A prompt or a list of prompts; for class models, class numbers"),
            InputParam("negative_prompt", description="Negative prompt: one for all images, or one per prompt"),
            InputParam("guidance_scale", type_hint=float, description="Guidance scale; default: of the model"),
            InputParam("seed", description="Image i uses seed + i, or the i-th seed of a list"),
            InputParam("generator", type_hint=torch.Generator, description="One random generator for the whole batch, instead of a seed"),
            InputParam("num_images_per_prompt", type_hint=int, default=1, description="Images per prompt"),
            InputParam("height", type_hint=int, description="In pixels, together with width"),
            InputParam("width", type_hint=int, description="In pixels, together with height"),
            InputParam("aspect", type_hint=str, description='Width and height such as "16:9", instead of height and width'),
            InputParam("method", description='Acceleration method, such as "stagevar"; default: dense'),
        ]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [
            OutputParam("images", type_hint=list[Image.Image], description="The images"),
            OutputParam("report", type_hint=nextscale.Report, description="Time, tokens and memory of the request"),
        ]

    @torch.no_grad()
    def __call__(self, components: ModularPipeline, state: PipelineState) -> tuple[ModularPipeline, PipelineState]:
        asked = self.get_block_state(state)
        pipeline = getattr(components, COMPONENT)
        if pipeline is None:
            remedy = f"Call load_components(), or update_components({COMPONENT}=nextscale.load(...))"
            raise nextscale.NextscaleError(f"no model is loaded. {remedy}.")
        prompt, negative = repeated(asked.prompt, asked.negative_prompt, asked.num_images_per_prompt)
        output = pipeline(
            prompt,
            seed=chosen_seed(asked.seed, asked.generator),
            negative=negative,
            guidance=asked.guidance_scale,
            size=chosen_size(asked.height, asked.width),
            aspect=asked.aspect,
            method=asked.method,
        )
        asked.images, asked.report = output.images, output.report
        self.set_block_state(state, asked)
        return components, state


def repeated(prompt: Any, negative: Any, images: int) -> tuple[Any, Any]:
    """Repeats every entry of the prompts and negative prompts `images` times. A single negative prompt applies to all images."""
    if not is_int(images, 1):
        raise nextscale.NextscaleError(f"num_images_per_prompt must be an int of at least 1; got {images!r}.")
    if images == 1:
        return prompt, negative
    prompts = prompt if isinstance(prompt, list | tuple) else [prompt]
    if isinstance(negative, list | tuple) and len(negative) > 1:
        if len(negative) != len(prompts):
            expected = f"one prompt or a list of {len(prompts)}, one per prompt"
            raise nextscale.NextscaleError(f"negative_prompt must be {expected}; got a list of {len(negative)}.")
        negative = [one for one in negative for _ in range(images)]
    return [one for one in prompts for _ in range(images)], negative


def chosen_seed(seed: Any, generator: torch.Generator | None) -> Any:
    if generator is None:
        return seed
    if seed is not None:
        raise nextscale.NextscaleError("seed and generator cannot be given together. Give one of them.")
    if not isinstance(generator, torch.Generator):
        raise nextscale.NextscaleError(
            f"generator must be one torch.Generator; got a {type(generator).__name__}. For one seed per image, pass a list as seed."
        )
    return generator


def chosen_size(height: int | None, width: int | None) -> tuple[int, int] | None:
    if (height is None) != (width is None):
        raise nextscale.NextscaleError(f"height and width must be given together; got height {height} and width {width}.")
    return None if height is None or width is None else (height, width)
