"""The networks whose features describe images, each with the preprocessing of its field."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nextscale.errors import CheckpointError, MissingExtra
from nextscale.io import from_levels

from .efficientnet import EfficientNetLite0
from .files import CLIP, DINOV2, EFFICIENTNET, INCEPTION, metric_file, metric_folder

SIDE = 224
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP_COLORS = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
INCEPTION_FEATURES = 2048


@dataclass(frozen=True, eq=False)
class Network:
    """Images [B, 3, H, W] in 8 bits, of any size, to features [B, D]; for the logits of Inception see `inception`."""

    name: str
    fingerprint: str  # of its weights
    features: Callable[[Tensor], Tensor]
    text: Callable[[Sequence[str]], Tensor] | None = None  # CLIP: prompts to features of the same space


def efficientnet(given: Path | None, device: torch.device) -> Network:
    file = metric_file(EFFICIENTNET, given)
    network = EfficientNetLite0.load(file, device)
    return Network("efficientnet", fingerprint(file), lambda levels: network.features(from_levels(levels)))


def inception(given: Path | None, device: torch.device) -> Network:
    """Features of FID followed by logits without bias, [B, 2048 + 1008], by torch-fidelity's network."""
    file = metric_file(INCEPTION, given)
    expected, found = file.stem.rpartition("-")[2], fingerprint(file)
    if not found.startswith(expected):  # torch-fidelity unpickles the given file
        raise CheckpointError(f"{file} is not the published file: its sha256 begins with {found[:8]}, not {expected}. Download it again")
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except Exception as error:  # besides a missing package, a torchvision that does not fit the torch that is installed
        raise MissingExtra(
            f"FID's network is torch-fidelity's, which cannot be imported ({error}): pip install 'nextscale[eval]', with the torchvision"
            f" that belongs to torch {torch.__version__}; or choose --metric fd-efficientnet"
        ) from error
    network = FeatureExtractorInceptionV3("inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path=str(file))
    network = network.to(device)
    return Network("inception", found, lambda levels: torch.cat(network(levels), dim=1))


def dinov2(given: Path | None, device: torch.device) -> Network:
    """The class token of DINOv2, of images resized to 224 x 224 pixels, as Stein et al. (2023) use it."""
    folder = metric_folder(DINOV2, given)
    network = _transformer("AutoModel", folder).to(device)

    def features(levels: Tensor) -> Tensor:
        return network(pixel_values=normalized(resized(levels, (SIDE, SIDE)), *IMAGENET)).last_hidden_state[:, 0]

    return Network("dinov2", _fingerprint_of(folder), features)


def clip(given: Path | None, device: torch.device) -> Network:
    """Image and text features of CLIP; the short side is resized to 224 pixels and the center is cut out."""
    folder = metric_folder(CLIP, given)
    network = _transformer("CLIPModel", folder).to(device)
    tokenizer = _transformer("AutoTokenizer", folder)
    side = network.config.vision_config.image_size

    def features(levels: Tensor) -> Tensor:
        cut = central(levels, side)
        return projected(network.get_image_features(pixel_values=normalized(cut, *CLIP_COLORS)))

    def text(prompts: Sequence[str]) -> Tensor:
        longest = network.config.text_config.max_position_embeddings
        tokens = tokenizer(list(prompts), padding=True, truncation=True, max_length=longest, return_tensors="pt").to(device)
        return projected(network.get_text_features(**tokens))

    return Network("clip", _fingerprint_of(folder), features, text)


NETWORKS: dict[str, Callable[[Path | None, torch.device], Network]] = {
    "inception": inception,
    "dinov2": dinov2,
    "efficientnet": efficientnet,
    "clip": clip,
}


def projected(found: Any) -> Tensor:
    """CLIP's projection, which newer versions of transformers return inside an object."""
    return found if isinstance(found, Tensor) else found.pooler_output


def resized(levels: Tensor, size: tuple[int, int]) -> Tensor:
    """8 bits to [0, 1], bicubic."""
    unit = levels.float() / 255
    if tuple(unit.shape[2:]) == size:
        return unit
    return F.interpolate(unit, size, mode="bicubic", align_corners=False, antialias=True).clamp(0, 1)


def central(levels: Tensor, side: int) -> Tensor:
    height, width = levels.shape[2:]
    factor = side / min(height, width)
    unit = resized(levels, (max(side, round(height * factor)), max(side, round(width * factor))))
    top, left = ((length - side) // 2 for length in unit.shape[2:])
    return unit[:, :, top : top + side, left : left + side]


def normalized(unit: Tensor, mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    return (unit - unit.new_tensor(mean).view(3, 1, 1)) / unit.new_tensor(deviation).view(3, 1, 1)


def fingerprint(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _fingerprint_of(folder: Path) -> str:
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise CheckpointError(f"{folder} holds no .safetensors file: download model.safetensors; other forms are not read")
    return hashlib.sha256("".join(map(fingerprint, weights)).encode()).hexdigest()


def _transformer(kind: str, folder: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("DINOv2 and CLIP are read by transformers: pip install 'nextscale[eval]'") from error
    try:
        if kind == "AutoTokenizer":
            return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        network = getattr(transformers, kind).from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} cannot be loaded ({str(error).splitlines()[0]}): download its files again") from error
    return network.eval().requires_grad_(False)
