"""Seeds belong to images: an image is the same alone, in any batch and in any order."""

import torch

import nextscale

pipe = nextscale.load("nano")
prompts = ["a flat icon of a rocket", "a 3D icon of a tree"]

batch = pipe(prompts, seed=[10, 20], size=128)  # one seed per image; seed=10 alone would mean 10 and 11
alone = pipe(prompts[1], seed=20, size=128)
same = all(torch.equal(codes[1], own[0]) for codes, own in zip(batch.codes, alone.codes, strict=True))
print("the tree in a batch has the codes of the tree alone:", same)

variants = pipe(prompts[0], seed=[1, 2, 3], size=128)  # one prompt, several seeds: several images
for seed, image in zip(variants.report.seeds, variants.images, strict=True):
    image.save(f"rocket-{seed}.png")

fresh = pipe(prompts[0], size=128)  # no seed: a fresh one, which the report knows
print("to get this image again: seed =", fresh.report.seeds[0])
