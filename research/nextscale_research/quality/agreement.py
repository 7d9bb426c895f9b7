"""Agreement of images with their prompts: linear probes of EfficientNet features name style and label.

A probe errs on real images too: its accuracy on real images that it was not trained on is the most that a generator can reach, and stands
beside every use. A probe measures a network's view of an image, which may differ from a person's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nextscale.errors import CheckpointError, SettingError
from nextscale.io import regular, replacing

from ..metrics.efficientnet import FEATURES, EfficientNetLite0
from .prompts import EvalPrompt

SIDE = 256  # pixels, to which real images are brought before their features are taken
FEATURES_BATCH = 64
TOP = 5
ATTRIBUTES = ("style", "label")
PROBE_TENSORS = ("mean", "scale", "weight", "bias")

Flags = Tensor  # [N] booleans


@dataclass(frozen=True, eq=False)
class Probe:
    """A linear classifier of standardized features."""

    classes: tuple[str, ...]
    mean: Tensor  # [D]
    scale: Tensor  # [D]
    weight: Tensor  # [C, D]
    bias: Tensor  # [C]

    @staticmethod
    def train(
        features: Tensor, labels: Sequence[str], *, epochs: int = 20, decay: float = 0.05, smoothing: float = 0.1, seed: int = 0
    ) -> Probe:
        """Fits features [N, D] with a label for each; takes a few seconds for 24,000 images."""
        classes = tuple(sorted(set(labels)))
        if len(labels) != len(features) or len(classes) < 2:
            raise SettingError(
                f"a probe is trained on images of two or more classes; got {len(features)} feature vectors,"
                f" {len(labels)} labels and {len(classes)} classes"
            )
        numbers = {name: number for number, name in enumerate(classes)}
        target = torch.tensor([numbers[label] for label in labels], device=features.device)
        mean, scale = features.float().mean(dim=0), features.float().std(dim=0) + 1e-3
        x = (features.float() - mean) / scale
        weight = torch.zeros(len(classes), x.shape[1], device=x.device, requires_grad=True)
        bias = torch.zeros(len(classes), device=x.device, requires_grad=True)
        generator = torch.Generator().manual_seed(seed)
        size = min(1024, len(x))
        steps = epochs * (len(x) // size)
        optimizer = torch.optim.AdamW([weight, bias], lr=3e-3, weight_decay=decay)
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
        with torch.enable_grad():
            for _ in range(epochs):
                order = torch.randperm(len(x), generator=generator).to(x.device)
                for part in order[: len(x) // size * size].split(size):
                    loss = F.cross_entropy(F.linear(x[part], weight, bias), target[part], label_smoothing=smoothing)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    rate.step()
        return Probe(classes, mean, scale, weight.detach(), bias.detach())

    def scores(self, features: Tensor) -> Tensor:
        """Logits [N, C] of features [N, D]."""
        return F.linear((features.to(self.mean) - self.mean) / self.scale, self.weight, self.bias)

    def knows(self, labels: Sequence[str | None]) -> Flags:
        return torch.tensor([label in self.classes for label in labels])

    def hits(self, features: Tensor, labels: Sequence[str], top: int = 1) -> Flags:
        """Returns True for images whose label, one of the classes, is among the `top` best scores of each image."""
        target = torch.tensor([self.classes.index(label) for label in labels])
        best = self.scores(features).topk(min(top, len(self.classes)), dim=1).indices.cpu()
        return (best == target[:, None]).any(dim=1)

    def checked(self) -> Probe:
        """The probe itself; raises ValueError unless it fits the network's features and its numbers make sense."""
        tensors = {name: getattr(self, name) for name in PROBE_TENSORS}
        classes = len(self.classes)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        expected = {"mean": (FEATURES,), "scale": (FEATURES,), "weight": (classes, FEATURES), "bias": (classes,)}
        if shapes != expected:
            raise ValueError(f"{classes} classes of {FEATURES} features were expected, and it has {shapes}")
        if not all(tensor.isfinite().all() for tensor in tensors.values()) or (self.scale <= 0).any():
            raise ValueError("it has values that are not finite, or a scale that is not positive")
        return self

    def to(self, device: torch.device | str) -> Probe:
        return Probe(self.classes, *(tensor.to(device) for tensor in (self.mean, self.scale, self.weight, self.bias)))


@dataclass(frozen=True, eq=False)
class Agreement:
    """Probes of styles and of labels, and how often each is right about real images that it was not trained on."""

    probes: Mapping[str, Probe]
    real: Mapping[str, float]  # by the names that `hits` uses

    @staticmethod
    def train(features: Tensor, prompts: Sequence[EvalPrompt], held_features: Tensor, held_prompts: Sequence[EvalPrompt]) -> Agreement:
        """Fits one vector of features per prompt; vectors of `held_prompts`, which are held out, show how good the probes are."""
        probes = {}
        for attribute in ATTRIBUTES:
            labels = [getattr(prompt, attribute) for prompt in prompts]
            known = [index for index, label in enumerate(labels) if label is not None]
            probes[attribute] = Probe.train(features[known], [labels[index] for index in known])
        hits = Agreement(probes, {}).hits(held_features, held_prompts)
        return Agreement(probes, {name: round(float(flags.double().mean()), 4) for name, (flags, _) in hits.items() if len(flags)})

    def hits(self, features: Tensor, prompts: Sequence[EvalPrompt]) -> dict[str, tuple[Flags, Tensor]]:
        """Returns the images that agree, for style, label and label_top5, among those whose class the probe knows; and their numbers."""
        found = {}
        for attribute, probe in self.probes.items():
            labels = [getattr(prompt, attribute) for prompt in prompts]
            known = probe.knows(labels).nonzero()[:, 0]
            asked = [labels[index] for index in known.tolist()]
            names = {attribute: 1} if attribute == "style" else {attribute: 1, f"{attribute}_top{TOP}": TOP}
            for name, top in names.items():
                found[name] = (probe.hits(features[known.to(features.device)], asked, top), known)
        return found

    def save(self, file: str | Path) -> None:
        """Writes one safetensors file, weights in float16."""
        tensors = {
            f"{attribute}.{name}": getattr(probe, name).half().contiguous().cpu()
            for attribute, probe in self.probes.items()
            for name in PROBE_TENSORS
        }
        classes = {attribute: probe.classes for attribute, probe in self.probes.items()}
        with replacing(Path(file)) as temporary:
            temporary.touch()
            usual_mode = temporary.stat().st_mode
            save_file(tensors, temporary, metadata={"classes": json.dumps(classes), "real": json.dumps(dict(self.real))})
            temporary.chmod(usual_mode)  # safetensors leaves its files readable by the owner only

    @staticmethod
    def load(file: str | Path, device: torch.device | str = "cpu") -> Agreement:
        try:
            with safe_open(regular(Path(file)), framework="pt") as stored:
                metadata = stored.metadata() or {}
                classes, real = json.loads(metadata["classes"]), json.loads(metadata["real"])
                probes = {
                    attribute: Probe(tuple(names), *(stored.get_tensor(f"{attribute}.{name}").float() for name in PROBE_TENSORS)).checked()
                    for attribute, names in classes.items()
                }
            if not {*probes} <= {*ATTRIBUTES} or not all(isinstance(share, float | int) for share in real.values()):
                raise ValueError(f"it has probes of {', '.join(probes)} with the shares {real}")
        except (OSError, SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{file} must be a file of probes ({error}); train one: `python -m nextscale_research quality --data SHARD --probe {file}`"
            ) from error
        return Agreement({attribute: probe.to(device) for attribute, probe in probes.items()}, real)


def real_features(network: EfficientNetLite0, prompts: Sequence[EvalPrompt], augmented: bool = False) -> Tensor:
    """Features of the prompts' real images, [N, 1280]; augmented: images are mirrored, cropped and blurred a little, at random."""
    device = network.fc.weight.device
    generator = torch.Generator().manual_seed(0)
    found = []
    for images in _image_batches(prompts):
        varied = torch.cat([vary(image, generator) for image in images.split(1)]) if augmented else images
        found.append(network.features(varied.to(device)))
    return torch.cat(found)


def vary(image: Tensor, generator: torch.Generator) -> Tensor:
    """An image [1, 3, S, S] mirrored or not, cropped to 88 % or more of its side, and blurred by a detour over half the side or more."""
    mirror, cut, across, down, blur = torch.rand(5, generator=generator).tolist()
    side = image.shape[-1]
    left_side = round(side * (0.88 + 0.12 * cut))
    top, left = (round((side - left_side) * share) for share in (down, across))
    image = image[:, :, top : top + left_side, left : left + left_side]
    reduced = round(side * (0.5 + 0.5 * blur))
    image = F.interpolate(image.flip(3) if mirror < 0.5 else image, (reduced, reduced), mode="bicubic", antialias=True)
    return F.interpolate(image, (side, side), mode="bicubic").clamp(-1, 1)


def _image_batches(prompts: Sequence[EvalPrompt]) -> Iterator[Tensor]:
    if any(prompt.encoded is None for prompt in prompts):
        raise SettingError("features of real images need their images: give .tar shards, which hold them")
    with ThreadPoolExecutor() as threads:
        for first in range(0, len(prompts), FEATURES_BATCH):
            yield torch.cat(list(threads.map(lambda prompt: prompt.image(SIDE), prompts[first : first + FEATURES_BATCH])))
