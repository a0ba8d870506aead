"""A small tokenizer with Qwen's special tokens and a chat template of the same structure.

It is a byte-level BPE trained on the sample's own questions and answers, so that a word is about one token and
sequences stay short; any other text is encoded byte by byte. Its normaliser, its pattern and its decoder are those of
Qwen's tokenizers, which also have tokens that are not special, such as `<think>`. The code that turns records into
tokens is the same for both.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from lookonce.datasets.sample.questions import NORMAL_QUESTION, QUESTIONS
from lookonce.datasets.sample.scene import LESIONS
from lookonce.families.family import SPECIAL_TOKENS

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
    """Return all words of the sample's conversations."""
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
        vocab_size=NUM_WORD_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer
