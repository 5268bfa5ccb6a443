"""The record of runs: many writers at once, damage, and one recorded run trained again."""
import json
import subprocess
import sys

import pytest

from howvits.record import COLUMNS, add_run, key_of, read_runs, record_folder
from howvits.sweep import record_row
from howvits.training import fit, from_canonical

ROW = """
def row(seed):
    import json
    from howvits.record import key_of
    config = json.dumps({"epochs": 5.0, "model": "vit", "recipe": 0, "seed": seed}, sort_keys=True, separators=(",", ":"))
    return dict(key=key_of(config), config=config, evaluated_on="test", error=0.25, n=2000, nll=0.7, ece=0.02, confidence=0.7, nll_train=0.9, parameters=300_000,
                images_seen=50_000, images_per_second=400.0, seconds=125.0, started="2020-01-01T00:00:00+00:00", finished="2020-01-01T00:03:00+00:00",
                device="cpu", threads=1, versions='{"torch":"2"}', commit="abc", snapshots=json.dumps({"late": "0" * 64}))
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
    from howvits.models import load_checkpoint
    runs = read_runs(record_folder()).set_index("key")
    kept = sorted((record_folder() / "checkpoints").glob("*.safetensors"))
    if not kept: pytest.skip("the record keeps no weights yet")
    assert sum(path.stat().st_size for path in kept) <= 40e6
    for path in kept:
        key, snapshot = path.stem.split("-")
        state, meta = load_checkpoint(path)
        assert meta["run"] == key and meta["snapshot"] == snapshot and key in runs.index
        assert all(t.dtype.itemsize == 2 for t in state.values() if t.is_floating_point())


def test_a_recorded_run_comes_out_the_same_when_it_is_trained_again(tmp_path):
    """The shortest run of the record. On the machine that made it, the weights are the same bit for bit; elsewhere the
    arithmetic rounds differently, so its numbers have to agree to what a few steps can make of that."""
    runs = read_runs(record_folder())
    short = runs[runs["images_seen"] <= 5_000].sort_values(["images_seen", "parameters"])
    if not len(short): pytest.skip("no short run is recorded yet")
    recorded = short.iloc[0]
    again = record_row(fit(from_canonical(recorded["config"]), cache=tmp_path, progress=False, again=True))
    assert again["key"] == recorded["key"] and again["n"] == recorded["n"]
    if json.loads(again["snapshots"]) == json.loads(recorded["snapshots"]): assert again["error"] == recorded["error"]
    else:
        assert again["nll_train"] == pytest.approx(recorded["nll_train"], rel=0.03)
        assert again["error"] == pytest.approx(recorded["error"], abs=0.05)
