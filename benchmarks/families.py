"""Model families with random weights and small configurations, sized so that activations outweigh parameters.

Each is a function that returns a `Family`: a model in train mode, its call, and its loss. `small` gives a version for
tests, which plans in a few seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F


class Family(NamedTuple):
    """A model and one training call of it; `loss_fn` is None where the output has a loss."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[[Any], torch.Tensor] | None


VOCABULARY = 512
CLASSES = 10
FAMILIES: dict[str, Callable[[bool], Family]] = {}


def family(make: Callable[[bool], Family]) -> Callable[[bool], Family]:
    """Register a family under the name of its function."""
    FAMILIES[make.__name__] = make
    return make


def build(name: str, small: bool = False, seed: int = 0) -> Family:
    """The family of that name, the same one each time; torch's generator is left seeded with `seed`."""
    torch.manual_seed(seed)
    made = FAMILIES[name](small)
    made.model.train()
    torch.manual_seed(seed)
    return made


def sizes(small: bool) -> dict[str, int]:
    """Batch, length of a sequence, width, heads and layers."""
    if small:
        return {"batch": 4, "length": 48, "width": 32, "heads": 2, "layers": 3}
    return {"batch": 8, "length": 128, "width": 96, "heads": 4, "layers": 6}


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (batch, length))


def images(small: bool, side: int) -> torch.Tensor:
    return torch.randn(4 if small else 8, 3, side // 2 if small else side, side // 2 if small else side)


def labels(batch: int) -> torch.Tensor:
    return torch.randint(CLASSES, (batch,))


def encoder(small: bool) -> dict[str, Any]:
    s = sizes(small)
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": s["width"],
        "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"],
        "intermediate_size": 4 * s["width"],
        "max_position_embeddings": 2 * s["length"],
    }


def masked(small: bool, model: nn.Module) -> Family:
    s = sizes(small)
    ids = tokens(s["batch"], s["length"])
    mask = torch.ones_like(ids)
    mask[0, -s["length"] // 4 :] = 0  # padding, as real batches have it
    targets = ids.masked_fill(torch.rand(ids.shape) > 0.3, -100)
    return Family(model, (), {"input_ids": ids, "attention_mask": mask, "labels": targets}, None)


def causal(small: bool, model: nn.Module) -> Family:
    s = sizes(small)
    ids = tokens(s["batch"], s["length"])
    return Family(model, (), {"input_ids": ids, "labels": ids}, None)


# -- text -----------------------------------------------------------------------------------------------------------


@family
def bert(small: bool) -> Family:
    return masked(small, tf.BertForMaskedLM(tf.BertConfig(**encoder(small))))


@family
def albert(small: bool) -> Family:
    return masked(
        small,
        tf.AlbertForMaskedLM(
            tf.AlbertConfig(
                **encoder(small),
                embedding_size=sizes(small)["width"] // 2,
                hidden_dropout_prob=0.1,
                attention_probs_dropout_prob=0.1,
            )
        ),
    )


@family
def deberta_v2(small: bool) -> Family:
    config = tf.DebertaV2Config(
        **encoder(small),
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=16,
        norm_rel_ebd="layer_norm",
    )
    return masked(small, tf.DebertaV2ForMaskedLM(config))


@family
def modernbert(small: bool) -> Family:
    config = tf.ModernBertConfig(
        **encoder(small),
        local_attention=16,
        attention_dropout=0.1,
        mlp_dropout=0.1,
        embedding_dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    )
    return masked(small, tf.ModernBertForMaskedLM(config))


@family
def gpt2(small: bool) -> Family:
    s = sizes(small)
    config = tf.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=s["length"],
        n_embd=s["width"],
        n_layer=s["layers"],
        n_head=s["heads"],
        bos_token_id=1,
        eos_token_id=2,
    )
    return causal(small, tf.GPT2LMHeadModel(config))


@family
def llama(small: bool) -> Family:
    config = tf.LlamaConfig(**encoder(small), num_key_value_heads=sizes(small)["heads"] // 2, attention_dropout=0.1)
    return causal(small, tf.LlamaForCausalLM(config))


@family
def qwen3(small: bool) -> Family:
    s = sizes(small)
    config = tf.Qwen3Config(
        **encoder(small), num_key_value_heads=s["heads"] // 2, head_dim=s["width"] // s["heads"], attention_dropout=0.1
    )
    return causal(small, tf.Qwen3ForCausalLM(config))


@family
def mixtral(small: bool) -> Family:
    s = sizes(small)
    config = tf.MixtralConfig(
        **{**encoder(small), "intermediate_size": 2 * s["width"]},
        num_key_value_heads=s["heads"] // 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        attention_dropout=0.1,
    )
    return causal(small, tf.MixtralForCausalLM(config))


@family
def mamba(small: bool) -> Family:
    s = sizes(small)
    config = tf.MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=s["width"] // 2,
        state_size=8,
        num_hidden_layers=2 if small else 3,
        use_cache=False,
    )
    ids = tokens(s["batch"], 12 if small else 32)  # the scan is a Python loop over the sequence
    return Family(tf.MambaForCausalLM(config), (), {"input_ids": ids, "labels": ids}, None)


@family
def t5(small: bool) -> Family:
    s = sizes(small)
    config = tf.T5Config(
        vocab_size=VOCABULARY,
        d_model=s["width"],
        d_kv=s["width"] // s["heads"],
        d_ff=4 * s["width"],
        num_layers=s["layers"] // 2 + 1,
        num_heads=s["heads"],
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    kwargs = {"input_ids": tokens(s["batch"], s["length"]), "labels": tokens(s["batch"], s["length"] // 2)}
    return Family(tf.T5ForConditionalGeneration(config), (), kwargs, None)


# -- images ---------------------------------------------------------------------------------------------------------


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


@family
def whisper(small: bool) -> Family:
    s = sizes(small)
    config = tf.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=s["width"],
        encoder_layers=s["layers"] // 2 + 1,
        decoder_layers=s["layers"] // 2 + 1,
        encoder_attention_heads=s["heads"],
        decoder_attention_heads=s["heads"],
        encoder_ffn_dim=4 * s["width"],
        decoder_ffn_dim=4 * s["width"],
        max_source_positions=s["length"],
        max_target_positions=s["length"],
        dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    kwargs = {
        "input_features": torch.randn(s["batch"], 16, 2 * s["length"]),
        "labels": tokens(s["batch"], s["length"] // 2),
    }
    return Family(tf.WhisperForConditionalGeneration(config), (), kwargs, None)


@family
def wav2vec2(small: bool) -> Family:
    s = sizes(small)
    config = tf.Wav2Vec2Config(
        vocab_size=32,
        hidden_size=s["width"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        intermediate_size=4 * s["width"],
        conv_dim=(16, 16, 16),
        conv_stride=(5, 4, 2),
        conv_kernel=(10, 8, 4),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.2,
        mask_time_length=2,
        layerdrop=0.0,  # it skips layers at random: such a step is another one than was planned
    )
    batch = s["batch"] // 2
    kwargs = {
        "input_values": torch.randn(batch, 2000 if small else 5000),
        "labels": torch.randint(1, 32, (batch, 8)),
    }
    return Family(tf.Wav2Vec2ForCTC(config), (), kwargs, None)


class Tagger(nn.Module):
    """A recurrent network of three layers over embedded tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.LSTM(width, width, num_layers=3, dropout=0.2, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found, _ = self.layers(self.embedding(ids))
        return self.head(F.dropout(found, 0.1, self.training))


@family
def lstm(small: bool) -> Family:
    s = sizes(small)
    ids = tokens(s["batch"], s["length"])
    y = torch.randint(CLASSES, ids.shape)
    return Family(Tagger(s["width"]), (ids,), {}, lambda logits: F.cross_entropy(logits.flatten(0, 1), y.flatten()))


class Encoder(nn.Module):
    """`nn.TransformerEncoder` over embedded tokens, with a padding mask."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(ids), src_key_padding_mask=ids < 16))


class StackedTagger(nn.Module):
    """Recurrent layers one by one, with residual connections and dropout between them."""

    def __init__(self, width: int, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + F.dropout(layer(x)[0], 0.2, self.training)
        return self.head(x)


@family
def lstm_stack(small: bool) -> Family:
    s = sizes(small)
    ids = tokens(s["batch"], s["length"])
    y = torch.randint(CLASSES, ids.shape)
    model = StackedTagger(s["width"], 4)
    return Family(model, (ids,), {}, lambda logits: F.cross_entropy(logits.flatten(0, 1), y.flatten()))


@family
def torch_encoder(small: bool) -> Family:
    s = sizes(small)
    ids = tokens(s["batch"], s["length"])
    y = torch.randint(CLASSES, ids.shape)
    model = Encoder(s["width"], s["heads"], s["layers"])
    return Family(model, (ids,), {}, lambda logits: F.cross_entropy(logits.flatten(0, 1), y.flatten()))
