"""What several commands take alike: options, and the optimizer that one of them names."""

from __future__ import annotations

from typing import Any

import click

from .config import MECHANISMS

optimizer_option = click.option(
    "--optimizer",
    envvar="CKPT_PLAN_OPTIMIZER",
    metavar="CLASS",
    help="A class of torch.optim, e.g. AdamW, whose state and step count too; over the file's `optimizer`. "
    '"none": no optimizer.',
)
mechanism_option = click.option(
    "--mechanism",
    envvar="CKPT_PLAN_MECHANISM",
    type=click.Choice(MECHANISMS),
    default="slice",
    show_default=True,
    help="slice: follow forward, run again only what was dropped; graph: the same on a captured graph, which runs in "
    "place of forward; torch: that graph with regions in torch.utils.checkpoint.",
)
device_option = click.option(
    "--device", envvar="CKPT_PLAN_DEVICE", help="Move the model and inputs there first, e.g. cuda."
)


def find_optimizer(name: str) -> Any:
    """The class of torch.optim with that name; None for "none".

    Raises:
        LookupError: there is none; its argument is the names that there are.
    """
    from torch import optim

    if name.lower() == "none":
        return None
    known = {
        n: c
        for n, c in vars(optim).items()
        if isinstance(c, type) and issubclass(c, optim.Optimizer) and c is not optim.Optimizer
    }
    if name not in known:
        raise LookupError(", ".join(sorted(known)))
    return known[name]
