"""The first image: load a model, give it a prompt, save the image.

python examples/first_image.py [PROMPT]
"""

import sys

import nextscale

prompt = " ".join(sys.argv[1:]) or "a 3D icon of a red apple"
pipe = nextscale.load("nano")  # in the package; on a GPU if there is one

out = pipe(prompt, seed=7, size=128)
out.images[0].save("apple.png")

print(f"{prompt!r}: {out.report.size[0]}x{out.report.size[1]} pixels in {out.report.seconds:.2f} s on {out.report.device}")
for stage in out.report.stages:
    print(f"  stage {stage.index}: {stage.height}x{stage.width} tokens, {1000 * stage.seconds:.1f} ms")
