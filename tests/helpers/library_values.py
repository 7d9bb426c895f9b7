"""Values of torchmetrics and torch-fidelity for the same images: `python -m tests.helpers.library_values FOLDER` writes values.json there.

It runs in its own process with a stand-in for torchvision, which both libraries import for networks and data sets. The stand-in only
provides the layouts of AlexNet and VGG16.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

INCEPTION_ROW = ("fid", "precision", "recall", "inception_score")
VGG16 = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")


def vgg16(weights: Any = None) -> nn.Module:
    layers: list[nn.Module] = []
    dim = 3
    for item in VGG16:
        if isinstance(item, str):
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers += [nn.Conv2d(dim, item, 3, padding=1), nn.ReLU()]
            dim = item
    network = nn.Module()
    network.features = nn.Sequential(*layers)
    return network


def alexnet(weights: Any = None) -> nn.Module:
    pool, relu = (lambda: nn.MaxPool2d(3, 2)), nn.ReLU
    network = nn.Module()
    network.features = nn.Sequential(
        *(nn.Conv2d(3, 64, 11, stride=4, padding=2), relu(), pool(), nn.Conv2d(64, 192, 5, padding=2), relu(), pool()),
        *(nn.Conv2d(192, 384, 3, padding=1), relu(), nn.Conv2d(384, 256, 3, padding=1), relu()),
        *(nn.Conv2d(256, 256, 3, padding=1), relu(), pool()),
    )
    return network


def anything(name: str) -> type:
    """Replaces imported names that are not used."""
    if name.startswith("__"):
        raise AttributeError(name)
    return object


def composed(steps: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    return lambda image: reduce(lambda value, step: step(value), steps, image)


def stand_in(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []
    module.__dict__.update(members, __getattr__=anything)
    sys.modules[name] = module
    return module


def without_torchvision() -> None:
    weights = types.SimpleNamespace(DEFAULT=None)
    functional = stand_in(
        "torchvision.transforms.functional", pil_to_tensor=lambda image: torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
    )
    transforms = stand_in("torchvision.transforms", functional=functional, Compose=composed)
    datasets = stand_in("torchvision.datasets")
    models = stand_in("torchvision.models", vgg16=vgg16, alexnet=alexnet, VGG16_Weights=weights, AlexNet_Weights=weights)
    stand_in("torchvision", transforms=transforms, datasets=datasets, models=models, __version__="0")


class Given(nn.Module):
    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


def by_torchmetrics(folder: Path, given: dict[str, Tensor]) -> dict[str, Any]:
    from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure
    from torchmetrics.functional.image.dists import DISTSNetwork
    from torchmetrics.functional.image.lpips import _LPIPS
    from torchmetrics.image.fid import FrechetInceptionDistance
    from torchmetrics.image.inception import InceptionScore
    from torchmetrics.image.kid import KernelInceptionDistance

    ours, real, a, b = (given[name] for name in ("ours", "real", "a", "b"))
    fid = FrechetInceptionDistance(feature=Given(ours.shape[1]))
    kid = KernelInceptionDistance(feature=Given(ours.shape[1]), subsets=3, subset_size=len(ours))  # the whole set: nothing is random
    for metric in (fid, kid):
        metric.update(real.double() if metric is fid else real, real=True)
        metric.update(ours.double() if metric is fid else ours, real=False)
    score = InceptionScore(feature=Given(ours.shape[1]), splits=1)
    score.update(ours)
    unit_a, unit_b = ((image + 1) / 2 for image in (a, b))
    luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    gray_a, gray_b = ((image * luma).sum(1, keepdim=True) for image in (unit_a, unit_b))
    _, windows = structural_similarity_index_measure(gray_a, gray_b, data_range=1.0, reduction="none", return_full_image=True)
    inside = windows[..., 5:-5, 5:-5]  # its own mean has the windows that reach over the margin, too
    values: dict[str, Any] = {
        "fid": float(fid.compute()),
        "kid": float(kid.compute()[0]),
        "inception_score": float(score.compute()[0]),
        "psnr": peak_signal_noise_ratio(unit_a, unit_b, data_range=1.0, dim=(1, 2, 3), reduction="none").tolist(),
        "ssim": inside.mean(dim=(1, 2, 3)).tolist(),
    }
    network = DISTSNetwork()
    convolutions = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]
    for number, layer in enumerate(convolutions):
        layer.weight.data, layer.bias.data = given[f"dists.features.{number}.weight"], given[f"dists.features.{number}.bias"]
    network.alpha.data, network.beta.data = given["dists.alpha"], given["dists.beta"]
    values["dists"] = network(unit_a, unit_b).tolist()
    lpips = _LPIPS(net="alex", pretrained=False)  # its heads are torchmetrics' own
    weights = load_file(folder / "lpips.safetensors")
    layers = [layer for layer in lpips.net.modules() if isinstance(layer, nn.Conv2d)]
    for number, layer in enumerate(layers):
        layer.weight.data, layer.bias.data = (weights[f"features.{number}.{part}"].float() for part in ("weight", "bias"))
    from torchmetrics.functional.image import lpips as home

    heads = torch.load(Path(home.__file__).parent / "lpips_models" / "alex.pth", map_location="cpu", weights_only=True)
    lpips.load_state_dict(heads, strict=False)
    with torch.no_grad():
        values["lpips"] = lpips.eval()(a, b).flatten().tolist()
    return values


def random_inception(folder: Path) -> Path:
    """Weights of the network of FID, random, in a file that is named by its hash as the published one is."""
    from torch_fidelity import feature_extractor_inceptionv3 as home

    torch.manual_seed(0)
    saved: dict[str, Tensor] = {}
    nn.Module.load_state_dict, usual = (lambda self, *_, **__: saved.update(self.state_dict())), nn.Module.load_state_dict  # type: ignore
    home.load_state_dict_from_url = lambda *_, **__: {}
    home.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"])
    nn.Module.load_state_dict = usual  # type: ignore[method-assign]
    content = folder / "random.pth"
    torch.save(saved, content)
    return content.rename(folder / f"random-{hashlib.sha256(content.read_bytes()).hexdigest()[:8]}.pth")


def by_torch_fidelity(folder: Path, given: dict[str, Tensor]) -> dict[str, Any]:
    from torch_fidelity import calculate_metrics
    from torch_fidelity.metric_prc import calculate_precision_recall_full

    precision, recall = calculate_precision_recall_full(given["ours"], given["real"])
    values = {"precision": precision, "recall": recall}
    weights = random_inception(folder)
    found = calculate_metrics(
        input1=str(folder / "ours"),
        input2=str(folder / "real"),
        cuda=False,
        fid=True,
        isc=True,
        isc_splits=1,
        prc=True,
        kid=True,
        kid_subsets=2,
        kid_subset_size=8,
        feature_extractor="inception-v3-compat",
        feature_extractor_weights_path=str(weights),
        cache=False,
        verbose=False,
    )
    from nextscale.eval.folders import ImageFolder
    from nextscale_research.metrics.judges import NetworkJudge
    from nextscale_research.metrics.networks import inception

    device = torch.device("cpu")
    judge = NetworkJudge(inception(weights, device), ImageFolder(folder / "real"), device)
    row = judge.row(ImageFolder(folder / "ours"), lambda images: None)
    both = {"theirs": {name: float(value) for name, value in found.items()}, "ours": {name: row[name]["value"] for name in INCEPTION_ROW}}
    return values | {"whole": both}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    without_torchvision()
    given = load_file(folder / "given.safetensors")
    values = {"torchmetrics": by_torchmetrics(folder, given)}
    if importlib.util.find_spec("torch_fidelity") is not None:
        values["torch_fidelity"] = by_torch_fidelity(folder, given)
    (folder / "values.json").write_text(json.dumps(values))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
