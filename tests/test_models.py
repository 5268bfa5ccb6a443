"""The papers' models; checkpoints as people have them: the authors' own layouts, wrappers, averages, half precision, and files that are none; weights from the hub."""
import argparse
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
from safetensors.torch import save_file
from torch import nn

from howvits import training
from howvits.attention import observe_attention
from howvits.chapters import find_weights
from howvits.data import DATASETS
from howvits.evaluation import evaluate
from howvits.models import PAPER, SMALL, VARIED, create_model, load_checkpoint, save_checkpoint
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


IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
VIT = create_model("vit").eval()
WEIGHTS = VIT.state_dict()
OTHER = {k: torch.zeros_like(v) for k, v in WEIGHTS.items()}
LOGITS = VIT(IMAGES).detach()


def prefixed(prefix, state=WEIGHTS): return {prefix + k: v for k, v in state.items()}


def loaded(content, tmp_path, name="vit", **kwargs):
    "The network that comes of a file."
    torch.save(content, tmp_path / "weights.pt")
    return create_model(name, checkpoint=tmp_path / "weights.pt", **kwargs).eval()


def refusal(content, tmp_path, name="vit", **kwargs):
    "What is said of a file that cannot be loaded: one sentence."
    with pytest.raises(ValueError) as told: loaded(content, tmp_path, name, **kwargs)
    assert "\n" not in str(told.value) and len(str(told.value)) < 700
    return str(told.value)


OPTIMISER = torch.optim.AdamW(create_model("vit").parameters())
for parameter in OPTIMISER.param_groups[0]["params"]: parameter.grad = torch.ones_like(parameter)
OPTIMISER.step()

ENTRIES = {  # where the weights lie in the file
    "alone": lambda s: s, "model": lambda s: {"model": s}, "state_dict": lambda s: {"state_dict": s}, "net": lambda s: {"net": s}, "network": lambda s: {"network": s},
    "teacher": lambda s: {"teacher": s}, "nested": lambda s: {"state": {"model": s}}, "list": lambda s: {"models": [s]},
    "training": lambda s: {"model": s, "optimizer": OPTIMISER.state_dict(), "epoch": 3, "rng": torch.get_rng_state(), "best": torch.tensor(0.9), "args": argparse.Namespace(lr=0.1), 0: None},
    "lightning": lambda s: {"state_dict": s, "callbacks": {"EarlyStopping": {"best_score": torch.tensor(0.9)}}, "pytorch-lightning_version": "2.0"}}
PREFIXES = ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model.", "module.model.", "model.module.", "model._orig_mod.", "backbone.net.", "_forward_module.module."]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_weights_load_wherever_they_lie_and_whatever_stands_before_their_names(entry, prefix, tmp_path):
    assert torch.equal(loaded(ENTRIES[entry](prefixed(prefix)), tmp_path)(IMAGES), LOGITS)


def test_the_wrappers_of_pytorch_leave_weights_that_load(tmp_path):
    parts = create_model("vit").eval()
    parts.load_state_dict(WEIGHTS)
    parts.blocks[1], parts.head = torch.compile(parts.blocks[1]), nn.DataParallel(parts.head)
    wrapped = [nn.DataParallel(VIT), torch.compile(VIT), nn.DataParallel(torch.compile(VIT)), torch.optim.swa_utils.AveragedModel(VIT), nn.Sequential(VIT), parts]
    for network in wrapped: assert torch.equal(loaded(network.state_dict(), tmp_path)(IMAGES), LOGITS)
    assert "blocks.1._orig_mod.norm1.weight" in parts.state_dict() and "n_averaged" in wrapped[3].state_dict()


@pytest.mark.parametrize("content", [
    *[{"model": OTHER, name: WEIGHTS} for name in ("state_dict_ema", "model_ema", "ema", "ema_state_dict", "ema_model", "EMA", "swa", "averaged_model")],
    {"state_dict": OTHER, "swa_model": torch.optim.swa_utils.AveragedModel(VIT).state_dict()}, {"model": OTHER, "ema": {"module": WEIGHTS, "decay": 0.99}},
    {**prefixed("online_model.", OTHER), **prefixed("ema_model."), "step": torch.tensor(3)}, {**OTHER, "epoch": 3, "ema": WEIGHTS},
    {"model": WEIGHTS, "ema_decay": 0.99, "ema": None}, {"model": WEIGHTS, "ema": {"updates": torch.tensor(3)}}, {"model": WEIGHTS, "optimizer": {"state": {0: {"ema": torch.ones(3)}}}}])
def test_averaged_weights_come_first(content, tmp_path):
    assert torch.equal(loaded(content, tmp_path)(IMAGES), LOGITS)


@pytest.mark.parametrize("content, words", [
    ({"student": OTHER, "teacher": WEIGHTS}, ["several sets of weights", "'student' and 'teacher'"]), ({"ema": WEIGHTS, "swa": OTHER}, ["'ema' and 'swa'"]),
    ({**prefixed("module.encoder_q."), **prefixed("module.encoder_k.", OTHER)}, ["'module.encoder_q' and 'module.encoder_k'"]),
    ({**prefixed("module."), **OTHER}, ["'module' and the top level"]), ({**WEIGHTS, "teacher": OTHER}, ["several sets of weights"]),
    ({"model": WEIGHTS, "ema": {"decay": 0.9, "shadow_params": list(WEIGHTS.values())}}, ["averaged weights, 'ema', but not under the names"]),
    ({"model": WEIGHTS, "shadow_params": list(WEIGHTS.values())}, ["averaged weights, 'shadow_params'"]),
    ({"model": WEIGHTS, "model_ema": {k: v for k, v in WEIGHTS.items() if k != "norm.bias"}}, ["averaged weights, 'model_ema'"])])
def test_which_weights_are_meant_is_never_guessed(content, words, tmp_path):
    told = refusal(content, tmp_path)
    assert all(word in told for word in words) and "save the" in told, told


def test_two_copies_of_the_same_weights_are_no_question(tmp_path):
    copy = {k: v.clone().double() for k, v in WEIGHTS.items()}
    for content in ({"model": WEIGHTS, "best": copy}, {**WEIGHTS, "n": None, "best": copy}): assert torch.equal(loaded(content, tmp_path)(IMAGES), LOGITS)


@pytest.mark.parametrize("content, words", [
    ({**WEIGHTS, "epoch": 3, "args": argparse.Namespace()}, ["has an extra epoch (int), args (Namespace); save model.state_dict() alone"]),
    ({**WEIGHTS, "optimizer": OPTIMISER.state_dict(), 0: 5}, ["optimizer.* (", "0 (int)", "save model.state_dict() alone"]),
    (dict(enumerate(WEIGHTS.values())), ["lacks cls_token", "has an extra 0, 1, 2 (and"]), ({**WEIGHTS, "cls_token": None}, ["cls_token as NoneType, not as tensor"]),
    ({}, ["no state dict with weights"]), ([WEIGHTS], ["holds a list and no state dict"]), (list(WEIGHTS.values()), ["holds a list"]), (torch.ones(3), ["holds a Tensor"]), ("text", ["holds a str"]),
    (None, ["holds a NoneType"]), ({"state_dict": None, "epoch": 3}, ["whose entries are state_dict, epoch, and no state dict"]), ({"state_dict": {}}, ["no state dict with weights"]),
    ({"state_dict": {k: v for k, v in WEIGHTS.items() if k != "norm.bias"}, "epoch": 3}, ["under 'state_dict', does not fit this model: it lacks norm.bias; name the model"])])
def test_what_a_file_holds_beside_weights_or_instead_is_told(content, words, tmp_path):
    told = refusal(content, tmp_path)
    assert all(word in told for word in words), told
    if "under" in words[0]: assert len(load_checkpoint(tmp_path / "weights.pt")[0]) == len(WEIGHTS) - 1  # fits no `vit`, and is a state dict all the same
    else:
        with pytest.raises(ValueError, match="no tensors with a name|no state dict with weights"): load_checkpoint(tmp_path / "weights.pt")


def test_the_network_settles_what_a_file_alone_does_not(tmp_path):
    content = {"model": WEIGHTS, "criterion": {"centers": torch.ones(3, 3)}}
    assert torch.equal(loaded(content, tmp_path)(IMAGES), LOGITS)
    with pytest.raises(ValueError, match="several state dicts, 'model' and 'criterion'"): load_checkpoint(tmp_path / "weights.pt")
    assert find_weights("vit", tmp_path / "weights.pt").checkpoint == tmp_path / "weights.pt"


def test_a_refusal_shows_some_of_each_kind_and_how_many(tmp_path):
    told = refusal(create_model("pit").state_dict(), tmp_path)
    missing, over, shapes = told.split("; ")[:3]
    own, theirs = set(WEIGHTS), set(create_model("pit").state_dict())
    assert "it lacks patch_embed.proj.weight, " in missing and f"(and {len(own - theirs) - 3} more)" in missing
    assert "has an extra" in over and f"transformers.* ({sum(k.startswith('transformers.') for k in theirs)} entries)" in over
    assert "cls_token of shape (1, 1, 22), not (1, 1, 64)" in shapes


@pytest.mark.parametrize("convert, off", [(torch.Tensor.half, 1e-2), (torch.Tensor.bfloat16, 1e-1), (torch.Tensor.double, 0)])
def test_weights_in_another_precision_load(convert, off, tmp_path):
    network = loaded({k: convert(v) for k, v in WEIGHTS.items()}, tmp_path)
    assert {p.dtype for p in network.parameters()} == {torch.float32} and (network(IMAGES) - LOGITS).abs().max() <= off


@pytest.mark.parametrize("convert, word", [(lambda v: v.mul(100).to(torch.int8), "torch.int8, not torch.float32"), (torch.Tensor.cfloat, "complex64"), (torch.Tensor.bool, "torch.bool"),
                                           (lambda v: v.to("meta"), "without values"), (torch.Tensor.to_sparse, "sparse"), (lambda v: v.numpy().tolist(), "no state dict with weights"),
                                           (lambda v: torch.quantize_per_tensor(v, 0.1, 0, torch.qint8), "qint8")])
def test_numbers_that_are_no_weights_are_refused(convert, word, tmp_path):
    assert word in refusal({k: convert(v) for k, v in WEIGHTS.items()}, tmp_path)


def test_counts_that_were_made_floats_load_and_averages_of_counts_do_not(tmp_path):
    state = create_model("resnet").state_dict()
    assert loaded({k: v.float() + 7 if v.ndim == 0 else v for k, v in state.items()}, tmp_path, "resnet").bn1.num_batches_tracked == 7
    assert "bn1.num_batches_tracked as torch.float32" in refusal({k: v + 0.5 if v.ndim == 0 else v for k, v in state.items()}, tmp_path, "resnet")


@pytest.mark.parametrize("name, args", [("swin", {}), ("levit", {}), ("twins", {}), ("convit", {}), ("beit_base_patch16_224", dict(depth=1)), ("maxvit_pico_rw_256", {}), ("swinv2_cr_tiny_224", {}),
                                        ("coatnet_pico_rw_224", {}), ("eva02_tiny_patch14_224", dict(depth=1)), ("mvitv2_tiny", {})])
def test_buffers_that_are_no_longer_kept_may_be_in_the_file(name, args, tmp_path):
    model = create_model(name, **args)
    more = {k: b.clone() for k, b in model.named_buffers() if k not in model.state_dict()}
    again = loaded({"model": {**model.state_dict(), **more}}, tmp_path, name, **args)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))


def test_old_batch_norms_did_not_count_and_half_of_the_counts_is_none(tmp_path):
    state = create_model("resnet").state_dict()
    old = {k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}
    assert torch.equal(loaded(old, tmp_path, "resnet").fc.weight, state["fc.weight"])
    assert "lacks layer1.0.bn1.num_batches_tracked" in refusal({**old, "bn1.num_batches_tracked": state["bn1.num_batches_tracked"]}, tmp_path, "resnet")


def test_a_tensor_with_two_names_needs_one(tmp_path, monkeypatch):
    def tied(name, **kwargs):
        network = make(name, **kwargs)
        network.blocks[1].mlp.fc1.weight = network.blocks[0].mlp.fc1.weight
        return network

    make = timm.create_model
    monkeypatch.setattr(timm, "create_model", tied)
    network = create_model("vit")
    state = {k: v for k, v in network.state_dict().items() if k != "blocks.1.mlp.fc1.weight"}  # as safetensors' save_model leaves it
    assert torch.equal(loaded(state, tmp_path).blocks[1].mlp.fc1.weight, network.blocks[1].mlp.fc1.weight)
    path = save_checkpoint(network, tmp_path / "tied", name="vit", dataset="fashion_mnist", num_classes=10)
    assert torch.equal(create_model("vit", checkpoint=path).blocks[1].mlp.fc1.weight, network.blocks[1].mlp.fc1.weight)


def test_the_head_of_another_number_of_classes_says_how_many(tmp_path):
    for name, args in (("vit", {}), ("resnet", {}), ("deit_tiny_distilled_patch16_224", dict(depth=1))):
        told = refusal(create_model(name, num_classes=37, **args).state_dict(), tmp_path, name, **args)
        assert "its head has 37 classes, give that as num_classes" in told
        assert loaded(torch.load(tmp_path / "weights.pt"), tmp_path, name, num_classes=37, **args).num_classes == 37
    assert "name the model and arguments" in refusal(create_model("vit", embed_dim=32).state_dict(), tmp_path)


def test_what_a_file_is_shows_in_its_first_bytes(tmp_path):
    strangers = {b"": "it is empty", b"\n": "it is empty", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n": "git lfs pull", b"<!DOCTYPE html><html></html>": "a web page",
                 b"  <?xml version='1.0'?>": "a web page", b"\x1f\x8b\x08": "compressed", b'{"error": "not found"}': "neither", b"\x89PNG": "neither", b"hello": "neither", b"PK\x03\x04": "damaged"}
    for suffix in (".safetensors", ".pth", ".bin", ""):
        for content, word in strangers.items():
            path = tmp_path / f"file{suffix}"
            path.write_bytes(content)
            with pytest.raises(ValueError, match=f"cannot be read.*{word}"): create_model("vit", checkpoint=path)
        save_file(WEIGHTS, path)
        assert torch.equal(create_model("vit", checkpoint=path).eval()(IMAGES), LOGITS)
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ValueError, match="cannot be read.*damaged"): create_model("vit", checkpoint=path)
        torch.save(WEIGHTS, path)
        assert torch.equal(create_model("vit", checkpoint=path).eval()(IMAGES), LOGITS)


def test_headers_of_any_length_are_read(tmp_path):
    weights, lengths = {"a": torch.ones(2, 2)}, set()
    for n in range(0, 300, 8):  # the length comes first in the file: it may look like the first byte of another kind
        save_file(weights, tmp_path / "file", metadata={"note": "x" * n})
        lengths.add((tmp_path / "file").read_bytes()[0])
        assert torch.equal(load_checkpoint(tmp_path / "file")[0]["a"], weights["a"])
    assert 0x80 in lengths


def test_a_whole_model_and_torchscript_are_refused_by_name(tmp_path):
    torch.save(VIT, tmp_path / "whole.pth")
    torch.jit.trace(VIT, IMAGES).save(tmp_path / "script.pt")
    for name, word in (("whole.pth", "VisionTransformer"), ("script.pt", "TorchScript")):
        with pytest.raises(ValueError, match=f"holds more than tensors .*{word}.*save model.state_dict"): create_model("vit", checkpoint=tmp_path / name)


def test_paths_that_lead_nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    torch.save(WEIGHTS, "runs/model_best.pth.tar")
    for typed, words in (("runs/model_bset.pth.tar", "no checkpoint at runs/model_bset.pth.tar: did you mean model_best.pth.tar"), ("missing/path.pth", r"at missing/path.pth \(nor a folder missing\)"),
                         ("runs/x.safetensors", "at runs/x.safetensors: check the path"), ("runs", "'runs' is a folder and no checkpoint: give a file in it, such as model_best.pth.tar"),
                         (Path("runs"), "'runs' is a folder"), ("", "'' is a folder and no checkpoint: there is none in it"), ("https://x.org/w.pth", "at https://x.org/w.pth")):
        for act in (load_checkpoint, lambda path: create_model("vit", checkpoint=path)):
            with pytest.raises(FileNotFoundError, match=words): act(typed)
    for thing in (WEIGHTS, {}, 5, VIT):
        with pytest.raises(TypeError, match="is the path of a file"): create_model("vit", checkpoint=thing)


@pytest.mark.parametrize("text, error, word", [
    ("", ValueError, "cannot be read"), ("[1]", ValueError, "does not describe"), ('{"args": [1]}', ValueError, "does not describe"), ('{"dataset": "mars"}', ValueError, "no dataset 'mars'"),
    ('{"num_classes": "ten"}', TypeError, "whole number"), ('{"name": "pit"}', ValueError, "holds the model 'pit'"), ('{"sha256": "0"}', ValueError, "sha256 differs")])
def test_descriptions_that_cannot_be(text, error, word, tmp_path):
    path = save_checkpoint(VIT, tmp_path / "saved", name="vit", dataset="fashion_mnist", num_classes=10)
    path.with_suffix(".json").write_text(text)
    with pytest.raises(error, match=word): create_model("vit", checkpoint=path)


def test_saving_loses_nothing(tmp_path):
    told = dict(name="resnet", dataset="fashion_mnist", num_classes=10)
    network = create_model("resnet")
    network.bn1.running_var.fill_(1e6)
    for rate in ("0.01", "0.001"): save_checkpoint(network, tmp_path / f"lr_{rate}", half=True, lr=float(rate), **told)
    assert [load_checkpoint(tmp_path / f"lr_{rate}")[1]["lr"] for rate in ("0.01", "0.001")] == [0.01, 0.001]
    assert (create_model("resnet", checkpoint=tmp_path / "lr_0.01").bn1.running_var == 1e6).all()
    with pytest.raises(TypeError, match="give tensors as numbers"): save_checkpoint(create_model("resnet"), tmp_path / "lr_0.01", metrics=torch.ones(1), **told)
    assert (create_model("resnet", checkpoint=tmp_path / "lr_0.01").bn1.running_var == 1e6).all()  # what was there stays, with its description


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


def test_a_distilled_network_is_evaluated_and_observed_and_its_training_refused(tmp_path, monkeypatch):
    "In training mode it returns two outputs: with a loss for the first alone, the other head would stay random and still be averaged in."

    def distilled(config):
        network = make(config)
        network.set_distilled_training(True)  # in training mode it returns the logits of both heads
        return network

    make, args = training.initial_model, dict(img_size=32, patch_size=8, embed_dim=48, depth=2)
    monkeypatch.setattr(training, "initial_model", distilled)
    config = RunConfig("deit_tiny_distilled_patch16_224", args, dataset="fashion_mnist_mini", split="fit", subset=0.01, images=32, batch_size=16)
    network, steps = distilled(config).train(), []
    assert isinstance(network(IMAGES), tuple)
    logits = observe(network, IMAGES, lambda step, *_: steps.append(step.kind))
    assert steps == ["msa", "mlp"] * 2 and logits.shape == (2, 10) and network.training
    batches = [(IMAGES, torch.tensor([0, 9]), torch.tensor([7, 8])), (IMAGES, torch.tensor([0, 9]), ["a", "path"])]  # a third item: an index, a file's name
    assert evaluate(network, batches) == evaluate(network, [batch[:2] for batch in batches]) and evaluate(network, batches)["n"] == 4
    with pytest.raises(ValueError, match="returns 2 outputs while it trains.*set_distilled_training"): fit(config, cache=tmp_path, progress=False)
    monkeypatch.setattr(training, "initial_model", make)  # as timm makes it
    assert fit(config, cache=tmp_path, progress=False).losses.isfinite().all()


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
