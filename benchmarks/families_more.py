"""Speech, recurrent and encoder families."""

from __future__ import annotations

import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F

from benchmarks.family import CLASSES, VOCABULARY, Family, family, sizes, tokens


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
