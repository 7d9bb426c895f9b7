"""The same prompts and seeds with several methods: time, MACs, distance from the dense image, and where each method computed less."""

from PIL import Image

import nextscale

pipe = nextscale.load("nano")
prompts = ["a 3D icon of a red apple", "a flat icon of a rocket"]
settings = {"seed": 7, "size": 128, "compute_mask": True}

dense = pipe(prompts, **settings)
for name in ("dense", "skip:last=1", "sparsevar:metric=logits,tau=0.9", "fastvar", "stagevar"):
    out = pipe(prompts, method=name, **settings)
    change = (out.pixels - dense.pixels).abs().mean().item() / 2  # pixels are between -1 and 1
    print(f"{out.report.method:40} {out.report.seconds:6.2f} s   MACs {out.report.cost_share:4.0%}   mean change {change:.1%}")

    label = name.partition(":")[0]
    out.images[0].save(f"{label}.png")
    mask = out.compute_mask[-1][0]  # of the last stage, of the first image: the share of the network that ran for every cell, [h, w]
    levels = (255 * mask.cpu()).byte().numpy()
    Image.fromarray(levels).resize((128, 128), Image.Resampling.NEAREST).save(f"{label}-mask.png")
