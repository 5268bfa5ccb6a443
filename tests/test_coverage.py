"""Which models work: the committed tables against today's rule, and networks from elsewhere."""
from collections import Counter
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from conftest import ROOT
from torch import nn
from torchvision import models as vision

from howvits.coverage import discover, load_tables, smallest
from howvits.steps import find_steps, observe

TABLES = ROOT / "book/coverage"
# Every kind, several streams, blocked tokens, windows that overlap, tokens beside the grid, and networks that have no steps.
SAMPLE = ["test_resnet", "test_vit", "test_convnext", "pit_ti_224", "halonet26t", "tnt_s_legacy_patch16_224", "crossvit_tiny_240", "mixer_s16_224",
          "poolformer_s12", "csatv2", "repvgg_a0", "vgg11"]


@pytest.fixture(scope="module")
def tables(): return load_tables(TABLES)


@pytest.mark.parametrize("name", SAMPLE)
def test_table_is_what_the_rule_finds(name, tables):
    row, now = tables[0].loc[name], discover(name)
    assert {key: (None if pd.isna(row[key]) else row[key]) for key in now.keys() - {"name", "reason"}} == {key: now[key] for key in now.keys() - {"name", "reason"}}
    assert ("" if pd.isna(row.reason) else row.reason) == now["reason"]


def test_nearly_all_networks_with_additions_have_steps(tables):
    import timm
    discovery, numbers = tables
    assert set(discovery.index) == set(timm.list_models())
    assert (discovery[discovery.additions > 0].steps > 0).mean() >= 0.98
    assert sorted(numbers.index) == smallest(discovery)
    assert (numbers.exact[numbers.steps > 0] == numbers.steps[numbers.steps > 0]).all()
    assert numbers[numbers.steps > 0][["fourier", "variance", "cka"]].notna().all().all()


@pytest.mark.parametrize("name, kinds, size", [
    ("resnet18", {"conv": 8}, 64), ("vit_b_16", {"msa": 12, "mlp": 12}, 224), ("swin_t", {"msa": 12, "mlp": 12}, 64), ("convnext_tiny", {"conv": 18}, 64)])
def test_torchvision(name, kinds, size):
    with torch.device("meta"): model = getattr(vision, name)()
    steps = find_steps(model, torch.empty(2, 3, size, size, device="meta"))
    assert Counter(s.kind for s in steps) == kinds and {s.stream for s in steps} == {0}


def check_additions(model, images):
    "Every step adds up, and what is observed is what the model computes."
    sums = []
    with torch.no_grad():
        logits = observe(model, images, lambda step, stream, branch, output: sums.append(torch.equal(stream + branch, output)))
        assert all(sums) and torch.equal(logits, getattr(model.eval()(images), "logits", model.eval()(images)))
    return Counter(s.kind for s in find_steps(model, images))


class Encoder(nn.Module):
    "A plain ViT of PyTorch's own encoder, whose fused path would slip past a watcher."
    def __init__(self):
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, 32, 8, 8), nn.Linear(32, 10)
        self.token = nn.Parameter(torch.zeros(1, 1, 32))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2, enable_nested_tensor=False)
    def forward(self, x):
        x = self.patch(x).flatten(2).mT
        return self.head(self.encoder(torch.cat([self.token.expand(len(x), -1, -1), x], 1))[:, 0])


class Answer(nn.Module):
    "As Hugging Face's models do: the logits are a field of the result."
    def __init__(self): super().__init__(); self.vit = Encoder()
    def forward(self, pixel_values): return SimpleNamespace(loss=None, logits=self.vit(pixel_values))


@pytest.mark.parametrize("model", [Encoder, Answer])
def test_plain_encoder(model):
    model = model().eval()
    with torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(False)
        try: assert check_additions(model, torch.randn(2, 3, 32, 32)) == {"msa": 2, "mlp": 2}
        finally: torch.backends.mha.set_fastpath_enabled(True)


def test_hugging_face():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8, num_labels=10)
    assert check_additions(transformers.ViTForImageClassification(config).eval(), torch.randn(2, 3, 32, 32)) == {"msa": 2, "mlp": 2}
