"""Stages arrive coarse to fine: look at the image after each of them, and stop early if you have seen enough."""

import nextscale

pipe = nextscale.load("nano")


def show(preview: nextscale.Preview) -> None:
    stage = preview.done.stage
    image = preview.images()[0]  # decodes the image so far
    image.save(f"stage{stage.index:02}.png")
    print(f"stage {stage.index}: {stage.height}x{stage.width} tokens, {sum(image.convert('L').histogram()[:32])} dark pixels")


class Enough(Exception):
    pass


def stop_at_the_fourth(preview: nextscale.Preview) -> None:
    if preview.done.stage.index == 3:
        raise Enough


pipe("a 3D icon of a red apple", seed=7, size=128, on_stage=show)
try:
    pipe("a 3D icon of a red apple", seed=7, size=128, on_stage=stop_at_the_fourth)
except Enough:
    print("stopped after the fourth stage; the pipeline can be used again")
