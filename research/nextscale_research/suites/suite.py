"""The benchmarks by name: prompt set, images per prompt, layout, and how their authors' program is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nextscale.errors import PromptError, SettingError
from nextscale.offline.prompts import SAFE_ID, SamplePrompt, is_unicode

from . import layouts, prompts
from .layouts import Samples


@dataclass(frozen=True)
class Suite:
    """A benchmark that is scored by its authors' program, in an environment of its own."""

    name: str
    title: str
    prompt_set: str  # what --prompt-set names
    published: int  # prompts in the published set
    seeds: int  # images per prompt
    read: Callable[[Path], list[SamplePrompt]]
    layout: Callable[[Samples, Path], None]
    environment: str
    command: str  # FOLDER is the exported folder
    prints: str
    needs_file: bool = True  # there is a prompt set to read
    sampling: str = ""  # options of `nextscale sample` for Infinity, with which its authors and the papers run this benchmark

    @property
    def images(self) -> int:
        return self.published * self.seeds

    def sample_command(self, prompts: Path) -> str:
        """Returns the command that generates the images, with the settings of the papers for Infinity."""
        per_prompt = f" -n {self.seeds}" if self.seeds > 1 else ""
        infinity = f"  # Infinity: {self.sampling}" if self.sampling else ""
        return f"nextscale sample -m MODEL --method METHOD --prompts {prompts}{per_prompt} --out FOLDER{infinity}"

    def prompts(self, path: Path | None) -> list[SamplePrompt]:
        if self.needs_file and path is None:
            raise SettingError(f"{self.title} needs its prompt set: pass --prompt-set with the path of {self.prompt_set}")
        found = self.read(path or Path())
        if not found:
            raise SettingError(f"{path} holds no prompt of {self.title}: expected {self.prompt_set}")
        times = Counter(prompt.id for prompt in found)
        if unfit := [prompt for prompt in found if times[prompt.id] > 1 or not SAFE_ID.fullmatch(prompt.id) or not is_unicode(prompt.text)]:
            raise PromptError(
                f"{path}: the ids must differ and consist of up to 120 letters, digits, dots, underscores and dashes, and the prompts must"
                f" be Unicode; got {unfit[0].id!r:.80} with {unfit[0].text!r:.80}. Download {self.prompt_set} again"
            )
        return found


INFINITY = "--guidance 4 --temperature 1"

ALL = (
    Suite(
        "geneval",
        "GenEval",
        "evaluation_metadata.jsonl of djghosh13/geneval",
        553,
        4,
        prompts.from_lines,
        layouts.geneval,
        "conda, environment.yml of djghosh13/geneval; mmdet 2.27; evaluation/download_models.sh",
        "python evaluation/evaluate_images.py FOLDER --outfile results.jsonl --model-path DETECTOR;"
        " python evaluation/summary_scores.py results.jsonl",
        "share of correct images: single object, two objects, counting, colors, position, color attribution, overall",
        sampling=INFINITY,
    ),
    Suite(
        "geneval2",
        "GenEval 2",
        "geneval2_data.jsonl of facebookresearch/GenEval2",
        800,
        1,
        prompts.from_lines,
        layouts.geneval2,
        "torch, transformers 4.57, pillow, tqdm, scipy",
        "python evaluation.py --benchmark_data geneval2_data.jsonl --image_filepath_data FOLDER/image_paths.json --method soft_tifa_gm"
        " --output_file scores.json",
        "Soft-TIFA, mean over prompts; soft_tifa_analysis.py: by skill and by number of atoms",
    ),
    Suite(
        "dpg",
        "DPG-Bench",
        "the folder dpg_bench/prompts of TencentQQGYLab/ELLA",
        1065,
        4,
        prompts.from_text_folder,
        layouts.dpg,
        "requirements.txt of TencentQQGYLab/ELLA; modelscope with mPLUG",
        "PIC_NUM=4 bash dpg_bench/dist_eval.sh FOLDER 1024  # images of a prompt, and the side of one in pixels",
        "scores of the categories and the mean, from 0 to 100",
        sampling=INFINITY,
    ),
    Suite(
        "hpsv2",
        "HPSv2.1",
        "the folder with anime.json, concept-art.json, paintings.json and photo.json of HPSv2's benchmark",
        3200,
        1,
        prompts.from_hps,
        layouts.hps,
        "pip install hpsv2",
        "python -c \"import hpsv2; hpsv2.evaluate('FOLDER', hps_version='v2.1')\"",
        "mean score and deviation of the four styles",
        sampling=INFINITY,
    ),
    Suite(
        "imagereward",
        "ImageReward",
        "benchmark/benchmark-prompts.json of THUDM/ImageReward",
        100,
        10,
        prompts.from_records,
        layouts.image_reward,
        "pip install image-reward; a checkout of THUDM/ImageReward",
        "python test-benchmark.py --img_dir FOLDER --model all --benchmark ImageReward-v1.0",
        "a table with the mean reward",
        sampling=INFINITY,
    ),
    Suite(
        "mjhq",
        "MJHQ-30K",
        "meta_data.json of playgroundai/MJHQ-30K",
        30_000,
        1,
        prompts.from_mjhq,
        layouts.mjhq,
        "nextscale[eval], or pip install clean-fid",
        "nextscale evaluate FOLDER/people --real mjhq30k_imgs/people --metric fid",
        "FID of a category; clip-score of the folder that sample wrote",
        sampling=INFINITY,
    ),
    Suite(
        "coco",
        "COCO-30k",
        "annotations/captions_val2014.json of COCO (captions_val2017.json: 5,000 images)",
        30_000,
        1,
        prompts.from_coco,
        layouts.flat,
        "nextscale[eval]",
        "nextscale evaluate FOLDER --real val2014 --metric fid",
        "FID, KID, precision, recall, Inception score, with intervals",
    ),
    Suite(
        "imagenet",
        "ImageNet-50k",
        "no file: classes 0 to 999",
        1000,
        50,
        prompts.imagenet_classes,
        layouts.imagenet,
        "tensorflow and requirements.txt of openai/guided-diffusion/evaluations",
        "python evaluator.py VIRTUAL_imagenet256_labeled.npz FOLDER/samples.npz  # 512 px: VIRTUAL_imagenet512.npz",
        "Inception Score, FID, sFID, Precision, Recall",
        needs_file=False,
    ),
    Suite(
        "t2i-compbench",
        "T2I-CompBench",
        "examples/dataset of Karine-Huang/T2I-CompBench: a folder of the *_val.txt files, or one of them",
        2400,
        10,
        prompts.from_compbench,
        layouts.compbench,
        "requirements.txt of Karine-Huang/T2I-CompBench",
        "python BLIP_vqa.py --out_dir FOLDER/color_val (color, shape, texture); UniDet_eval and CLIPScore_eval for the other sets",
        "BLIP-VQA score of the set",
    ),
    Suite(
        "evalscope",
        "evalscope, any prompts",
        "a .jsonl file with prompt",
        0,
        1,
        prompts.from_lines,
        layouts.evalscope,
        "pip install 'evalscope[aigc]'",
        "run_task with datasets=['general_t2i'] and dataset_args={'general_t2i': {'dataset_id': 'FOLDER/samples.jsonl',"
        " 'metric_list': [...]}}",
        "a table of PickScore, CLIPScore, HPSv2.1Score, ImageReward, VQAScore, MPS, ... as chosen",
    ),
)
SUITES: Mapping[str, Suite] = {one.name: one for one in ALL}


def suite(name: str) -> Suite:
    if name not in SUITES:
        raise SettingError(f"suite must be one of {', '.join(SUITES)}; got {name!r}")
    return SUITES[name]


def suite_table() -> str:
    """Returns all benchmarks in Markdown: environment, command and its output."""
    heads = ("name", "prompts x images", "`--prompt-set`", "environment", "command, with FOLDER from `--export`", "prints")
    lines = []
    for one in ALL:
        count = f"{one.published} x {one.seeds}" if one.published else "any"
        lines.append((f"`{one.name}` ({one.title})", count, one.prompt_set, one.environment, f"`{one.command}`", one.prints))
    first, *others = (f"| {' | '.join(cells)} |" for cells in (heads, *lines))
    return "\n".join([first, "|" + "---|" * len(heads), *others])
