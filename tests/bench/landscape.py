"""A loss surface of 21 x 21 points: `howvits.landscape` against `loss-landscapes`, a loop that loads each point's weights, and the bare forward passes.

All see the same network, plane and images, in turn, round by round; the table gives medians. The peers compute the NLL alone, ours its l2 term as well. *wrong by* is the
largest difference of an NLL from that of the loading loop; of loss-landscapes every second row only, since its others lie one step off.

    pip install loss-landscapes==3.0.6
    python tests/bench/landscape.py [--rounds 3] [--points 21] [--batches 4] [--threads N] [model ...]
"""
import argparse
import copy

import numpy as np
import pandas as pd
import torch
from timing import in_turn

from howvits.data import load_dataset
from howvits.evaluation import keep_memory
from howvits.landscape import filter_direction, measure_surface
from howvits.losses import curved_parameters, draw_batches, soft_nll
from howvits.models import create_model
from howvits.steps import evaluation_mode
from howvits.training import RunConfig

MODELS, RADIUS = ("vit", "resnet"), 0.5


def moved(model, parameters_of, shift):
    "A copy of the model, its weights shifted."
    model = copy.deepcopy(model)
    parameters = parameters_of(model)
    torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(parameters).detach() + shift, parameters)
    return model


def compare(name, points, count, rounds):
    config = RunConfig(name, dataset="fashion_mnist_mini", epochs=1, augment="weak", mixup=0.0, cutmix=0.0)
    model = create_model(name, pretrained=True).eval()
    images, targets = (torch.cat(parts) for parts in zip(*draw_batches(load_dataset(config.dataset, "train", augment="weak"), config, count=count)))
    parameters_of = lambda m: curved_parameters(m, 0.0)[0]
    plane = [filter_direction(parameters_of(model), seed) for seed in (0, 1)]
    axis, step = np.linspace(-RADIUS, RADIUS, points), 2 * RADIUS / (points - 1)

    @torch.no_grad()
    def bare():
        with evaluation_mode(model):
            for _ in range(points**2): soft_nll(model(images), targets).item()

    @torch.no_grad()
    def loading():
        found, other, origin = [], copy.deepcopy(model), copy.deepcopy(model.state_dict())
        names = {id(p): n for n, p in model.named_parameters()}
        for x in axis:
            for y in axis:
                state, shift = copy.deepcopy(origin), (x * plane[0] + y * plane[1]).float()
                for p, part in zip(parameters_of(model), shift.split([p.numel() for p in parameters_of(model)])): state[names[id(p)]] += part.view_as(p)
                other.load_state_dict(state)
                found.append(soft_nll(other(images), targets).item())
        return found

    def ours(): return measure_surface(model, [(images, targets)], radius=RADIUS, points=points, directions=plane, progress=False)["nll"].tolist()

    def landscapes():  # its even rows begin one step along the second direction, its odd ones without
        from loss_landscapes import planar_interpolation
        from loss_landscapes.metrics import Loss
        corner = moved(model, parameters_of, -RADIUS * plane[0] - (RADIUS + step) * plane[1])
        ends = [moved(corner, parameters_of, points * step * d) for d in plane]
        with torch.no_grad(): return planar_interpolation(corner, *ends, Loss(soft_nll, images, targets), steps=points).ravel().tolist()

    contestants = {"bare passes": bare, "howvits": ours, "loading loop": loading, "loss-landscapes": landscapes}
    grid = lambda values: np.reshape(values, (points, points))[::2]
    right = grid(loading())
    wrong = {who: np.max(abs(grid(find()) - right)) for who, find in contestants.items() if find is not bare}
    seconds = in_turn(contestants, rounds)
    return [dict(model=name, contestant=who, seconds=s, **{"times bare": s / seconds["bare passes"], "wrong by": wrong.get(who, np.nan)}) for who, s in seconds.items()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    for name, default in (("rounds", 3), ("points", 21), ("batches", 4), ("threads", torch.get_num_threads())): parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_memory()
    print(pd.DataFrame([row for name in options.models for row in compare(name, options.points, options.batches, options.rounds)]).to_string(index=False, float_format="{:.3g}".format))
