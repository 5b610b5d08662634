"""BERT base (12 layers, d=768) for masked tokens, with random weights, on eight sequences of 128 tokens.

ckpt-plan report examples/bert/model.py --budget 75%
"""

import torch
from transformers import BertConfig, BertForMaskedLM

BATCH, LENGTH = 8, 128
MASK, IGNORED = 103, -100


def model() -> torch.nn.Module:
    return BertForMaskedLM(BertConfig())


def example_inputs() -> dict[str, torch.Tensor]:
    tokens = torch.randint(1000, BertConfig().vocab_size, (BATCH, LENGTH))
    chosen = torch.rand(BATCH, LENGTH) < 0.15
    return {
        "input_ids": tokens.masked_fill(chosen, MASK),
        "attention_mask": torch.ones_like(tokens),
        "labels": tokens.masked_fill(~chosen, IGNORED),
    }
