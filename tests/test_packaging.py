"""Files about the project that nothing runs here: hosted CI, hooks, how to cite it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

import offload

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def read_yaml(path: Path) -> dict[Any, Any]:
    read = yaml.safe_load(path.read_text())
    assert isinstance(read, dict)
    return read


def steps_of(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_a_workflow_may_read_alone_and_ends() -> None:
    workflow = read_yaml(WORKFLOW)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is True
    for name, job in workflow["jobs"].items():
        assert "permissions" not in job, f"{name} has more"
        assert 0 < job["timeout-minutes"] <= 120, name


def test_actions_are_pinned_by_commit_with_their_release_beside_it() -> None:
    """A tag can be moved to other code; the comment is for people."""
    used = [step["uses"] for step in steps_of(read_yaml(WORKFLOW)) if "uses" in step]
    assert used
    for action in used:
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", action), action
        assert re.search(rf"{re.escape(action)} # v\d+\.\d+\.\d+\n", WORKFLOW.read_text()), action


def test_hosted_ci_runs_what_ci_runs() -> None:
    hosted = " ".join(step.get("run", "") for step in steps_of(read_yaml(WORKFLOW)))
    assert {"test", "lint", "versions"} <= set(re.findall(r"\bmake ([a-z]+)", hosted))


def test_hooks_download_nothing() -> None:
    hooks = read_yaml(ROOT / ".pre-commit-config.yaml")
    assert [repository["repo"] for repository in hooks["repos"]] == ["local"]
    for hook in hooks["repos"][0]["hooks"]:
        assert hook["language"] == "system" and hook["entry"].startswith(".venv/bin/python ")


def test_the_citation_is_of_this_version() -> None:
    citation = read_yaml(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys(), "CFF requires these"
    assert citation["version"] == offload.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["license"] == project["license"]
