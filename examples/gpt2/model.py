"""GPT-2 small (12 layers, d=768) with random weights, on four sequences of 256 tokens.

ckpt-plan report examples/gpt2/model.py --budget 75%
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

BATCH, LENGTH = 4, 256


def model() -> torch.nn.Module:
    return GPT2LMHeadModel(GPT2Config())


def example_inputs() -> dict[str, torch.Tensor]:
    tokens = torch.randint(GPT2Config().vocab_size, (BATCH, LENGTH))
    return {"input_ids": tokens, "labels": tokens}
