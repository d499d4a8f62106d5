"""The recipe: what is wrong is refused, with the key and the remedy; what is right is read as it was meant."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from command_line import UsageError
from pipeline.recipe import deepspeed_file, first_difference, load, numbers
from pipeline.recipe.file import INSTALLED

Write = Callable[..., Path]


@pytest.mark.parametrize("path", sorted((INSTALLED / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_load(path: Path) -> None:
    recipe = load(path)
    assert recipe.name == path.stem
    assert deepspeed_file(recipe).is_file()
    assert Path(recipe.data.rows).is_absolute()


def test_the_paper_numbers() -> None:
    """RECIPE, section 1."""
    detour, twin = (load(INSTALLED / "recipes" / f"modernbert-base-bio-{name}.yaml") for name in ("detour", "mlm-twin"))
    first, decay = detour.phases
    assert (first.objective, first.tokens, first.learning_rate.warmup_tokens) == ("clm", 10**10, 10**8)
    assert (first.learning_rate.peak, first.learning_rate.shape) == (2e-4, "constant")
    assert (decay.objective, decay.mask_rate, decay.tokens) == ("mlm", 0.15, 10**9)
    assert (decay.learning_rate.peak, decay.learning_rate.end) == (2e-4, 2e-5)
    assert decay.learning_rate.shape == "one_minus_sqrt"
    assert detour.batch.rows == 384
    assert detour.optimizer.weight_decay == pytest.approx(1e-5 / 2e-4)
    assert (detour.optimizer.betas, detour.optimizer.eps, detour.optimizer.clip) == ((0.9, 0.98), 1e-6, 1.0)
    assert (detour.seed, detour.data_seed) == (17, 42)
    assert (twin.phases[0].objective, twin.phases[0].mask_rate) == ("mlm", 0.3)
    # The arms differ in the first phase's objective and in names, in nothing else.
    ours, theirs = numbers(detour), numbers(twin)
    for tree in (ours, theirs):
        del tree["name"]
        for key in ("name", "objective", "mask_rate"):
            del tree["phases"][0][key]
    assert ours == theirs


def test_numbers_are_numbers_however_written(recipe: Write) -> None:
    path = recipe()
    text = path.read_text().replace("peak: 0.002", "peak: 2e-3", 1).replace("tokens: 12000", "tokens: 12_000")
    path.write_text(text + "optimizer: {eps: 1e-6, weight_decay: '0.05'}\nseed: 1_7\n")
    assert isinstance(yaml.safe_load(path.read_text())["optimizer"]["eps"], str)  # what PyYAML makes of it
    read = load(path, ["phases.1.tokens=5e3", "phases.1.learning_rate.peak=1e-3"])
    assert (read.phases[0].learning_rate.peak, read.phases[0].tokens, read.optimizer.eps) == (2e-3, 12_000, 1e-6)
    assert (read.seed, read.phases[1].tokens, read.phases[1].learning_rate.peak) == (17, 5000, 1e-3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("sead=1", "unknown key 'sead'; did you mean 'seed'?"),
        ("batch.rowz=8", "batch: unknown key 'rowz'; did you mean 'rows'?"),
        ("phases.0.learning_rate.warm=1", "phases.0.learning_rate: unknown key 'warm'"),
        ("phases.0.tokens=0", "phases.0.tokens: Input should be greater than 0"),
        ("phases.0.tokens=-5", "phases.0.tokens"),
        ("phases.0.tokens=1.5", "must be a whole number"),
        ("phases.0.tokens=nan", "must be a whole number"),
        ("phases.0.tokens=true", "must be a number, not true or false"),
        ("phases.0.tokens=many", "must be a number"),
        ("phases.0.learning_rate.peak=.inf", "phases.0.learning_rate.peak"),
        ("phases.0.learning_rate.peak=0", "peak must be above 0"),
        ("phases.0.learning_rate.end=1e-5", "end has no effect with shape constant"),
        ("phases.0.learning_rate.shape=cosin", "phases.0.learning_rate.shape"),
        ("phases.0.learning_rate.warmup_tokens=12000", "must be below tokens"),
        ("phases.0.mask_rate=0.3", "mask_rate has no effect with objective clm"),
        ("phases.0.objective=mlm", "an mlm phase needs a mask_rate"),
        ("phases.1.mask_rate=1", "phases.1.mask_rate"),
        ("phases.1.mask_rate=0", "phases.1.mask_rate"),
        ("phases.1.learning_rate.end=1", "end 1.0 is above peak"),
        ("phases.1.name=clm", "two phases have the same name"),
        ("phases.1.name=../x", "it names a folder of the run"),
        ("phases=[]", "phases"),
        ("phases.0.data=restart", "nothing to restart"),
        ("batch.rows_per_device=3", "rows 8 is not a multiple of rows_per_device 3"),
        ("data.cache=c", "cache has no effect"),
        ("data.validation=null", "validation has no effect"),
        ("model.revision=abc", "revision has no effect"),
        ("model.init=x", "give either init"),
        ("model.config=null", "give either init"),
        ("start.checkpoint=x", "init and config have no effect with start.checkpoint"),
        ("phases.0.frozen_layers=[7-3]", "the range '7-3' runs backwards"),
        ("phases.0.frozen_layers=[first]", "'first' is not a layer's number"),
        ("data.rows=[]", "data.rows"),
        ("data.rows=[{rows: a, proportion: 0}]", "proportion"),
        ("faults.skip_rows=[-1]", "faults.skip_rows.0"),
        ("faults.on_nonfinite=ignore", "faults.on_nonfinite"),
        ("optimizer.clip=0", "clip: null clips nothing"),
        ("seed=-1", "seed"),
        ("name=a/b", "it names the run folder"),
        ("logging=3", "logging: must be a mapping of keys"),
        ("logging.tensorboard=often", "logging.tensorboard"),
    ],
)
def test_impossible_recipes_are_refused(recipe: Write, change: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        load(recipe(), [change])
    assert says in str(error.value)
    assert "recipe.yaml" in str(error.value)


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    for text, says in (("a: [", "not YAML: line"), ("- 1", "must be a mapping"), ("", "must be a mapping")):
        bad.write_text(text)
        with pytest.raises(UsageError, match=says):
            load(bad)
    with pytest.raises(UsageError, match="no such file"):
        load(tmp_path / "none.yaml")
    bad.write_text("a: !!python/object/apply:os.system ['true']")
    with pytest.raises(UsageError):
        load(bad)


@pytest.mark.parametrize("assignment", ["seed", "=3", "phases.9.tokens=3", "seed.x=3", "seed=["])
def test_wrong_overrides(recipe: Write, assignment: str) -> None:
    with pytest.raises(UsageError):
        load(recipe(), [assignment])


def test_paths_resolve_against_the_recipe(recipe: Write, tmp_path: Path) -> None:
    read = load(recipe(data={"rows": "rows/a", "validation": "s3://bucket/b", "cache": "c"}))
    assert read.data.rows == str(tmp_path / "rows" / "a")
    assert read.data.validation == "s3://bucket/b"
    assert read.data.cache == str(tmp_path / "c")
    assert deepspeed_file(read) == INSTALLED / "ds_configs" / "zero1.json"
    own = load(recipe(engine={"deepspeed": "mine.json"}))
    assert deepspeed_file(own) == tmp_path / "mine.json"


def test_what_may_change_when_a_run_goes_on(recipe: Write) -> None:
    path = recipe()
    before = numbers(load(path))
    free = ["batch.rows_per_device=4", "logging.every_steps=7", "checkpoints.keep=9", "model.attention=sdpa"]
    assert first_difference(before, numbers(load(path, free))) is None
    for change, key in (
        ("seed=18", "seed"),
        ("batch.rows=16", "batch.rows"),
        ("phases.1.learning_rate.end=1e-5", "phases.1.learning_rate.end"),
        ("model.config.hidden_size=64", "model.config.hidden_size"),
        ("optimizer.clip=null", "optimizer.clip"),
    ):
        assert first_difference(before, numbers(load(path, [change]))) == key
