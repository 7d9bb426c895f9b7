"""Measures the decoder layer by layer in CUDA graphs: time, MACs, bytes and the ratio to the roofline.

    python -m benchmarks.decode [--model nano --size 512 --batch 32] [--out FILE]

Without options: nano at 512 x 512, batch 32, and infinity-2b at 1024 x 1024, batch 4. Images are decoded in groups, as in
`tokenizers.tiles`; times are per image. Rows after the layers measure alternative implementations, whose results are compared first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nextscale import kernels
from nextscale.eval.results import append_rows
from nextscale.loading.load import fill_random
from nextscale.loading.presets import build_tokenizer, model_spec
from nextscale.tokenizers import autoencoder, tiles
from nextscale.tokenizers.autoencoder import Decoder, ResidualBlock, Upsample, module_to_channels_last
from nextscale.tokenizers.layers import NormAct, add_residual_, to_channels_last, upsample_nearest, without_bias
from nextscale.tokenizers.tiles import decode, images_at_a_time, stride

from .results import measure, options, require_gpu

if TYPE_CHECKING:
    from nextscale.kernels.group_norm import Sums

FLOPS, BYTES = 790e12, 4.3e12  # per second, of a large matrix product and a copy in bfloat16 on an H200
CASES = (("nano", 512, 32), ("infinity-2b", 1024, 4))
TILES = ((4096, 2), (4096, 4), (8192, 4), (8192, 8), (16384, 8))  # bytes and warps; see kernels/norm_conv.py
BOUND = 2e-2  # maximum relative error between two implementations in bfloat16
WARM_UPS, REPLAYS = 2, 15


def captured_ms(run: Callable[[], Any]) -> float:
    """Returns the median time of a CUDA graph of `run`, which excludes host time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    times = []
    for number in range(-WARM_UPS, REPLAYS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        if number >= 0:
            times.append(begun.elapsed_time(ended))
    return statistics.median(times)


@dataclass(frozen=True)
class Step:
    """An operation of the decoder with its inputs."""

    name: str
    run: Callable[[], Tensor]
    macs: int = 0
    bytes: int = 0

    @property
    def roofline_us(self) -> float:
        return 1e6 * max(2 * self.macs / FLOPS, self.bytes / BYTES)


def convolution(name: str, conv: nn.Conv2d, x: Tensor) -> Step:
    pixels = x.shape[0] * x.shape[2] * x.shape[3]
    written = pixels * conv.out_channels * x.element_size()
    return Step(name, lambda: without_bias(conv, x, conv.padding), pixels * conv.weight.numel(), x.nbytes + written)  # type: ignore[arg-type]


class Walk:
    """Runs a decoder and records its operations."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def do(self, step: Step) -> Tensor:
        self.steps.append(step)
        return step.run()

    def norm(self, name: str, norm: NormAct, x: Tensor, shift: Tensor | None = None, sums: Sums | None = None) -> Tensor:
        return self.do(Step(name, lambda: norm.fused(x, shift, sums), bytes=(3 if sums is None else 2) * x.nbytes))

    def block(self, name: str, block: ResidualBlock, x: Tensor, sums: Sums | None = None) -> tuple[Tensor, Sums]:
        inner = self.do(convolution(f"{name} conv1", block.conv1, self.norm(f"{name} norm1", block.norm1, x, sums=sums)))
        out = self.do(convolution(f"{name} conv2", block.conv2, self.norm(f"{name} norm2", block.norm2, inner, block.conv1.bias)))
        residual, bias = x, None
        if isinstance(block.shortcut, nn.Conv2d):
            residual, bias = self.do(convolution(f"{name} shortcut", block.shortcut, x)), block.shortcut.bias
        found = add_residual_(out, block.conv2, residual, bias)
        self.steps.append(Step(f"{name} add", lambda: add_residual_(out, block.conv2, residual, bias).parts, bytes=3 * out.nbytes))
        self.steps.append(Step(f"{OTHER}{name} add, no sums", partial(add_only, out, block.conv2, residual, bias), bytes=3 * out.nbytes))
        return out, found

    def upsample(self, name: str, resize: Upsample, x: Tensor) -> Tensor:
        macs = 4 * x.numel() * 4 * resize.conv.out_channels
        out = self.do(Step(f"{name} transposed", lambda: resize.without_bias(x), macs, 5 * x.nbytes))
        self.steps += other_upsampling(name, resize.conv, x, out)
        return out

    def decoder(self, decoder: Decoder, z: Tensor) -> None:
        x = decoder.conv_in(to_channels_last(z))
        for number, block in enumerate(part for part in decoder.middle if isinstance(part, ResidualBlock)):
            x, _ = self.block(f"middle {number}", block, x)
        for place, level in enumerate(decoder.stack):
            sums: Sums | None = None
            for number, block in enumerate(level.stack):
                x, sums = self.block(f"level {place} block {number}", block, x, sums)
            if isinstance(level.resize, Upsample):
                x = self.upsample(f"level {place}", level.resize, x)
        macs = x.numel() * 9 * decoder.conv_out.out_channels
        self.steps += other_image(decoder, x, self.do(Step("norm, conv out", lambda: decoder.image(x, sums), macs, x.nbytes)))


OTHER = "instead: "


def add_only(y: Tensor, conv: nn.Conv2d, residual: Tensor, bias: Tensor | None) -> Tensor:
    assert conv.bias is not None
    return kernels.add_bias_residual_(y, conv.bias, residual, bias)


def sums_unknown(y: Tensor, conv: nn.Conv2d, residual: Tensor, bias: Tensor | None) -> None:
    add_only(y, conv, residual, bias)


def other_upsampling(name: str, conv: nn.Conv2d, x: Tensor, expected: Tensor) -> Iterator[Step]:
    """Yields upsampling and convolution as separate steps, with nine multiplications per pixel instead of four."""
    macs, moved = 9 * expected.numel() * conv.in_channels, 9 * x.nbytes + expected.nbytes
    step = Step(f"{OTHER}{name} upsample, conv", lambda: without_bias(conv, upsample_nearest(x), 1), macs, moved)
    require_close(step, expected)
    yield step


def other_image(decoder: Decoder, x: Tensor, expected: Tensor) -> Iterator[Step]:
    """Yields norm and convolution as separate steps, with three output channels and with eight, a size that suits tensor cores better."""
    norm, conv = decoder.norm_out, decoder.conv_out
    wide = nn.Conv2d(conv.in_channels, 8, 3, padding=1, device=x.device, dtype=x.dtype)
    for narrow, padded in zip(conv.parameters(), wide.parameters(), strict=True):
        padded.data.zero_()[:3] = narrow
    for convolving in (conv, module_to_channels_last(wide)):
        step = convolution(f"{OTHER}norm, then conv out to {convolving.out_channels}", convolving, x)
        step = replace(step, run=partial(apart, norm, convolving, x), bytes=step.bytes + 3 * x.nbytes)
        require_close(step, expected)
        yield step
    for tile, warps in TILES:
        step = Step(f"{OTHER}tiles of {tile} bytes, {warps} warps", partial(tiled, decoder, x, tile, warps), 0, 2 * x.nbytes)
        require_close(step, expected)
        yield step


def tiled(decoder: Decoder, x: Tensor, tile: int, warps: int) -> Tensor:
    """Runs the kernel of `decoder.image` with another tile size."""
    from nextscale.kernels import norm_conv

    norm, conv = decoder.norm_out, decoder.conv_out
    assert conv.bias is not None
    with set_to(norm_conv, "TILE", tile), set_to(norm_conv, "WARPS", warps):
        return norm_conv.group_norm_silu_conv(x, norm.num_groups, norm.weight, norm.bias, norm.eps, conv.weight, conv.bias)


def apart(norm: NormAct, conv: nn.Conv2d, x: Tensor) -> Tensor:
    return conv(norm(x))[:, :3]


def require_close(step: Step, expected: Tensor) -> None:
    found = step.run().double()
    error = ((found - expected.double()).norm() / expected.double().norm()).item()
    if not error < BOUND:
        raise ArithmeticError(f"{step.name} differs by {error:.2e}")


def timed(model: str, size: int, batch: int) -> dict[str, Any]:
    with torch.device("meta"):
        tokenizer = build_tokenizer(model_spec(model).tokenizer)
    fill_random(tokenizer, torch.Generator("cuda").manual_seed(0), torch.bfloat16, tokenizer.float32)
    decoder = module_to_channels_last(tokenizer).decoder
    assert isinstance(decoder, Decoder)
    side = size // stride(decoder)
    z = torch.randn(batch, decoder.conv_in.in_channels, side, side, device="cuda").bfloat16()
    together = images_at_a_time(decoder, z.shape, z.dtype, None)
    layers = {}
    print(f"{model}, {size} px, {together} images at a time; microseconds per image")
    walk = Walk()
    walk.decoder(decoder, z[:together])
    for step in walk.steps:
        us, least = 1000 * captured_ms(step.run) / together, step.roofline_us / together
        layers[step.name] = {"us": round(us, 2), "roofline_us": round(least, 2), "gmacs": round(step.macs / together / 1e9, 3)}
        layers[step.name] |= {"mb": round(step.bytes / together / 1e6, 2)}
        print(f"{step.name:>34} {us:9.1f} {least:9.1f} {us / least:6.1f}x  {step.macs / together / 1e9:8.2f} GMAC", flush=True)
    own = [row for name, row in layers.items() if not name.startswith(OTHER)]
    found = {
        **whole_times(decoder, z),
        "layers_ms": round(sum(row["us"] for row in own) / 1000, 4),
        "roofline_ms": round(sum(row["roofline_us"] for row in own) / 1000, 4),
        "gmacs": round(sum(row["gmacs"] for row in own), 2),
    }
    print(found, flush=True)
    return found | {"together": together, "layers": layers}


def whole_times(decoder: Decoder, z: Tensor) -> dict[str, float]:
    """Returns the milliseconds per image of the whole decoder: unchanged, with fused steps separated, and for several group sizes."""

    def whole() -> float:
        return round(captured_ms(lambda: decode(decoder, z)) / len(z), 4)

    found = {"whole_ms": whole()}
    with set_to(Upsample, "without_bias", lambda resize, x: without_bias(resize.conv, upsample_nearest(x), 1)):
        found["whole_upsample_apart_ms"] = whole()
    with set_to(Decoder, "image", lambda decoder, x, sums: apart(decoder.norm_out, decoder.conv_out, x)):
        found["whole_conv_out_apart_ms"] = whole()
    with set_to(autoencoder, "add_residual_", sums_unknown):
        found["whole_sums_apart_ms"] = whole()
    for together in (1, 2, 4, 8, 16, 32):
        if together <= len(z):
            with set_to(tiles, "images_at_a_time", lambda *given, together=together: together):
                found[f"whole_{together}_at_a_time_ms"] = whole()
    return found


@contextmanager
def set_to(owner: ModuleType | type, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@torch.inference_mode()
def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    require_gpu(parser, "kernels are measured")
    for model, size, batch in CASES if args.model is None else ((args.model, args.size, args.batch),):
        config = {"model": model, "size": [size, size], "batch": batch, "dtype": "bfloat16"}
        row = measure("decode", config, partial(timed, model, size, batch))
        append_rows([row], args.out)
        if "error" in row:
            print(row["error"])


if __name__ == "__main__":
    main()
