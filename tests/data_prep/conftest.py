"""Fixtures of the data preparation tests: a way to run commands, and a small tokenizer."""

from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.__main__ import main
from tests.data_prep.data_prep_helpers import Result, save_word_tokenizer


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run `python -m data_prep ARGUMENTS` in this process."""

    def call(*arguments: object) -> Result:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return call


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_word_tokenizer(tmp_path_factory.mktemp("tokenizer") / "words", 1000)
