"""`python -m evaluation` answers before it loads what only some of its commands need."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "matplotlib", "transformers", "data_prep", "pipeline")


@pytest.mark.parametrize("arguments", [["--help"], ["report", "--help"], ["sample", "a.jsonl", "--documents", "1"]])
def test_light_commands_load_no_heavy_library(tmp_path: Path, arguments: list[str]) -> None:
    code = (
        "import sys; from command_line import run; from evaluation.__main__ import main\n"
        "try: code = run(main)\n"
        "except SystemExit as ended: code = ended.code\n"
        f"sys.exit(code or ' '.join(set({HEAVY}) & set(sys.modules)) or 0)"
    )
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {code}", *arguments]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
