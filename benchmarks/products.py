"""Matrix products in every format and form, for the shapes of a model's blocks: microseconds inside a captured graph.

    python -m benchmarks.products [--dim 2048] [--hidden 8192] [--tokens 16 64 288 800 1152 3200 8192] [--out FILE]

Forms: "bfloat16"; "fp8", one scale per tensor, which is what models run; "fp8 rows", one scale per token and output; "int8 kernel" with
several tiles; "int8 torch", torch's own kernel, where it has one for this device; "int8 restored", weights made whole and multiplied by
torch. Weights of several layers take turns, as in a model, so that they do not come from the second cache. Then what the inputs cost:
the norm and the attention that write e4m3 against those that do not, and gelu with rounding.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nextscale.kernels.e4m3 import E4M3
from nextscale.lab.results import Row
from nextscale.models.quantized import Fp8Linear, Int8Linear, scaled_product

from .results import measure, options, record, require_gpu

LAYERS = 8  # whose weights take turns: 100 MB and more of bfloat16
ROUNDS = 20


def microseconds(runs: Sequence[Callable[[], Any]]) -> float:
    """Median time of one of these launches, all of them one after another in a captured graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs:  # compiled, and libraries have chosen
            run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [run() for run in runs]
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    del kept
    return round(1000 * sorted(times)[ROUNDS // 2] / len(runs), 2)


def by_rows(x: Tensor, linear: Fp8Linear, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return torch._scaled_mm(x, linear.codes.t(), scale_a, scale_b, bias=linear.bias, out_dtype=linear.dtype, use_fast_accum=True)


def product_times(tokens: int, channels: int, outputs: int) -> dict[str, float]:
    from nextscale.kernels.int8 import Tile, int8_linear, tile_for

    weights = [torch.randn(outputs, channels, device="cuda", dtype=torch.bfloat16) / channels**0.5 for _ in range(LAYERS)]
    bias = nn.Parameter(torch.randn(outputs, device="cuda", dtype=torch.bfloat16), requires_grad=False)
    x = torch.randn(tokens, channels, device="cuda", dtype=torch.bfloat16)
    found = {"bfloat16": microseconds([partial(F.linear, x, weight, bias) for weight in weights])}
    fp8, rounded = [Fp8Linear.of(weight, bias) for weight in weights], x.to(E4M3)
    found["fp8"] = microseconds([partial(scaled_product, rounded, linear) for linear in fp8])
    scale_a, scale_b = torch.ones(tokens, 1, device="cuda"), torch.ones(1, outputs, device="cuda")
    found["fp8 rows"] = microseconds([partial(by_rows, rounded, linear, scale_a, scale_b) for linear in fp8])
    int8 = [Int8Linear.of(weight, bias) for weight in weights]
    found["int8 restored"] = microseconds([lambda one=one: F.linear(x, one.restored_weight(x.dtype), bias) for one in int8])
    with suppress(NotImplementedError, RuntimeError):  # not every version has it
        scaled = [(one.codes, one.scale.to(x.dtype)) for one in int8]
        found["int8 torch"] = microseconds([partial(torch._weight_int8pack_mm, x, codes, scale) for codes, scale in scaled])
    if tokens <= 1152:
        tiles = {
            tile_for(tokens, outputs),
            Tile(16, 32, 128, 4, 4),
            Tile(64, 32, 128, 4, 3),
            Tile(64, 64, 64, 4, 4),
            Tile(128, 64, 64, 8, 3),
        }
        for tile in sorted(tiles):
            runs = [partial(int8_linear, x, one.codes, one.scale, bias, tile=tile) for one in int8]
            found[f"int8 kernel {'x'.join(map(str, tile))}"] = microseconds(runs)
        found["int8 kernel"] = min(time for name, time in found.items() if name.startswith("int8 kernel"))
    return found


def input_times(tokens: int, dim: int, hidden: int) -> dict[str, float]:
    from nextscale.kernels.norm import norm_modulate, residual_norm_modulate
    from nextscale.kernels.quantize import gelu_to_e4m3, round_to_e4m3

    maps = [torch.randn(2, tokens // 2, dim, device="cuda", dtype=torch.bfloat16) for _ in range(2 * LAYERS)]
    wide = [torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    scale, shift, gain = (torch.randn(2, 1, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    pairs = list(zip(maps[::2], maps[1::2], strict=True))
    found = {}
    for name, e4m3_scale in (("bfloat16", None), ("fp8", 1.0)):
        modulated = {"e4m3_scale": e4m3_scale}
        found[f"norm {name}"] = microseconds([partial(norm_modulate, x, scale, shift, **modulated) for x in maps])
        found[f"residual norm {name}"] = microseconds(
            [partial(residual_norm_modulate, x, gain, update, scale, shift, **modulated) for x, update in pairs]
        )
    found["round"] = microseconds([partial(round_to_e4m3, x, 1.0) for x in maps])
    found["gelu"] = microseconds([partial(gelu_to_e4m3, x, 1.0) for x in wide])
    return found


def rows(args: argparse.Namespace) -> Iterator[Row]:
    shapes = ((args.dim, 3 * args.dim), (args.dim, args.dim), (args.dim, args.hidden), (args.hidden, args.dim))
    for tokens in args.tokens:
        for channels, outputs in shapes:
            config = {"tokens": tokens, "channels": channels, "outputs": outputs, "dtype": "bfloat16"}
            yield measure(
                "products", config, lambda config=config: {"us": product_times(config["tokens"], config["channels"], config["outputs"])}
            )
        config = {"tokens": tokens, "channels": args.dim, "outputs": args.hidden, "dtype": "bfloat16"}
        yield measure("product inputs", config, lambda tokens=tokens: {"us": input_times(tokens, args.dim, args.hidden)})


@torch.inference_mode()
def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 288, 800, 1152, 3200, 8192])
    args = parser.parse_args()
    require_gpu(parser, "products are measured")
    record(rows(args), args.out)


if __name__ == "__main__":
    main()
