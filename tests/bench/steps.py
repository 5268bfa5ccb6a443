"""What watching costs: `observe` with a visitor that does nothing, against the plain forward pass, in turn.

    python tests/bench/steps.py [--batch 64] [--rounds 9] [--threads N] [model ...]
"""
import argparse
import time

import pandas as pd
import torch
from timing import in_turn

from howvits.evaluation import keep_memory
from howvits.models import create_model
from howvits.steps import find_steps, observe

MODELS = ("resnet", "vit", "pit", "swin", "resnet50", "vit_small_patch16_224")


def compare(name, batch, rounds):
    "One row of the table: medians over rounds."
    model = create_model(name).eval()
    images = torch.randn(batch, *model.pretrained_cfg["input_size"])
    variants = {"plain s": lambda: model(images), "observed s": lambda: observe(model, images, lambda *_: None)}
    keep_memory()  # as every chapter and command does
    with torch.no_grad():
        start = time.perf_counter()
        count = len(find_steps(model, images))
        found = time.perf_counter() - start
        row = in_turn(variants, rounds, warm_up=1)
    return {"model": name, "steps": count, "found once in s": found, **row, "observed / plain": row["observed s"] / row["plain s"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    for name, default in (("batch", 64), ("rounds", 9), ("threads", torch.get_num_threads())): parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(pd.DataFrame([compare(name, options.batch, options.rounds) for name in options.models]).round(3).to_string(index=False))
