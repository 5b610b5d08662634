"""The models of `benchmarks.peers`, at sizes that a step takes about a second for on two cores. No dropout.

`rotor_gpt` and `rotor_resnet` are the two small models on which the published chain and graph planners were run here.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.families_vision import DenseNet, UNet
from benchmarks.family import Family


class Block(nn.Module):
    """A transformer block with explicit attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        scores = F.softmax(q @ k.transpose(-2, -1) / math.sqrt(width // self.heads), dim=-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):
    """Six blocks of width 128 over 256 tokens."""

    def __init__(self, layers: int = 6, width: int = 128, vocabulary: int = 512, length: int = 256) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(1, length, width))
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _convolution(inner: int, outer: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, size, stride, size // 2, bias=False),
        nn.BatchNorm2d(outer),
    )


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = _convolution(inner, outer, 3, stride), _convolution(outer, outer, 3)
        self.skip = nn.Identity() if inner == outer and stride == 1 else _convolution(inner, outer, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.skip(x))


class SmallResNet(nn.Module):
    """Eight residual blocks of widths 32 to 256 on 32 x 32 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, inner, blocks = _convolution(3, 32, 3), 32, []
        for stage in range(4):
            for i in range(2):
                blocks.append(Residual(inner, 32 << stage, 2 if stage and not i else 1))
                inner = 32 << stage
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inner, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.relu(self.stem(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def _mean(output: torch.Tensor) -> torch.Tensor:
    return output.float().pow(2).mean()


def rotor_gpt() -> Family:
    return Family(Gpt(), (torch.randint(0, 512, (8, 256)),), {}, _mean)


def rotor_resnet() -> Family:
    return Family(SmallResNet(), (torch.randn(16, 3, 32, 32),), {}, _mean)


def gpt2(batch: int = 2) -> Family:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=8192, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0))
    ids = torch.randint(8192, (batch, 256))
    return Family(model, (), {"input_ids": ids, "labels": ids, "use_cache": False}, None)


def _bert(width: int, heads: int, vocabulary: int) -> Family:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=24,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    ids = torch.randint(vocabulary, (8, 128))
    return Family(BertForMaskedLM(config), (), {"input_ids": ids, "labels": ids}, None)


def bert_large() -> Family:
    """BERT-large's 24 layers at a quarter of their width."""
    return _bert(256, 8, 4096)


def bert_large_full() -> Family:
    """BERT-large itself; a step takes a quarter of a minute or so on two cores."""
    return _bert(1024, 16, 30522)


def vit() -> Family:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=24,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    kwargs = {"pixel_values": torch.randn(8, 3, 128, 128), "labels": torch.randint(2, (8,))}
    return Family(ViTForImageClassification(config), (), kwargs, None)


def resnet101() -> Family:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=32, hidden_sizes=[64, 128, 256, 512], depths=[3, 4, 23, 3])
    kwargs = {"pixel_values": torch.randn(16, 3, 128, 128), "labels": torch.randint(2, (16,))}
    return Family(ResNetForImageClassification(config), (), kwargs, None)


def _undropped(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout2d)):
            module.p = 0.0
    return model


def unet() -> Family:
    return Family(_undropped(UNet((16, 32, 64, 128))), (torch.randn(4, 3, 128, 128),), {}, _mean)


def densenet() -> Family:
    return Family(_undropped(DenseNet(16, (6, 12, 24, 16))), (torch.randn(4, 3, 64, 64),), {}, _mean)


def swin() -> Family:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=128, embed_dim=48, depths=[2, 2, 6, 2], num_heads=[2, 4, 8, 16], window_size=4, drop_path_rate=0.0
    )
    kwargs = {"pixel_values": torch.randn(8, 3, 128, 128), "labels": torch.randint(2, (8,))}
    return Family(SwinForImageClassification(config), (), kwargs, None)


def t5() -> Family:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=4096,
        d_model=256,
        d_kv=32,
        d_ff=1024,
        num_layers=6,
        num_heads=8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    ids = torch.randint(4096, (8, 128))
    return Family(T5ForConditionalGeneration(config), (), {"input_ids": ids, "labels": ids, "use_cache": False}, None)


def mixtral() -> Family:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=4,
    )
    ids = torch.randint(4096, (4, 128))
    return Family(MixtralForCausalLM(config), (), {"input_ids": ids, "labels": ids, "use_cache": False}, None)


def mamba() -> Family:
    from transformers import MambaConfig, MambaForCausalLM

    ids = torch.randint(4096, (8, 16))
    config = MambaConfig(vocab_size=4096, hidden_size=256, num_hidden_layers=6, state_size=16)
    return Family(MambaForCausalLM(config), (), {"input_ids": ids, "labels": ids, "use_cache": False}, None)


SUITE = {
    f.__name__: f for f in (gpt2, bert_large, vit, resnet101, unet, densenet, swin, t5, mixtral, mamba)
}  # fmt: skip
# The class of the blocks that people wrap in each of them.
BLOCKS = {
    "gpt2": "GPT2Block",
    "gpt2_batch_8": "GPT2Block",
    "bert_large": "BertLayer",
    "bert_large_full": "BertLayer",
    "vit": "ViTLayer",
    "resnet101": "ResNetBottleNeckLayer",
    "unet": "Sequential",
    "densenet": "Sequential",
    "swin": "SwinLayer",
    "t5": "T5Block",
    "mixtral": "MixtralDecoderLayer",
    "mamba": "MambaBlock",
}
# MiB above parameters and gradients at which rotor and Rockmate were run, and their overheads (a CPU, one thread).
ROTOR = {
    "rotor_gpt": (rotor_gpt, {133.0: (0.20, 0.12), 99.7: (0.30, 0.28), 66.5: (0.35, 0.21), 49.9: (0.39, 0.34)}),
    "rotor_resnet": (rotor_resnet, {32.4: (0.19, 0.14), 24.3: (0.26, 0.25), 16.2: (0.31, 0.26)}),
}
