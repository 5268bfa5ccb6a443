"""Many runs: on this machine, on a Ray cluster whose worker is killed, and the papers' own configurations."""
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from howvits import training
from howvits.claims import find_claim, load_claims
from howvits.data import DATASETS, ImageDataset
from howvits.models import FURTHER, SMALL, VARIED, ZOO, create_model
from howvits.record import COLUMNS, add_measures, add_run, read_runs
from howvits.sweep import (CHANGES, PRESETS, Clock, Planned, beyond_standard, canonical_args, cells_of, choose_rate, config_of, count_parameters, evidence, images_of, in_processes, keep,
                           main, measured, module_of, plan, refused, still_to_do, train_all, train_one, verdicts, weights_of)
from howvits.training import Diverged, RunConfig, Trainer, canonical, fit, train_step

TINY = RunConfig("vit", dict(embed_dim=16, depth=1, num_heads=2), "fashion_mnist_mini", subset=0.02, augment="weak", mixup=0.0, cutmix=0.0, images=192)


@pytest.fixture
def places(tmp_path, monkeypatch):
    "A cache and a record of one's own, for this process and those that it starts."
    monkeypatch.setenv("HOWVITS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOWVITS_RECORD", str(tmp_path / "record"))
    return tmp_path


def planned(configs): return [Planned({"model": "vit", "subset": 0.02, "lr": config.lr}, config.seed, config) for config in configs]


def clock():
    known = Clock(read_runs())
    known.seconds = lambda config: 1.0
    return known


def test_failed_runs_are_named_and_the_others_recorded(places):
    good, bad = [replace(TINY, seed=seed) for seed in range(2)], replace(TINY, model_args=dict(embed_dim=15, depth=1, num_heads=2))
    failed = train_all(planned([bad, *good]), partial(in_processes, jobs=2), clock(), 2)
    assert len(failed) == 1 and "divisible" in str(*failed.values())
    assert sorted(read_runs()["key"]) == sorted(config.key for config in good)


def test_a_run_that_diverges_is_recorded_and_not_tried_again(places, capsys):
    bad = replace(TINY, lr=1e12, clip_grad=None, warmup=0.0)
    assert train_all(planned([bad]), partial(in_processes, jobs=1), clock(), 1) == {}
    assert "diverged, and is recorded so: the loss of vit became" in capsys.readouterr().out
    row, = read_runs().to_dict("records")
    assert row["n"] == 0 and np.isnan(row["error"]) and row["snapshots"] == "{}" and 0 < row["images_seen"] <= 192
    with pytest.raises(Diverged, match=f"the loss of this run of vit was not finite after {row['images_seen']} images"): fit(bad, progress=False)
    assert weights_of(row) is None and not len(measured(read_runs()))
    assert train_all(planned([TINY]), partial(in_processes, jobs=1), clock(), 1) == {}
    assert read_runs()["n"].tolist() == [0, 2000] and read_runs()["n"].dtype.kind == "i"  # others keep their numbers as they are


def spoilt(folder, where, change):
    "The book's record in a place of its own, with some rows changed. `where`: condition of the claims table, and seed; `change`: of a row."
    keys = {p.config.key for p in plan(list(load_claims().values()), read_runs())[0] if p.config and (p.where, p.seed) in where}
    rows = [change(row) if row["key"] in keys else row for row in read_runs().to_dict("records")]
    pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(folder / "runs.csv", index=False)
    assert keys
    return folder


def diverge(row): return row | dict.fromkeys(("error", "nll", "ece", "confidence", "nll_train")) | {"n": 0, "snapshots": "{}"}


def test_a_learning_rate_that_diverged_is_not_chosen(tmp_path):
    rates, best = PRESETS["small"].rates, choose_rate("vit", read_runs())
    folder = spoilt(tmp_path, [({"model": "vit", "trial at lr": best}, 0)], diverge)
    assert choose_rate("vit", read_runs(folder)) in set(rates) - {best}
    claims = [find_claim("H1")]
    assert not [p for p in still_to_do(claims, folder=folder)[0] if "trial at lr" in p.where]


def test_a_model_that_diverged_at_every_rate_is_named(tmp_path):
    folder = spoilt(tmp_path, [({"model": "vit", "trial at lr": rate}, 0) for rate in PRESETS["small"].rates], diverge)
    now, later, impossible = still_to_do([find_claim("H1")], folder=folder)
    assert not [p for p in now + later if p.where["model"] == "vit"]
    assert any(sentence.startswith("vit: training diverged at every learning rate") for sentence in impossible)


def test_a_claim_says_which_of_its_runs_diverged(tmp_path, monkeypatch):
    folder = spoilt(tmp_path, [({"model": "vit"}, 0)], diverge)
    found = verdicts("02_inductive_bias", folder=folder)["I1"]
    assert found.overall == "no verdict"
    assert {(row.cell, row.seed) for row in found.missing.itertuples() if row.why == "diverged"} == {("vit", 0)}
    assert not [p for p in still_to_do([find_claim("I1")], folder=folder)[0] if (p.where, p.seed) == ({"model": "vit"}, 0)]
    monkeypatch.setenv("HOWVITS_RECORD", str(folder))
    assert refused([find_claim("I1")], "small") == ["I1: 1 of its runs diverged (vit, seed 0), so it stays without a verdict."]


@pytest.mark.parametrize("column, value", [("parameters", 123_456), ("n", 1000), ("images_seen", 96)])
def test_a_row_that_contradicts_its_configuration_is_refused(tmp_path, column, value):
    def edit(row): return row | {"error": 0.25, column: value} | ({"images_per_second": value / row["seconds"]} if column == "images_seen" else {})

    folder = spoilt(tmp_path, [({"model": "vit"}, 0)], edit)
    with pytest.raises(ValueError, match=f"has {column} {value}, and its configuration makes "): verdicts("02_inductive_bias", folder=folder)


def test_weights_of_the_zoos_seeds_are_kept(places):
    train_all([Planned({"model": "vit"}, 0, TINY), *planned([replace(TINY, seed=1)])], partial(in_processes, jobs=1), clock(), 1)
    kept = sorted((places / "record" / "checkpoints").glob("*.safetensors"))
    assert [path.stem for path in kept] == [f"{TINY.key}-early", f"{TINY.key}-late"]  # not those of seed 1, which is under another condition
    shutil.rmtree(places / "cache")
    run = fit(TINY, progress=False)  # known to the record, and its weights are kept
    assert run.metrics["error"] == read_runs().set_index("key").loc[TINY.key, "error"] and not (places / "cache").exists()
    weights = create_model("vit", checkpoint=run.checkpoint).state_dict()
    assert all(torch.equal(tensor, tensor.half().float()) for tensor in weights.values())


def test_weights_of_another_run_are_not_kept(places):
    "As when a worker on another machine trained in a cache of its own: nothing is trained here a second time, and nothing recorded."
    row = train_one(TINY)
    elsewhere = row | {"snapshots": json.dumps(dict.fromkeys(("early", "late"), "0" * 64))}
    failed = train_all([Planned({"model": "vit"}, 0, TINY)], lambda configs: [(TINY, elsewhere)], clock(), 1)
    assert "one folder for all that train" in str(*failed.values())
    assert not len(read_runs()) and not list((places / "record").glob("checkpoints/*"))
    add_run(row)
    assert weights_of(row) and weights_of(elsewhere) is None
    keep(row)
    kept = next((places / "record" / "checkpoints").glob("*-late.json"))
    kept.unlink()
    keep(row)  # a lost description is written again
    assert kept.is_file() and weights_of(row) == kept.with_suffix(".safetensors")


def test_measures_of_other_weights_do_not_count(places):
    row = train_one(TINY)
    add_run(row)
    own, other = json.loads(row["snapshots"])["late"], "0" * 64
    common = dict(key=TINY.key, snapshot="late", measure="log_amplitude_msa", n=None, measured="2100-01-01T00:00:00+00:00", version=1)
    add_measures("05_fourier", [common | dict(checkpoint=own, value=1.0), common | dict(checkpoint=other, value=-500.0)])
    assert measured(read_runs())["log_amplitude_msa"].tolist() == [1.0]


def test_a_measurement_from_before_its_run_was_finished_is_refused(places):
    row = train_one(TINY)
    add_run(row)
    add_measures("05_fourier", [dict(key=TINY.key, snapshot="late", measure="log_amplitude_msa", n=None, measured="2001-01-01T00:00:00+00:00", version=1, checkpoint=json.loads(row["snapshots"])["late"], value=1.0)])
    with pytest.raises(ValueError, match=f"a measurement .log_amplitude_msa. of the run {TINY.key} from before it was finished"): measured(read_runs())


def test_a_second_row_of_a_run_that_came_out_otherwise_is_reported(places):
    row = train_one(TINY)
    add_run(row)
    failed = train_all(planned([TINY]), lambda configs: [(TINY, row | {"snapshots": json.dumps({"early": "0" * 64, "late": "0" * 64})})], clock(), 1)
    assert "came out otherwise" in str(*failed.values()) and len(read_runs()) == 1


def test_a_worker_that_dies_does_not_end_the_sweep(places):
    "Killed as by a machine that is short of memory. Its own run and the one beside it are tried again."
    configs = [replace(TINY, seed=seed, images=96 * length) for seed, length in ((0, 400), (1, 2), (2, 2))]
    folder = places / "cache" / "runs" / f"vit-{configs[0].key}"
    killer = threading.Thread(target=lambda: (wait_for(lambda: (folder / "early.safetensors").exists()), os.kill(lock_holder(folder / "lock"), signal.SIGKILL)))
    killer.start()
    assert not train_all(planned(configs), partial(in_processes, jobs=2), clock(), 2)
    killer.join()
    assert sorted(read_runs()["key"]) == sorted(config.key for config in configs)


def test_dry_run_prints_the_plan_and_trains_nothing(places, capsys, monkeypatch):
    monkeypatch.setattr("howvits.sweep.measure_throughput", lambda config, steps: 400.0)
    assert main(["--claim", "I5", "--dry-run", "--jobs", "2"]) == 0
    out = capsys.readouterr().out
    assert "vit, trial at lr 0.001, seed 0: 112 s" in out and "vit, patch 8, seed 4: about 125 s, when its learning rate has been chosen" in out
    assert "15 runs to train now, about 0.2 h with 2 at a time; 47 to follow, about 0.8 h." in out
    assert not read_runs().shape[0]


@pytest.mark.parametrize("arguments, sentence", [(["--claim", "I99"], "nearest are"), (["--preset", "pappr"], "invalid choice"), (["--preset", "paper"], "cifar-100-python")])
def test_bad_arguments_stop_at_once(places, arguments, sentence, capsys, monkeypatch):
    monkeypatch.setenv("HOWVITS_DATA", str(places))
    with pytest.raises(SystemExit) as stop: main(arguments)
    assert stop.value.code == 2 and sentence.lower() in capsys.readouterr().err.lower()


def test_interrupted_command_goes_on_from_there(places):
    "SIGINT to the process group, as Ctrl-C at a terminal; what was finished is recorded, and the same command finishes the rest."
    program = f"""
if __name__ == "__main__":
    from dataclasses import replace
    from functools import partial
    from howvits.sweep import in_processes, train_all
    from tests.test_sweep import TINY, clock, planned
    configs = [replace(TINY, seed=seed, images=96 * length) for seed, length in ((0, 1), (1, 100_000))]
    train_all(planned(configs), partial(in_processes, jobs=1), clock(), 1)
"""
    script = places / "script.py"
    script.write_text(program)
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "TQDM_DISABLE": "1"}
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests in the background has it ignored
    process = subprocess.Popen([sys.executable, str(script)], env=environment, start_new_session=True, preexec_fn=heed, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(read_runs()) == 1 and list((places / "cache" / "runs").glob("vit-*/config.json"))[1:], process)
    time.sleep(2)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0 and len(read_runs()) == 1
    saved = torch.load(next((places / "cache" / "runs").glob("vit-*/state.pt")), weights_only=True)  # on the way out
    seen = []
    with pytest.MonkeyPatch.context() as patch:  # the same again goes on from there
        patch.setattr(training, "train_step", lambda trainer: (seen.append(trainer.step), stop_there()))
        with pytest.raises(KeyboardInterrupt): fit(replace(TINY, seed=1, images=9_600_000), progress=False, again=True)
    assert seen == [saved["step"]] and saved["step"] > 0


def stop_there(): raise KeyboardInterrupt


def wait_for(condition, process=None, seconds=120):
    "Wait until something has happened."
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and (process is None or process.poll() is None), "it did not happen"
        time.sleep(0.2)


def test_ray_worker_that_is_killed_is_replaced(places):
    "Two workers; the one with the longer run is killed in the middle. Its run is resumed by another, and every run reaches the record, once."
    pytest.importorskip("ray", reason="Ray is not installed: pip install howvits[sweep]")
    program = """
if __name__ == "__main__":
    from dataclasses import replace
    from functools import partial
    from howvits.sweep import on_ray, train_all
    from tests.test_sweep import TINY, clock, planned
    import ray
    ray.init(num_cpus=2, include_dashboard=False)
    configs = [replace(TINY, seed=seed, images=96 * length) for seed, length in ((0, 1_000), (1, 2), (2, 2))]
    assert not train_all(planned(configs), partial(on_ray, address=None, save_every=0.5), clock(), 2)
"""
    script = places / "script.py"
    script.write_text(program)
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen([sys.executable, str(script)], env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    long_run = places / "cache" / "runs" / f"vit-{replace(TINY, images=96_000).key}"
    wait_for(lambda: (long_run / "state.pt").exists(), process)
    os.kill(lock_holder(long_run / "lock"), signal.SIGKILL)
    killed = datetime.now(timezone.utc)
    errors = process.communicate(timeout=240)[1]
    assert process.returncode == 0, errors[-2000:]
    runs = read_runs().set_index("key")
    assert runs.index.is_unique and len(runs) == 3
    resumed = runs.loc[long_run.name.removeprefix("vit-")]
    assert datetime.fromisoformat(resumed["started"]) < killed < datetime.fromisoformat(resumed["finished"]) and not (long_run / "state.pt").exists()


def lock_holder(path):
    "The process that holds a file open."
    for process in os.listdir("/proc"):
        if not process.isdigit(): continue
        try: files = [os.readlink(f"/proc/{process}/fd/{n}") for n in os.listdir(f"/proc/{process}/fd")]
        except OSError: continue
        if str(path) in files: return int(process)
    raise AssertionError(f"nobody holds {path}")


def random_images(name, classes):
    "Noise in the shape of a data set: it tests that a configuration runs, and nothing else."
    info = DATASETS[name]
    return ImageDataset(torch.randint(0, 256, (16, 3, *info.size), dtype=torch.uint8), torch.arange(16) % classes, [str(i) for i in range(classes)], info,
                        name=name, split="train", note="noise", augment=None)


def paper_configurations():
    "One run of each kind that the papers' presets plan: network, arguments, and what of the recipe changes a step."
    kinds = {}
    for preset in ("paper", "paper-imagenet"):
        for run in plan(list(load_claims().values()), read_runs(), preset)[0]:
            config = run.likely
            kinds.setdefault((preset, config.model, json.dumps(config.model_args, sort_keys=True), config.sam, config.augment), (run, replace(config, batch_size=2, images=4, epochs=None, subset=None)))
    return [pytest.param(config, id=f"{preset}, {run}") for (preset, *_), (run, config) in kinds.items()]


@pytest.mark.parametrize("config", paper_configurations())
def test_two_steps_of_every_paper_configuration(config):
    assert config.model not in ZOO + FURTHER + VARIED + SMALL  # these are for small images and small budgets
    trainer = Trainer(config, random_images(config.dataset, DATASETS[config.dataset].num_classes), torch.device("cpu"))
    for _ in range(2): train_step(trainer)
    assert trainer.losses.isfinite().all()


def test_a_patch_is_as_large_for_large_images():
    sizes = [config_of({"model": "vit"} | ({"patch": patch} if patch else {}), 0, 1e-4, "paper-imagenet").model_args for patch in (2, None, 8)]
    assert sizes == [{"patch_size": 8}, {}, {"patch_size": 32}]  # the standard is 16: half of it, and twice, as with 32 pixels


@pytest.mark.parametrize("preset, impossible", [("small", 0), ("paper", 2), ("paper-imagenet", 0)])
def test_every_claim_of_chapter_02_can_be_planned(preset, impossible):
    "Except I5 with the papers' networks on CIFAR, whose own patches are the smallest of its three."
    claims = [claim for claim in load_claims().values() if claim.chapter == "02_inductive_bias"]
    sentences = plan(claims, read_runs(), preset)[1]
    assert len(sentences) == impossible and all(s.startswith("I5, ") and "one run" in s for s in sentences)


@pytest.mark.parametrize("preset", PRESETS)
def test_no_two_conditions_come_to_the_same_run(preset, monkeypatch):
    "At whatever rate is chosen; `plan` refuses it."
    for rate in PRESETS[preset].rates:
        monkeypatch.setattr("howvits.sweep.choose_rate", lambda model, runs, preset: rate)
        planned, _ = plan(list(load_claims().values()), read_runs(), preset)
        conditions = {(json.dumps(beyond_standard(p.where, preset), sort_keys=True), p.seed) for p in planned}
        assert len({p.config.key for p in planned}) == len(conditions) > 50


@pytest.mark.parametrize("arguments, sentence", [
    (["--measure", "05"], "05_fourier"), (["--measure", "02_inductive_bias"], "rest on the record alone"), (["--measure", ""], "05_fourier"), (["--jobs", "0"], "--jobs must be at least 1")])
def test_bad_requests_are_one_sentence(places, arguments, sentence, capsys):
    with pytest.raises(SystemExit): main(arguments)
    assert sentence in capsys.readouterr().err


def test_a_row_that_cannot_be_recorded_does_not_stop_the_others(places):
    bad, good = replace(TINY, seed=0), replace(TINY, seed=1)

    def train(configs):
        for config in configs:
            row = train_one(config)
            yield config, row | {"nll_train": float("nan")} if config == bad else row
    failed = train_all(planned([bad, good]), train, clock(), 1)
    assert "nll_train is missing" in str(*failed.values()) and read_runs()["key"].tolist() == [good.key]


def made_up_record(claims, measure):
    "A record in which every run that the claims need has the numbers that `measure(condition, seed)` gives, and what its configuration decides."
    for _ in range(2):  # the trials, then the runs whose learning rate they settle
        for run in still_to_do(claims)[0]:
            config, (error, nll_train) = run.config, measure(run.where, run.seed)
            counts, images = DATASETS[config.dataset].counts, round(images_of(config) / config.batch_size) * config.batch_size
            n = counts["train"] // 10 if config.split == "fit" else counts["test"]
            add_run(dict(key=config.key, config=canonical(config), evaluated_on="val" if config.split == "fit" else "test", error=round(error * n) / n, n=n, nll=2 * error, ece=0.02, confidence=0.9,
                         nll_train=nll_train, parameters=count_parameters(config.model, canonical_args(config), DATASETS[config.dataset].num_classes), images_seen=images, images_per_second=400.0,
                         seconds=images / 400, started="2100-01-01T00:00:00+00:00", finished="2100-01-01T01:00:00+00:00", device="made up", threads=1,
                         versions="{}", commit=None, snapshots=json.dumps({"late": "0" * 64})))


def as_claimed(where, seed):
    "Error and training NLL in which every claim of chapter 02 is true, with some noise from run to run."
    rng = np.random.default_rng([seed, *str(sorted(where.items())).encode()])
    bias = {"resnet": -0.5, "resnext": -0.5, "swin": -0.3, "pit": -0.2, "vit": 0.9}.get(where["model"], 0)
    more = 0.3 * bool(where.get("patch")) - 0.3 * np.log(where.get("subset", 1) * where.get("length", 1)) - 0.05 * np.log(where.get("subset", 1))
    convolution = -0.2 * where["model"].startswith("resne")
    return 1 / (1 + np.exp(1.5 - bias - more - convolution + 0.03 * rng.standard_normal())), np.exp(0.3 * (bias + more) + 0.01 * rng.standard_normal())


def test_from_a_record_to_verdicts(places):
    "Made-up runs in which all is as claimed."
    claims = [claim for claim in load_claims().values() if claim.chapter == "02_inductive_bias"]
    made_up_record(claims, as_claimed)
    assert still_to_do(claims) == ([], [], [])
    assert {i: v.overall for i, v in verdicts("02_inductive_bias").items()} == dict.fromkeys(["I1", "I2", "I3", "I4", "I5", "I6", "I7"], "holds")


CLAIMS = list(load_claims().values())
MEASURING = sorted({claim.chapter for claim in CLAIMS if module_of(claim.chapter)})


def test_evidence_writes_every_condition_out(places):
    "The standard where a run has it, and a column for each measure, measured or not."
    claims = [claim for claim in CLAIMS if claim.id in ("I4", "I5", "H4")]
    made_up_record(claims, as_claimed)
    table = evidence(claims)
    standard = claims[0].components[0].cells[0].standard
    assert set(CHANGES) <= set(table) and {c.measure for claim in claims for c in claim.components} <= set(table)
    for name in CHANGES:
        known = {run.config.key: run.where.get(name, standard[name]) for run in plan(claims, read_runs(), extended={c.id for c in claims})[0] if run.config}
        found = dict(zip(table["key"], table[name].astype(object).where(table[name].notna(), None)))
        assert found and found == {key: known[key] for key in found}, name
    assert set(table["patch"]) == {2, 4, 8} and set(table["head"].dropna()) == {"gap"} and set(table["optimiser"]) == {"adamw"} and table["nep_early"].isna().all()


def test_evidence_of_an_empty_record_has_the_same_columns(places):
    empty = evidence(CLAIMS)
    assert not len(empty) and {*CHANGES, *COLUMNS} - {"config"} <= set(empty)
    assert {name for claim in CLAIMS for c in claim.components for name in (c.measure, c.covariate) if name} <= set(empty)
    assert all(not len(c.select(empty)) and set(c.select(empty)) == set(empty) for claim in CLAIMS for c in claim.components)


def test_two_chapters_measure(): assert {"03_hessians", "05_fourier"} <= set(MEASURING)


@pytest.mark.parametrize("chapter", MEASURING)
def test_every_measure_of_a_claim_is_measured(chapter):
    "By the chapter's module, or when the run was trained."
    named = {name for claim in CLAIMS if claim.chapter == chapter for c in claim.components for name in (c.measure, c.covariate) if name}
    snapshots = module_of(chapter).SNAPSHOTS
    assert named & set(snapshots) and named <= {*snapshots, *COLUMNS}
    assert all(when and set(when) <= {"early", "late"} for when in snapshots.values())


def test_an_inconclusive_claim_is_extended_once(places):
    claim = [load_claims()["I5"]]
    made_up_record(claim, lambda where, seed: (0.3 + 0.02 * (seed % 5), 1.0 + 0.1 * (seed % 5)))
    assert verdicts("02_inductive_bias")["I5"].overall == "inconclusive"
    now = still_to_do(claim)[0]
    assert sorted({run.seed for run in now if run.where.get("patch") == 8}) == [5, 6, 7, 8, 9] and len(now) == 8 + 5 + 5
    made_up_record(claim, lambda where, seed: (0.3 + 0.02 * (seed % 5), 1.0 + 0.1 * (seed % 5)))
    assert still_to_do(claim)[0] == [] and verdicts("02_inductive_bias")["I5"].look == 2


def test_the_introduction_says_what_the_preset_is():
    words = dict(zip(range(1, 10), "one two three four five six seven eight nine".split()))
    recipe, cells = PRESETS["small"].recipe, cells_of(list(load_claims().values()))
    plain = {seeds for where, seeds in cells if set(where) == {"model"} and where["model"] in ZOO}
    others = {seeds for where, seeds in cells if set(where) > {"model"}}
    intro = (Path(__file__).parents[1] / "book/intro.md").read_text().replace("\n", " ")
    assert plain == {8} and others == {5}
    assert f"{words[recipe['epochs']]} epochs on {DATASETS[recipe['dataset']].counts['train']:,} images, with {words[8]} seeds of each" in intro
    assert f"and {words[5]} seeds of every other condition" in intro


def test_nothing_is_measured_that_no_claim_needs(places, capsys):
    "The kept weights are all that the claims of chapter 05 need, decided as they are; and a dry run leaves the record alone."
    shutil.copytree(Path(__file__).parents[1] / "book/runs", places / "record", dirs_exist_ok=True)
    assert main(["--measure", "05_fourier"]) == 0 and "32 runs are measured." in capsys.readouterr().out
    file = places / "record/measures/05_fourier.csv"
    lines = file.read_text().splitlines(keepends=True)
    key = lines[1].split(",")[0]
    file.write_text("".join(line for line in lines if not line.startswith(key)))
    before = file.read_bytes()
    assert main(["--measure", "05_fourier", "--dry-run"]) == 0 and "1 files of weights to measure now, 0 are not" in capsys.readouterr().out
    assert file.read_bytes() == before
