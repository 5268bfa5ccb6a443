"""Chapter 02 from the command line: one more network among those of the record."""
import json

import pandas as pd
import pytest
from conftest import run_chapter

from howvits.models import FURTHER, PAPER, ZOO
from howvits.sweep import verdicts


def test_places_a_network_among_the_recorded(tmp_path):
    done = run_chapter("02_inductive_bias", tmp_path, ("model", "vit"), ("images", 200))
    assert done.returncode == 0, done.stderr[-2000:]
    out = tmp_path / "runs" / "02_inductive_bias" / "vit"
    record = json.loads((out / "run.json").read_text())
    assert {c["id"]: c["verdict"] for c in record["claims"]} == {i: v.overall for i, v in verdicts("02_inductive_bias").items()}
    assert record["sentences"]["vit"][0].startswith("For this network, the test error is 0.1")
    table = pd.read_csv(out / "table.csv")
    assert (table["model"] == "vit").any() and table["error"].between(0, 1).all() and (table["nll_train"] > 0).all()
    assert set(pd.read_csv(out / "costs.csv")["model"]) == {*ZOO, *FURTHER, "vit, patch 2", "vit, patch 8", *PAPER[:4]}


def test_an_untrained_network_is_not_placed(tmp_path):
    done = run_chapter("02_inductive_bias", tmp_path, ("model", "resnet18"), ("images", 8))
    assert done.returncode == 0, done.stderr[-2000:]
    assert not json.loads((tmp_path / "runs" / "02_inductive_bias" / "resnet18" / "run.json").read_text())["sentences"]


@pytest.mark.parametrize("parameters, sentence", [([("images", 0)], "images must be a whole number of at least 1"), ([("seeed", 1)], "did you mean seed?")])
def test_bad_parameters_stop_the_run(tmp_path, parameters, sentence):
    done = run_chapter("02_inductive_bias", tmp_path, *parameters)
    assert done.returncode != 0 and sentence in done.stderr
