"""ViT base (12 layers, d=768, patches of 16) with random weights, on eight images of 224 pixels.

ckpt-plan report examples/vit/model.py --budget 75%
"""

import torch
from transformers import ViTConfig, ViTForImageClassification

BATCH, CLASSES = 8, 1000


def model() -> torch.nn.Module:
    return ViTForImageClassification(ViTConfig(num_labels=CLASSES))


def example_inputs() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 224, 224), "labels": torch.randint(CLASSES, (BATCH,))}
