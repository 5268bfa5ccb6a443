"""Checkpoints as people have them: the authors' own layouts, wrappers, averages, half precision, and files that are none."""
import json
import pickle
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from howvits.models import create_model

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
    assert not Path("harm").exists()


def test_foreign_keys_are_listed(tmp_path):
    torch.save({"backbone.stem.weight": torch.ones(3)}, tmp_path / "foreign.pth")
    with pytest.raises(ValueError, match="lacks cls_token.*more.*name the model"): create_model("vit", checkpoint=tmp_path / "foreign.pth")
