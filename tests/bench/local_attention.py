"""What a window costs: `LocalAttention` against timm's attention over the whole map, in turn, on the same tokens and weights.

    python tests/bench/local_attention.py [--side 32] [--batch 8] [--rounds 9] [--threads N] [window ...]

The layer is ViT-Ti's (width 192, three heads). *forward* is without, *training* with the gradients of tokens and weights; *cpu s* counts
what this process computed and not what it waited for. *products* are those of queries and keys that are formed, as a share of all. *unfold* is
the convolutional way: every query with its own copy of its neighbours, which `torch.nn.functional.unfold` makes.
"""
import argparse
import math
import time
from functools import partial

import pandas as pd
import torch
from timing import in_turn
from timm.layers import Attention
from torch.nn import functional as F

from howvits.architectures import LocalAttention

WIDTH, HEADS = 192, 3  # ViT-Ti


def unfolded(layer, window, x):
    "Attention in a window by unfolding keys and values; what lies outside the map is masked."
    (height, width), heads = layer.grid, layer.num_heads
    neighbours = lambda t: F.unfold(t.transpose(1, 2).unflatten(2, (height, width)), window, padding=window // 2).unflatten(1, (heads, -1, window**2))
    q, k, v = layer.qkv(x).chunk(3, -1)
    real = F.unfold(torch.ones(1, 1, height, width), window, padding=window // 2)[:, None] > 0
    q = q.transpose(1, 2).unflatten(1, (heads, -1))[:, :, :, None]
    weights = ((q * neighbours(k)).sum(2) * layer.scale).masked_fill(~real, -math.inf).softmax(2)
    return layer.proj((weights[:, :, None] * neighbours(v)).sum(3).flatten(1, 2).transpose(1, 2))


def forward(attend, x):
    with torch.no_grad(): attend(x)


def training(attend, x): attend(x.clone().requires_grad_()).sum().backward()


def compare(window, side, batch, rounds):
    "One row of the table."
    everywhere, local = Attention(WIDTH, HEADS).eval(), LocalAttention(WIDTH, HEADS).eval()
    local.load_state_dict(everywhere.state_dict())
    local.place((side, side), window)
    x, ways = torch.randn(batch, side * side, WIDTH), {"global": everywhere, "window": local, "unfold": partial(unfolded, local, window)}
    with torch.no_grad(): difference = (ways["window"](x) - ways["unfold"](x)).abs().max().item()
    row = {"window": window, "tile": local.tile[0], "products": local.block[0] * local.block[1] / side**2}
    for run in (forward, training):
        seconds = in_turn({name: partial(run, way, x) for name, way in ways.items()}, rounds, warm_up=1, clock=time.process_time)
        row |= {f"{run.__name__} {name} cpu s": s for name, s in seconds.items()} | {f"{run.__name__} global / window": seconds["global"] / seconds["window"]}
    return row | {"largest difference": difference}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("windows", nargs="*", type=int, default=(3, 5, 7))
    for name, default in (("side", 32), ("batch", 8), ("rounds", 9), ("threads", torch.get_num_threads())): parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = pd.DataFrame([compare(window, options.side, options.batch, options.rounds) for window in options.windows])
    print(table.round({c: 7 if c.startswith("largest") else 4 for c in table}).T.to_string(header=False))
