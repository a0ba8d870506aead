"""A model with random weights as an ordinary model folder: a tiny one to train, or real sizes to measure speed.

Design: weights are drawn with variance 1/fan_in, so that every layer keeps the scale of its input. transformers' own
initialisation (0.02 everywhere) shrinks a tiny tower's output until nothing can be learned from it. The real sizes have
the shapes of the published configurations.

The tokenizer is a byte-level BPE trained on the sample's own questions and answers, so a word is about one token. Its
normaliser, pattern, decoder, special tokens and the structure of its chat template are those of Qwen's tokenizers.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoTokenizer, PreTrainedModel
from transformers.models.auto import processing_auto

from lookonce.datasets.sample.scene import LESIONS, NORMAL_QUESTION, QUESTIONS
from lookonce.errors import UsageError
from lookonce.families.family import SPECIAL_TOKENS, Family
from lookonce.families.lookup import DEFAULT, family_of
from lookonce.files import follow_umask
from lookonce.text import first_line

NUM_WORD_TOKENS = 640
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Splits text into words before BPE: letters with one leading character, single digits, punctuation, line breaks."""

CHAT_TEMPLATE = """\
{%- macro parts(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'text' -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + parts(message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def write_tokenizer(folder: Path) -> dict[str, int]:
    """Write tokenizer and chat template as Hugging Face files into `folder`; return the ids of the special tokens."""
    tokenizer = _train(_corpus())
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return {token: vocabulary[token] for token in SPECIAL_TOKENS}


def _corpus() -> list[str]:
    rows, columns = ("upper", "center", "lower"), ("left", "center", "right")
    cells = [f"{row}-{column}; center" for row, column in itertools.product(rows, columns)]
    lesions = [f"{lesion.color} {lesion.size} {lesion.paris_type}" for lesion in LESIONS]
    answers = ["yes", "no", "none", "not relevant", "red", "polyp", "ulcerative colitis", "oesophagitis", "tube"]
    answers += ["biopsy forceps", "z-line", "colonoscopy", "gastroscopy"]
    roles = ["system\n", "user\n", "assistant\n"]
    return [NORMAL_QUESTION, *QUESTIONS, *cells, *lesions, *answers, *roles]


def _train(corpus: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_WORD_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


POSITION_STD = 0.1
"""The standard deviation of the tower's position embedding; a larger one drowns the colours of the tiny model."""
PATCH_GRID = 2
"""Patch kernels are drawn on a grid with this many cells per side and enlarged. Trained towers look at coarse structure
too, and kernels with noise in every pixel cost 4 points of held-out accuracy on the sample."""
HEAD_GAIN = 3
"""Scales the weights of the output head. Hidden states are normalised and the head is frozen, so with a gain of 1 no
token of the tiny model could get more than about three quarters of the probability."""
DECAYS = 0.005, 1.0
"""Decays of the heads of linear attention, slowest and fastest. transformers draws them up to 16, which forgets all."""

MIN_PIXELS, MAX_PIXELS = 65_536, 16_777_216
"""The limits of Qwen3-VL."""
TINY_MIN_PIXELS, TINY_MAX_PIXELS = 4_096, 25_600
"""The limits of the tiny model, which give about 20 visual tokens per image."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"),
    *("added_tokens.json", "special_tokens_map.json"),
)
MAX_SHARD_SIZE = "5GB"
"""As of the published models. A file's tensors are all in host memory before it is written."""


def write_model(
    folder: Path,
    size: str = "tiny",
    seed: int = 0,
    tokenizer: Path | None = None,
    *,
    family: Family = DEFAULT,
    tower_only: bool = False,
) -> None:
    """Write a model folder with random weights.

    `size` is one of the family's; real sizes are written in bfloat16, the tiny one in float32. `tokenizer` is a folder
    whose tokenizer and chat template are copied; by default the sample's own small tokenizer is written. `tower_only`
    leaves out the tensors of the language model.

    Raises:
        UsageError: the size is unknown, or the folder has no tokenizer.
        ModelError: the installed transformers does not have the family.
    """
    if size not in family.sizes:
        raise UsageError(f"no {family.name} of size {size!r}; choose one of {', '.join(family.sizes)}")
    folder.mkdir(parents=True, exist_ok=True)
    ids = _copy_tokenizer(tokenizer, folder) if tokenizer else write_tokenizer(folder)
    config = make_config(size, ids, family)
    dtype = torch.float32 if size == "tiny" else torch.bfloat16
    if tower_only:
        _write_tower(folder, config, seed, dtype)
    else:
        device = "cuda" if size != "tiny" and torch.cuda.is_available() else "cpu"  # billions of draws take minutes
        random_model(config, seed, dtype, device).save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)
    limits = (TINY_MIN_PIXELS, TINY_MAX_PIXELS) if size == "tiny" else (MIN_PIXELS, MAX_PIXELS)
    write_image_processor(folder, *limits, config.vision_config.patch_size, family)
    follow_umask(folder)


def make_config(size: str, ids: dict[str, int], family: Family = DEFAULT) -> Any:
    """Return the configuration of one of the family's sizes for a tokenizer with these special token ids."""
    if family.model_type not in CONFIG_MAPPING:
        raise family.missing(f"models of type {family.model_type}")
    shape = family.sizes[size]
    text, vision = dict(shape.text), dict(shape.vision)
    vocab_size = math.ceil((max(ids.values()) + 1) / 64) * 64
    text["vocab_size"] = max(vocab_size, text.get("vocab_size", 0))
    text["tie_word_embeddings"] = shape.tied
    text["pad_token_id"] = ids["<|endoftext|>"]
    text |= {name: ids["<|im_end|>"] for name in ("bos_token_id", "eos_token_id") if name in text}
    vision[family.feature_size] = text["hidden_size"]
    special: dict[str, Any] = {
        "image_token_id": ids[family.image_token],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    config_class: Any = CONFIG_MAPPING[family.model_type]
    return config_class(text_config=text, vision_config=vision, tie_word_embeddings=shape.tied, **special)


def random_model(config: Any, seed: int, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """Return a model of this configuration with weights drawn from `seed` with variance 1/fan_in."""
    stock_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    model: PreTrainedModel = _drawn(stock_class, config, seed, dtype, device, config.tie_word_embeddings)
    model.tie_weights()
    for name in ("eos_token_id", "pad_token_id"):  # older versions of transformers have them in one place only
        value = getattr(config, name, None)
        setattr(model.generation_config, name, getattr(config.text_config, name) if value is None else value)
    return model


def _write_tower(folder: Path, config: Any, seed: int, dtype: torch.dtype) -> None:
    """Write the tower's tensors, named as in a whole model, and the whole configuration."""
    family = family_of(config)
    tower = _drawn(family.load(family.tower_class), config.vision_config, seed, dtype, "cpu", False)
    tensors = {f"model.{family.tower}.{name}": tensor for name, tensor in tower.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config.save_pretrained(folder)


def _drawn(model_class: Any, config: Any, seed: int, dtype: torch.dtype, device: str, tied: bool) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = model_class(config)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter, generator, tied)
    return model


def _draw(name: str, parameter: torch.Tensor, generator: torch.Generator, tied: bool) -> None:
    """Draw one parameter; norms keep their ones, and tied embeddings are drawn like a head."""
    if "patch_embed" in name and parameter.ndim == 5:
        out_channels, in_channels, frames, side, _ = parameter.shape
        grid = parameter.new_empty(out_channels, in_channels, PATCH_GRID, PATCH_GRID)
        grid.normal_(0, 1 / math.sqrt(parameter[0].numel()), generator=generator)
        smooth = torch.nn.functional.interpolate(grid, size=(side, side), mode="nearest")
        parameter.copy_(smooth[:, :, None].expand(-1, -1, frames, -1, -1))
    elif "pos_embed" in name:
        parameter.normal_(0, POSITION_STD, generator=generator)
    elif "embed_tokens" in name and not tied:
        parameter.normal_(0, 1, generator=generator)
    elif parameter.ndim >= 2:
        is_of_experts = ".experts." in name  # the matrices of all experts in one
        fan_in = parameter.shape[-1] if is_of_experts else parameter[0].numel()
        parameter.normal_(0, (HEAD_GAIN if "lm_head" in name else 1) / math.sqrt(fan_in), generator=generator)
    elif name.endswith("A_log"):  # the decays of linear attention: from heads that forget slowly to fast ones
        parameter.copy_(torch.linspace(*DECAYS, len(parameter)).log())
    elif name.endswith("bias"):
        parameter.zero_()


def write_image_processor(
    folder: Path, min_pixels: int, max_pixels: int, patch_size: int = 16, family: Family = DEFAULT
) -> None:
    """Write `preprocessor_config.json` with Qwen3-VL's settings, these limits and this size of patches."""
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": min_pixels, "longest_edge": max_pixels},
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 3,
        "do_convert_rgb": True,
        "processor_class": vars(processing_auto)["PROCESSOR_MAPPING_NAMES"][family.model_type],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _copy_tokenizer(source: Path, folder: Path) -> dict[str, int]:
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise UsageError(f"{source} has no tokenizer: {first_line(error)}") from None
    if not (folder / "tokenizer.json").exists():  # newer families read their vocabulary from no other file
        tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary
