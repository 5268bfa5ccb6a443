"""Packaging: everything is read from settings.ini."""
from configparser import ConfigParser
from pathlib import Path
from shutil import copyfile

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="])
parser.read(here / "settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]


class BuildWithClaims(build_py):
    "The table of claims and its register belong to the book; a wheel gets a copy."

    def run(self):
        super().run()
        if not self.editable_mode:
            assets = Path(self.build_lib, cfg["lib_name"], "assets")
            assets.mkdir(parents=True, exist_ok=True)
            for name in ("claims.yml", "registered.csv"): copyfile(here / "book" / name, assets / name)


setup(
    name=cfg["lib_name"], version=cfg["version"], description=cfg["description"], keywords=cfg["keywords"],
    author=cfg["author"], author_email=cfg["author_email"], url=cfg["git_url"], license="Apache-2.0",
    long_description=(here / "README.md").read_text(encoding="utf-8"), long_description_content_type="text/markdown",
    packages=find_packages(include=["howvits", "howvits.*"]), include_package_data=True, zip_safe=False,
    package_data={"howvits": ["assets/**/*", "assets/*"]}, cmdclass={"build_py": BuildWithClaims},
    entry_points={"papermill.io": ["nowhere: = howvits.terminal:nowhere"]},
    python_requires=">=" + cfg["min_python"], install_requires=cfg["requirements"].split(),
    extras_require={name: cfg[f"{name}_requirements"].split() for name in ("dev", "sweep")},
)
