import math

import pytest

from pipeline.recipe import learning_rate
from pipeline.recipe.schema import LearningRate

SHAPES = ("constant", "linear", "cosine", "one_minus_sqrt")


def schedule(shape: str, **changes: float) -> LearningRate:
    end = {} if shape == "constant" else {"end": 2e-5}
    return LearningRate.model_validate({"peak": 2e-4, "shape": shape, **end, **changes})


@pytest.mark.parametrize("shape", SHAPES)
def test_first_step_moves_and_last_step_is_the_end(shape: str) -> None:
    for warmup in (0, 300):
        s = schedule(shape, warmup_tokens=warmup)
        assert 0 < learning_rate(s, 1, 1000) <= s.peak
        last = s.peak if shape == "constant" else s.end
        assert learning_rate(s, 1000, 1000) == last
        assert learning_rate(s, 1017, 1000) == last  # the last step goes a little over the budget
        after = [learning_rate(s, t, 1000) for t in range(max(1, warmup), 1001)]
        assert after == sorted(after, reverse=True)


def test_warmup_is_linear_and_meets_the_peak() -> None:
    s = schedule("constant", warmup_tokens=100)
    assert [learning_rate(s, t, 1000) for t in (1, 50, 99)] == pytest.approx([2e-6, 1e-4, 1.98e-4])
    assert learning_rate(s, 100, 1000) == 2e-4
    assert learning_rate(schedule("linear", warmup_tokens=100), 100, 1000) == 2e-4


def test_formulas_at_a_quarter() -> None:
    values = {shape: learning_rate(schedule(shape), 250, 1000) for shape in SHAPES}
    span = 2e-4 - 2e-5
    assert values["constant"] == 2e-4
    assert values["linear"] == pytest.approx(2e-5 + span * 0.75)
    assert values["cosine"] == pytest.approx(2e-5 + span * (1 + math.cos(math.pi / 4)) / 2)
    assert values["one_minus_sqrt"] == pytest.approx(2e-5 + span * 0.5)  # 1 - sqrt(1/4)


def test_a_step_trains_something() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        learning_rate(schedule("constant"), 0, 1000)
