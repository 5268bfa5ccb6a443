"""A wheel of the project works in a clean environment, away from the repository."""
import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
from conftest import ROOT

SETTINGS = ConfigParser(delimiters=["="])
SETTINGS.read(ROOT / "settings.ini", encoding="utf-8")
SETTINGS = SETTINGS["DEFAULT"]


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, "."]
    subprocess.run(command, cwd=tree, check=True)
    [path] = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    "The Python of a new environment that holds the wheel, and borrows everything else from this one."
    home = tmp_path_factory.mktemp("clean")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    [packages] = home.glob("lib/python*/site-packages")
    # A path in a .pth file brings in the packages there, but not the link by which this repository is installed.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    return python


def run(python, cwd, code):
    done = subprocess.run([python, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_wheel_holds_the_package_and_all_its_assets(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    assert {name.split("/")[0] for name in held} == {"howvits", f"howvits-{SETTINGS['version']}.dist-info"}
    expected = {p.relative_to(ROOT).as_posix(): p for p in (ROOT / "howvits").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    for name in ("claims.yml", "registered.csv"): expected[f"howvits/assets/{name}"] = ROOT / "book" / name
    assert {name for name in held if name.startswith("howvits/")} == set(expected)
    assert all(held[name] == path.read_bytes() for name, path in expected.items())
    assert any(name.endswith("/LICENSE") for name in held)


def test_import_is_light_and_the_version_is_right(python, tmp_path):
    found = run(python, tmp_path, "import sys, json, howvits; print(json.dumps([howvits.__version__, howvits.__file__, 'torch' in sys.modules]))")
    assert found[0] == SETTINGS["version"]
    assert Path(found[1]).is_relative_to(python.parent.parent)
    assert not found[2], "import howvits also imported torch"


def test_everything_that_howvits_offers_can_be_had(python, tmp_path):
    modules = sorted(path.stem for path in (ROOT / "howvits").glob("[!_]*.py"))
    code = f"""
import importlib, json, howvits
for name in dir(howvits): getattr(howvits, name)
for name in {modules}: importlib.import_module("howvits." + name)
print(json.dumps(dir(howvits)))"""
    offered = run(python, tmp_path, code)
    assert {"create_model", "list_models", "load_dataset", "steps", "fourier"} <= set(offered)


def test_shipped_data_networks_and_claims_can_be_used(python, tmp_path):
    code = """
import json, howvits
data = howvits.load_dataset("fashion_mnist_mini", "test")
shapes = {name: list(howvits.create_model(name, pretrained=True).eval()(data[0][0][None]).shape) for name in ("resnet", "vit", "pit", "swin")}
print(json.dumps([len(data), shapes, len(howvits.claims.load_claims())]))"""
    images, shapes, claims = run(python, tmp_path, code)
    assert images == 2000 and claims > 50
    assert shapes == {name: [1, 10] for name in ("resnet", "vit", "pit", "swin")}
