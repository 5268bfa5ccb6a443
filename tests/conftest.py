"""What several test files share."""
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOT_SOURCE = {".venv", ".git", "_build", "build", "dist", "runs"}


def copy_tree(target: Path) -> Path:
    "A copy of the project's sources at `target`, to do things to that the user's own tree should not suffer."
    def left_out(folder, names):
        top = NOT_SOURCE & set(names) if Path(folder) == ROOT else set()
        return top | {name for name in names if name in ("__pycache__", ".ipynb_checkpoints") or name.endswith(".egg-info")}
    return Path(shutil.copytree(ROOT, target, ignore=left_out))


def load_build(root: Path = ROOT):
    "The module book/build.py of the project at `root`."
    spec = importlib.util.spec_from_file_location(f"book_build_{abs(hash(root))}", root / "book" / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run_chapter(chapter, folder, *parameters):
    "`papermill nbs/CHAPTER.ipynb -p ...` in an empty folder, without an output path."
    line = [str(Path(sys.executable).with_name("papermill")), str(ROOT / "nbs" / f"{chapter}.ipynb")]
    for name, value in parameters: line += ["-p", name, str(value)]
    # ipykernel keeps no copy of the terminal where it believes that it is itself under test
    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"} | {"TQDM_DISABLE": "1"}
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment)


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    "A copy of the project's sources, shared by the tests of a run."
    return copy_tree(tmp_path_factory.mktemp("copy") / "project")
