"""Families of vision models."""

from __future__ import annotations

import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F

from benchmarks.family import CLASSES, VOCABULARY, Family, family, images, labels, sizes, tokens


@family
def vit(small: bool) -> Family:
    s = sizes(small)
    x = images(small, 96)
    config = tf.ViTConfig(
        hidden_size=s["width"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        intermediate_size=4 * s["width"],
        image_size=x.shape[-1],
        patch_size=8,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=CLASSES,
    )
    return Family(tf.ViTForImageClassification(config), (x,), {"labels": labels(len(x))}, None)


@family
def swin(small: bool) -> Family:
    x = images(small, 64)
    config = tf.SwinConfig(
        image_size=x.shape[-1],
        patch_size=2,
        embed_dim=16 if small else 32,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        drop_path_rate=0.1,
        hidden_dropout_prob=0.1,
        num_labels=CLASSES,
    )
    return Family(tf.SwinForImageClassification(config), (x,), {"labels": labels(len(x))}, None)


@family
def segformer(small: bool) -> Family:
    x = images(small, 64)
    config = tf.SegformerConfig(
        depths=[1, 1, 1, 1] if small else [2, 2, 2, 2],
        hidden_sizes=[8, 16, 24, 32] if small else [16, 32, 48, 64],
        decoder_hidden_size=32,
        hidden_dropout_prob=0.1,
        drop_path_rate=0.1,
        num_labels=CLASSES,
    )
    targets = torch.randint(CLASSES, (len(x), *x.shape[-2:]))
    return Family(tf.SegformerForSemanticSegmentation(config), (x,), {"labels": targets}, None)


@family
def resnet(small: bool) -> Family:
    x = images(small, 96)
    config = tf.ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32] if small else [32, 64, 96, 128],
        depths=[2, 2] if small else [2, 2, 2, 2],
        num_labels=CLASSES,
    )
    return Family(tf.ResNetForImageClassification(config), (x,), {"labels": labels(len(x))}, None)


@family
def convnext(small: bool) -> Family:
    x = images(small, 96)
    config = tf.ConvNextConfig(
        hidden_sizes=[8, 16, 24, 32] if small else [24, 32, 48, 64],
        depths=[1, 1, 2, 1] if small else [2, 2, 3, 2],
        drop_path_rate=0.1,
        num_labels=CLASSES,
    )
    return Family(tf.ConvNextForImageClassification(config), (x,), {"labels": labels(len(x))}, None)


@family
def clip(small: bool) -> Family:
    s, x = sizes(small), images(small, 64)
    ids = tokens(len(x), s["length"] // 2)
    ids[:, -1] = VOCABULARY - 1
    shape = {
        "hidden_size": s["width"],
        "intermediate_size": 4 * s["width"],
        "num_hidden_layers": s["layers"] // 2 + 1,
        "num_attention_heads": s["heads"],
        "attention_dropout": 0.1,
    }
    config = tf.CLIPConfig(
        text_config={
            **shape,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": s["length"],
            "eos_token_id": VOCABULARY - 1,
        },
        vision_config={**shape, "image_size": x.shape[-1], "patch_size": 8},
        projection_dim=32,
    )
    kwargs = {"input_ids": ids, "pixel_values": x, "return_loss": True}
    return Family(tf.CLIPModel(config), (), kwargs, None)


class DenseNet(nn.Module):
    """Each layer of a block reads all the layers before it, concatenated (Huang et al. 2017)."""

    def __init__(self, growth: int, blocks: tuple[int, ...]) -> None:
        super().__init__()
        channels = 2 * growth
        self.first = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for depth in blocks:
            layers = nn.ModuleList()
            for _ in range(depth):
                layers.append(
                    nn.Sequential(
                        nn.BatchNorm2d(channels),
                        nn.ReLU(inplace=True),
                        nn.Conv2d(channels, 4 * growth, 1, bias=False),
                        nn.BatchNorm2d(4 * growth),
                        nn.ReLU(inplace=True),
                        nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
                        nn.Dropout(0.1),
                    )
                )
                channels += growth
            self.blocks.append(layers)
            self.transitions.append(
                nn.Sequential(
                    nn.BatchNorm2d(channels),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(channels, channels // 2, 1),
                    nn.AvgPool2d(2),
                )
            )
            channels //= 2
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layers, transition in zip(self.blocks, self.transitions, strict=True):
            features = [x]
            for layer in layers:
                features.append(layer(torch.cat(features, dim=1)))
            x = transition(torch.cat(features, dim=1))
        return self.head(x.mean((2, 3)))


@family
def densenet(small: bool) -> Family:
    x = images(small, 48)
    y = labels(len(x))
    model = DenseNet(8, (3, 3)) if small else DenseNet(12, (5, 5, 5))
    return Family(model, (x,), {}, lambda logits: F.cross_entropy(logits, y))


class UNet(nn.Module):
    """Halves the image and doubles the channels at each level, then goes back up over skip connections."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.down = nn.ModuleList(self.double(a, b) for a, b in zip((3, *widths[:-1]), widths, strict=True))
        self.middle = self.double(widths[-1], 2 * widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths))
        self.merge = nn.ModuleList(self.double(2 * w, w) for w in reversed(widths))
        self.head = nn.Conv2d(widths[0], CLASSES, 1)

    @staticmethod
    def double(inner: int, outer: int) -> nn.Sequential:
        """Two convolutions with batch norm, and dropout of whole channels."""
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
            nn.Dropout2d(0.1),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips), strict=True):
            x = merge(torch.cat((skip, up(x)), dim=1))
        return self.head(x)


@family
def unet(small: bool) -> Family:
    x = images(small, 64)
    y = torch.randint(CLASSES, (len(x), *x.shape[-2:]))
    model = UNet((8, 16)) if small else UNet((16, 32, 64))
    return Family(model, (x,), {}, lambda logits: F.cross_entropy(logits, y))


# -- speech and sequences -------------------------------------------------------------------------------------------
