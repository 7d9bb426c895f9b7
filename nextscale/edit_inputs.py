"""Images and masks of an edit: reading, fitting to a size, filling the hole, and the stage from which it changes."""

from __future__ import annotations

import math
import struct
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from .edit import Box, Edit, Paste, touched
from .errors import SettingError, SizeError
from .io import from_levels, to_levels
from .schedules import AspectLike, Schedules, SizeLike
from .stage import Schedule
from .tokenizers.base import Tokenizer
from .validation import is_fraction, is_int, require, require_choice, require_flags

MAX_CUT = 1 / 8  # of an image that is cropped to another aspect ratio
DEFAULT_STRENGTH = 0.6  # without a mask
MAX_PIXELS = 2**26  # of an image that is opened: 8192 x 8192
ROUNDING = 1e-5  # of pixels that were made from levels: a little less than a level is that level
WINDOW = 2  # cells a side that must fit into a mask
GRAY = 128.0  # level of a hole without surroundings

Fill = Literal["surroundings", "original"]


@dataclass(frozen=True)
class EditOptions:
    """Settings of an edit that few callers change.

    from_stage: index of the first stage that changes the image, instead of `strength`. Earlier stages keep its codes.
    fill: pixels under the mask when the image is encoded. "surroundings", the default with a mask, is an average of the pixels around it
        and lets nothing of the hidden ones through; "original" keeps their coarse color and layout.
    grow: pixels by which the mask grows.
    feather: width in pixels of the ramp inside the mask from the image to the generated pixels; None is one token, 0 is a hard edge.
    paste: put the result into the image, so that pixels outside the mask keep their 8-bit levels. False returns the decoded latent.
    padding_mask_crop: edit only the box around the mask and this number of pixels more, enlarged to the model's size, and paste the result
        back at the image's own size.
    near_mask: add `NearMask`, which leaves cells away from the mask out of late stages.
    """

    from_stage: int | None = None
    fill: Fill | None = None
    grow: int = 0
    feather: int | None = None
    paste: bool = True
    padding_mask_crop: int | None = None
    near_mask: bool = True

    def __post_init__(self) -> None:
        for name in ("from_stage", "feather", "padding_mask_crop"):
            value = getattr(self, name)
            require(value is None or is_int(value), name, "an int from 0, or None", value)
        require(is_int(self.grow), "grow", "a number of pixels from 0", self.grow)
        require_flags(self, "paste", "near_mask")
        if self.fill is not None:
            require_choice("fill", self.fill, get_args(Fill))


@dataclass(frozen=True, eq=False)
class EditInputs:
    """The images of an edit at the size of a schedule."""

    schedule: Schedule
    levels: Tensor  # [B, 3, H, W], uint8, with the hole filled
    mask: Tensor  # [B, 1, H, W], True where the image changes
    from_stage: tuple[int, ...]
    paste: Paste | None
    near_mask: bool  # late stages leave out cells away from the mask

    def __len__(self) -> int:
        return len(self.from_stage)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the result."""
        height, width = (self.levels if self.paste is None else self.paste.levels).shape[2:]
        return height, width

    @property
    def key(self) -> Hashable:
        """Equal for edits that can share a batch."""
        return self.schedule, self.size, self.from_stage, self.paste is None, self.near_mask

    @classmethod
    def joined(cls, several: Sequence[EditInputs]) -> EditInputs:
        """Returns edits with the same key as one."""
        first, pastes = several[0], [one.paste for one in several if one.paste is not None]
        paste = Paste.joined(pastes) if pastes else None
        levels, mask = (torch.cat([getattr(one, name) for one in several]) for name in ("levels", "mask"))
        return cls(first.schedule, levels, mask, tuple(stage for one in several for stage in one.from_stage), paste, first.near_mask)

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each image that changes."""
        return tuple(self.mask.float().mean(dim=(1, 2, 3)).tolist())

    @torch.inference_mode()
    def encoded(self, tokenizer: Tokenizer, continuous: bool) -> Edit:
        """Encodes the images. continuous: the latent of the last stage is completed by a residual (HART)."""
        schedule, device = self.schedule, tokenizer.device
        features = tokenizer.features(from_levels(self.levels.to(device)))
        codes, mask = tokenizer.quantize(features, schedule), self.mask.to(device)
        cells, gate = tuple(touched(mask, stage.size) for stage in schedule), touched(mask, tokenizer.map_size(schedule[-1]))
        first, paste = torch.tensor(self.from_stage, device=device), self.paste and self.paste.to(device)
        return Edit(tuple(codes), cells, gate, first, (features,) if continuous else (), paste)


# --- reading


def open_image(file: Path | BinaryIO, name: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Returns the decoded image of a PNG, JPEG or WEBP file, whatever it is called. Raises SettingError for any other file."""
    try:
        with Image.open(file, formats=("PNG", "JPEG", "WEBP")) as image:
            require(getattr(image, "n_frames", 1) == 1, name, "a still image", f"{getattr(image, 'n_frames', 1)} frames")
            size = f"{image.width}x{image.height}"
            require(image.width * image.height <= max_pixels, name, f"an image of at most {max_pixels} pixels", size)
            image.load()
            return image
    except (FileNotFoundError, SettingError):
        raise
    except (OSError, ValueError, SyntaxError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise SettingError(f"{name} must be a whole PNG, JPEG or WEBP file; {str(error) or type(error).__name__}.") from error


def read_image(image: Any) -> list[Tensor]:
    """Returns the 8-bit levels [3, H, W] of images: PIL, a list of them, or a tensor [B, 3, H, W] in [-1, 1]."""
    if isinstance(image, Tensor):
        image = image[None] if image.ndim == 3 else image
        require(image.ndim == 4 and image.shape[1] == 3 and image.numel(), "image", "a tensor [B, 3, H, W]", list(image.shape))
        require_range("image", image, -1, 1)
        return list(to_levels(image + ROUNDING).cpu())
    if isinstance(image, Sequence) and image and not isinstance(image, str):
        return [one for each in image for one in read_image(each)]
    require(isinstance(image, Image.Image), "image", "a PIL image, a list of images, or a tensor [B, 3, H, W] in [-1, 1]", image)
    return [levels_of(image)]


def levels_of(image: Image.Image) -> Tensor:
    """Returns 8-bit levels [3, H, W]: turned as EXIF says, over white where the image is transparent."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # which Pillow would clip at 255
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if has_alpha(image):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def has_alpha(image: Image.Image) -> bool:
    return "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info


def read_mask(mask: Any) -> list[Tensor]:
    """Returns masks [H, W] from 0 to 1: of PIL images without alpha (white is edited) or tensors [H, W], [1, H, W], [B, 1, H, W]."""
    if isinstance(mask, Tensor):
        require(mask.ndim in (2, 3, 4) and (mask.ndim == 2 or mask.shape[-3] == 1), "mask", "[H, W], [1, H, W] or [B, 1, H, W]", mask.shape)
        mask = mask.detach().cpu().float()
        require_range("mask", mask, 0, 1)
        return list(mask.reshape(-1, *mask.shape[-2:]))
    if isinstance(mask, Sequence) and mask and not isinstance(mask, str):
        return [one for each in mask for one in read_mask(each)]
    require(isinstance(mask, Image.Image), "mask", "a PIL image, a list of them, or a tensor in [0, 1]", mask)
    if has_alpha(mask):
        raise SettingError(
            "mask has an alpha channel, which may mean either part. nextscale.mask_from_alpha(image) edits the transparent part, as OpenAI"
            ' does; mask.convert("L") edits the white part.'
        )
    mask = ImageOps.exif_transpose(mask)
    return [torch.from_numpy(np.asarray(mask.convert("L"), dtype=np.float32) / 255)]


def require_range(name: str, values: Tensor, low: float, high: float) -> None:
    """Raises SettingError for NaN and for values outside the range."""
    least, most = float(values.min()), float(values.max())
    require(least >= low and most <= high and not values.isnan().any(), name, f"in [{low}, {high}]", f"{least:.4g} to {most:.4g}")


def mask_from_alpha(image: Image.Image) -> Image.Image:
    """Returns the mask in an image's alpha channel as OpenAI's clients send it: transparent pixels are edited."""
    require(has_alpha(image), "image", "an image with an alpha channel", image.mode)
    image = ImageOps.exif_transpose(image)
    return ImageOps.invert(image.convert("RGBA").getchannel("A"))


def expanded(image: Image.Image, left: int = 0, top: int = 0, right: int = 0, bottom: int = 0) -> tuple[Image.Image, Image.Image]:
    """Returns the image on a larger frame, and the mask of what was added: for out-painting by `pipe.edit`."""
    for name, side in {"left": left, "top": top, "right": right, "bottom": bottom}.items():
        require(is_int(side), name, "a number of pixels from 0", side)
    image = ImageOps.exif_transpose(image).convert("RGB")
    size = image.width + left + right, image.height + top + bottom
    wide, mask = Image.new("RGB", size), Image.new("L", size, 255)
    wide.paste(image, (left, top))
    mask.paste(0, (left, top, left + image.width, top + image.height))
    return wide, mask


# --- one size for all


def read_edit(
    image: Any,
    mask: Any,
    strength: float | None,
    options: EditOptions,
    schedules: Schedules,
    size: SizeLike,
    aspect: AspectLike,
    pixels: int,
) -> EditInputs:
    """Returns images and masks at the size of the schedule that fits them. pixels: of a token, along one side."""
    if isinstance(image, EditInputs):
        return image
    images = read_image(image)
    masks = [torch.ones(one.shape[1:]) for one in images] if mask is None else read_mask(mask)
    count = max(len(images), len(masks))
    if {len(images), len(masks)} - {1, count}:
        raise SettingError(f"mask must be one for all images, or one each; got {len(masks)} masks for {len(images)} images.")
    images, masks = (several * count if len(several) == 1 else several for several in (images, masks))
    if options.padding_mask_crop is not None and mask is None:
        raise SettingError("padding_mask_crop needs a mask: give one, or leave it out.")
    fill = options.fill or ("original" if mask is None else "surroundings")
    frames = []
    for levels, weight in zip(images, masks, strict=True):
        height, width = levels.shape[1:]
        if weight.shape != (height, width):
            raise SettingError(f"mask must have the size of its image, {width}x{height}; got {weight.shape[1]}x{weight.shape[0]}.")
        weight = grown(weight, options.grow)
        frames.append((filled(levels, weight > 0) if fill == "surroundings" else levels, weight))  # before hidden pixels are resampled
    crop = options.padding_mask_crop
    boxes = [Box(0, 0, *levels.shape[1:]) if crop is None else masked_box(weight, crop) for levels, weight in frames]
    schedule = fitting_schedule(schedules, size, aspect, boxes[0].size, pixels)
    if mask is not None and any(not weight.any() for _, weight in frames):
        warnings.warn("a mask selects nothing: that image is returned as it is", stacklevel=4)
    grid = schedule.grid[0] * pixels, schedule.grid[1] * pixels
    if crop is None:
        frames = [fitted(levels, weight, grid) for levels, weight in frames]
        boxes = [Box(0, 0, *grid)] * count
    else:
        boxes = [of_aspect(box, grid, levels.shape[1:]) for box, (levels, _) in zip(boxes, frames, strict=True)]
        if len({levels.shape for levels, _ in frames}) > 1:
            raise SettingError("padding_mask_crop needs images of one size: edit the others in calls of their own.")
    work = [cropped(levels, weight, box, grid) for (levels, weight), box in zip(frames, boxes, strict=True)]
    levels, inside = torch.stack([one for one, _ in work]), torch.stack([weight > 0 for _, weight in work])[:, None]
    first = first_stages(inside, schedule, strength, options.from_stage, mask is not None)
    feather = pixels if options.feather is None else options.feather
    weights = torch.stack([torch.minimum(ramp(weight > 0, feather), weight) for _, weight in frames])[:, None]
    paste = Paste(torch.stack([levels for levels, _ in frames]), weights, tuple(boxes)) if options.paste else None
    return EditInputs(schedule, levels, inside, first, paste, mask is not None and options.near_mask)


def fitting_schedule(schedules: Schedules, size: SizeLike, aspect: AspectLike, shape: tuple[int, int], pixels: int) -> Schedule:
    """Returns the schedule asked for; by default one of exactly this shape, or the default budget's nearest aspect ratio."""
    if size is not None or aspect is not None:
        return schedules.choose(size, aspect)
    if shape in schedules.offers():
        return schedules.choose(shape, None)
    try:
        return schedules.choose(None, shape[0] / shape[1])
    except SizeError:  # a model of square images, or an aspect ratio beyond all of them: `fitted` says what fits
        return schedules.choose(None, None)


def fitted(levels: Tensor, weight: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Resizes an image and its mask to cover a size, and crops them to the center."""
    height, width = levels.shape[1:]
    scale = max(size[0] / height, size[1] / width)
    across, down = size[1] / scale, size[0] / scale
    if 1 - across * down / (width * height) > MAX_CUT:
        raise SizeError(
            f"an image of {width}x{height} does not fit {size[1]}x{size[0]}: more than {MAX_CUT:.0%} would be cut off. Choose a size or an"
            f" aspect nearer to {width / height:.3g}:1, crop the image, or extend it with nextscale.expanded."
        )
    left, top = (width - across) / 2, (height - down) / 2
    return resized(levels, weight, (left, top, left + across, top + down), size)


def cropped(levels: Tensor, weight: Tensor, box: Box, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return resized(levels, weight, (box.left, box.top, box.right, box.bottom), size)


def resized(levels: Tensor, weight: Tensor, box: tuple[float, float, float, float], size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Returns a part of an image and, by area, of its mask at another size; unchanged where nothing has to be resampled."""
    height, width = levels.shape[1:]
    if box == (0, 0, width, height) and (height, width) == size:
        return levels, weight
    shape = size[1], size[0]
    picture = Image.fromarray(levels.permute(1, 2, 0).contiguous().numpy()).resize(shape, Image.Resampling.LANCZOS, box)
    mask = Image.fromarray(weight.numpy()).resize(shape, Image.Resampling.BOX, box)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1), torch.from_numpy(np.array(mask)).clamp(0, 1)


def masked_box(weight: Tensor, padding: int) -> Box:
    """Returns the smallest box around a mask [H, W], with padding, within the image; the whole image if the mask is empty."""
    rows, columns = (weight.any(dim=axis).nonzero().flatten().tolist() for axis in (1, 0))
    if not rows:
        return Box(0, 0, *weight.shape)
    (height, width), (top, bottom), (left, right) = weight.shape, (rows[0], rows[-1] + 1), (columns[0], columns[-1] + 1)
    return Box(max(0, top - padding), max(0, left - padding), min(height, bottom + padding), min(width, right + padding))


def of_aspect(box: Box, size: tuple[int, int], frame: Sequence[int]) -> Box:
    """Returns the box grown to the aspect ratio of `size`, within a frame (height, width)."""
    scale = max(box.size[0] / size[0], box.size[1] / size[1])
    sides = [min(round(scale * side), most) for side, most in zip(size, frame, strict=True)]
    if abs(math.log(sides[0] / sides[1] * size[1] / size[0])) > MAX_CUT:
        raise SizeError(
            f"the box around the mask, {box.size[1]}x{box.size[0]}, does not fit {size[1]}x{size[0]} within the image: choose a size or an"
            " aspect nearer to it, or less padding_mask_crop."
        )
    starts = [
        min(max(0, start - (side - own) // 2), most - side)
        for start, own, side, most in zip((box.top, box.left), box.size, sides, frame, strict=True)
    ]
    return Box(starts[0], starts[1], starts[0] + sides[0], starts[1] + sides[1])


# --- masks


def grown(mask: Tensor, pixels: int) -> Tensor:
    """Returns a mask [H, W] grown by a number of pixels, corners included."""
    if not pixels:
        return mask
    along = F.max_pool2d(mask[None], (1, 2 * pixels + 1), stride=1, padding=(0, pixels))
    return F.max_pool2d(along, (2 * pixels + 1, 1), stride=1, padding=(pixels, 0))[0]


def ramp(inside: Tensor, width: int) -> Tensor:
    """Returns weights [H, W] that rise from 1 / width at the edge of `inside` to 1, `width` pixels further in; the frame is not an edge."""
    depth, weight = inside.clone(), inside.short()
    for _ in range(width - 1):
        for axis, last in enumerate(side - 1 for side in inside.shape):  # a cell stays if both neighbors are inside
            before = depth.clone()
            depth.narrow(axis, 1, last).logical_and_(before.narrow(axis, 0, last))
            depth.narrow(axis, 0, last).logical_and_(before.narrow(axis, 1, last))
        weight += depth
    return weight.float() / max(width, 1)


def filled(levels: Tensor, hole: Tensor) -> Tensor:
    """Returns levels [3, H, W] with the hole [H, W] filled by averages of known pixels only, coarser ones further inside."""
    known = (~hole).float()[None, None]
    steps = [(levels * known, known)]
    while max(steps[-1][1].shape[2:]) > 1:
        total, share = (F.avg_pool2d(one, 2, ceil_mode=True, count_include_pad=False) for one in steps[-1])
        steps.append((total, share))
    found = torch.full((1, 3, 1, 1), GRAY)
    for total, share in reversed(steps):
        coarse = F.interpolate(found, size=share.shape[2:], mode="bilinear")
        found = torch.where(share > 0, total / share.clamp(min=torch.finfo(share.dtype).tiny), coarse)
    return torch.where(hole, found[0].round().to(torch.uint8), levels)


def first_stages(mask: Tensor, schedule: Schedule, strength: float | None, from_stage: int | None, masked: bool) -> tuple[int, ...]:
    """Returns the first stage that changes each image. mask [B, 1, H, W]."""
    stages = len(schedule)
    if strength is not None and from_stage is not None:
        raise SettingError("strength and from_stage both set the first stage: give one of them.")
    if from_stage is not None:
        require(from_stage < stages, "from_stage", f"a stage of this schedule, 0 to {stages - 1}", from_stage)
        return (from_stage,) * len(mask)
    if masked and strength is None:
        return tuple(default_stage(one[0], schedule) for one in mask)
    strength = DEFAULT_STRENGTH if strength is None else strength
    require(is_fraction(strength, above_zero=True), "strength", "a number above 0, at most 1", strength)
    return (min(int(stages - stages * strength), stages - 1),) * len(mask)


def default_stage(mask: Tensor, schedule: Schedule) -> int:
    """Returns the first stage of which a window of 2 x 2 cells fits into a mask [H, W]; the last one if none does.

    From stage 0 on the hole would ignore its surroundings, since the first tokens decide its color alone. Nano, 20 % masks, against the
    hidden pixels: 18.5 dB from stage 0, 22.4 from this one, 21.7 from stage 6, where the blur of the fill shows.
    """
    if mask.all():
        return 0
    height, width = mask.shape
    sums = F.pad(mask.int(), (1, 0, 1, 0)).cumsum(dim=0, dtype=torch.int32).cumsum(dim=1, dtype=torch.int32)
    for stage in schedule:
        down, across = math.ceil(WINDOW * height / stage.height), math.ceil(WINDOW * width / stage.width)
        if down <= height and across <= width:
            inside = sums[down:, across:] - sums[:-down, across:] - sums[down:, :-across] + sums[:-down, :-across]
            if bool((inside == down * across).any()):
                return stage.index
    return len(schedule) - 1
