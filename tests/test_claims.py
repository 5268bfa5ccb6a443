"""The table of claims, bad tables, and verdicts on simulated runs (which say nothing about networks)."""
import copy
import json

import numpy as np
import pandas as pd
import pytest
import yaml
from conftest import ROOT
from scipy import stats
from scipy.special import expit, logit

from howvits.claims import adjust, claim_box, for_this_network, load_claims, missing_runs, rule_of, to_scale, verdict

CLAIMS = load_claims(ROOT / "book" / "claims.yml")
TABLE = yaml.safe_load((ROOT / "book" / "claims.yml").read_text(encoding="utf-8"))


def cells_of(claim):
    return {c.label: c for x in claim.components for c in x.cells}.values()


def simulate(claim, seeds, seed=0, **measures):
    "Runs 0 to seeds - 1 of every condition; `measures` give a function of (table, generator) for each."
    table = pd.DataFrame([{**c.where, "seed": s} for c in cells_of(claim) for s in range(seeds)])
    rng = np.random.default_rng(seed)
    return table.assign(**{name: value(table, rng) for name, value in measures.items()})


# The table

def test_every_claim_is_there():
    count = {"S": 4, "I": 7, "H": 11, "D": 4, "F": 4, "V": 3, "M": 3, "A": 5, "G": 2, "R": 12}
    assert set(CLAIMS) == {f"{letter}{i + 1}" for letter, n in count.items() for i in range(n)}
    assert all(c.part == (2 if c.id.startswith("R") else 1) for c in CLAIMS.values())
    assert list(load_claims()) == list(CLAIMS)


def test_every_claim_can_be_decided():
    for claim in CLAIMS.values():
        assert any(c.decides for c in claim.components), claim.id
        assert all(x.seeds >= 5 for c in claim.components for x in c.cells), claim.id
        assert len(missing_runs(claim)) and claim.id in claim_box(claim)._repr_html_()


def change(**fields):
    def apply(table, claim):
        claim["components"][0].update(fields)
    return apply


def become(kind, *without, **fields):
    "The first component as one of another kind."
    def apply(table, claim):
        drop(*without)(table, claim)
        change(kind=kind, **fields)(table, claim)
    return apply


def drop(*names):
    def apply(table, claim):
        for name in names:
            claim["components"][0].pop(name)
    return apply


def twice(table, claim):
    table["claims"].append(copy.deepcopy(claim))


def same_name(table, claim):
    claim["components"].append(copy.deepcopy(claim["components"][0]))


@pytest.mark.parametrize("spoil, words", [
    (drop("direction"), "the field direction is missing"),
    (drop("of"), "the field of is missing"),
    (change(direction=2), "direction must be 1, -1 or negligible, not 2"),
    (change(direction="negligible"), "a negligible effect needs a margin"),
    (change(measure="noise_slop"), "measure 'noise_slop' is unknown; nearest: noise_slope"),
    (change(kind="differences"), "kind 'differences' is unknown; nearest: difference"),
    (change(of={"model": "resnt"}), "the model 'resnt' is unknown; nearest: resnet"),
    (change(of={"model": "vit", "pach": 2}), "the condition 'pach' is unknown; nearest: patch"),
    (change(of={"patch": 2}), "of must be one condition or several, each with a model"),
    (change(scale="log10"), "scale 'log10' is unknown; nearest: log"),
    (change(pared=True), "the field 'pared' is unknown; nearest: paired"),
    (become("contrast", "of", "minus", cells=[{"model": "vit", "weight": 1}, {"model": "pit", "weight": 1}]), "the weights must sum to 0"),
    (become("contrast", "of", "minus", cells=[{"model": "vit"}, {"model": "pit", "weight": -1}]), "every cell needs a weight"),
    (become("slope", "minus", over="subset", at={"subset": [1.0]}), "at needs two different numbers for subset"),
    (become("slope", "minus", over="subset", at={"length": [1.0, 2.0]}), "at must give lists of equal length"),
    (become("slope", "minus", over="subset", at={"subset": [0.0, 1.0]}, x_scale="log"), "a log scale needs x > 0"),
    (become("slope", "minus", over="losses"), "the measure 'losses' is unknown"),
    (lambda table, claim: claim.pop("statement"), "the field statement is missing"),
    (lambda table, claim: claim.update(chapters="05"), "the field 'chapters' is unknown; nearest: chapter"),
    (lambda table, claim: claim["source"].update(paper="park2022"), "the paper 'park2022' is unknown; nearest: park2022how"),
    (lambda table, claim: claim.update(origin="guess"), "origin 'guess' is unknown"),
    (same_name, "two components have the same name"),
    (twice, "the id is used twice"),
])
def test_a_bad_table_is_one_sentence(tmp_path, spoil, words):
    claim = copy.deepcopy(next(c for c in TABLE["claims"] if c["id"] == "F3"))
    table = {**TABLE, "claims": [claim]}
    spoil(table, claim)
    (tmp_path / "claims.yml").write_text(json.dumps(table))  # JSON is YAML
    with pytest.raises(ValueError) as error:
        load_claims(tmp_path / "claims.yml")
    text = str(error.value)
    assert words in text and "claim F3" in text and text.endswith(".") and "\n" not in text


@pytest.mark.parametrize("content, words", [("a: [1", "is not YAML"), ("[]", "expected fields"), ("papers: {}", "the field seeds is missing"), ("\x00", "is not YAML")])
def test_a_file_that_is_no_table(tmp_path, content, words):
    (tmp_path / "claims.yml").write_text(content)
    with pytest.raises(ValueError, match=words):
        load_claims(tmp_path / "claims.yml")


def test_a_table_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no table of claims"):
        load_claims(tmp_path / "claims.yml")


def test_an_unknown_claim_gives_the_nearest():
    with pytest.raises(ValueError, match="no claim 'F11'.*H11"):
        verdict("F11", pd.DataFrame({"model": [], "seed": []}))


# The runs

@pytest.mark.parametrize("runs, error, words", [
    ([1, 2], TypeError, "must be a DataFrame"),
    (pd.DataFrame({"model": ["vit"]}), ValueError, "lacks the column seed"),
    (pd.DataFrame({"model": ["mixer"] * 2, "seed": [0, 0], "error": [0.1, 0.2]}), ValueError, "error twice for mixer, seed 0"),
])
def test_bad_runs(runs, error, words):
    with pytest.raises(error, match=words):
        verdict("D4", runs)


def errors(table, rng):
    return expit(-2 + 0.1 * rng.normal(size=len(table)))


@pytest.mark.parametrize("spoil, words", [
    (lambda t: t.assign(error=t.error.where(t.seed > 0, np.inf)), "error is infinite for seed 0"),
    (lambda t: t.assign(error=t.error.where(t.seed > 0, 0.0)), "error_n"),
    (lambda t: t.assign(error=0.25), "were copies of one run measured"),
])
def test_impossible_values(spoil, words):
    with pytest.raises(ValueError, match=words):
        verdict("D4", spoil(simulate(CLAIMS["D4"], 8, error=errors)))


def test_runs_in_other_conditions_are_no_evidence():
    runs = simulate(CLAIMS["D4"], 8, error=errors)
    assert verdict("D4", runs).overall != "no verdict"
    for column, value in (("subset", 0.1), ("dataset", "cifar100"), ("augment", "weak"), ("patch", 2), ("window", 3), ("trained", False)):
        assert verdict("D4", runs.assign(**{column: value})).overall == "no verdict", column
    for column, value in (("subset", 1.0), ("subset", np.nan), ("patch", 4), ("window", None), ("remark", "any"), ("trained", True)):
        assert verdict("D4", runs.assign(**{column: value})).overall != "no verdict", column


def test_one_missing_run_is_named():
    runs = simulate(CLAIMS["D4"], 8, error=errors).query("model != 'vit' or seed != 5")
    result = verdict("D4", runs)
    assert result.overall == "no verdict" and result.components.empty
    assert result.missing.to_dict("records") == [dict(cell="vit", seed=5, measure="error", why="no run")]
    assert "vit: seed 5 (no run)" in claim_box(result)._repr_html_() and "papermill nbs/04_data_specificity.ipynb" in repr(claim_box(result))


# Verdicts

def test_pooled_and_welch_are_the_textbooks():
    def scaled(spread):
        return lambda t, rng: rng.normal(size=len(t)) * np.where(t.model == "vit", spread, 1)
    for spread in (1.0, 12.0):
        runs = simulate(CLAIMS["H6"], 8, rise_far=scaled(spread), rise_near=scaled(spread))
        row = verdict("H6", runs).components.iloc[-1]  # PiT - ViT, the only component on this measure
        pit, vit = (runs[runs.model == m].rise_near for m in ("pit", "vit"))
        reference = stats.ttest_ind(pit, vit, equal_var=spread == 1)
        interval = reference.confidence_interval(row.level)
        assert np.allclose([row.effect, row.low, row.high, row.p, row.df], [pit.mean() - vit.mean(), *interval, reference.pvalue, reference.df])


def test_pairs_are_paired():
    runs = simulate(CLAIMS["S3"], 5, ape_late=lambda t, rng: np.exp(3.0 * t.seed + np.where(t.blur == "all", -1.0, 0.0) + 0.05 * rng.normal(size=len(t))))
    row = verdict("S3", runs).components.iloc[0]
    blurred, plain = (np.log(runs[m].ape_late.to_numpy()) for m in (runs.blur == "all", runs.blur.isna()))
    assert row.outcome == "holds" and row.n == 5 and np.isclose(row.p, stats.ttest_rel(blurred, plain).pvalue)


def test_a_power_law_gives_back_its_exponent():
    runs = simulate(CLAIMS["H7"], 5, ape_early=lambda t, rng: 50 * t.heads**-0.5 * np.exp(0.1 * rng.normal(size=len(t))),
                    nep_early=lambda t, rng: expit(1 - 0.5 * np.log(t.heads) + 0.05 * rng.normal(size=len(t))))
    result = verdict("H7", runs)
    row = result.components.iloc[0]
    slope = stats.linregress(np.log(runs.heads), np.log(runs.ape_early)).slope
    assert result.overall == "holds" and row.low < -0.5 < row.high and np.isclose(row.effect, slope)


def test_both_arms_of_data_size_find_their_runs():
    claim = CLAIMS["I3"]
    shrinking = dict(error=lambda t, rng: expit(-2 - 0.3 * np.log(t.subset.fillna(1)) + 0.05 * rng.normal(size=len(t))),
                     nll_train=lambda t, rng: np.exp(-0.2 * np.log(t.subset.fillna(1)) + 0.05 * rng.normal(size=len(t))))
    runs = simulate(claim, 8, **shrinking)
    assert verdict(claim, runs).overall == "holds"
    equal_epochs = runs[runs["length"].isna()]
    assert set(missing_runs(claim, equal_epochs).cell) == {"vit, subset 0.1, length 10.0", "vit, subset 0.02, length 50.0"}


def test_slope_over_a_measure_and_difference_at_equal_values_of_one():
    nll = dict(nll_train=lambda t, rng: np.exp(rng.normal(size=len(t))))
    runs = simulate(CLAIMS["I7"], 8, **nll)
    family = runs.model.isin(["resnet", "resnext"])
    runs["error"] = expit(-2 + 0.5 * np.log(runs.nll_train) - 0.8 * family + 0.05 * np.random.default_rng(1).normal(size=len(runs)))
    row = verdict("I7", runs).components.iloc[0]
    assert row.outcome == "holds" and row.low < -0.8 < row.high
    runs["error"] = expit(-2 + 0.5 * np.log(runs.nll_train) + 0.05 * np.random.default_rng(2).normal(size=len(runs)))
    row = verdict("I2", runs).components.iloc[0]
    assert row.outcome == "holds" and row.low < 0.5 < row.high
    used = runs[runs.model != "resnext"]
    assert np.isclose(row.effect, stats.linregress(np.log(used.nll_train), logit(used.error)).slope)


def test_negligible_is_a_finding():
    def tight(shift):
        return dict(error=lambda t, rng: expit(-2.2 + shift * (t.window == 3) + 0.005 * rng.normal(size=len(t))), nll_train=lambda t, rng: np.exp(0.01 * rng.normal(size=len(t))))
    claim = CLAIMS["D1"]
    last = lambda runs: verdict(claim, runs).components.iloc[-1]
    assert last(simulate(claim, 8, **tight(0.0))).outcome == "holds"
    assert last(simulate(claim, 8, **tight(0.5))).outcome == "contradicted"
    assert "claimed to be negligible" in rule_of(claim)
    runs = simulate(CLAIMS["D4"], 8, error=lambda t, rng: expit(-2.2 + 0.03 * rng.choice([-1, 1], size=len(t))))
    assert verdict("D4", runs).overall in ("negligible", "inconclusive")
    runs = simulate(CLAIMS["D4"], 8, error=lambda t, rng: expit(-2.2 + 0.001 * (-1.0) ** t.seed))
    assert verdict("D4", runs).overall == "negligible"


def test_a_small_sure_effect_holds_and_is_marked():
    runs = simulate(CLAIMS["D4"], 8, error=lambda t, rng: expit(-2.2 + 0.01 * (t.model == "mixer") + 0.001 * rng.normal(size=len(t))))
    result = verdict("D4", runs)
    assert result.overall == "holds" and result.components.within_margin.all() and "within the margin" in claim_box(result)._repr_html_()


def test_two_looks():
    "An inconclusive first look asks for as many runs again; with them, the second look decides, at 97.5 %."
    claim = CLAIMS["F2"]
    weak = simulate(claim, 16, log_amplitude_msa_first=lambda t, rng: 1.2 + np.where(t.seed < 8, 1.6, 0.5) * (-1.0) ** t.seed)
    first = verdict(claim, weak[weak.seed < 8])
    assert first.overall == "inconclusive" and set(first.missing.seed) == set(range(8, 16))
    assert verdict(claim, weak[weak.seed < 15]).overall == "inconclusive"  # half an extension is none
    second = verdict(claim, weak)
    assert (second.overall, second.look) == ("holds", 2)
    assert (second.components.level == 0.975).all() and (second.first_look.level == 0.975).all() and "second look" in claim_box(second)._repr_html_()
    row, values = second.components.iloc[0], weak.log_amplitude_msa_first
    assert np.allclose([row.low, row.high], stats.t.interval(0.975, 15, values.mean(), stats.sem(values)))


def test_a_component_that_does_not_decide():
    claim = CLAIMS["R8"]
    better = dict(localisation_error=lambda t, rng: 2 - (t.model == "vit") + 0.1 * rng.normal(size=len(t)))
    both = simulate(claim, 8, **better)
    without = both[both["head"].isna()]
    assert verdict(claim, without).overall == "holds" and len(verdict(claim, without).components) == 1
    assert verdict(claim, both).overall == "holds" and verdict(claim, both).components.decides.tolist() == [True, False]


def test_detectable_effect_is_detected_four_times_in_five():
    claim, rng, sets = CLAIMS["D4"], np.random.default_rng(0), 200
    mde = verdict(claim, simulate(claim, 8, error=lambda t, r: expit(-2 + (-1.0) ** t.seed * np.sqrt(7 / 8)))).components.mde.item()  # both spreads are 1
    found = []
    for i in range(sets):
        runs = simulate(claim, 8, seed=i, error=lambda t, r: expit(-2 + r.normal(size=len(t)) + mde * (t.model == "mixer")))
        found.append(verdict(claim, runs).overall == "holds")
    assert abs(np.mean(found) - 0.8) < 4 * np.sqrt(0.8 * 0.2 / sets)


def test_corrections():
    ps = {"F3": 0.5, "F2": 1.2}
    verdicts = [verdict(i, simulate(CLAIMS[i], 8, **{c.measure: lambda t, rng, s=s, c=c: rng.normal(c.direction * s * (t.model == c.cells[0].where["model"]), 1) for c in CLAIMS[i].components}))
                for i, s in ps.items()]
    table = adjust(verdicts)
    assert len(table) == 4 and (table.holm >= table.p).all() and (table.bh >= table.p).all() and table.holm.min() == pytest.approx(4 * table.p.min())
    assert "p, Holm (chapter)" in claim_box(verdicts[0], table)._repr_html_()
    assert adjust([verdict("F2", pd.DataFrame({"model": [], "seed": []}))]).empty


def test_empirical_logit_is_used_for_every_run():
    values, count = pd.Series([0.0, 0.4], name="nep_early"), pd.Series([10, 10])
    assert np.allclose(to_scale(values, "logit", count), logit([0.5 / 11, 4.5 / 11]))


def test_sentence_for_one_network():
    text = for_this_network([0.1, 0.3, 0.2, 0.2], "the slope", unit=" per pi")
    low, high = stats.t.interval(0.95, 3, 0.2, stats.sem([0.1, 0.3, 0.2, 0.2]))
    assert f"{low:.3g} per pi to {high:.3g} per pi" in text and "One network is no verdict." in text and not any(w in text for w in ("holds", "contradicted"))
    for values in ([], [1.0], [1.0, float("nan")], [[1.0, 2.0]]):
        with pytest.raises(ValueError, match="two folds or more"):
            for_this_network(values, "it")
