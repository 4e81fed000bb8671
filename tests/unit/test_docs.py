"""What the documents say is true: the figures, the example, the files and commands they name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_figures_are_those_of_the_results():
    from benchmarks import tables

    texts = [document.read_text() for document in tables.DOCUMENTS]
    assert [tables.filled(text) for text in texts] == texts, "run `python -m benchmarks.tables`"
    named = re.findall(r"<!-- figures: ([a-z0-9-]+) -->", "".join(texts))
    assert sorted(named) == sorted(tables.TABLES)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        if not target.startswith("http"):
            assert (document.parent / target).exists(), target


def test_the_examples_of_a_spec_are_valid():
    from kvgen.spec import load_any_spec

    for document in DOCUMENTS:
        for block in re.findall(r"```yaml\n(.*?)```", document.read_text(), re.DOTALL):
            assert load_any_spec(block).workloads


@pytest.mark.slow
def test_the_python_example_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    own = {f"KVGEN_{name}_DIR": str(tmp_path / name) for name in ("REGISTRY", "SITE")}
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "[1001, 1001] (2, 1, 32, 128)" in run.stdout


def test_the_makefile_has_every_target_that_the_documents_name():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for document in DOCUMENTS for name in re.findall(r"(?:^|`)make ([a-z-]+)", document.read_text(), re.MULTILINE)}
    assert {"demo", "test", "lint", "docs"} <= named <= targets


def test_every_environment_variable_is_told():
    used = set()
    for source in (ROOT / "kvgen").rglob("*.py"):
        used |= set(re.findall(r"KVGEN_[A-Z]+(?:_[A-Z]+)*", source.read_text()))
    told = set(re.findall(r"`(KVGEN_[A-Z_]+)`", (ROOT / "docs" / "python.md").read_text()))
    assert used == told


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """The options of every command of `kvgen`."""
    import typer

    from kvgen.cli import commands as registered

    commands = typer.main.get_command(registered()).commands  # type: ignore[attr-defined]
    shared = {"--help", "-h", "--debug"}
    return {name: shared | {option for parameter in command.params for option in parameter.opts} for name, command in commands.items()}


def named_commands(text: str) -> list[list[str]]:
    """The commands that a document names, in backticks, in indented lines and in blocks of shell, without comments."""
    shell = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    lines = re.findall(r"^ {4}(?:python|kvgen) .+$", text, re.MULTILINE) + re.findall(r"^(?:python|kvgen) .+$", shell, re.MULTILINE)
    return [re.split(r"\s#|\s{2,}", found.strip())[0].split() for found in re.findall(r"`((?:python|kvgen) [^`\n]+)`", text) + lines]


def missing(command: list[str], options: dict[str, set[str]]) -> list[str]:
    """What of a command does not exist: its file or name, and its options."""
    if gone := [word for word in command if word.startswith("examples/") and not (ROOT / word).exists()]:
        return gone
    program, *words = ["kvgen", *command[3:]] if command[:3] == ["python", "-m", "kvgen"] and command[3:] else command
    if program == "kvgen":
        given = {word.strip("[],") for word in words if re.match(r"\[?--?[a-z]", word)}
        if words[0].startswith("-") or words[0].isupper():
            return []
        return sorted(given - options[words[0]]) if words[0] in options else [words[0]]
    path = ROOT / (words[1].replace(".", "/") if words[0] == "-m" else words[0].removesuffix(".py"))
    ours = path.relative_to(ROOT).parts[0] in ("kvgen", "tests", "benchmarks")
    return [" ".join(words)] if ours and not (path.is_dir() or path.with_suffix(".py").is_file()) else []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_that_a_document_names_exist(document, options):
    for command in named_commands(document.read_text()):
        assert not missing(command, options), " ".join(command)
