"""Chapter 05 from the command line, as a user runs it: what it leaves, and how it refuses."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from conftest import ROOT, run_chapter
from torch import nn

from howvits.fourier import measure_frequency_noise, measure_log_amplitude
from howvits.sweep import verdicts

CHAPTER = ROOT / "nbs" / "05_fourier.ipynb"


@pytest.mark.parametrize("model, kinds, trained", [("swin", {"msa", "mlp"}, True), ("resnet18", {"conv"}, False)])
def test_leaves_figure_table_and_record(tmp_path, model, kinds, trained):
    done = run_chapter("05_fourier", tmp_path, ("model", model), ("images", 24))
    assert done.returncode == 0, done.stderr[-2000:]
    out = tmp_path / "runs" / "05_fourier" / model
    assert f"are in {out.relative_to(tmp_path)}" in done.stderr  # said at the terminal
    record = json.loads((out / "run.json").read_text())
    assert record["parameters"]["model"] == model and record["images"] == 24
    assert record["networks"][0]["trained"] is trained
    assert {c["id"]: c["verdict"] for c in record["claims"]} == {i: v.overall for i, v in verdicts("05_fourier").items()}  # the record's, whatever is measured here
    assert (out / "figure.png").stat().st_size > 5_000
    table = pd.read_csv(out / "table.csv")
    silent = table["delta_log_amplitude"].isna()
    assert set(table["kind"]) == kinds and table["frequency"].max() == 1
    assert silent.equals(table["of"] == "branch") if model == "resnet18" else not silent.any()  # timm's ResNet begins with branches of zero
    assert set(table["state"]) == ({"trained", "untrained"} if trained else {"untrained"})
    assert bool(record["sentences"]) is trained


@pytest.mark.parametrize("parameters, sentence", [
    ([("modle", "swin")], "There is no parameter 'modle': did you mean model?"),
    ([("model", "convnxt_tiny")], "convnext_tiny"),
    ([("dataset", "fashion_mnits")], "fashion_mnist"),
    ([("images", 0)], "images must be a whole number of at least 1"),
    ([("model", "vit"), ("images", 8), ("batch_size", 64)], "batch_size=64 is more than the 8 images"),
    ([("model", "vit"), ("out", "/proc/nowhere")], "cannot be written"),
    ([("model", "vit"), ("checkpoint", "lost.safetensors")], "no checkpoint at"),
])
def test_bad_parameters_stop_the_run(tmp_path, parameters, sentence):
    done = run_chapter("05_fourier", tmp_path, *parameters)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert not list(tmp_path.glob("runs/**/*.json"))


def test_two_runs_at_once_leave_one_whole_result(tmp_path):
    "Same folder, two models: the files are those of one run (the hashes in its record say which)."
    import hashlib
    line = [str(Path(sys.executable).with_name("papermill")), str(CHAPTER), "-p", "images", "24", "-p", "out", "shared"]
    runs = [subprocess.Popen([*line, "-p", "model", m], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) for m in ("vit", "swin")]
    for run in runs: assert run.communicate()[1] is not None and run.returncode == 0
    record = json.loads((tmp_path / "shared" / "run.json").read_text())
    assert all(hashlib.sha256((tmp_path / "shared" / name).read_bytes()).hexdigest() == digest for name, digest in record["files"].items())


@pytest.mark.parametrize("shape", [(3, 32, 48), (3, 33, 33), (1, 31, 40), (3, 7, 5)])
def test_whole_measurements_on_images_of_any_shape(shape):
    "Maps and noise on odd sides, oblong images and one channel: all finite, and the axis true."
    channels, height, width = shape
    torch.manual_seed(0)

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.branch, self.head = nn.Conv2d(channels, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

        def forward(self, x):
            x = self.stem(x)
            return self.head((x + self.branch(x)).mean((2, 3)))

    network, data = Network(), [(torch.randn(6, *shape), torch.arange(6) % 4)]
    maps, noise = measure_log_amplitude(network, data), measure_frequency_noise(network, data, bands=2)
    assert maps["delta_log_amplitude"].notna().all() and maps["frequency"].max() <= 1
    assert len(noise) == 2 and noise["accuracy_loss"].between(-1, 1).all()
