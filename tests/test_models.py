"""The papers' models; checkpoints as people have them: the authors' own layouts, wrappers, averages, half precision, and files that are none; weights from the hub."""
import json
import os
import pickle
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from howvits.attention import observe_attention
from howvits.data import DATASETS
from howvits.evaluation import evaluate
from howvits.models import PAPER, SMALL, VARIED, create_model, save_checkpoint
from howvits.steps import find_steps, image_channels, observe
from howvits.training import RunConfig, fit

AUTHORS = sorted(path.stem for path in Path(__file__).with_name("authors").glob("*.json"))


def authors_checkpoint(name):
    "A state dict with the keys and shapes of the authors' model, filled by a rule; and the first eight logits of two images, which their own network gives with it."
    told = json.loads((Path(__file__).with_name("authors") / f"{name}.json").read_text())
    state = {}
    for key, (shape, dtype) in told["state_dict"].items():
        noise = np.random.RandomState(zlib.crc32(key.encode())).standard_normal(shape)
        value = 1 + 0.1 * abs(noise) if key.endswith("running_var") else 1 + 0.05 * noise if len(shape) == 1 and key.endswith("weight") else 0.05 * noise
        state[key] = torch.tensor(value, dtype=torch.float32) if dtype.endswith("float32") else torch.zeros(shape, dtype=torch.int64)
    return state, torch.tensor(told["expected_logits"])


@pytest.mark.parametrize("name", AUTHORS)
def test_authors_checkpoint_gives_the_authors_logits(name, tmp_path):
    state, expected = authors_checkpoint(name)
    torch.save({"state_dict": state, "epoch": 300}, tmp_path / "best.pth.tar")
    model = create_model(name, dataset="cifar100", checkpoint=tmp_path / "best.pth.tar").eval()
    images = torch.from_numpy(np.random.RandomState(0).standard_normal((2, 3, 32, 32)).astype(np.float32))
    with torch.no_grad(): logits = model(images)[:, : expected.shape[1]]
    assert (logits - expected).abs().max() < 1e-3 * expected.std()


def test_a_missing_key_of_an_old_layout_is_named(tmp_path):
    state, _ = authors_checkpoint("resnet_50")
    del state["layer3.2.conv2.1.bias"]
    torch.save(state, tmp_path / "cut.pth")
    with pytest.raises(ValueError, match="lacks layer3.2.bn2.bias"): create_model("resnet_50", dataset="cifar100", checkpoint=tmp_path / "cut.pth")


@pytest.mark.parametrize("wrap", [
    lambda s: s, lambda s: {"model": s}, lambda s: {"state_dict": s, "optimizer": {"lr": 1.0}},
    lambda s: {"state_dict": {k: 0 * v for k, v in s.items()}, "state_dict_ema": s}, lambda s: {"model": {k: 0 * v for k, v in s.items()}, "model_ema": s},
    lambda s: {f"module.{k}": v for k, v in s.items()}, lambda s: {f"_orig_mod.module.{k}": v for k, v in s.items()},
    lambda s: {k: v.half() if v.is_floating_point() else v for k, v in s.items()}])
def test_wrapped_weights_load(wrap, tmp_path):
    model = create_model("vit")
    torch.save(wrap(model.state_dict()), tmp_path / "weights.pt")
    loaded = create_model("vit", checkpoint=tmp_path / "weights.pt").state_dict()
    assert all(v.dtype == w.dtype and torch.allclose(v, w, rtol=1e-3, atol=1e-6) for v, w in zip(model.state_dict().values(), loaded.values()))


class Harmful:
    def __reduce__(self): return Path.touch, (Path("harm"),)


def test_code_in_a_checkpoint_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": create_model("vit").state_dict(), "args": Harmful()}, "weights.pth")
    with pytest.raises(ValueError, match="holds more than tensors"): create_model("vit", checkpoint="weights.pth")
    Path("plain.pth").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ValueError, match="cannot be read|holds more than tensors"): create_model("vit", checkpoint="plain.pth")
    for junk in (b"root:x:0:0:root:/root:/bin/bash\n" * 20, b"", b"\x80\x02.", b"\x80\x02K\x01Q.", b"PK\x03\x04"):
        Path("junk").write_bytes(junk)
        with pytest.raises(ValueError, match="cannot be read|holds more than tensors|no state dict"): create_model("vit", checkpoint="junk")
    assert not Path("harm").exists()


def test_foreign_keys_are_listed(tmp_path):
    torch.save({"backbone.stem.weight": torch.ones(3)}, tmp_path / "foreign.pth")
    with pytest.raises(ValueError, match="lacks cls_token.*more.*name the model"): create_model("vit", checkpoint=tmp_path / "foreign.pth")


# steps of each kind at 32 x 32 pixels: HDVW's figures 9 and D.2 give 16 blocks for ResNet-50, 12 of two steps for ViT; Twins has a positional convolution in each stage
STEPS = {
    "resnet_preact": dict(conv=12), "twins": dict(msa=6, mlp=6, conv=3), "convit": dict(msa=6, mlp=6), "levit": dict(msa=6, mlp=8),
    "convolutional_vit": dict(msa=6, mlp=6), "deepvit": dict(msa=6, mlp=6),
    "resnet_18": dict(conv=8), "resnet_50": dict(conv=16), "resnet_101": dict(conv=33), "resnext_50": dict(conv=16), "resnet_preact_50": dict(conv=16),
    "vit_ti": dict(msa=12, mlp=12), "vit_s": dict(msa=12, mlp=12), "pit_ti": dict(msa=12, mlp=12), "swin_ti": dict(msa=12, mlp=12), "mixer_ti": dict(mixer=8, mlp=8),
    "twins_s": dict(msa=18, mlp=18, conv=4), "convit_ti": dict(msa=12, mlp=12), "levit_s": dict(msa=9, mlp=11),
    "convolutional_vit_ti": dict(msa=12, mlp=12), "deepvit_ti": dict(msa=12, mlp=12),
    "vit_half": dict(msa=3, mlp=3), "vit_half_ti": dict(msa=6, mlp=6), "vit_wide": dict(msa=6, mlp=6), "resnet_wide": dict(conv=12)}


@pytest.mark.parametrize("name", VARIED + SMALL + PAPER)
def test_every_model_shows_its_steps(name):
    with torch.device("meta"): model = create_model(name, **WINDOW.get(name, {}))
    assert Counter(step.kind for step in find_steps(model, torch.empty(2, 3, 32, 32, device="meta"))) == STEPS[name]


WINDOW = {"convolutional_vit": dict(window=5), "convolutional_vit_ti": dict(window=5)}  # without one they are ViTs


@pytest.mark.parametrize("name", ("vit_half", "vit_wide") + SMALL)
def test_steps_of_the_small_models_add_up(name):
    model, images, seen = create_model(name, **WINDOW.get(name, {})).eval(), torch.randn(2, 3, 32, 32), []

    def visit(step, stream, branch, output):
        assert torch.equal(output, stream + branch) and step.activation == "" and output.shape[1:] == step.shape
        seen.append(step.index)

    with torch.no_grad(): logits = observe(model, images, visit)
    assert seen == list(range(sum(STEPS[name].values()))) and torch.equal(logits, model(images).detach())


@pytest.mark.parametrize("name, maps", [("twins", 6), ("convit", 6), ("levit", 6), ("convolutional_vit", 6), ("deepvit", 6)])
def test_attention_of_the_small_models_is_seen(name, maps):
    model, images, seen = create_model(name, **WINDOW.get(name, {})).eval(), torch.randn(2, 3, 32, 32), []

    def visit(step, attention):
        torch.testing.assert_close(attention.weights.sum(-1), torch.ones(attention.weights.shape[:-1]))
        torch.testing.assert_close(attention.mixed @ attention.values, attention.result)
        seen.append(step.index)

    with torch.no_grad(): observe_attention(model, images, visit)
    assert len(set(seen)) == maps


@pytest.mark.parametrize("name", VARIED + SMALL)
def test_two_steps_of_training(name, tmp_path):
    config = RunConfig(name, WINDOW.get(name, {}), dataset="fashion_mnist_mini", split="fit", subset=0.01, images=32, batch_size=16)
    run = fit(config, cache=tmp_path, progress=False)
    loaded = create_model(name, checkpoint=run.checkpoint)
    assert len(run.losses) == 2 and run.losses.isfinite().all() and 0 <= run.metrics["error"] <= 1 and loaded.num_classes == 10


@pytest.mark.parametrize("name", ["resnet", "resnet_preact"])
def test_the_stages_of_a_cnn_as_a_backbone(name):
    backbone = timm.create_model(name, features_only=True)
    sides = [maps.shape[-1] for maps in backbone(torch.zeros(1, 3, 32, 32))]
    assert sides == [32 // reduction for reduction in backbone.feature_info.reduction()] == [32, 32, 16, 8, 4]


# One process without a network: what each of three requests says, and how long it takes.
OFFLINE = """
import json, sys, time
from howvits.models import create_model
def attempt(name):
    start = time.monotonic()
    try: create_model(name, pretrained=True)
    except Exception as error: return type(error).__name__, str(error), time.monotonic() - start
print(json.dumps([attempt(name) for name in ("resnet18", "vit_tiny_patch16_224", "vit_small_patch16_18x2_224")]))
"""


def test_trained_weights_offline_fail_within_seconds(tmp_path):
    closed = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "TORCH_HOME": str(tmp_path)}  # the port of the discard service, where nothing listens
    done = subprocess.run([sys.executable, "-c", OFFLINE], env=os.environ | closed, capture_output=True, text=True, timeout=600)
    (one, two, none) = json.loads(done.stdout.splitlines()[-1])
    for (kind, sentence, seconds), name in ((one, "resnet18"), (two, "vit_tiny_patch16_224")):
        assert kind == "ConnectionError" and seconds < 15
        assert f"The trained weights of {name!r} are not on this machine" in sentence and f"create_model({name!r}, checkpoint=FILE, num_classes=1000)" in sentence
        assert "\n" not in sentence
    assert none[0] == "ValueError" and "has no trained weights" in none[1]


def test_normalisation_is_that_of_the_weights(tmp_path):
    name, own = "vit_tiny_patch16_224", (0.5, 0.5, 0.5)  # timm's weights of this name were trained with these
    assert timm.models.get_pretrained_cfg(name).mean == own
    fresh = create_model(name, dataset="cifar10")
    assert fresh.pretrained_cfg["mean"] == DATASETS["cifar10"].mean  # random weights know no other data
    torch.save(fresh.state_dict(), tmp_path / "from_elsewhere.pth")
    assert create_model(name, checkpoint=tmp_path / "from_elsewhere.pth").pretrained_cfg["mean"] == own
    path = save_checkpoint(fresh, tmp_path / "ours", name=name, dataset="cifar10", num_classes=10)
    assert create_model(name, checkpoint=path).pretrained_cfg["mean"] == DATASETS["cifar10"].mean


@pytest.mark.parametrize("name", ["dla34", "dpn68", "fasternet_t0", "fastvit_t8", "csatv2", "tresnet_m", "resnet18", "vit_tiny_patch16_224"])
def test_images_of_three_channels_are_never_refused_by_a_model_that_reads_them(name):
    with torch.device("meta"): model = timm.create_model(name)
    assert image_channels(model) in (3, None)


def test_a_network_whose_first_convolution_is_deep_inside_is_evaluated():
    model = timm.create_model("fasternet_t0", num_classes=10)
    assert evaluate(model, [(torch.randn(4, 3, 64, 64), torch.arange(4))])["n"] == 4
    with pytest.raises(ValueError, match="where the model reads 3"): evaluate(model, [(torch.randn(4, 1, 64, 64), torch.arange(4))])
