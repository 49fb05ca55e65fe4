"""Commands in the documents: those marked so are executed, and all others are at least command lines of today."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from tiny_chat import Run, make_run

from rapid_infer import hub
from rapid_infer.cli import app
from rapid_infer.errors import HubError

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("plugins/*/README.md")),
    *sorted(ROOT.glob("examples/*/README.md")),
]
EXECUTED = re.compile(r"<!-- executed: tests/unit/test_documented_commands.py -->\s+```sh\n(.*?)```", re.DOTALL)
BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?rapid-infer( .*)$", re.MULTILINE)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    try:
        hub.resolve("demo")
    except HubError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # and back, after `--offline`
    return make_run(capsys)


def test_commands_of_the_quick_start_run(run: Run) -> None:
    blocks = EXECUTED.findall((ROOT / "docs" / "quick-start.md").read_text())
    commands = "".join(blocks).splitlines()
    assert len(commands) > 4
    for command in commands:
        code, out, err = run(*shlex.split(command)[1:])
        assert (code, bool(out)) == (0, True), f"{command}: {err}"


def test_the_recorded_terminal_is_what_the_commands_print(run: Run) -> None:
    recorder: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "record_terminal.py"))
    made = recorder["draw"](recorder["record"]())
    assert made == recorder["FIGURE"].read_text(encoding="utf-8"), "run python scripts/record_terminal.py"


def documented() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            found += [(page.name, line) for line in LINE.findall(block.replace("\\\n", " "))]
    return found


def test_every_documented_command_line_is_one_that_there_is() -> None:
    """Parsed as the shell and the command would, and not run."""
    group: Any = typer.main.get_command(app.build_app([]))
    lines = documented()
    assert len(lines) > 30
    for page, line in lines:
        words = shlex.split(line, comments=True)
        # What follows is the shell's.
        end = next((i for i, word in enumerate(words) if word in ("|", ">", "&", "&&", ";")), len(words))
        try:
            _parse(group, words[:end])
        except app.USAGE_ERROR as error:
            pytest.fail(f"{page}: rapid-infer{line}: {error.format_message()}")


def _parse(command: Any, words: list[str]) -> None:
    if hasattr(command, "commands"):
        if words and not words[0].startswith("-"):
            assert words[0] in command.commands, f"no command {words[0]!r}"
            _parse(command.commands[words[0]], words[1:])
    elif "--help" not in words:
        command.make_context(command.name, list(words))


def test_links_lead_to_files_and_headings() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
            name, _, heading = link.partition("#")
            if ":" in name:
                continue
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), f"{page.name}: {link}"
            if heading:
                assert heading in headings(target), f"{page.name}: {link}"


def headings(page: Path) -> set[str]:
    """As GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
