"""Models that nobody thought of: hypothesis draws a program of torch operations, a module runs it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

ROWS, WIDTH = 24, 16

UNARY = (
    "linear", "shared_linear", "relu", "relu_inplace", "tanh", "gelu", "dropout", "layer_norm", "batch_norm",
    "softmax", "transpose_twice", "chunk_swap", "detached_gate", "rand_like_noise", "write_slices", "top_k",
    "float_mask", "counter", "no_grad_scale", "lookup", "mul_inplace", "alpha_dropout", "cumsum", "abs_sqrt",
)  # fmt: skip
LATER = ("read_statistics", "write_through_a_view")  # what changes what a replay may be to read
BINARY = ("add", "mul", "add_inplace", "cat_halves", "matmul", "where")

Instruction = tuple[str, int, int]


def programs(most: int = 14, more: tuple[str, ...] = ()) -> st.SearchStrategy[list[Instruction]]:
    """Programs of up to `most` instructions: an operation, `more` among them, and the values it reads, latest first."""
    unary = st.tuples(st.sampled_from(UNARY + more), st.integers(0, 3), st.just(0))
    binary = st.tuples(st.sampled_from(BINARY), st.integers(0, 3), st.integers(0, 5))
    return st.lists(st.one_of(unary, unary, binary), min_size=3, max_size=most)


class RandomModel(nn.Module):
    """Runs a program on its input; every value that nobody read is part of the output."""

    def __init__(self, program: list[Instruction], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.program = program
        self.first, self.shared = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in program])
        self.norms = nn.ModuleList(
            [nn.BatchNorm1d(WIDTH) if i % 2 else nn.LayerNorm(WIDTH) for i in range(len(program))]
        )
        self.table = nn.Embedding(7, WIDTH)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [self.first(x)]
        for position, (name, a, b) in enumerate(self.program):
            first, second = values[-1 - a % len(values)], values[-1 - b % len(values)]
            values.append(self.run(name, position, first, second))
        return torch.stack([v.mean() for v in values[-3:]]).sum() + values[-1].pow(2).mean()

    def run(self, name: str, position: int, x: torch.Tensor, y: torch.Tensor) -> Any:
        match name:
            case "linear":
                return self.linears[position](x)
            case "shared_linear":
                return self.shared(x)
            case "relu":
                return F.relu(x)
            case "relu_inplace":
                return F.relu(x + 0.1, inplace=True)
            case "tanh":
                return torch.tanh(x)
            case "gelu":
                return F.gelu(x)
            case "dropout":
                return F.dropout(x, 0.3)
            case "alpha_dropout":
                return F.alpha_dropout(x, 0.2, training=True)
            case "layer_norm":
                return F.layer_norm(x, (WIDTH,))
            case "batch_norm":
                return self.norms[position](x)
            case "softmax":
                return x.softmax(-1)
            case "transpose_twice":
                return x.t().contiguous().exp().clamp(max=3).t() * 0.5
            case "chunk_swap":
                left, right = x.chunk(2, -1)
                return torch.cat([right, left.sigmoid()], -1)
            case "detached_gate":
                return x * torch.sigmoid(x.detach())
            case "rand_like_noise":
                return x + 0.1 * torch.rand_like(x)
            case "write_slices":
                made = torch.zeros_like(x)
                made[1:] = x[:-1].tanh()
                made[0] = x[-1]
                return made
            case "top_k":
                scores, indices = x.topk(WIDTH // 2, dim=-1)
                return torch.zeros_like(x).scatter(1, indices, scores.softmax(-1))
            case "float_mask":
                return x.masked_fill(x > 0.5, 0.25)
            case "counter":
                self.count += 1
                return x * self.count.cos()
            case "no_grad_scale":
                with torch.no_grad():
                    scale = x.abs().mean() + 1
                return x / scale
            case "lookup":
                index = (x.detach().sum(-1).abs() * 3).long() % 7
                return x + self.table(index)
            case "mul_inplace":
                return torch.sin(x).mul_(0.5)
            case "read_statistics":
                norm = self.norms[position]
                normal = norm(x)
                return normal.sin() + norm.running_mean if isinstance(norm, nn.BatchNorm1d) else normal
            case "write_through_a_view":
                made = x.exp().clamp(max=3)
                made.view(-1)[:WIDTH].mul_(0.5)
                return made
            case "cumsum":
                return x.cumsum(0) * 0.1
            case "abs_sqrt":
                return (x.abs() + 0.1).sqrt()
            case "add":
                return x + y
            case "mul":
                return x * y
            case "add_inplace":
                made = x + 0.0
                made += y
                return made
            case "cat_halves":
                return torch.cat([x[:, : WIDTH // 2], y[:, WIDTH // 2 :]], -1)
            case "matmul":
                return (x @ y.t()).softmax(-1) @ y
            case "where":
                return torch.where(x > y, x, y * 0.5)
        raise AssertionError(name)
