"""The notebooks are clean, can be run by papermill, and the package is what they export."""
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from conftest import ROOT, copy_tree

NOTEBOOKS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
CHAPTERS = [name for name in NOTEBOOKS if Path(name).parent == Path("nbs") and Path(name).name[:2].isdigit()]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_is_clean(name):
    notebook = nbformat.read(ROOT / name, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.language == "python"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in code), "it holds outputs: run nbdev_clean"
    assert not any(cell.execution_count for cell in code), "it holds execution counts: run nbdev_clean"
    title, *others = [line for cell in notebook.cells if cell.cell_type == "markdown" for line in headings(cell.source) if line.startswith("# ")]
    lost = [cell.source for cell in code if cell.source.startswith("#| hide") and "Markdown(" in cell.source]
    assert not lost, f"a hidden cell has no output on its page: tag it remove-input instead: {lost[0][:80]}"
    assert notebook.cells[0].source.startswith(title) and not others, "a notebook starts with its title, and has only this one"


def headings(markdown):
    fenced = False
    for line in markdown.splitlines():
        fenced ^= line.startswith(("```", ":::"))
        if not fenced and line.startswith("#"):
            yield line


@pytest.mark.parametrize("name", CHAPTERS)
def test_chapter_has_parameters(name):
    notebook = nbformat.read(ROOT / name, as_version=4)
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1 and tagged[0].cell_type == "code", "papermill needs one code cell with the tag 'parameters'"


def state(root):
    files = [path for folder in ("nbs", "howvits") for path in (root / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def export(root):
    environment = {key: value for key, value in os.environ.items() if key != "IN_TEST"}
    for command in ("nbdev_export", "nbdev_clean"):
        subprocess.run([Path(sys.executable).with_name(command)], cwd=root, env=environment, check=True)


def test_package_is_what_the_notebooks_export(tmp_path):
    root = copy_tree(tmp_path / "project")
    before = state(root)
    for module in (root / "howvits").glob("*.py"):
        module.unlink()
    export(root)
    after = state(root)
    differing = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    assert not differing, f"run nbdev_export && nbdev_clean, and commit {', '.join(differing)}"
