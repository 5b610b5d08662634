"""A U-Net (Ronneberger et al. 2015, with padding and batch norm) on two images of 256 pixels, with torch alone.

The output is a map of logits, so the file gives the loss too.

    ckpt-plan report examples/unet/model.py --budget 75%
"""

import torch
from torch import nn
from torch.nn import functional as F

BATCH, SIZE, CLASSES = 2, 256, 2


def double_convolution(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1, bias=False),
        nn.BatchNorm2d(outer),
        nn.ReLU(inplace=True),
        nn.Conv2d(outer, outer, 3, padding=1, bias=False),
        nn.BatchNorm2d(outer),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Halves the image and doubles the channels at each level, then goes back up over skip connections."""

    def __init__(self, channels: int = 3, classes: int = CLASSES, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            double_convolution(a, b) for a, b in zip((channels, *widths[:-1]), widths, strict=True)
        )
        self.middle = double_convolution(widths[-1], 2 * widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in reversed(widths))
        self.merge = nn.ModuleList(double_convolution(2 * width, width) for width in reversed(widths))
        self.head = nn.Conv2d(widths[0], classes, 1)

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


def model() -> nn.Module:
    return UNet()


def example_inputs() -> torch.Tensor:
    return torch.randn(BATCH, 3, SIZE, SIZE)


def loss_fn(logits: torch.Tensor) -> torch.Tensor:
    """The cross entropy against a disc in the middle of each image."""
    axis = torch.linspace(-1, 1, SIZE, device=logits.device)
    target = (axis[:, None] ** 2 + axis[None, :] ** 2 < 0.5).long().expand(len(logits), SIZE, SIZE)
    return F.cross_entropy(logits, target)
