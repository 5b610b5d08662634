"""ResNet-50 with random weights, on eight images of 224 pixels.

ckpt-plan report examples/resnet/model.py --budget 75%
"""

import torch
from transformers import ResNetConfig, ResNetForImageClassification

BATCH, CLASSES = 8, 1000


def model() -> torch.nn.Module:
    return ResNetForImageClassification(ResNetConfig(num_labels=CLASSES))


def example_inputs() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 224, 224), "labels": torch.randint(CLASSES, (BATCH,))}
