"""Which models work: the committed tables against today's rule, and networks from elsewhere."""
from collections import Counter
from types import SimpleNamespace

import pandas as pd
import pytest
import timm
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
    discovery, numbers = tables
    assert set(discovery.index) == {name for name in timm.list_models() if timm.model_entrypoint(name).__module__.startswith("timm.")}
    assert (discovery[discovery.additions > 0].steps > 0).mean() >= 0.98
    assert sorted(numbers.index) == smallest(discovery)
    steps = numbers[numbers.measured == "steps"]
    assert (steps.exact == discovery.steps[steps.index]).all() and len(steps) == (discovery.steps[numbers.index] > 0).sum()
    assert numbers[["fourier", "variance", "cka"]].notna().all(axis=1).sum() >= len(numbers) - 3


# What the architectures' sources in timm say: steps by kind, stages (0: not compared), streams. Depths of stages stand beside where they are not evident.
SOURCES = {
    "beit_base_patch16_224": ("12 msa 12 mlp", 1, 1), "cait_xxs24_224": ("24 msa 24 mlp", 1, 1), "coat_tiny": ("26 msa 26 mlp 26 conv", 0, 3),  # 2+2+2+2 serial, 6 x 3 parallel, each with a positional convolution
    "convit_tiny": ("12 msa 12 mlp", 1, 1), "convmixer_768_32": ("32 conv", 1, 1), "test_convnext": ("9 conv", 4, 1), "crossvit_tiny_240": ("15 msa 15 mlp", 1, 2),
    "davit_tiny": ("6 msa 18 mlp 24 conv", 4, 1), "deit_tiny_patch16_224": ("12 msa 12 mlp", 1, 1), "dla34": ("12 conv", 4, 1), "dpn68": ("22 conv", 4, 1),  # 3, 4, 12, 3
    "edgenext_small": ("18 conv", 4, 1), "efficientformer_l1": ("1 msa 15 mlp 14 pool", 4, 1), "efficientvit_m0": ("6 msa 16 mlp 16 conv", 3, 1),
    "eva02_tiny_patch14_224": ("12 msa 12 mlp", 1, 1), "fasternet_t0": ("13 conv", 4, 1), "fastvit_s12": ("24 conv", 4, 1),  # 2, 2, 6, 2, each a mixer and an MLP with a convolution
    "focalnet_tiny_lrf": ("12 mlp 12 conv", 4, 1), "gcvit_tiny": ("31 msa 31 mlp 4 conv", 5, 1),  # 3, 4, 19, 5, and a residual reduction before each
    "gemma4_vit_167m": ("16 msa 16 mlp", 1, 1), "ghostnet_050": ("16 conv", 0, 1), "hiera_tiny_224": ("12 msa 12 mlp", 4, 1), "sam2_hiera_tiny": ("12 msa 12 mlp", 4, 1),
    "hrnet_w18_small": ("23 conv", 0, 4), "inception_next_atto": ("12 conv", 4, 1), "inception_resnet_v2": ("40 conv", 3, 1),  # 10, 20, 10
    "caformer_s18": ("12 msa 18 mlp 6 conv", 4, 1), "mvitv2_tiny": ("10 msa 10 mlp", 4, 1), "nest_tiny": ("12 msa 12 mlp", 3, 1), "pit_xs_224": ("12 msa 12 mlp", 3, 1),
    "pvt_v2_b0": ("8 msa 8 conv", 4, 1),  # its MLP holds a convolution
    "regnety_040_sgn": ("22 conv", 4, 1), "res2net50_26w_4s": ("16 conv", 4, 1), "resnest26d": ("8 conv", 4, 1), "resnetv2_18": ("8 conv", 4, 1),
    "rexnet_100": ("11 conv", 11, 1), "legacy_seresnet18": ("8 conv", 4, 1), "sequencer2d_s": ("18 mlp 18 mixer", 2, 1), "skresnet18": ("8 conv", 4, 1), "starnet_s1": ("15 conv", 4, 1),
    "swin_s3_tiny_224": ("12 msa 12 mlp", 4, 1), "swinv2_cr_tiny_224": ("12 msa 12 mlp", 4, 1), "tiny_vit_5m_224": ("10 msa 10 mlp 2 conv", 4, 1), "tnt_s_patch16_224": ("24 msa 24 mlp", 1, 2),
    "tresnet_l": ("30 conv", 4, 1), "visformer_tiny": ("8 msa 8 mlp 7 conv", 3, 1), "volo_d1_224": ("18 msa 18 mlp", 2, 1), "vitamin_small_224": ("14 msa 14 mlp 6 conv", 3, 1),
    "xception41": ("12 conv", 4, 1), "samvit_base_patch16": ("12 msa 12 mlp", 1, 1),
    "vgg11": ("", 0, 0), "densenet121": ("", 0, 0), "nasnetalarge": ("", 0, 0), "pnasnet5large": ("", 0, 0), "repvgg_a0": ("", 0, 0), "inception_v4": ("", 0, 0)}


@pytest.mark.parametrize("name", SOURCES)
def test_table_is_what_the_source_says(name, tables):
    row, (steps, stages, streams) = tables[0].loc[name], SOURCES[name]
    assert " ".join(f"{int(row[kind])} {kind}" for kind in ("msa", "mlp", "conv", "mixer", "pool") if row[kind] > 0) == steps
    assert row.streams == streams and (not stages or row.stages == stages)


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
    import transformers
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8, num_labels=10)
    assert check_additions(transformers.ViTForImageClassification(config).eval(), torch.randn(2, 3, 32, 32)) == {"msa": 2, "mlp": 2}
