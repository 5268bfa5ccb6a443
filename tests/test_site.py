"""The site: no page older than its source, nothing broken or missing in it, and it can be read in a browser, without a network, at any width."""
import os
import re
import shutil
import subprocess
import sys
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from unittest import mock
from urllib.parse import unquote, urldefrag, urlparse

import nbformat
import pytest
from bs4 import BeautifulSoup
from conftest import ROOT, load_build

BUILD = load_build()
PAGES = BUILD.contents()
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]


# The executed notebooks

def test_every_notebook_is_a_page_of_the_book():
    notebooks = {path.relative_to(ROOT / "nbs").with_suffix("").as_posix() for path in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts}
    assert notebooks == set(BUILD.chapters())


@pytest.mark.parametrize("name", BUILD.chapters())
def test_page_is_in_step_with_its_source(name):
    assert BUILD.staleness(name) is None, f"{BUILD.staleness(name)}: run make book, and commit the page"


@pytest.mark.parametrize("name", BUILD.chapters())
def test_outputs_hold_no_errors_progress_bars_or_paths_of_a_machine(name):
    for cell in nbformat.read(BUILD.page_of(name), as_version=4).cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            texts = [output.get("text", "")] + [text for mime, text in output.get("data", {}).items() if not mime.startswith("image/png")]
            for text in map(str, texts):
                assert "\r" not in text and not re.search(r"\d+%\|", text), f"a progress bar: {text[:200]}"
                assert not re.search(r"(?<![\w.:/])/(home|root|tmp|work|Users|opt|mnt|var)/\w|site-packages|ipykernel_", text), f"a path: {text[:300]}"


# How the pages are made, tried on a book of one notebook

@pytest.fixture
def book(tmp_path):
    "A book of one notebook, nbs/one.ipynb, which imports the module howvits/tool.py."
    for folder in ("book", "nbs", "howvits"):
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "book/build.py", tmp_path / "book")
    (tmp_path / "_toc.yml").write_text("format: jb-book\nroot: book/intro\nchapters:\n- file: book/chapters/one\n")
    (tmp_path / "_config.yml").write_text("title: One\nonly_build_toc_files: true\nexecute: {execute_notebooks: 'off'}\n")
    (tmp_path / "book/intro.md").write_text("# Intro\n")
    (tmp_path / "book/references.bib").write_text("")
    (tmp_path / "book/claims.yml").write_text("claims: []\n")
    (tmp_path / "howvits/__init__.py").write_text("dict(submod_attrs={'tool': ['twice']})\n")
    (tmp_path / "howvits/tool.py").write_text("from .deep import two\n# a remark\ndef twice(x): return two * x\n")
    (tmp_path / "howvits/deep.py").write_text("two = 2\n")
    (tmp_path / "howvits/claims.py").write_text("")
    write_notebook(tmp_path, "print('four:', 2 + 2)")
    return tmp_path


def write_notebook(book, *code):
    cells = [nbformat.v4.new_markdown_cell("# One"), *map(nbformat.v4.new_code_cell, code)]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "python3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), book / "nbs/one.ipynb")


def build(book, *arguments):
    done = subprocess.run([sys.executable, "book/build.py", *arguments], cwd=book, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def execute(book):
    "Run the notebook in this process; what went wrong with it."
    with mock.patch.dict(os.environ):
        return load_build(book).execute("one", keep=False)[1]


def test_page_is_run_by_this_python_and_only_once(book):
    write_notebook(book, "import sys\nprint(sys.prefix)")
    status, said = build(book)
    assert status == 0 and "Running 1 notebook" in said and "1 of 1: nbs/one.ipynb ran in" in said and (book / "_build/html/book/chapters/one.html").is_file(), said
    page = (book / "book/chapters/one.ipynb").read_bytes()
    assert nbformat.reads(page, as_version=4).cells[1].outputs[0].text == ".venv\n"
    status, said = build(book)
    assert status == 0 and "ran in" not in said and (book / "book/chapters/one.ipynb").read_bytes() == page


def test_page_is_for_readers_and_without_traces_of_the_machine(book):
    bar = "import sys, time\nfor i in range(3): print(f'\\r{i}%|## | {i}/2 [00:00<00:01]', end='', file=sys.stderr, flush=True); time.sleep(0.05)"
    write_notebook(book, "#| hide\nimport os", "#| export\nprint('at', os.getcwd() + '/x', object())", "#| eval: false\n1/0", bar)
    assert execute(book) is None
    page = (book / "book/chapters/one.ipynb").read_bytes()
    hidden, exported, shown, noisy = nbformat.reads(page, as_version=4).cells[1:]
    assert "remove-cell" in hidden.metadata.tags
    assert exported.metadata.tags == ["exported"] and exported.outputs[0].text == "at nbs/x <object object at 0x...>\n"
    assert (shown.cell_type, shown.source) == ("markdown", "```python\n1/0\n```")
    assert not noisy.outputs, "a progress bar"
    assert execute(book) is None and (book / "book/chapters/one.ipynb").read_bytes() == page


def test_a_page_that_has_fallen_behind_is_named(book):
    write_notebook(book, "if False:\n    import howvits\n    howvits.twice(2)")
    assert "one.ipynb is missing" in build(book, "--check")[1]
    assert execute(book) is None
    staleness = load_build(book).staleness
    assert staleness("one") is None
    (book / "howvits/deep.py").write_text("two = 2\n# a remark\n")
    assert staleness("one") is None
    (book / "howvits/deep.py").write_text("two = 3\n")
    assert staleness("one") == "book/chapters/one.ipynb is stale: code or data that nbs/one.ipynb uses has changed since it was run"
    write_notebook(book, "print('five')")
    assert staleness("one") == "book/chapters/one.ipynb is stale: nbs/one.ipynb has changed since it was run"
    status, said = build(book, "--check")
    assert status == 1 and staleness("one") in said


def test_a_notebook_that_fails_stops_the_build_and_leaves_the_page_as_it_was(book):
    assert execute(book) is None
    page = (book / "book/chapters/one.ipynb").read_bytes()
    write_notebook(book, "print('on the way')", "raise ValueError('broken')")
    status, said = build(book)
    assert status != 0 and "1 of 1: nbs/one.ipynb failed in code cell 2: ValueError: broken" in said
    assert (book / "book/chapters/one.ipynb").read_bytes() == page
    assert [path.name for path in (book / "book/chapters").iterdir()] == ["one.ipynb"]


def test_a_page_in_step_stays_as_it_is_on_another_machine(book):
    write_notebook(book, "import time\nprint(time.time_ns())")
    build(book)
    page = (book / "book/chapters/one.ipynb").read_bytes()
    (book / "_build/ran.json").unlink()
    status, said = build(book)
    assert status == 0 and "ran in" in said and (book / "book/chapters/one.ipynb").read_bytes() == page
    assert build(book, "--force")[0] == 0 and (book / "book/chapters/one.ipynb").read_bytes() != page


def test_a_worker_that_is_killed_is_one_sentence(book):
    write_notebook(book, "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)")
    status, said = build(book)
    assert status != 0 and "A worker was killed (out of memory?) with nbs/one.ipynb under way or waiting." in said and "Traceback" not in said


def test_a_missing_page_stops_the_build(book):
    assert execute(book) is None
    with open(book / "_toc.yml", "a") as toc:
        toc.write("- file: book/nowhere\n")
    status, said = build(book, "--site")
    assert status != 0 and "book/nowhere" in said


def test_a_warning_stops_the_build_every_time(book):
    assert execute(book) is None
    (book / "book/intro.md").write_text("# Intro\n\n[a link](to/nothing.md)\n")
    for _ in range(2):
        status, said = build(book, "--site")
        assert status != 0 and "to/nothing.md" in said


def test_hashes_cover_what_a_notebook_exports_imports_and_reads(book):
    of = load_build(book).hashes
    write_notebook(book, "#| default_exp claims", "1")
    before = of("one")
    (book / "book/claims.yml").write_text("claims: [ ]\n")
    assert of("one")["code_sha256"] != before["code_sha256"] and of("one")["sha256"] == before["sha256"]
    reach = ["from howvits.tool import twice", "import howvits.tool as t", "from howvits import twice", "from howvits import tool", "import howvits as h\nh.twice(1)", "import howvits\nhowvits.tool"]
    found = set()
    for code in reach:
        write_notebook(book, code)
        found.add(of("one")["code_sha256"])
    write_notebook(book, "import os")
    assert len(found) == 1 and of("one")["code_sha256"] not in found


# The site as files

@pytest.fixture(scope="session")
def site():
    "The folder of the built site, and the parsed pages of the contents."
    done = subprocess.run([sys.executable, ROOT / "book/build.py", "--site"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return BUILD.HTML, {page: BeautifulSoup((BUILD.HTML / f"{page}.html").read_text(encoding="utf-8"), "html.parser") for page in PAGES}


@cache
def anchors(path):
    return set(re.findall(r'\bid="([^"]+)"', path.read_text(encoding="utf-8")))


def test_every_link_picture_and_script_of_the_site_is_there(site):
    html, soups = site
    broken, outside = [], []
    for page, soup in soups.items():
        here = html / f"{page}.html"
        for element in soup.find_all(["a", "link", "img", "script", "source"]):
            address = element.get("href") or element.get("src") or ""
            url, anchor = urldefrag(address)
            if urlparse(url).scheme or url.startswith("//"):
                outside += [f"{page}: {url}"] if element.name != "a" and not url.startswith("data:") else []
                continue
            target = (here.parent / unquote(urlparse(url).path)).resolve() if url else here
            if not target.is_file() or anchor and target.suffix == ".html" and unquote(anchor) not in anchors(target):
                broken.append(f"{page}: {address}")
    assert not broken and not outside, f"broken: {broken}; loaded from elsewhere: {outside}"


@pytest.mark.parametrize("page", PAGES)
def test_page_has_one_title_and_words_for_its_pictures(site, page):
    article = site[1][page].find("article")
    assert len(article.find_all("h1")) == 1
    for image in article.find_all("img"):
        words = image.get("alt", "")
        assert words and not words.endswith((".png", ".svg")), f"a picture without a description: {image.get('src')}"


@pytest.mark.parametrize("page", PAGES)
def test_page_shows_no_directives_and_no_errors(site, page):
    text = site[1][page].find("article").get_text()
    assert not re.search(r"^\s*#\s*\|", text, re.MULTILINE)
    assert "Traceback (most recent call last)" not in text


def test_page_can_be_downloaded_as_a_notebook_that_is_one(site):
    html, soups = site
    for page, soup in soups.items():
        if page.startswith(BUILD.CHAPTERS):
            [link] = [a["href"] for a in soup.find_all("a", href=True) if a["href"].endswith(".ipynb")]
            nbformat.validate(nbformat.read((html / f"{page}.html").parent / link, as_version=4))


@pytest.mark.parametrize("chapter, claims", [("02_inductive_bias", "I1 I2 I3 I4 I5 I6 I7"), ("03_hessians", "H1 H2 H3 H4 H5 H6 H7 H8 H9 H10 H11"), ("05_fourier", "F1 F2 F3 F4")])
def test_chapter_has_numbered_figures_and_its_claims(site, chapter, claims):
    article = site[1][f"book/chapters/{chapter}"].find("article")
    captions = [figure.figcaption.get_text() for figure in article.find_all("figure") if figure.figcaption]
    assert captions and all(re.match(r"\s*Fig\. \d", caption) for caption in captions)
    boxes = " ".join(box.get_text() for box in article.find_all(class_="claim-box"))
    assert set(claims.split()) <= set(re.findall(r"\b[A-Z]\d+\b", boxes))


# The site in a browser

@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed: with it (Debian's package chromium) the site is also tested in a browser")
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


class Visit:
    "A tab that notes whatever goes wrong in it, and whatever it loads from anywhere but `origin`."

    def __init__(self, browser, width, scheme="light", origin="file:"):
        self.faults = []
        self.tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.tab.on("console", lambda message: message.type in ("error", "warning") and self.faults.append(message.text))
        self.tab.on("pageerror", lambda error: self.faults.append(str(error)))
        self.tab.on("requestfailed", lambda request: self.faults.append(f"not loaded: {request.url}"))
        self.tab.on("response", lambda response: response.status >= 400 and self.faults.append(f"not found: {response.url}"))
        self.tab.on("request", lambda request: request.url.startswith((origin, "data:", "blob:")) or self.faults.append(f"from elsewhere: {request.url}"))

    def settle(self):
        self.tab.wait_for_load_state("load")
        self.tab.evaluate("window.MathJax?.startup?.promise")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_pages_can_be_read(site, browser, width, scheme):
    visit = Visit(browser, width, scheme)
    for page in PAGES:
        visit.tab.goto((site[0] / f"{page}.html").as_uri())
        visit.settle()
        assert visit.tab.evaluate("document.documentElement.dataset.theme") == scheme
        assert not visit.faults, f"{page}: {visit.faults}"
        assert visit.tab.evaluate("document.documentElement.scrollWidth") <= width, f"{page} is wider than the window"
        assert visit.tab.evaluate("[...document.images].every(image => image.complete && image.naturalWidth)"), f"{page}: a picture that does not show"
        assert not visit.tab.locator("mjx-merror").count(), f"{page}: a formula that cannot be set"
    visit.tab.close()


def test_contents_lead_through_the_book(site, browser):
    visit = Visit(browser, 1440)
    visit.tab.goto((site[0] / "index.html").as_uri())
    visit.tab.wait_for_url("**/book/intro.html")
    links = visit.tab.locator(".bd-sidebar-primary nav a.internal")
    assert links.count() == len(PAGES)
    for number, page in enumerate(PAGES):
        links.nth(number).click()
        visit.tab.wait_for_url(f"**/_build/html/{page}.html*")
        visit.settle()
    assert not visit.faults
    visit.tab.close()


CHAPTERS = [page for page in PAGES if re.search(r"/\d\d_[a-z_]+$", page) and "foundations" not in page]


@pytest.mark.parametrize("width", [390, 1000, 1200, 1440])
def test_no_table_of_a_claim_is_cut_off(site, browser, width):
    "Nor anything else of its box; but for the head of the table, which is there for screen readers alone where the window is narrow."
    visit, boxes = Visit(browser, width), 0
    for page in CHAPTERS:
        visit.tab.goto((site[0] / f"{page}.html").as_uri())
        visit.settle()
        boxes += visit.tab.locator(".claim-box").count()
        cut = visit.tab.evaluate("""[...document.querySelectorAll('.claim-box')].filter(box => [box, ...box.querySelectorAll(':not(thead, thead *)')].some(e =>
            e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display != 'inline' || e.getBoundingClientRect().right > box.getBoundingClientRect().right + 1)).map(box => box.ariaLabel)""")
        assert not cut, f"{page}: {cut}"
    assert boxes > 20
    visit.tab.close()


@pytest.mark.parametrize("chapter", ["02_inductive_bias", "03_hessians", "05_fourier"])
def test_chapter_shows_its_figures_and_claims(site, browser, chapter):
    visit = Visit(browser, 1440)
    visit.tab.goto((site[0] / f"book/chapters/{chapter}.html").as_uri())
    visit.settle()
    for what in ("article figure img", "article figcaption", "article .claim-box"):
        assert visit.tab.locator(what).count() and visit.tab.locator(what).first.is_visible(), what
    visit.tab.close()


def test_search_finds_a_word_of_the_book(site, browser):
    handler = partial(QuietHandler, directory=site[0])
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:  # the search reads pages, which a browser allows only by HTTP
        Thread(target=server.serve_forever, daemon=True).start()
        origin = f"http://127.0.0.1:{server.server_port}/"
        visit = Visit(browser, 1440, origin=origin)
        visit.tab.goto(f"{origin}search.html?q=stream")
        visit.tab.locator("#search-results li").first.wait_for(timeout=20_000)
        assert not visit.faults
        visit.tab.close()
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def test_the_table_of_claims_shows_the_verdicts():
    from howvits.sweep import verdicts
    rows = dict(re.findall(r"(?m)^\| \[?([A-Z]\d+)\b.* \| ([a-z]*) \|$", BUILD.claims_page()))
    assert rows == {id: verdict.overall.replace("no verdict", "") for id, verdict in verdicts().items()} and set(rows.values()) > {"", "holds"}
