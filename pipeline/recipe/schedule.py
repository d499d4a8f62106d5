"""The learning rate: a pure function of tokens, written into the optimizer every step and never restored."""

import math

from pipeline.recipe.schema import LearningRate


def learning_rate(schedule: LearningRate, tokens: int, budget: int) -> float:
    """Returns the learning rate of the step that brings the phase to `tokens` (that step included) out of `budget`.

    Warm-up is linear from 0 to `peak` over `warmup_tokens`. After it, x from 0 to 1 is the share done of the rest:

        constant        peak
        linear          end + (peak - end) * (1 - x)
        cosine          end + (peak - end) * (1 + cos(pi x)) / 2
        one_minus_sqrt  end + (peak - end) * (1 - sqrt(x))          (arXiv 2605.12438; 2405.18392)

    The first step's rate is above 0 and the last one's is exactly `end`, because `tokens` includes the step itself.
    """
    done = min(tokens, budget)
    if done <= 0:
        raise ValueError("a step trains at least one token")
    if done < schedule.warmup_tokens:
        return schedule.peak * done / schedule.warmup_tokens
    if schedule.shape == "constant":
        return schedule.peak
    end = schedule.end or 0.0
    x = (done - schedule.warmup_tokens) / (budget - schedule.warmup_tokens)
    left = {"linear": 1 - x, "cosine": (1 + math.cos(math.pi * x)) / 2, "one_minus_sqrt": 1 - math.sqrt(x)}[
        schedule.shape
    ]
    return end + (schedule.peak - end) * left
