"""FLOPs of the matrix products of a training step, compared with PyTorch's own count."""

from __future__ import annotations

import pytest
import torch
from support.batches import BatchMaker
from torch.utils.flop_counter import FlopCounterMode

from lookonce.bench.step import num_flops, num_pairs
from lookonce.run.open import TO_BUILD, open_run
from lookonce.train.model.attention import PackMask
from lookonce.train.model.compile import training_on_packs
from lookonce.train.model.load import add_lora, load_without_tower, text_model
from lookonce.train.model.loss import forward_loss

CPU = torch.device("cpu")


def test_flops_with_weights_are_those_that_pytorch_counts(make_run, built):
    cache = {"dir": str(built.folder.parent)}
    inputs = open_run(make_run(cache=cache, lora={"modules_to_save": ["embed_tokens"]}), TO_BUILD)
    session = inputs
    model = add_lora(
        load_without_tower(inputs.model_folder, torch.float32), inputs.model_folder, inputs.run.lora, seed=1
    )
    examples = session.examples("train")[0]
    batch_maker = BatchMaker.of(examples, session.chat_tokenizer, session.features, inputs.run.batch, CPU, seed=3)
    [micro_batch] = next(iter(batch_maker.sampler.epoch(0)))
    with training_on_packs(model, compiled=False), FlopCounterMode(display=False) as counter:
        forward_loss(model, batch_maker.batch(micro_batch), PackMask(8192, CPU)).backward()
    counted = sum(number for operation, number in counter.get_flop_counts()["Global"].items() if "mm" in str(operation))
    config = text_model(model).config
    attention = (config.num_hidden_layers - 1) * config.num_attention_heads * config.head_dim
    pairs = sum(num_pairs(group) for group in micro_batch.pack.groups)
    expected = num_flops(model, micro_batch.pack.groups, examples) - 14 * attention * pairs
    assert counted == pytest.approx(expected, rel=0.02)
