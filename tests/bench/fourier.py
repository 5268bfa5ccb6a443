"""The Fourier measurement against `fft2` of every stored map, side by side in one run.

    python tests/bench/fourier.py [--images N] [--batch N] [--rounds 5] [--threads N] [model ...]

The peer is what the authors' notebook does: keep the map of every step, transform each in two dimensions, take the
logarithm of all amplitudes and read the half diagonal. Both see the same network (random weights), the same images
(1,024 of 32 x 32 pixels in batches of 128, which is the measurement's own default, and 64 larger ones at once, if not
told otherwise) and the same batches, in turn, round by round; the
table gives medians. *found s* is what finding the steps costs, once for a model, and is in no other column. *extra* is
the time on top of the bare forward passes; *peak* is the highest resident memory on top of what the process held
before, and *peak extra* what of it is beyond the peak of the bare passes (Linux only).
"""
import argparse
import time
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from timing import in_turn

from howvits.fourier import FLOOR, measure_log_amplitude
from howvits.models import create_model
from howvits.steps import find_steps, observe

MODELS = ("vit", "swin", "resnet50", "vit_small_patch16_224")


def bare(model, batches):
    "The forward passes alone."
    with torch.no_grad():
        for x, _ in batches: model(x)


def ours(model, batches): return measure_log_amplitude(model, batches)["log_amplitude"].to_numpy()


def peer(model, batches):
    "Store the maps of a batch, then `fft2` of each."
    sums, n = {}, 0
    with torch.no_grad():
        for x, _ in batches:
            kept = []
            observe(model, x, lambda step, stream, branch, output: kept.append(output.clone()))
            n += len(x)
            for i, maps in enumerate(kept):
                spectrum = torch.fft.fft2(maps).abs().clamp_min(FLOOR).log().mean(1).sum(0)
                sums[i] = sums.get(i, 0) + spectrum.diagonal()[: maps.shape[-1] // 2 + 1]
    return torch.cat(list(sums.values())).numpy() / n


def memory(field):
    "A field of /proc/self/status, in MiB."
    return next(int(line.split()[1]) / 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))


def peak(function, *args):
    "Highest resident memory while `function` runs, on top of what was there before, in MiB."
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    function(*args)
    return memory("VmHWM") - before


def compare(name, images, batch, rounds):
    "One row of the table."
    model = create_model(name).eval()
    size = model.pretrained_cfg["input_size"]
    generator = torch.Generator().manual_seed(0)
    images, batch = images or (1024 if size[-1] <= 64 else 64), batch or (128 if size[-1] <= 64 else 64)
    start = time.perf_counter()
    find_steps(model, torch.zeros(2, *size))
    found = time.perf_counter() - start
    batches = [(torch.randn(batch, *size, generator=generator), torch.zeros(batch, dtype=torch.long)) for _ in range(images // batch)]
    difference = abs(ours(model, batches) - peer(model, batches)).max()  # warms up too
    t = in_turn({f.__name__: partial(f, model, batches) for f in (bare, ours, peer)}, rounds)
    m = {f.__name__: peak(f, model, batches) for f in (bare, ours, peer)}
    extra = {name: max(value - m["bare"], 1) for name, value in m.items()}
    return {"model": name, "images": images, "found s": found, "bare s": t["bare"], "ours s": t["ours"], "fft2 s": t["peer"], "ours / bare": t["ours"] / t["bare"],
            "extra: fft2 / ours": (t["peer"] - t["bare"]) / max(t["ours"] - t["bare"], 1e-9),
            "peak bare MiB": m["bare"], "peak ours MiB": m["ours"], "peak fft2 MiB": m["peer"], "peak: ours / fft2": m["ours"] / m["peer"],
            "peak extra: ours / fft2": extra["ours"] / extra["peer"], "largest difference": difference}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    for name, default in (("images", None), ("batch", None), ("rounds", 5), ("threads", torch.get_num_threads())): parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = pd.DataFrame([compare(name, options.images, options.batch, options.rounds) for name in options.models])
    print(table.round({c: 6 if c.startswith("largest") else 3 for c in table}).to_string(index=False))
