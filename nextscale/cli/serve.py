"""`nextscale serve`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from ..errors import MissingExtra, SettingError
from ..loading.load import choose_device, load
from ..loading.presets import model_spec
from ..methods.registry import resolve_method
from ..pipeline import Pipeline
from .groups import grouped
from .options import (
    DEFAULT_MODEL,
    MACHINE,
    MODEL_HELP,
    CombinedMethods,
    DtypeName,
    KvDtypeName,
    OffloadText,
    QuantizeName,
    RayOptions,
    TextEncoderSource,
    TokenizerFile,
    Weights,
    as_kv_dtype,
    as_quantize,
    as_torch_dtype,
)
from .parse import settled_method
from .program import app

BATCHING, NETWORK, LIMITS = "Batching", "Network and security", "Limits"  # panels of the help


@dataclass(frozen=True)
class ServedOptions:
    """Which models, and where they run."""

    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", metavar="NAME", show_default=DEFAULT_MODEL, help=f"{MODEL_HELP}; can be repeated."),
    ] = None
    weights: Weights = None
    tokenizer: TokenizerFile = None
    text_encoder: TextEncoderSource = None
    offload_text: OffloadText = False
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            rich_help_panel=MACHINE,
            show_default="cuda if there is a GPU",
            help="cpu, cuda or cuda:N; repeat it to generate on several GPUs.",
        ),
    ] = None
    dtype: DtypeName = None
    quantize: QuantizeName = None
    kv_dtype: KvDtypeName = None
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="NAME=MODEL", help="A further name of a model, for clients that ask for it; can be repeated."),
    ] = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.model or [DEFAULT_MODEL]))

    def require_known(self) -> None:
        """Wrong names and devices are refused before anything is loaded."""
        for name in self.names:
            model_spec(name)
        for device in self.device or ():
            choose_device(device)
        if len(self.names) > 1 and (self.weights or self.tokenizer or self.text_encoder):
            raise SettingError(
                "--weights, --tokenizer and --text-encoder are files of one model: serve one, or put the files where NEXTSCALE_HOME says"
            )

    def load(self, name: str, device: str | None) -> Pipeline:
        return load(
            name,
            weights=self.weights,
            tokenizer=self.tokenizer,
            text_encoder=self.text_encoder,
            offload_text=self.offload_text,
            device=device,
            dtype=as_torch_dtype(self.dtype),
            quantize=as_quantize(self.quantize),
            kv_dtype=as_kv_dtype(self.kv_dtype),
        )


@dataclass(frozen=True)
class BatchingOptions:
    """How requests are joined."""

    max_batch: Annotated[int, typer.Option("--max-batch", metavar="N", min=1, rich_help_panel=BATCHING, help="Images per batch.")] = 8
    batch_delay_ms: Annotated[
        float,
        typer.Option("--batch-delay-ms", metavar="MS", min=0, rich_help_panel=BATCHING, help="How long a first image waits for company."),
    ] = 5.0
    max_queue: Annotated[
        int,
        typer.Option("--max-queue", metavar="N", min=1, rich_help_panel=BATCHING, help="Images that may wait; then clients get 429."),
    ] = 64
    same_images: Annotated[
        bool,
        typer.Option(
            "--same-images",
            rich_help_panel=BATCHING,
            help="Fill every batch up, so that an image is the same alone and in company, bit for bit; alone it takes as long as a batch.",
        ),
    ] = False
    warmup: Annotated[
        list[str] | None,
        typer.Option(
            "--warmup",
            metavar="WxH:B,B",
            rich_help_panel=BATCHING,
            help="Sizes and batches to generate before the server is ready, such as 1024x1024:1,4; on a GPU this captures CUDA graphs.",
        ),
    ] = None


@dataclass(frozen=True)
class NetworkOptions:
    """Where the server listens, and to whom."""

    host: Annotated[str, typer.Option("--host", metavar="HOST", rich_help_panel=NETWORK, help="0.0.0.0 opens it to other machines.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option("--port", metavar="PORT", min=0, max=65535, rich_help_panel=NETWORK, help="0: any.")] = 8000
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file", metavar="FILE", rich_help_panel=NETWORK, help="Keys that clients send as bearer tokens, one per line."
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        typer.Option("--cors-origin", metavar="ORIGIN", rich_help_panel=NETWORK, help="Pages of this origin may call; can be repeated."),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", rich_help_panel=NETWORK, help="A name of this server besides localhost."),
    ] = None
    log_prompts: Annotated[bool, typer.Option("--log-prompts", rich_help_panel=NETWORK, help="Write prompts into the log.")] = False


@dataclass(frozen=True)
class LimitOptions:
    """What a request may take."""

    request_timeout: Annotated[
        float,
        typer.Option("--request-timeout", metavar="SECONDS", min=0.001, rich_help_panel=LIMITS, help="When a request is given up."),
    ] = 300.0
    shutdown_timeout: Annotated[
        float,
        typer.Option(
            "--shutdown-timeout", metavar="SECONDS", min=0.001, rich_help_panel=LIMITS, help="What accepted requests have after SIGTERM."
        ),
    ] = 30.0
    max_images: Annotated[int, typer.Option("--max-images", metavar="N", min=1, max=10, rich_help_panel=LIMITS, help="Per request.")] = 10
    max_pixels: Annotated[
        int, typer.Option("--max-pixels", metavar="N", min=1, rich_help_panel=LIMITS, help="Per request, of all its images.")
    ] = 10 * 1024 * 1024
    max_prompt: Annotated[int, typer.Option("--max-prompt", metavar="N", min=1, rich_help_panel=LIMITS, help="Characters of a prompt.")] = (
        2000
    )


@app.command()
@grouped
def serve(
    *,
    model: ServedOptions,
    method: CombinedMethods = None,
    batching: BatchingOptions,
    network: NetworkOptions,
    limits: LimitOptions,
    on_ray: RayOptions,
) -> None:
    """Serve images over HTTP, as OpenAI's clients ask for them, with a studio at /."""
    model.require_known()
    ray = on_ray.settings()
    named = " + ".join(method or ["dense"])
    chosen = resolve_method(named)
    for spec, device in product(map(model_spec, model.names), model.device or (None,)):
        settled_method(chosen, spec, spec.settings.schedules.choose(None, None), 1, choose_device(device), model.weights)
    require_packages()
    from ..serve.run import serve as run
    from ..serve.service import Content, Warmup
    from ..serve.settings import Limits, ServeSettings, parse_aliases, read_api_keys

    warmups = tuple(map(Warmup.parse, batching.warmup or ()))
    for warmup in warmups:
        if not any(warmup.size in model_spec(name).settings.schedules.offers() for name in model.names):
            raise SettingError(f"--warmup {warmup.size[1]}x{warmup.size[0]}: no model that is served has this size")
    settings = ServeSettings(
        host=network.host,
        port=network.port,
        max_batch=batching.max_batch,
        batch_delay=batching.batch_delay_ms / 1000,
        max_queue=batching.max_queue,
        same_images=batching.same_images,
        request_timeout=limits.request_timeout,
        shutdown_timeout=limits.shutdown_timeout,
        api_keys=() if network.api_key_file is None else read_api_keys(network.api_key_file),
        cors_origins=tuple(network.cors_origin or ()),
        allowed_hosts=tuple(network.allow_host or ()),
        log_prompts=network.log_prompts,
        limits=Limits(prompt_chars=limits.max_prompt, images=limits.max_images, pixels=limits.max_pixels),
    )
    devices: tuple[str | None, ...] = tuple(model.device) if model.device else (None,)
    aliases = parse_aliases(model.alias or [], model.names)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    content = Content(model.names, devices, model.load, aliases, named, warmups)
    if ray is None:
        run(content, settings)
        return
    from ..serve.ray import RayServer, serve_on_ray

    serve_on_ray(RayServer(content, settings, ray))


def require_packages() -> None:
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        try:
            import_module(package)
        except ImportError as error:
            raise MissingExtra(f"`nextscale serve` needs the package {package}: pip install 'nextscale[serve]'") from error
