"""The record of runs: many writers at once, damage, and one recorded run trained again."""
import json
import subprocess
import sys

import pytest
import torch

from howvits.data import load_dataset
from howvits.evaluation import evaluate
from howvits.models import create_model, load_checkpoint
from howvits.record import COLUMNS, add_run, find_run, key_of, read_runs, record_folder
from howvits.sweep import LIGHT, record_row
from howvits.training import RECIPE, RunConfig, fit, from_canonical

ROW = """
def row(seed):
    import json
    from howvits.record import key_of
    config = json.dumps({"epochs": 5.0, "model": "vit", "recipe": 0, "seed": seed}, sort_keys=True, separators=(",", ":"))
    return dict(key=key_of(config), config=config, evaluated_on="test", error=0.25, n=2000, nll=0.7, ece=0.02, confidence=0.7, nll_train=0.9, parameters=300_000,
                images_seen=50_000, images_per_second=400.0, seconds=125.0, started="2020-01-01T00:00:00+00:00", finished="2020-01-01T00:03:00+00:00",
                device="cpu", threads=1, versions='{"torch":"2"}', commit="a" * 40, snapshots=json.dumps({"late": "0" * 64}))
"""
exec(ROW)  # the same rows here and in the writers' processes


def test_writers_at_once_lose_nothing(tmp_path):
    "Three processes, each with ten rows of its own and one that all of them have."
    program = ROW + "import sys; from howvits.record import add_run\nfor seed in [99, *range(10 * int(sys.argv[1]), 10 * int(sys.argv[1]) + 10)]: add_run(row(seed), sys.argv[2])"
    writers = [subprocess.Popen([sys.executable, "-c", program, str(i), str(tmp_path)]) for i in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert sorted(read_runs(tmp_path)["key"]) == sorted(row(seed)["key"] for seed in [99, *range(30)])


def test_a_full_disk_leaves_the_old_table(tmp_path, monkeypatch):
    add_run(row(0), tmp_path)
    before = (tmp_path / "runs.csv").read_bytes()

    def full(*args): raise OSError(28, "No space left on device")
    monkeypatch.setattr("howvits.models.os.fsync", full)
    with pytest.raises(OSError, match="No space left on device.*run the same command again"): add_run(row(1), tmp_path)
    assert (tmp_path / "runs.csv").read_bytes() == before
    assert not [p for p in tmp_path.iterdir() if p.suffix not in (".csv", ".lock")]


def test_the_books_record_opens():
    "Every row matches its key, and was trained by the recipe that its text names."
    runs = read_runs(record_folder())
    assert list(runs) == list(COLUMNS)
    for text, key in zip(runs["config"], runs["key"]): assert key_of(text) == key and from_canonical(text).key == key


def test_kept_weights_are_those_of_recorded_runs():
    runs = read_runs(record_folder()).set_index("key")
    kept = sorted((record_folder() / "checkpoints").glob("*.safetensors"))
    if not kept: pytest.skip("the record keeps no weights yet")
    assert sum(path.stat().st_size for path in kept) <= 40e6
    for path in kept:
        key, snapshot = path.stem.split("-")
        state, meta = load_checkpoint(path)
        assert meta["run"] == key and meta["snapshot"] == snapshot and meta["source"] == json.loads(runs.loc[key, "snapshots"])[snapshot]
        assert all(t.dtype.itemsize == 2 for t in state.values() if t.is_floating_point())


def test_a_recorded_run_comes_out_the_same_when_it_is_trained_again(tmp_path):
    """The shortest run of the record. On the machine that made it, the weights are the same bit for bit; elsewhere the
    arithmetic rounds differently, so its numbers have to agree to what a few steps can make of that."""
    runs = read_runs(record_folder())
    short = runs[runs["images_seen"] <= 5_000].sort_values(["images_seen", "parameters"])
    if not len(short): pytest.skip("no short run is recorded yet")
    recorded = short.iloc[0]
    torch.set_num_threads(int(recorded["threads"]))
    again = record_row(fit(from_canonical(recorded["config"]), cache=tmp_path, progress=False, again=True))
    assert again["key"] == recorded["key"] and again["n"] == recorded["n"] and again["parameters"] == recorded["parameters"]
    same = json.loads(again["snapshots"]) == json.loads(recorded["snapshots"])
    for name, tolerance in (("nll_train", 0.02), ("nll", 0.02), ("error", 0.02)):
        assert again[name] == pytest.approx(recorded[name], rel=0 if same else tolerance, abs=1e-12 if same else tolerance), name


GOLDEN = {2: {  # recipe: what it makes of three steps: their losses, and the sum of squares of the weights after them
    ("vit", "strong"): ([2.314125, 2.324387, 2.394948], 974.5067),
    ("resnet", "weak"): ([2.360800, 2.359697, 2.290990], 3313.8182),
    ("vit", "weak"): ([2.295761, 2.330087, 2.314722], 974.5926),
    ("pit", "weak"): ([2.510763, 2.477908, 2.783530], 2196.1334),
    ("swin", "weak"): ([2.311976, 2.312492, 2.306530], 1171.9018),
    ("mixer", "weak"): ([2.302584, 2.302582, 2.299463], 3468.6389),
    ("resnext", "weak"): ([2.326483, 2.321169, 2.311188], 9760.4619),
}}


@pytest.mark.parametrize("model, augment", GOLDEN[RECIPE])
def test_another_loop_needs_another_recipe(model, augment, tmp_path):
    "In float32, what a recipe makes of three steps is the same on every machine to rounding; leaving out weight decay alone would change ViT's sum of squares four times as much as is allowed."
    losses, squares = GOLDEN[RECIPE][model, augment]
    recipe = dict(LIGHT, channels_last="resne" in model) if augment == "weak" else {}
    config = RunConfig(model, dataset="fashion_mnist_mini", subset=0.05, images=3 * 96, lr=3e-3, warmup=0.4, seed=1, **recipe)
    run = fit(config, cache=tmp_path, progress=False, again=True)
    weights = create_model(model, checkpoint=run.checkpoint).state_dict().values()
    assert run.losses.tolist() == pytest.approx(losses, rel=1e-4), "the numbers of this recipe have changed: raise RECIPE and note the new ones"
    assert sum(w.float().square().sum().item() for w in weights) == pytest.approx(squares, rel=1e-5)


@pytest.mark.parametrize("file", sorted((record_folder() / "checkpoints").glob("*-late.safetensors"))[::4], ids=lambda file: file.stem)
def test_kept_weights_have_the_recorded_error(file):
    "A result that was typed in is found out by the weights beside it; they are rounded to 16 bits, so an image or two may change sides."
    row = find_run(file.stem.removesuffix("-late"))
    config = from_canonical(row["config"])
    found = evaluate(create_model(config.model, checkpoint=file), load_dataset(config.dataset, "test"))
    assert abs(found["error"] - row["error"]) <= 2 / row["n"] and found["nll"] == pytest.approx(row["nll"], abs=1e-3)


def test_every_row_names_clean_commits():
    assert read_runs(record_folder())["commit"].str.fullmatch(r"[0-9a-f]{40}(, [0-9a-f]{40})*").all()
