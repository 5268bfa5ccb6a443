"""What a notebook cannot test of training: kills, locks, full disks, damaged files, and the networks that ship."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from howvits import training
from howvits.data import load_dataset
from howvits.evaluation import evaluate, predict
from howvits.models import ASSETS, ZOO, create_model, load_checkpoint
from howvits.training import RunConfig, Trainer, canonical, fit, from_canonical, main, run_folder

TINY = RunConfig("vit", dict(embed_dim=24, depth=2, num_heads=2), "fashion_mnist_mini", split="fit", subset=0.05,
                 images=32 * 40, batch_size=32, lr=1e-3, warmup=0.1, snapshots=(0.5,))

# A run in a process of its own: what it prints last is the JSON of its result.
CHILD = """
import json, signal, sys, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal
torch.set_num_threads(1)
from howvits.training import RunConfig, fit
from pathlib import Path
config, cache, save_every = json.loads(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
config["snapshots"] = tuple(config["snapshots"])
run = fit(RunConfig(**config), cache=cache, save_every=save_every, progress=False)
print(json.dumps([run.config.key, run.seconds, run.metrics]))
"""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start(config, cache, save_every=0.0, before=""):
    return subprocess.Popen([sys.executable, "-c", before + CHILD, json.dumps(asdict(config)), str(cache), str(save_every)],
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def quick(config, cache, **kwargs):
    return fit(config, cache=cache, progress=False, **kwargs)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    "An uninterrupted run, with the cache it lies in."
    torch.set_num_threads(1)
    cache = tmp_path_factory.mktemp("cache")
    return quick(TINY, cache), cache


def assert_same_run(one, other, **tolerance):
    "The same losses and weights: to the bit, or to a tolerance."
    assert set(one.snapshots) == set(other.snapshots)
    close = torch.testing.assert_close
    close(other.losses, one.losses, **(tolerance or dict(rtol=0, atol=0)))
    for name in one.snapshots:
        close(load_file(other.snapshots[name]), load_file(one.snapshots[name]), **(tolerance or dict(rtol=0, atol=0)))


def wait_for_state(folder, step):
    "Wait until a run has saved a state of at least this step, and return the step."
    for _ in range(6000):
        try:
            done = torch.load(folder / "state.pt", weights_only=True)["step"]
            if done >= step:
                return done
        except FileNotFoundError:
            pass
        time.sleep(0.05)
    raise AssertionError("the run saved no state")


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_interrupted_run_resumes_to_the_same_bits(signal_, finished, tmp_path):
    process = start(TINY, tmp_path)
    folder = run_folder(TINY, tmp_path)
    done = wait_for_state(folder, step=12)
    process.send_signal(signal_)
    process.communicate()
    assert process.returncode != 0 and not (folder / "run.json").exists(), "the run ended before it was interrupted"
    assert 12 <= done < 40
    left = torch.load(folder / "state.pt", weights_only=True)["step"]

    steps = []
    original = training.train_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "train_step", lambda trainer: (steps.append(trainer.step), original(trainer)))
        resumed = quick(TINY, tmp_path)
    assert steps == list(range(left, 40)), "it did not resume where it was saved"

    whole = finished[0]
    assert set(resumed.snapshots) == {"early", "0.5", "late"}
    assert_same_run(whole, resumed)
    timing = {"images_per_second"}
    assert {k: v for k, v in whole.metrics.items() if k not in timing} == {k: v for k, v in resumed.metrics.items() if k not in timing}


def test_ctrl_c_saves_the_state(finished, tmp_path):
    process = start(TINY, tmp_path, save_every=1e9)
    folder = run_folder(TINY, tmp_path)
    for _ in range(6000):
        if (folder / "early.json").exists(): break
        time.sleep(0.05)
    assert not (folder / "state.pt").exists()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode != 0 and re.match("KeyboardInterrupt: after step .* of 40; the same call of fit goes on", err.splitlines()[-1])
    assert 4 < torch.load(folder / "state.pt", weights_only=True)["step"] < 40
    assert_same_run(finished[0], quick(TINY, tmp_path))


def test_two_processes_share_one_run(finished, tmp_path):
    first, second = start(TINY, tmp_path), start(TINY, tmp_path)
    results = []
    for process in (first, second):
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, err
        results.append(json.loads(out.splitlines()[-1]))
    assert results[0] == results[1]  # the seconds too: one of them trained, the other read
    assert results[0][0] == TINY.key
    assert results[0][2]["nll"] == finished[0].metrics["nll"]


def test_finished_run_is_read_and_not_trained(finished, monkeypatch):
    run, cache = finished
    monkeypatch.setattr(training, "Trainer", lambda *args, **kwargs: pytest.fail("trained again"))
    again = quick(TINY, cache)
    assert again.metrics == run.metrics and torch.equal(again.losses, run.losses)


def test_snapshots_are_checkpoints_of_different_moments(finished):
    run = finished[0]
    untrained = training.initial_model(TINY).state_dict()
    weights = {name: create_model("vit", checkpoint=path).state_dict()["blocks.0.mlp.fc1.weight"] for name, path in run.snapshots.items()}
    weights["untrained"] = untrained["blocks.0.mlp.fc1.weight"]
    names = list(weights)
    assert not any(torch.equal(weights[a], weights[b]) for i, a in enumerate(names) for b in names[:i])
    assert load_checkpoint(run.snapshots["early"])[1]["step"] == 4
    assert not run.losses.isnan().any() and run.losses[-10:].mean() < run.losses[:10].mean()


def test_seed_decides_weights_and_order(finished, tmp_path):
    other = quick(replace(TINY, seed=1, images=32 * 4), tmp_path)
    assert other.losses[0] != finished[0].losses[0]


def test_fit_leaves_the_random_generators_alone(tmp_path):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(1)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    quick(replace(TINY, images=64), tmp_path)
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("augment", ["strong", "weak", None])
def test_every_recipe_trains(precision, augment, tmp_path):
    run = quick(replace(TINY, precision=precision, augment=augment, images=64, mixup=0.8 if augment else 0, cutmix=0), tmp_path)
    assert run.losses.isfinite().all() and run.metrics["n"] == 1000 and run.metrics["evaluated_on"] == "val"


def test_diverging_loss_is_one_clear_error(tmp_path):
    with pytest.raises(FloatingPointError, match="the loss of vit became .* at step .* of 40: lower the learning rate"):
        quick(replace(TINY, lr=1e8, clip_grad=None, warmup=0.0), tmp_path)


def test_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot write .*set HOWVITS_CACHE"):
        quick(TINY, tmp_path / "file")


def test_full_disk_leaves_nothing_half_written(tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"  # no file above 20 kB
    process = start(TINY, tmp_path, before=limit)
    _, err = process.communicate(timeout=600)
    assert process.returncode != 0
    assert "cannot write" in err.splitlines()[-1] and "free some space" in err.splitlines()[-1]
    left = {p.name for p in run_folder(TINY, tmp_path).iterdir()}
    assert left <= {"config.json", "lock"}


def test_damaged_files_are_named_and_not_trained_over(finished, tmp_path):
    config = replace(TINY, images=64)
    run = quick(config, tmp_path)
    weights = run.checkpoint.read_bytes()
    run.checkpoint.write_bytes(weights[:-1] + b"?")
    with pytest.raises(ValueError, match="is damaged .*late.safetensors.*delete that folder"):
        quick(config, tmp_path)
    run.checkpoint.write_bytes(weights)
    (run_folder(config, tmp_path) / "run.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        quick(config, tmp_path)
    other = replace(config, seed=5)
    run_folder(other, tmp_path).mkdir()
    (run_folder(other, tmp_path) / "state.pt").write_bytes(b"not a state")
    with pytest.raises(ValueError, match="state.pt is damaged .*delete it"):
        quick(other, tmp_path)


@pytest.mark.parametrize("change, words", [
    (dict(model="vitt"), "vit"),
    (dict(dataset="fashon_mnist"), "fashion_mnist"),
    (dict(subset=1e-4), "at least one of each of the 10 classes"),
    (dict(clip_grad=-1.0), "clip_grad"),
    (dict(model_args={"dept": 3}), "dept"),
])
def test_bad_configurations_stop_before_training(change, words, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "train_step", lambda trainer: pytest.fail("a step was done"))
    with pytest.raises((ValueError, TypeError), match=words):
        quick(replace(TINY, **change), tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_keys_do_not_drift():
    "If this fails, a default or the hash has changed, and no earlier run would be found again: raise RECIPE, or undo it."
    assert RunConfig("vit", epochs=300).key == "f61ca1a2677ab88c"
    assert TINY.key == "f48bae155c997a7b"


def test_canonical_text_of_a_key_can_be_read_back():
    assert from_canonical(canonical(TINY)) == TINY


# The same run by other means

BRIEF = replace(TINY, images=32 * 10, drop_path=0.3)  # stochastic depth, mixup and CutMix on


@pytest.fixture(scope="module")
def brief(tmp_path_factory):
    torch.set_num_threads(1)
    return quick(BRIEF, tmp_path_factory.mktemp("brief"))


def arguments(config, cache):
    "A configuration as options of the command line."
    given = {name: value for name, value in asdict(config).items() if value != asdict(RunConfig("", epochs=1)).get(name) or name == "epochs"}
    text = {name: "none" if value is None else value if isinstance(value, str) else json.dumps(value) for name, value in given.items()}
    return [word for name, value in text.items() for word in (f"--{name.replace('_', '-')}", value)] + ["--cache", str(cache), "--device", "cpu"]


def torchrun(config, cache):
    "A run by two processes, read from the cache."
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "howvits.training"]
    done = subprocess.run([*command, *arguments(config, cache)], capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [line["key"] for line in printed] == [config.key]  # one of the two speaks
    assert (run_folder(config, cache) / "run.json").exists()
    return quick(config, cache)


def test_two_processes_train_the_same_network(brief, tmp_path):
    run = torchrun(BRIEF, tmp_path)
    assert_same_run(brief, run, rtol=0, atol=2e-4)
    assert run.record["processes"] == 2 and abs(run.metrics["nll"] - brief.metrics["nll"]) < 1e-3


def test_two_processes_resume_what_one_began(finished, tmp_path):
    process = start(TINY, tmp_path)
    wait_for_state(run_folder(TINY, tmp_path), step=12)
    process.kill()
    process.communicate()
    run = torchrun(TINY, tmp_path)
    assert not torch.equal(run.losses, finished[0].losses), "it did not resume in two processes"
    assert_same_run(finished[0], run, rtol=0, atol=2e-3)


@pytest.mark.parametrize("accumulate", [2, 8])
def test_accumulation_trains_the_same_network(accumulate, brief, tmp_path):
    assert_same_run(brief, quick(BRIEF, tmp_path, accumulate=accumulate), rtol=0, atol=2e-4)


def test_the_parts_of_a_batch_do_not_share_their_draws(brief, tmp_path, monkeypatch):
    "The tests above could tell: without the mode that cuts out a part's draws, the losses differ."
    monkeypatch.setattr(training.DrawsOfPart, "__torch_function__", lambda self, func, types, args=(), kwargs=None: func(*args, **(kwargs or {})))
    other = quick(BRIEF, tmp_path, accumulate=2)
    assert (other.losses - brief.losses).abs().max() > 1e-3


def test_batches_drawn_ahead_are_the_same(brief, tmp_path):
    assert_same_run(brief, quick(BRIEF, tmp_path, workers=2))


def test_compiled_network_trains_the_same(tmp_path):
    try:
        training.check_compiler(torch.device("cpu"))
    except ValueError as error:
        pytest.skip(str(error))
    config = replace(BRIEF, model_args=dict(embed_dim=16, depth=2, num_heads=2), images=32 * 3)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled = quick(config, tmp_path / "compiled", compile=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    assert_same_run(quick(config, tmp_path / "eager"), compiled, rtol=0, atol=2e-4)


@pytest.mark.parametrize("count, change, words", [
    (3, {}, "a batch of 32 images cannot be cut into 3 .processes. x 1 .accumulate. equal parts"),
    (2, dict(model="resnet", model_args={}), "resnet has BatchNorm, which needs the whole batch at once"),
])
def test_what_cannot_be_spread_over_processes(count, change, words, monkeypatch):
    monkeypatch.setattr(training, "processes", lambda: (0, count))
    with pytest.raises(ValueError, match=words):
        Trainer(replace(TINY, **change), load_dataset(TINY.dataset, subset=50), torch.device("cpu"))


def test_no_compiler_is_one_sentence(monkeypatch):
    monkeypatch.setattr(training.shutil, "which", lambda name: None)
    with pytest.raises(ValueError, match="needs a C.. compiler.*leave compile out"):
        Trainer(TINY, load_dataset(TINY.dataset, subset=50), torch.device("cpu"), compile=True)


def test_command_line_reads_every_field():
    changed = replace(TINY, augment=None, clip_grad=None, channels_last=True, optimiser="sgd", precision="bfloat16", seed=3)
    given = vars(training.make_parser().parse_args(arguments(changed, "cache")))
    assert RunConfig(**{name: value for name, value in given.items() if name in asdict(changed)}) == changed


@pytest.mark.parametrize("words, message", [
    (["--epochs", "1"], "--model"), (["--model", "vit"], "length of the run"), (["--model", "vitt", "--epochs", "1"], "'vit'"),
    (["--model", "vit", "--epochs", "long"], "'long' is no float"), (["--model", "vit", "--epochs", "1", "--sead", "1"], "--sead"),
])
def test_command_line_refuses_in_one_sentence(words, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*words, "--cache", str(tmp_path)])
    assert stop.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


# What a record says

def test_record_says_when_and_from_what(finished):
    record = finished[0].record
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", record["started"]) and record["started"] <= record["finished"]
    assert record["commit"] is None or re.fullmatch("[0-9a-f]{40}(-dirty)?", record["commit"])
    assert {"error", "nll", "ece", "nll_train", "parameters", "images_per_second"} <= record["metrics"].keys()


def test_a_resumed_run_started_when_it_was_begun(tmp_path):
    trainers = [Trainer(TINY, load_dataset(TINY.dataset, subset=50), torch.device("cpu")) for _ in range(2)]
    trainers[0].started = "2022-02-14T00:00:00+00:00"
    training.save_state(trainers[0], tmp_path / "state.pt")
    training.load_state(trainers[1], tmp_path / "state.pt")
    assert trainers[1].started == trainers[0].started


def test_a_lost_snapshot_is_named(tmp_path):
    folder = run_folder(TINY, tmp_path)
    folder.mkdir(parents=True)
    trainer = Trainer(TINY, load_dataset(TINY.dataset, subset=TINY.subset), torch.device("cpu"))
    trainer.step = 12
    training.save_state(trainer, folder / "state.pt")
    with pytest.raises(ValueError, match="lost its snapshot 'early'.*delete the folder"):
        quick(TINY, tmp_path)


def test_commit_of_the_sources(tmp_path, monkeypatch):
    def git(*words): return subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *words], check=True, capture_output=True, text=True).stdout
    commit = training.source_commit.__wrapped__
    package = tmp_path / "howvits"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(training, "files", lambda name: package)
    assert commit() is None  # no checkout
    git("init")
    assert commit() is None  # another project's
    git("add", "."), git("commit", "-m", "m")
    head = git("rev-parse", "HEAD").strip()
    (package / "notes.txt").write_text("")
    assert commit() == head
    (package / "__init__.py").write_text("changed = True")
    assert commit() == f"{head}-dirty"


def test_a_folder_of_another_configuration_is_refused(finished, tmp_path):
    config = replace(TINY, images=64)
    folder = run_folder(config, tmp_path)
    quick(config, tmp_path)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "config": {**record["config"], "seed": 9}}))
    with pytest.raises(ValueError, match="is damaged .*another configuration"):
        quick(config, tmp_path)
    for other in (json.dumps(asdict(replace(config, seed=9))), "{", '{"no": "field"}'):
        (folder / "config.json").write_text(other)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(ValueError, match="config.json is damaged, or belongs to another configuration.*move its folder away"):
            quick(config, tmp_path)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_evaluate_leaves_the_model_as_it_was():
    model = create_model("resnet", drop_path_rate=0.5)
    model.layer1.eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    evaluate(model, load_dataset("fashion_mnist_mini", augment="strong"), images=20)
    assert torch.rand(1) == expected
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_evaluate_restores_the_mode_after_an_error():
    model = create_model("vit", num_classes=5)
    with pytest.raises(ValueError, match="5 classes"):
        evaluate(model, load_dataset("fashion_mnist_mini"), images=50)
    assert all(m.training for m in model.modules())


def test_predictions_do_not_depend_on_the_batch_size():
    model, data = create_model("resnet"), load_dataset("fashion_mnist_mini")
    logits, labels = predict(model, data, images=50)
    for batch_size in (1, 7):
        other, same = predict(model, data, images=50, batch_size=batch_size)
        torch.testing.assert_close(other, logits)
        assert torch.equal(labels, same)


@pytest.mark.parametrize("name", ZOO)
def test_shipped_networks_are_what_their_description_says(name):
    _, meta = load_checkpoint(ASSETS / name)  # checks the hash
    model, data = create_model(name, pretrained=True), load_dataset("fashion_mnist_mini")
    assert meta["dataset"] == "fashion_mnist" and meta["metrics"]["n"] == 10_000
    assert meta["lr"] == float(min(meta["learning_rates"], key=meta["learning_rates"].get)) and len(meta["learning_rates"]) == 3
    error = meta["metrics"]["error"]
    found = evaluate(model, data)["error"]  # the mini test set is a fifth of the test set
    assert abs(found - error) < 4 * (error * (1 - error) / len(data)) ** 0.5
    assert found > 0


@pytest.mark.parametrize("name, floor", [("resnet", 0.91), ("vit", 0.88), ("pit", 0.88), ("swin", 0.88)])
def test_shipped_networks_reach_what_was_asked_for(name, floor):
    assert load_checkpoint(ASSETS / name)[1]["metrics"]["accuracy"] >= floor


def test_the_zoo_fits_into_the_package():
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) <= 8e6


def test_zoo_prints_its_plan_and_trains_nothing(tmp_path):
    env = {**os.environ, "HOWVITS_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "howvits.zoo", "--dry-run", "--models", "vit", "pit"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "6 trials" in done.stdout and "2 runs" in done.stdout
    assert not list(tmp_path.iterdir())


def test_zoo_refuses_an_unknown_model():
    done = subprocess.run([sys.executable, "-m", "howvits.zoo", "--models", "vitt"], capture_output=True, text=True)
    assert done.returncode == 2 and "vitt" in done.stderr.splitlines()[-1]
