"""A chapter as a program: parameters of papermill, bad input, and what is left in the folder."""
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import matplotlib
import nbformat
import pandas as pd
import pytest
import torch
from nbformat.v4 import new_code_cell, new_notebook
from torch import nn

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from howvits import chapters, models  # noqa: E402
from howvits.claims import verdict  # noqa: E402

PARAMETERS = """model = "vit"
dataset = "fashion_mnist_mini"
checkpoint = None
images = 32
batch_size = 16
seed = 0
device = "cpu"
out = None
amplitude = 0.1"""
START = """from howvits.chapters import start, finish
run = start("00_made_up", model=model, dataset=dataset, checkpoint=checkpoint, images=images, batch_size=batch_size, seed=seed, device=device, out=out, amplitude=amplitude)"""
END = """import matplotlib.pyplot as plt, pandas as pd
fig, ax = plt.subplots()
files = finish(run, fig, pd.DataFrame({"a": [1]}))"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def chapter(folder):
    "A small chapter: parameters, start, finish."
    cells = [new_code_cell("import os"), new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}), new_code_cell(START), new_code_cell(END)]
    path = folder / "chapter.ipynb"
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "language": "python", "display_name": "python3"}}), path)
    return path


def papermill(folder, *arguments):
    "Run the small chapter from the command line; the exit status and what was said."
    env = {**os.environ, "OMP_NUM_THREADS": "1", "JUPYTER_PREFER_ENV_PATH": "1"}
    done = subprocess.run([sys.executable, "-m", "papermill", str(chapter(folder)), str(folder / "done.ipynb"), "--no-progress-bar", *arguments],
                          cwd=folder, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_papermill_line(folder):
    status, said = papermill(folder, "-p", "model", "pit", "-p", "amplitude", "1")
    assert status == 0, said
    out = folder / "runs" / "00_made_up" / "pit"
    record = json.loads((out / "run.json").read_text())
    assert sorted(record["files"]) == ["figure.png", "table.csv"] and record["parameters"]["amplitude"] == 1 and record["images"] == 32
    assert record["versions"]["torch"] == torch.__version__ and "Fashion-MNIST" in record["data"] and record["seconds"] > 0
    printed = "".join(o.get("text", "") for c in nbformat.read(folder / "done.ipynb", 4).cells for o in c.get("outputs", []))
    assert f"are in {Path('runs', '00_made_up', 'pit')}" in printed and str(folder) not in printed


def test_a_misspelt_parameter_stops(folder):
    status, said = papermill(folder, "-p", "modle", "pit")
    assert status != 0 and said.splitlines()[-1].startswith("There is no parameter 'modle': did you mean model?") and "Traceback" not in said
    assert not (folder / "runs").exists()


def test_a_parameters_cell_without_its_tag_stops():
    with pytest.raises(ValueError, match="lost its tag `parameters`"):
        chapters.injected(["", "# Parameters\nmodel = 'pit'\n", PARAMETERS])


@pytest.mark.parametrize("bad, error, words", [
    (dict(model="vti"), ValueError, "no model 'vti': did you mean"),
    (dict(model="convnext_tinny"), ValueError, "convnext_tiny"),
    (dict(model=50), ValueError, "model must be the name of a model"),
    (dict(dataset="fashion"), ValueError, "fashion_mnist"),
    (dict(checkpoint="nowhere.safetensors"), FileNotFoundError, "no checkpoint at nowhere.safetensors"),
    (dict(model="nowhere.safetensors"), FileNotFoundError, "no checkpoint at nowhere.safetensors"),
    (dict(model="a.pth", checkpoint="b.pth"), ValueError, "is a path already"),
    (dict(images=0), ValueError, "images must be a whole number of at least 1"),
    (dict(images="many"), ValueError, "images must be a whole number"),
    (dict(images=3.5), ValueError, "images must be a whole number"),
    (dict(images=10**6), ValueError, "more than the 2,000 that there are"),
    (dict(batch_size=0), ValueError, "batch_size must be"),
    (dict(batch_size=True), ValueError, "batch_size must be"),
    (dict(seed=-1), ValueError, "seed must be"),
    (dict(seed=None), ValueError, "seed must be"),
    (dict(device="gpu"), ValueError, "device 'gpu' is not available"),
    (dict(device="cuda:77"), ValueError, "device 'cuda:77' is not available"),
    (dict(out=""), ValueError, "out must be the path"),
    (dict(out="file/below"), ValueError, "output folder file/below cannot be written"),
])
def test_bad_parameters_are_one_sentence(folder, bad, error, words):
    (folder / "file").touch()
    with pytest.raises(error) as raised:
        chapters.start("00_made_up", **{"dataset": "fashion_mnist_mini", "images": 16, **bad})
    assert words in str(raised.value) and "\n" not in str(raised.value)
    assert [p.name for p in folder.iterdir()] == ["file"]


def history(given):
    return ["", PARAMETERS, f"# Parameters\n{given}\n"]


@pytest.mark.parametrize("given, error, words", [
    ('batchsize = 64', ValueError, "did you mean batch_size?"),
    ('zzz = 1', ValueError, "this chapter has model, dataset"),
    ('amplitude = "loud"', TypeError, "amplitude must be a number, such as 0.1, not 'loud'"),
    ('model = 50', TypeError, "model must be a text, such as 'vit', not 50"),
    ('seed = 1.5', TypeError, "seed must be a whole number"),
    ('seed = True', TypeError, "seed must be a whole number"),
])
def test_injected_cells(given, error, words):
    with pytest.raises(error, match=words):
        chapters.check_injected(*chapters.injected(history(given)))


def test_a_batch_that_was_asked_for_must_fit(folder, monkeypatch):
    class Shell:
        user_ns = {"In": history("batch_size = 64")}
    monkeypatch.setattr(chapters, "get_ipython", Shell)
    with pytest.raises(ValueError, match="batch_size=64 is more than the 32 images"):
        chapters.start("00_made_up", dataset="fashion_mnist_mini", images=32, batch_size=64)


def start(folder, name="out", **changes):
    return chapters.start("00_made_up", **{"dataset": "fashion_mnist_mini", "images": 16, "device": "cpu", "out": folder / name, **changes})


def test_a_checkpoint_by_path(folder):
    torch.manual_seed(1)
    network = models.create_model("pit")
    path = models.save_checkpoint(network, folder / "mine", name="pit", dataset="fashion_mnist", num_classes=10)
    for how in (dict(model=str(path)), dict(model="pit", checkpoint=str(path))):
        run = start(folder, **how)
        assert run.name == "pit" and run.weights.trained and torch.equal(run.model.state_dict()["head.weight"], network.state_dict()["head.weight"])
        assert not torch.equal(run.untrained().state_dict()["head.weight"], network.state_dict()["head.weight"])
    with pytest.raises(ValueError, match="holds the model 'pit', not 'vit'"):
        start(folder, model="vit", checkpoint=str(path))
    path.with_suffix(".json").unlink()
    with pytest.raises(ValueError, match="does not say which model it holds"):
        start(folder, model=str(path))
    assert chapters.start("00_made_up", model="pit", checkpoint=path, dataset="fashion_mnist_mini", images=4).out == Path("runs/00_made_up/pit-mine")


def test_a_model_of_timm_gets_images_of_its_size(folder, capsys):
    run = start(folder, model="resnet10t", images=None)
    assert "Random weights: figures, no verdict." in capsys.readouterr().out and not run.weights.trained
    images, labels = run.data.batch(range(2))
    assert run.model(images).shape == (2, 10) and images.shape[-2:] == tuple(run.model.pretrained_cfg["input_size"][1:]) and run.images == chapters.SOME
    assert "Resized" in run.data.note and not run.model.training


def test_the_same_seed_gives_the_same_untrained_network(folder):
    one, two, other = (start(folder, model="resnet10t", seed=s).model.fc.weight for s in (3, 3, 4))
    assert torch.equal(one, two) and not torch.equal(one, other)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(folder):
    (folder / "closed").mkdir(mode=0o500)
    with pytest.raises(ValueError, match="cannot be written"):
        start(folder, "closed")


def test_the_record(folder, capsys):
    run = start(folder, model="resnet10t")
    claims = [verdict("F2", pd.DataFrame({"model": ["vit"], "seed": [0], "log_amplitude_msa_first": [0.1], "trained": [False]})),
              verdict("F2", pd.DataFrame({"model": "vit", "seed": range(8), "log_amplitude_msa_first": [1.0, 1.1] * 4}))]
    fig, ax = plt.subplots()
    files = chapters.finish(run, {"one": fig, "two": fig}, {"left": pd.DataFrame({"x": [1.5]}), "right": pd.DataFrame({"x": [float("nan")]})}, claims, share=torch.tensor(0.5))
    record = json.loads((run.out / "run.json").read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    assert [f.name for f in files] == ["one.png", "two.png", "left.csv", "right.csv", "run.json"] and record["share"] == 0.5
    assert [c["verdict"] for c in record["claims"]] == ["no verdict", "holds"] and record["claims"][1]["components"][0]["n"] == 8
    assert record["claims"][0]["missing"] == ["vit: seed 0 (untrained weights)", "vit: seeds 1–7 (no run)"]
    assert {p.name for p in run.out.iterdir()} <= {f.name for f in files} | {".lock"}
    assert "are in out" in capsys.readouterr().out


def test_two_runs_leave_no_mixture(folder):
    "Eight threads write into one folder, again and again: whatever is there at the end belongs together."
    out = folder / "out"
    out.mkdir()

    def work(name):
        for i in range(15):
            text = f"{name} {i}"
            chapters.publish(out, {f"{k}.csv": lambda path: path.write_text(text) for k in "abc"}, {"text": text})
    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    [t.start() for t in threads], [t.join() for t in threads]
    record = json.loads((out / "run.json").read_text())
    assert {(out / f"{k}.csv").read_text() for k in "abc"} == {record["text"]}
    assert not [p for p in out.iterdir() if p.name.startswith(".new-")]


def test_a_full_disk_changes_nothing(folder):
    out = folder / "out"
    out.mkdir()
    chapters.publish(out, {"a.csv": lambda path: path.write_text("old")}, {})
    before = (out / "run.json").read_bytes()

    def full(path):
        path.write_text("ne")
        raise OSError(28, "No space left on device")
    with pytest.raises(OSError, match="cannot be written to .*No space left"):
        chapters.publish(out, {"a.csv": full}, {})
    assert (out / "a.csv").read_text() == "old" and (out / "run.json").read_bytes() == before


def test_a_network_without_a_size_gets_the_data_as_they_are(folder):
    data = start(folder).data
    assert chapters.fit_to_model(data, nn.Identity()) is data
