"""What one product with the Hessian costs, in several ways, in turn: small networks, a mini-batch of 16.

*kept graph* is `howvits.hessian`'s: the graph of the gradient is built once, each product walks back through it. *eight at once* hands that walk eight
vectors; the seconds are those of one. *forward over reverse* differentiates the gradient along the vector, as torch.func does.

    python tests/bench/products.py [--rounds 9] [--threads N] [model ...]
"""
import argparse

import pandas as pd
import torch
from timing import in_turn
from torch.func import functional_call, grad, jvp

from howvits.data import load_dataset
from howvits.evaluation import keep_memory
from howvits.hessian import HessianProduct, twice_differentiable
from howvits.losses import curved_parameters, draw_batches, soft_nll, split_like
from howvits.models import create_model
from howvits.training import RunConfig


def compare(name, rounds, several=8):
    "One row of the table: milliseconds for a product."
    config = RunConfig(name, dataset="fashion_mnist_mini", epochs=1, augment="weak", mixup=0.0, cutmix=0.0)
    model, ((images, targets),) = create_model(name), draw_batches(load_dataset(config.dataset, "train", augment="weak"), config, count=1)
    parameters, decay = curved_parameters(model, 0.0)
    names, product = [n for n, p in model.named_parameters() if p.requires_grad], HessianProduct(model, images, targets, parameters, decay)
    one, many = torch.randn(len(decay)), torch.randn(several, len(decay))
    point = {n: p.detach() for n, p in zip(names, parameters)}
    along, loss = dict(zip(names, split_like(one, parameters))), lambda moved: soft_nll(functional_call(model, moved, (images,)), targets)
    stacked = [torch.stack(parts) for parts in zip(*(split_like(v, parameters) for v in many))]
    ways = {
        "gradient": lambda: grad(loss)(point),
        "kept graph": lambda: product(one),
        "eight at once": lambda: torch.autograd.grad(product.gradient, parameters, stacked, retain_graph=True, is_grads_batched=True),
        "forward over reverse": lambda: jvp(grad(loss), (point,), (along,))[1],
    }
    with twice_differentiable(model):
        found = torch.cat([t.reshape(-1) for t in ways["forward over reverse"]().values()])
        seconds = in_turn(ways, rounds, warm_up=1)
    seconds["eight at once"] /= several
    return {"model": name, **{f"{way} ms": 1e3 * s for way, s in seconds.items()}, "largest difference": (found - product(one)).abs().max().item()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=("vit", "resnet"))
    for name, default in (("rounds", 9), ("threads", torch.get_num_threads())): parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
    print(pd.DataFrame([compare(name, options.rounds) for name in options.models]).to_string(index=False, float_format="{:.3g}".format))
