"""Training throughput: `howvits.training` against a plain loop with the same recipe, model and precision, in turn.

The plain loop is what one would write with torchvision: PIL images, transforms.Compose, a DataLoader (without workers
and with two), timm's Mixup, AdamW and a cosine schedule. Ours also runs without workers and with two. The ratio is
that of the best of each.

    python tests/bench/training.py [--rounds 5] [--steps 10] [--threads N] [--quick] [model ...]
"""
import argparse
import multiprocessing
import statistics
import time

import pandas as pd
import torch
from timm.data import Mixup
from timm.data.auto_augment import rand_augment_transform
from timm.loss import SoftTargetCrossEntropy
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from tqdm import tqdm

from howvits.data import RAND_AUGMENT, load_dataset
from howvits.evaluation import keep_memory
from howvits.models import create_model
from howvits.training import RunConfig, Trainer, train_step

SMALL, PAPER = ("resnet", "vit"), ("resnet_50", "vit_ti")
RECIPES = {
    "weak": dict(augment="weak", mixup=0.0, cutmix=0.0, precision="bfloat16"),  # the record's
    "strong": dict(augment="strong", precision="bfloat16"),
    "strong, float32": dict(augment="strong"),
}


class PilImages(Dataset):
    "Grey PIL images and labels, as torchvision's FashionMNIST hands them out."

    def __init__(self, data, transform):
        self.images = [transforms.functional.to_pil_image(image) for image in data.raw]
        self.labels, self.transform = data.labels.tolist(), transform

    def __len__(self): return len(self.labels)

    def __getitem__(self, index): return self.transform(self.images[index]), self.labels[index]


def plain_transform(data, augment):
    "The recipe's augmentation of one image."
    steps = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    if augment == "strong":
        steps.append(rand_augment_transform(RAND_AUGMENT, dict(img_mean=round(255 * data.mean[0]))))
    steps += [transforms.Grayscale(3), transforms.ToTensor(), transforms.Normalize(data.mean, data.std)]
    if augment == "strong":
        steps.append(transforms.RandomErasing(0.25, value=0))
    return transforms.Compose(steps)


def plain_loop(config, data, steps, workers):
    "A generator that does one step of a plain training loop each time."
    loader = DataLoader(PilImages(data, plain_transform(data, config.augment)), config.batch_size, shuffle=True, drop_last=True,
                        num_workers=workers, persistent_workers=workers > 0)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    model = create_model(config.model, dataset=config.dataset, drop_path_rate=config.drop_path).to(memory_format=layout).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    mixup, criterion = Mixup(config.mixup, config.cutmix, label_smoothing=config.label_smoothing, num_classes=data.num_classes), SoftTargetCrossEntropy()
    mixup.mixup_enabled = config.mixup > 0 or config.cutmix > 0
    while True:
        for images, labels in loader:
            images, targets = mixup(images.to(memory_format=layout), labels)
            with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bfloat16"):
                logits = model(images)
            loss = criterion(logits.float(), targets)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
            optimiser.step()
            schedule.step()
            yield loss.item()


def our_loop(config, data, workers):
    "A generator that does one step of a run each time."
    trainer = Trainer(config, data, torch.device("cpu"), workers=workers)
    while True:
        train_step(trainer)
        yield trainer.losses[trainer.step - 1].item()


def serve(pipe, loop, config, threads, *args):
    "A loop in a process of its own, so that neither profits from the memory that the other keeps: so many steps when told to, and answers images/s."
    torch.set_num_threads(threads)
    if loop is our_loop: keep_memory()  # as `python -m howvits.training` and the sweep do
    steps_of = loop(config, load_dataset(config.dataset, config.split, augment=config.augment), *args)
    while steps := pipe.recv():
        start = time.perf_counter()
        for _ in range(steps): next(steps_of)
        pipe.send(steps * config.batch_size / (time.perf_counter() - start))


def begin(*args):
    "Start a loop, and return the pipe to it."
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.Process(target=serve, args=(theirs, *args)).start()
    return ours


def compare(model, recipe, steps, rounds, batch, threads):
    "One row of the table: images/s, medians over rounds of `steps` steps each."
    total = (rounds + 1) * steps
    config = RunConfig(model, dataset="fashion_mnist_mini", images=total * batch, batch_size=batch, channels_last="resnet" in model, **RECIPES[recipe])
    loops = {(who, workers): begin(loop, config, threads, *args, workers) for workers in (0, 2)
             for who, loop, args in (("ours", our_loop, ()), ("plain", plain_loop, (total,)))}
    speeds = {name: [] for name in loops}
    for _ in range(rounds + 1):
        for name, pipe in loops.items():
            pipe.send(steps)
            speeds[name].append(pipe.recv())
    for pipe in loops.values(): pipe.send(0)
    medians = {name: statistics.median(values[1:]) for name, values in speeds.items()}
    best = {who: max(speed for (other, _), speed in medians.items() if other == who) for who in ("ours", "plain")}
    return {"model": model, "recipe": recipe, **{f"{who}, {workers} workers": speed for (who, workers), speed in medians.items()},
            "ours / plain": best["ours"] / best["plain"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=SMALL + PAPER)
    parser.add_argument("--rounds", type=int, default=5, help="after one that is not counted")
    parser.add_argument("--steps", type=int, default=10, help="per round, for the small models; the papers' own take two")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="one short round of the small models: does it work?")
    options = parser.parse_args()
    if options.quick:
        options.models, options.rounds, options.steps, options.batch = SMALL, 1, 1, 8
    multiprocessing.set_start_method("spawn")
    plan = [(model, recipe) for model in options.models for recipe in RECIPES]
    rows = [compare(model, recipe, options.steps if model in SMALL else min(2, options.steps), options.rounds, options.batch, options.threads)
            for model, recipe in tqdm(plan, disable=None)]
    print(pd.DataFrame(rows).round({"ours / plain": 2, **{f"{who}, {n} workers": 0 for who in ("ours", "plain") for n in (0, 2)}}).to_string(index=False))
