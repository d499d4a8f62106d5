"""PITFALLS trials 8 and 9: one step is one step, however it is cut: over ranks, ZeRO stages and micro-batches.

The yardstick is plain PyTorch on one process: the whole batch in one forward, the mean over its labels, torch's optimizer.
The gradient norm is compared before clipping, and plain SGD besides: AdamW does not see a wrong loss scale.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ModernBertConfig

from pipeline.engine import optimizer as optimizers
from pipeline.model import Encoder, LossModel, PackedBatch
from pipeline.recipe import Recipe
from tests.ranks import Ranks

ROWS, STEPS = 8, 5
# Labels of the eight rows: wildly uneven, so that a mean of means is far off.
LABELS = [1, 1, 1, 1, 1, 1, 1, 40]


def config() -> ModernBertConfig:
    ids = {f"{role}_token_id": 0 for role in ("pad", "cls", "sep", "bos", "eos")}
    # 61 and 47 are odd: partitions over 2 ranks are padded, parameters cut.
    return ModernBertConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=47,
        num_hidden_layers=2,
        num_attention_heads=2,
        local_attention=8,
        **ids,
    )


def batches(step: int, per_batch: int) -> list[PackedBatch]:
    rng = np.random.default_rng(step)
    rows = []
    for labels in LABELS:
        ids = rng.integers(0, 61, 50)
        positions = np.sort(rng.choice(49, labels, replace=False))
        rows.append((ids, positions, rng.integers(0, 61, labels)))
    result = []
    for begin in range(0, ROWS, per_batch):
        part = rows[begin : begin + per_batch]
        result.append(
            PackedBatch.from_arrays(
                np.concatenate([ids for ids, _, _ in part]),
                np.full(2 * len(part), 25),
                np.concatenate([positions + 50 * n for n, (_, positions, _) in enumerate(part)]),
                np.concatenate([labels for *_, labels in part]),
            )
        )
    return result


def recipe(per_device: int, clip: float | None, deepspeed: str, precision: str, name: str = "adamw") -> Recipe:
    return Recipe.model_validate(
        {
            "name": "parity",
            "model": {"config": {}},
            "precision": precision,
            "data": {"rows": "unused"},
            "phases": [{"name": "p", "objective": "clm", "tokens": 1, "learning_rate": {"peak": 1}}],
            "batch": {"rows": ROWS, "rows_per_device": per_device},
            "optimizer": {"name": name, "clip": clip},
            "engine": {"deepspeed": deepspeed},
        }
    )


def sgd(parameters: Any, settings: Any, fused: bool) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p], "name": n} for n, p in parameters], lr=0.0)


@cache
def plain(
    clip: float | None, kind: str, rate: float, half: bool = False
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Returns the weights after the steps, and the gradient norms before clipping."""
    encoder = Encoder.random(config(), 3, "sdpa")
    if half:  # bf16 weights, gradients and moments: what "plain bf16" means
        encoder = encoder.to(torch.bfloat16)
    model = LossModel(encoder)
    if kind == "sgd":
        optimizer = sgd(model.encoder.named_parameters(), None, False)
    else:
        optimizer = optimizers.build(
            model.encoder.named_parameters(), recipe(1, clip, "", "float32", kind).optimizer, False
        )
        if kind == "stable_adamw":
            for p in model.parameters():
                optimizer.state[p] = {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    norms = []
    for step in range(STEPS):
        [batch] = batches(step, ROWS)
        (model(batch, step % 2 == 0) / len(batch.labels)).backward()
        grads = [p.grad for p in model.parameters()]
        norms.append(float(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]).norm()))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().float() for n, p in model.encoder.named_parameters()}, norms


def _steps(
    out: str, per_device: int, clip: float | None, deepspeed: str, precision: str, kind: str, rate: float
) -> int:
    """Run the same steps by the engine on each rank; rank 0 keeps the weights and norms."""
    import os

    from pipeline.engine import Engine, start_processes
    from pipeline.ranks import device_of, from_environment

    ranks = from_environment(os.environ)
    start_processes(ranks, device_of(ranks))
    if kind == "sgd":
        optimizers.build = sgd
    settings = recipe(per_device, clip, deepspeed, precision, "adamw" if kind == "sgd" else kind)
    engine = Engine(Encoder.random(config(), 3, "sdpa"), settings, ranks, device_of(ranks))
    norms = []
    for step in range(STEPS):
        mine = batches(step, per_device)
        share = len(mine) // ranks.world_size
        mine = mine[ranks.rank * share : (ranks.rank + 1) * share]
        norms.append(engine.train_step(mine, step % 2 == 0, sum(LABELS), rate)[1])
    weights = dict(engine.tensors("weights"))
    if kind != "sgd":
        assert engine.adam_step == STEPS
    if ranks.leads:
        torch.save({"weights": weights, "norms": norms}, out)
    return 0


def by_engine(tmp_path: Path, world: int, **arguments: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    out = tmp_path / "out.pt"
    stage = arguments.pop("stage")
    file = f"ds_configs/zero{stage}.json"
    if stage == 0:
        file = str(tmp_path / "zero0.json")
        Path(file).write_text(
            json.dumps({"zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "fp32"}})
        )
    order = ("per_device", "clip", "deepspeed", "precision", "kind", "rate")
    values = {"precision": "float32", "deepspeed": file, **arguments}
    results = Ranks(_steps, (str(out), *(values[key] for key in order)), world, tmp_path / "log").wait()
    assert [result.code for result in results] == [0] * world, results[0].err[-3000:]
    saved = torch.load(out, weights_only=True)
    return saved["weights"], saved["norms"]


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


CASES = [
    # stage, ranks, rows per device
    (0, 1, 2),
    (0, 2, 4),
    (1, 1, 8),
    (1, 1, 1),
    (1, 2, 4),
    (1, 2, 1),
    (2, 1, 4),
    (2, 2, 2),
    (3, 1, 2),
    (3, 2, 4),
    (3, 2, 1),
    ("3_offload", 2, 1),
]


@pytest.mark.parametrize(("stage", "world", "per_device"), CASES)
def test_parity_with_plain_pytorch(tmp_path: Path, stage: int | str, world: int, per_device: int) -> None:
    for kind, clip, rate in (("adamw", 0.5, 1e-3), ("sgd", None, 1e-1)):
        weights, norms = plain(clip, kind, rate)
        ours, our_norms = by_engine(
            tmp_path, world, stage=stage, per_device=per_device, clip=clip, kind=kind, rate=rate
        )
        assert difference(weights, ours) < 1e-6, kind
        assert our_norms == pytest.approx(norms, rel=1e-6), kind
        assert min(norms) > 0.5 or clip is None  # clipping does something
        start = {n: p.detach() for n, p in Encoder.random(config(), 3, "sdpa").named_parameters()}
        assert difference(weights, start) > 1e-3


@pytest.mark.parametrize(("stage", "world"), [(0, 2), (1, 2), (3, 2)])
def test_parity_of_stable_adamw(tmp_path: Path, stage: int, world: int) -> None:
    weights, norms = plain(None, "stable_adamw", 1e-3)
    ours, our_norms = by_engine(tmp_path, world, stage=stage, per_device=2, clip=None, kind="stable_adamw", rate=1e-3)
    assert difference(weights, ours) < 1e-6
    assert our_norms == pytest.approx(norms, rel=1e-6)
    assert difference(weights, plain(None, "adamw", 1e-3)[0]) > 1e-4  # it is not AdamW


@pytest.mark.parametrize(
    ("stage", "precision"), [(1, "bf16"), (2, "bf16"), (3, "bf16"), (1, "bf16_autocast"), (3, "bf16_autocast")]
)
def test_bf16_is_at_most_twice_as_far_off_as_plain_bf16(tmp_path: Path, stage: int, precision: str) -> None:
    """Error against float32, as root mean square over all weights; accumulation over 4 micro-batches on 2 ranks."""
    exact, _ = plain(None, "adamw", 1e-3)
    plain_half, _ = plain(None, "adamw", 1e-3, half=True)
    ours, _ = by_engine(tmp_path, 2, stage=stage, per_device=1, clip=None, kind="adamw", rate=1e-3, precision=precision)

    def error(weights: dict[str, torch.Tensor]) -> float:
        return float(torch.cat([(weights[n] - exact[n]).flatten() for n in exact]).square().mean().sqrt())

    assert error(ours) <= 2 * error(plain_half)
    assert error(ours) < 1e-3
