"""Build the book: run its notebooks, write the pages that are made from them, render the site.

    python book/build.py                what has changed, or has never run on this machine; then the site
    python book/build.py 05_fourier     of the notebooks only this one; then the site
    python book/build.py --force        every notebook again; then the site
    python book/build.py --site         only the site, from the executed notebooks that are there
    python book/build.py --check        name the executed notebooks that are out of step with their source

The page `book/chapters/X` of `_toc.yml` is the executed copy of `nbs/X.ipynb`. It carries the hashes of its source and of the
package code, data and checkpoints that it imports, so a page that is older than what it shows can be told (`--check`).
"""
import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import nbformat
import yaml

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = "book/chapters/"
HTML = ROOT / "_build" / "html"
RAN = ROOT / "_build" / "ran.json"  # which notebooks have run on this machine, at which hashes, and how long they took
# What a module reads besides its own code.
DATA = {"data": ["howvits/assets/fashion_mnist_mini/*"], "models": ["howvits/assets/zoo/*"], "claims": ["book/claims.yml", "book/registered.csv"],
        "coverage": ["book/coverage/*.csv"], "sweep": ["book/runs/*.csv", "book/runs/measures/*.csv"]}
VERSIONS = ["torch", "torchvision", "timm", "numpy", "scipy", "statsmodels", "pandas", "matplotlib"]
PARTS = {1: "Part I. How do vision transformers work?", 2: "Part II. Do vision transformers see like CNNs?"}
WORKERS = min(2, os.cpu_count() or 1)


# The contents, and the hashes that tie a page to its source

def contents() -> list[str]:
    "The pages of `_toc.yml`, in reading order."
    def walk(node):
        if isinstance(node, list):
            return [page for item in node for page in walk(item)]
        if not isinstance(node, dict):
            return []
        own = [node[key] for key in ("root", "file") if key in node]
        return own + [page for value in node.values() for page in walk(value)]
    return walk(yaml.safe_load((ROOT / "_toc.yml").read_text(encoding="utf-8")))


def chapters() -> list[str]:
    "The names of the pages that are executed notebooks, such as `05_fourier` or `foundations/00_data`."
    return [page.removeprefix(CHAPTERS) for page in contents() if page.startswith(CHAPTERS)]


def source_of(name: str) -> Path:
    return ROOT / "nbs" / f"{name}.ipynb"


def page_of(name: str) -> Path:
    return ROOT / CHAPTERS / f"{name}.ipynb"


def read(path: Path):
    if not path.is_file():
        raise SystemExit(f"{path.relative_to(ROOT)} is listed in _toc.yml, but there is no such file.")
    return nbformat.read(path, as_version=4)


def digest(*parts: bytes) -> str:
    "SHA-256 over `parts` and their lengths."
    total = hashlib.sha256()
    for part in parts:
        total.update(b"%d:" % len(part) + part)
    return total.hexdigest()


def top_names() -> dict[str, str]:
    "Which module each name comes from that `howvits` itself offers (`create_model` from `models`)."
    calls = [node for node in ast.walk(ast.parse((ROOT / "howvits/__init__.py").read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    offered = [ast.literal_eval(key.value) for call in calls for key in call.keywords if key.arg == "submod_attrs"]
    return {name: module for names in offered for module, attrs in names.items() for name in attrs}


def imported(code: str) -> set[str]:
    "The modules of the package that `code` imports, or reaches as `howvits.module` or `howvits.name`."
    tree, reached = list(ast.walk(ast.parse(code))), set()
    aliases = {a.asname or "howvits" for node in tree if isinstance(node, ast.Import) for a in node.names if a.name.split(".")[0] == "howvits"}
    for node in tree:
        if isinstance(node, ast.Import):
            reached |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, ["howvits" if node.level else None, node.module]))
            reached |= {f"{base}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            reached.add(f"howvits.{node.attr}")
    names = {name.split(".")[1] for name in reached if name.startswith("howvits.")}
    names = {top_names().get(name, name) for name in names}
    return {name for name in names if (ROOT / f"howvits/{name}.py").is_file()}


def python_of(notebook) -> str:
    "The code of a notebook without IPython's magics."
    from IPython.core.inputtransformer2 import TransformerManager
    return "\n".join(TransformerManager().transform_cell(cell.source) for cell in notebook.cells if cell.cell_type == "code")


def hashes(name: str) -> dict[str, str]:
    "Of the notebook's cells; of the modules that it exports and imports, directly or through others, and of what those read."
    notebook = read(source_of(name))
    cells = [[cell.cell_type, cell.source, cell.metadata] for cell in notebook.cells]
    exports = {module for cell in notebook.cells for module in re.findall(r"^#\| default_exp (\w+)", cell.source)} - {"__init__"}
    found, todo, parts = set(), imported(python_of(notebook)) | exports, []
    while todo:
        module = todo.pop()
        found.add(module)
        todo |= imported((ROOT / f"howvits/{module}.py").read_text(encoding="utf-8")) - found
    for module in sorted(found):
        lines = (ROOT / f"howvits/{module}.py").read_text(encoding="utf-8").splitlines()
        parts.append("\n".join(line for line in lines if not line.startswith("#")).encode())
        files = sorted(file for pattern in DATA.get(module, []) for file in ROOT.glob(pattern))
        parts += [part for file in files for part in (file.name.encode(), file.read_bytes())]
    return {"sha256": digest(json.dumps(cells, sort_keys=True).encode()), "code_sha256": digest(*parts)}


def staleness(name: str) -> str | None:
    "Why the executed copy of `name` is out of step with its source, or None."
    page, source = page_of(name), f"nbs/{name}.ipynb"
    if not page.is_file():
        return f"{CHAPTERS}{name}.ipynb is missing: {source} has not been run"
    now, then = hashes(name), read(page).metadata.get("howvits", {})
    if then.get("sha256") != now["sha256"]:
        return f"{CHAPTERS}{name}.ipynb is stale: {source} has changed since it was run"
    if then.get("code_sha256") != now["code_sha256"]:
        return f"{CHAPTERS}{name}.ipynb is stale: code or data that {source} uses has changed since it was run"
    return None


# Running a notebook

TAGS = {"hide": "remove-cell", "hide_input": "remove-input", "echo: false": "remove-input", "hide_output": "remove-output",
        "output: false": "remove-output", "code-fold": "hide-input", "export": "exported", "exports": "exported", "exporti": "exported"}


def only_imports(code: str) -> bool:
    return all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(code).body)


def plain(markdown: str) -> str:
    "The last paragraph of `markdown` without its markup."
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"\{[\w:-]+\}`[^`]*`", "", markdown.strip().split("\n\n")[-1]))
    return re.sub(r"[`*$]", "", " ".join(text.split()))


def for_readers(notebook):
    """nbdev's directives become tags that the site knows; cells that are shown but never run become prose; imports are folded;
    a picture that its cell does not describe is described by its caption, or by the paragraph before it."""
    notebook.cells, prose = [cell for cell in notebook.cells if not cell.source.startswith("#| default_exp")], ""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            prose = cell.source
            continue
        about = cell.metadata.setdefault("mystnb", nbformat.NotebookNode())
        about.setdefault("image", nbformat.NotebookNode()).setdefault("alt", plain(about.get("figure", {}).get("caption", prose)))
        lines = cell.source.splitlines()
        directives = [re.sub(r"^#\s*\|\s*", "", line).strip() for line in lines if re.match(r"#\s*\|", line)]
        cell.source = "\n".join(line for line in lines if not re.match(r"#\s*\|", line)).strip("\n")
        tags = {tag for directive in directives for key, tag in TAGS.items() if directive == key or directive.startswith(f"{key}:")}
        if "eval: false" in directives:
            cell.update(cell_type="markdown", source=f"```python\n{cell.source}\n```")
            for key in ("outputs", "execution_count"):
                cell.pop(key)
        elif not cell.source.startswith(("%", "!")) and only_imports(cell.source):
            tags.add("hide-input")
        tags |= set(cell.metadata.get("tags", []))
        if tags:
            cell.metadata["tags"] = sorted(tags)
    return notebook


def without_traces(text: str) -> str:
    "`text` without what differs from machine to machine: paths, addresses of objects, lines of a progress bar."
    text = "".join(line for line in re.split(r"(?<=[\r\n])", text) if not re.search(r"\d+%\|.*\| *\d+/\d+", line)).replace("\r", "")
    text = re.sub(r"(?m)^\S*/(?:site-packages|ipykernel_\d+)/\S+?:\d+: ", "", text)
    text = re.sub(r"/tmp/ipykernel_\d+/\d+\.py", "the cell above", text)
    for path, word in [(f"{ROOT}/", ""), (str(ROOT), "."), (sys.prefix, ".venv"), (str(Path.home()), "~"), (f"{tempfile.gettempdir()}/", "a-temporary-folder/")]:
        text = text.replace(path, word)
    for number, name in enumerate(dict.fromkeys(re.findall(r"\bT_[0-9a-f]{5}\b", text))):  # pandas' tables, by content: two of one page do not meet
        text = text.replace(name, f"T_{hashlib.sha256(text.replace(name, '').encode()).hexdigest()[:8]}{number}")
    return re.sub(r" at 0x[0-9a-f]+", " at 0x...", text)


def joined(outputs) -> list:
    "`outputs`, with what was printed in pieces made one."
    whole = []
    for output in outputs:
        if whole and output.output_type == whole[-1].output_type == "stream" and output["name"] == whole[-1]["name"]: whole[-1]["text"] += output["text"]
        else: whole.append(output)
    return whole


def publish(notebook, name: str, made_from: dict[str, str]) -> None:
    "Write the executed `notebook` as the page `name`, whole or not at all, with nothing in it that changes from run to run."
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python", "pygments_lexer": "ipython3"},
        "howvits": {"source": f"nbs/{name}.ipynb", **made_from, "versions": {package: version(package) for package in VERSIONS}},
    }
    for cell in notebook.cells:
        cell.metadata = {key: cell.metadata[key] for key in ("tags", "mystnb") if cell.metadata.get(key)}
        if not any(mime.startswith("image/") for output in cell.get("outputs", []) for mime in output.get("data", {})):
            cell.metadata.pop("mystnb", None)
        for output in cell.get("outputs", []):
            if "text" in output:
                output["text"] = without_traces(output["text"])
            for mime, value in output.get("data", {}).items():
                if isinstance(value, str) and not mime.startswith("image/png"):
                    output["data"][mime] = without_traces(value)
        if "outputs" in cell:
            cell["outputs"] = joined(output for output in cell["outputs"] if output.output_type != "stream" or output["text"].strip())
    page = page_of(name)
    page.parent.mkdir(parents=True, exist_ok=True)
    half = page.with_suffix(f".{os.getpid()}.tmp")
    nbformat.write(notebook, half)
    os.replace(half, page)


def execute(name: str, keep: bool) -> tuple[float, str | None]:
    "Run nbs/`name`.ipynb, and publish it unless its page is to be kept; the seconds that it took, and what went wrong."
    import papermill
    from nbclient.exceptions import DeadKernelError
    from traitlets.config import Config
    started, made_from = time.perf_counter(), hashes(name)  # before it runs: someone may go on writing meanwhile
    with tempfile.TemporaryDirectory(prefix="howvits-") as folder:
        source, result = Path(folder, "source.ipynb"), Path(folder, "result.ipynb")
        nbformat.write(for_readers(read(source_of(name))), source)
        # The kernel is this Python's own; it runs where the notebook lies, as nbdev_test does; it shows no progress bars; it talks through
        # sockets in `folder`, since the ports of two kernels may clash.
        os.environ.update(JUPYTER_PREFER_ENV_PATH="1", JUPYTER_RUNTIME_DIR=folder, TQDM_DISABLE="1", PYTHONWARNINGS="ignore:IProgress not found,ignore:`torch.jit.script` is deprecated")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // WORKERS)))
        ipc = Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/kernel"}})
        try:
            papermill.execute_notebook(source, result, kernel_name="python3", cwd=str(source_of(name).parent), progress_bar=False, config=ipc,
                                       extra_arguments=["--log-level=CRITICAL"])
        except papermill.PapermillExecutionError as error:
            return time.perf_counter() - started, f"code cell {error.exec_count}: {error.ename}: {error.evalue}\n\n{error.source}"
        except DeadKernelError:
            return time.perf_counter() - started, "its kernel, which died (out of memory?)"
        if not keep: publish(nbformat.read(result, as_version=4), name, made_from)
    return time.perf_counter() - started, None


def quietly() -> None:
    "Nothing of this process reaches the terminal: what a notebook says there is on its page as well."
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def run(names: list[str], force: bool = False) -> bool:
    """Run those of the notebooks that are stale, or have not run here; True if all went well. A page that is in step with its
    source, code and data stays as it is: another machine rounds differently, and has other times to tell."""
    ran = json.loads(RAN.read_text()) if RAN.is_file() else {}
    todo = [name for name in names if force or staleness(name) or ran.get(name, {}).get("hashes") != hashes(name)]
    if todo: print(f"Running {len(todo)} notebook{'s' if len(todo) > 1 else ''}, {WORKERS} at a time.", flush=True)
    well = True
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn"), max_tasks_per_child=1, initializer=quietly) as pool:
        jobs = {pool.submit(execute, name, keep=not (force or staleness(name))): name for name in todo}
        for count, job in enumerate(as_completed(jobs), 1):
            name = jobs[job]
            try: seconds, error = job.result()
            except BrokenProcessPool:  # all that wait fail with it
                left = [f"nbs/{jobs[j]}.ipynb" for j in jobs if not j.done() or j.exception()]
                print(f"A worker was killed (out of memory?) with {', '.join(left)} under way or waiting. What has run is kept: run the same command again.")
                return False
            print(f"{count} of {len(todo)}: nbs/{name}.ipynb " + (f"failed in {error}" if error else f"ran in {seconds:.0f} s"), flush=True)
            well &= error is None
            if error is None:
                record = read(page_of(name)).metadata["howvits"]
                ran[name] = {"hashes": {key: record[key] for key in ("sha256", "code_sha256")}, "seconds": round(seconds)}
                RAN.parent.mkdir(exist_ok=True)
                RAN.write_text(json.dumps(ran, indent=1))
    return well


# The site

def status_page() -> str:
    "A table of the executed notebooks: from which source, with which versions, and how long they took on this machine."
    ran = json.loads(RAN.read_text()) if RAN.is_file() else {}
    rows, made_with = [], set()
    for name in chapters():
        notebook = read(page_of(name))
        record = notebook.metadata["howvits"]
        made_with.add(tuple(record["versions"].items()))
        here = ran.get(name, {})
        seconds = f"{here['seconds']} s" if here.get("hashes", {}).get("sha256") == record["sha256"] else "not run here"
        title = next(cell.source for cell in notebook.cells if cell.cell_type == "markdown").splitlines()[0].lstrip("# ")
        rows.append(f"| [{title}](chapters/{name}.ipynb) | `{record['sha256'][:8]}` | `{record['code_sha256'][:8]}` | {seconds} |")
    libraries = sorted({f"{package} {number}" for versions in made_with for package, number in versions})
    return "\n".join([
        "# Status and versions", "",
        "Every page with code is the output of a notebook that was run from its first cell to its last. The two fingerprints tie the page to",
        "the notebook, and to the code, data and checkpoints that it uses; the tests fail when a page is out of step with one of them.", "",
        "| page | notebook | code and data | run here in |", "|---|---|---|---|", *rows, "",
        f"The pages were run with howvits {version('howvits')} and {', '.join(libraries)}.", ""])


def claims_page() -> str:
    "The table of claims, by chapter, each with what the record says; a chapter that is written is linked."
    from howvits.sweep import verdicts
    found, written = verdicts().values(), chapters()
    lines = [
        "# The claims", "",
        "What this book puts to the test, chapter by chapter. Each row is a statement of the papers in our words; how it is measured, on which networks,",
        "and what would support it, was written down before the runs. The verdicts are for small networks on small data; the chapters compute them, and say what they rest on.",
        "An id without a link belongs to a chapter that is still to be written, a verdict that is missing to runs that are still to be made.", ""]
    for part, title in PARTS.items():
        lines += ["", f"## {title}", "", "| id | claim | verdict |", "|---|---|---|"]
        for claim, word in ((verdict.claim, verdict.overall) for verdict in found if verdict.claim.part == part):
            link = f"[{claim.id}](chapters/{claim.chapter}.ipynb)" if claim.chapter in written else claim.id
            lines.append(f"| {link} | {claim.statement} ({{cite:t}}`{claim.paper}`, {claim.where}) | {'' if word == 'no verdict' else word} |")
    return "\n".join([*lines, ""])


def site() -> int:
    "Render the site, with warnings as errors; the exit status."
    for page, text in (("status", status_page()), ("claims", claims_page())):
        (ROOT / f"book/{page}.md").write_text(text, encoding="utf-8")
    missing = [page for page in contents() if not any((ROOT / f"{page}{suffix}").is_file() for suffix in (".md", ".ipynb"))]
    if missing:
        print(f"_toc.yml lists pages that do not exist: {', '.join(missing)}")
        return 1
    sources = [file for page in contents() for file in (ROOT / f"{page}.md", ROOT / f"{page}.ipynb") if file.is_file()]
    sources += [ROOT / "_toc.yml", ROOT / "_config.yml", ROOT / "book/references.bib", *sorted((ROOT / "book/_static").glob("*"))]
    fingerprint = digest(*(part for file in sources for part in (file.name.encode(), file.read_bytes())))
    built = HTML / ".fingerprint"
    if not (built.is_file() and built.read_text() == fingerprint):
        # From scratch: Sphinx would leave old contents in the sidebars, and keep quiet about the warnings of a page that it read before.
        for folder in (HTML, ROOT / "_build/.doctrees"):
            shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-c", "from jupyter_book.cli.main import main; main()", "build", ".", "--path-output", ".", "-W", "--keep-going", "-q"]
        status = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode  # warnings come by stderr
        unwritten = [page for page in contents() if not (HTML / f"{page}.html").is_file()]
        if status or unwritten:
            print("The site was not built" + (f": no page came of {', '.join(unwritten)}" if unwritten else ": see the warnings above") + ".")
            return status or 1
        built.write_text(fingerprint)
    print(f"The book: {(HTML / 'index.html').as_uri()}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="notebooks to run, such as 05_fourier; all of them by default")
    parser.add_argument("--force", action="store_true", help="run them even if nothing has changed")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--site", action="store_true", help="run nothing")
    what.add_argument("--check", action="store_true", help="only name the pages that are out of step")
    args = parser.parse_args()
    unknown = set(args.names) - set(chapters())
    if unknown:
        parser.error(f"no such notebook in _toc.yml: {', '.join(sorted(unknown))}; there are {', '.join(chapters())}")
    names = args.names or chapters()
    if args.check:
        stale = [reason for reason in map(staleness, names) if reason]
        print("\n".join(stale) or "Every page is in step with its source.")
        return 1 if stale else 0
    if not args.site and not run(names, force=args.force):
        return 1
    return site()


if __name__ == "__main__":
    sys.exit(main())
