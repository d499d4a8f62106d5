"""`attend`: equal to a plain per-document attention under an explicit mask, isolated and causal bit by bit."""

import itertools
import math
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from command_line import Failure
from pipeline.model import attend, available, describe, reference
from pipeline.model.attention import flash, torch_varlen
from pipeline.model.attention import packed as attention
from pipeline.model.attention.packed import choose
from tests.pipeline.modernbert import LENGTHS, error

CUDA = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))
MASKS = list(itertools.product((False, True), (None, 64)))
LONG = (5, 64, 65, 130, 1, 200)


def qkv(lengths: tuple[int, ...], heads: int = 3, size: int = 16, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(sum(lengths), heads, size, generator=generator, requires_grad=True) for _ in range(3)]
    return x, torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


class Place:
    """A back end where it runs: on a CPU in float32, on a GPU in bf16."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.device = torch.device("cpu" if backend == "sdpa" else "cuda")
        try:
            available(backend, self.device)
        except Failure as reason:
            pytest.skip(str(reason))

    def inputs(self, lengths: tuple[int, ...], size: int = 16) -> tuple[list[Tensor], Tensor]:
        x, cu = qkv(lengths, size=size)
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        return [t.detach().to(self.device, dtype).requires_grad_() for t in x], cu.to(self.device)

    def __call__(self, x: list[Tensor], cu: Tensor, longest: int, causal: bool, window: int | None) -> Tensor:
        return attend(*x, cu, longest, causal=causal, half_window=window, backend=self.backend)

    def same_gradients(self, a: Tensor, b: Tensor) -> bool:
        """Equal bit by bit on a CPU; a GPU's backward adds in any order."""
        return torch.equal(a, b) if self.device.type == "cpu" else error(a, b) < 1e-2


@pytest.fixture(params=["sdpa", *(pytest.param(name, marks=CUDA) for name in ("flash", "torch_varlen"))])
def place(request: pytest.FixtureRequest) -> Place:
    return Place(request.param)


def grads(out: Tensor, inputs: list[Tensor], seed: int = 9) -> tuple[Tensor, ...]:
    seen = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out)
    return torch.autograd.grad(out, inputs, seen)


@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize("lengths", [LENGTHS, (1,), (3, 1, 1), (64,) * 3, (257,)])
def test_equals_the_reference(lengths: tuple[int, ...], causal: bool, window: int | None) -> None:
    x, cu = qkv(lengths)
    out = attend(*x, cu, max(lengths), causal=causal, half_window=window)
    expected = reference(*x, cu, max(lengths), causal, window)
    assert error(out, expected) < 1e-6
    for ours, theirs in zip(grads(out, x), grads(expected, x), strict=True):
        assert error(ours, theirs) < 1e-5


@pytest.mark.parametrize("window", [1, 2, 7, 16, 33, 100])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [2, 20, 64, 96])
def test_any_window_and_head_size(window: int, causal: bool, size: int) -> None:
    lengths = (1, 50, 130, 9)
    x, cu = qkv(lengths, heads=2, size=size)
    out = attend(*x, cu, max(lengths), causal=causal, half_window=window)
    expected = reference(*x, cu, max(lengths), causal, window)
    assert error(out, expected) < 1e-6
    for ours, theirs in zip(grads(out, x), grads(expected, x), strict=True):
        assert error(ours, theirs) < 1e-5


def test_the_reference_is_softmax_attention() -> None:
    """The yardstick itself, against the formula written out with loops in float64."""
    lengths, window = (4, 1, 9), 3
    (q, k, v), cu = qkv(lengths, heads=1, size=4)
    q, k, v = q.double(), k.double(), v.double()
    for causal in (False, True):
        out = reference(q, k, v, cu, 9, causal, window)
        for begin, end in itertools.pairwise(cu.tolist()):
            for i in range(begin, end):
                keys = [j for j in range(begin, end) if abs(i - j) <= window and not (causal and j > i)]
                weight = (
                    torch.tensor([float((q[i, 0] @ k[j, 0]).detach()) / math.sqrt(4) for j in keys]).double().softmax(0)
                )
                expected = sum(w * v[j, 0] for w, j in zip(weight, keys, strict=True))
                assert torch.allclose(out[i, 0], expected, atol=1e-6)


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_isolation_is_bitwise(place: Place, causal: bool, window: int | None) -> None:
    """Another document's queries, keys and values change neither outputs nor gradients of the rest, by a single bit."""
    x, cu = place.inputs(LONG)
    changed = [t.detach().clone() for t in x]
    for t in changed:
        t[cu[3] : cu[4]] = torch.randn_like(t[cu[3] : cu[4]]) * 5
        t.requires_grad_()
    kept = torch.ones(len(x[0]), dtype=torch.bool)
    kept[cu[3] : cu[4]] = False
    outs = [place(t, cu, 200, causal, window) for t in (x, changed)]
    assert torch.equal(outs[0][kept], outs[1][kept])
    assert not torch.equal(outs[0][~kept], outs[1][~kept])
    for a, b in zip(grads(outs[0], x), grads(outs[1], changed), strict=True):
        assert place.same_gradients(a[kept], b[kept])


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_huge_values_of_a_document_stay_in_it(place: Place, causal: bool, window: int | None) -> None:
    """A finite "minus infinity" in the mask would let them through."""
    x, cu = place.inputs(LONG)
    broken = [t.detach().clone() for t in x]
    for t in broken:
        t[cu[3] : cu[4]] = 1e30
        t.requires_grad_()
    out, clean = (place(t, cu, 200, causal, window) for t in (broken, x))
    assert torch.equal(out[: cu[3]], clean[: cu[3]])
    assert torch.equal(out[cu[4] :], clean[cu[4] :])


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_which_keys_each_query_sees(place: Place, causal: bool, window: int | None) -> None:
    """From the gradients: query i of its document has exactly zero gradient at every key that it may not see."""
    length, before = 200, 37
    x, cu = place.inputs((before, length, 20))
    for query in (0, 1, 64, 65, 100, 199):
        out = place(x, cu, length, causal, window)
        _, dk, dv = torch.autograd.grad(out[before + query].sum(), x)
        seen = (dv.abs().sum((1, 2)) > 0).nonzero().flatten().tolist()
        low = 0 if window is None else max(0, query - window)
        high = query if causal else length - 1 if window is None else min(length - 1, query + window)
        assert seen == list(range(before + low, before + high + 1))
        assert set((dk.abs().sum((1, 2)) > 0).nonzero().flatten().tolist()) <= set(seen)


def test_order_and_company_do_not_matter(place: Place) -> None:
    x, cu = place.inputs(LONG)
    tolerance = 1e-6 if place.device.type == "cpu" else 1e-2
    for causal, window in MASKS:
        whole = place(x, cu, 200, causal, window)
        weight = torch.randn(whole.shape).to(whole)
        gradients = torch.autograd.grad((whole * weight).sum(), x)
        for i, length in enumerate(LONG):
            mine = slice(int(cu[i]), int(cu[i + 1]))
            alone = [t[mine].detach().requires_grad_() for t in x]
            out = place(alone, torch.tensor([0, length], dtype=torch.int32, device=cu.device), length, causal, window)
            assert (out - whole[mine]).abs().max() < tolerance
            for a, b in zip(torch.autograd.grad((out * weight[mine]).sum(), alone), gradients, strict=True):
                assert (a - b[mine]).abs().max() < tolerance


def test_strided_inputs() -> None:
    """q, k, v as slices of one projection, which is how the encoder calls it."""
    packed = torch.randn(sum(LONG), 3, 3, 16, requires_grad=True)
    cu = torch.tensor([0, *itertools.accumulate(LONG)], dtype=torch.int32)
    for causal, window in MASKS:
        out = attend(*packed.unbind(1), cu, 200, causal=causal, half_window=window)
        expected = reference(*packed.unbind(1), cu, 200, causal, window)
        assert error(out, expected) < 1e-6
        (ours,), (theirs,) = grads(out, [packed]), grads(expected, [packed])
        assert error(ours, theirs) < 1e-5


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_bf16_errs_at_most_twice_as_much_as_the_plain_bf16(causal: bool, window: int | None) -> None:
    x, cu = qkv(LENGTHS, size=32)
    half = [t.detach().bfloat16().requires_grad_() for t in x]
    exact = [t.detach().float().requires_grad_() for t in half]
    truth = reference(*exact, cu, 700, causal, window)
    plain = reference(*half, cu, 700, causal, window)
    out = attend(*half, cu, 700, causal=causal, half_window=window)
    assert out.dtype == torch.bfloat16
    assert error(out, truth) <= 2 * error(plain, truth) + 1e-5
    for ours, theirs, wanted in zip(grads(out, half), grads(plain, half), grads(truth, exact), strict=True):
        assert error(ours, wanted) <= 2 * error(theirs, wanted) + 1e-5


@pytest.mark.parametrize(
    ("cu", "longest"),
    [([1, 9], 9), ([0, 8], 9), ([0, 10], 10), ([0, 4, 4, 9], 9), ([0, 5, 3, 9], 9), ([0, 9], 8), ([0], 9), ([0, 9], 0)],
)
def test_wrong_boundaries_are_refused(cu: list[int], longest: int) -> None:
    x, _ = qkv((9,))
    with pytest.raises(ValueError, match=r"cu_seqlens|max_seqlen"):
        attend(*x, torch.tensor(cu, dtype=torch.int32), longest, causal=False, half_window=None)


def test_wrong_types_are_refused() -> None:
    x, cu = qkv((9,))
    with pytest.raises(ValueError, match="int32"):
        attend(*x, cu.long(), 9, causal=False, half_window=None)
    with pytest.raises(ValueError, match="host int"):
        attend(*x, cu, torch.tensor(9), causal=False, half_window=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="alike"):
        attend(x[0], x[1][:8], x[2], cu, 9, causal=False, half_window=None)
    with pytest.raises(ValueError, match="half_window"):
        attend(*x, cu, 9, causal=False, half_window=0)


def test_back_ends() -> None:
    cpu = torch.device("cpu")
    assert choose(cpu) == "sdpa"
    available("auto", cpu, 20, "float32")
    for name in ("flash", "torch_varlen"):
        with pytest.raises(Failure, match="CUDA"):
            available(name, cpu)


@pytest.mark.usefixtures("fresh")
def test_what_a_gpu_kernel_cannot_do_is_said_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(attention, "_installed", lambda name: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    for name in ("auto", "flash", "torch_varlen"):
        available(name, cuda, 64, "bf16")
        with pytest.raises(Failure, match=r"heads of a multiple of 8 up to 256, not of 20"):
            available(name, cuda, 20, "bf16")
        with pytest.raises(Failure, match="computes in bf16; with precision float32 use"):
            available(name, cuda, 64, "float32")
    available("sdpa", cuda, 20, "float32")
    choose.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    for name in ("auto", "flash", "torch_varlen"):
        with pytest.raises(Failure, match=r"compute capability 7.0.*model.attention=sdpa"):
            available(name, cuda)


@pytest.mark.usefixtures("fresh")
def test_a_torch_whose_kernel_has_no_windows_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, k, v, is_causal=False: q)
    assert not attention._installed("torch_varlen")


def test_a_local_layer_costs_the_same_per_token_at_any_length() -> None:
    """8,192 tokens as 16 documents or as one: O(T x window), where O(T x length) would cost 16 times as much."""

    def seconds(length: int) -> float:
        x, cu = qkv((length,) * (8192 // length), heads=2, size=32)
        best = math.inf
        for _ in range(3):
            begin = time.perf_counter()
            grads(attend(*x, cu, length, causal=False, half_window=64), x)
            best = min(best, time.perf_counter() - begin)
        return best

    seconds(512)
    assert seconds(8192) < 3 * seconds(512)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("backend", ["flash", "torch_varlen"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "size"), [(None, 64), (64, 64), (1, 32), (33, 96), (100, 128)])
def test_gpu_kernels(backend: str, causal: bool, window: int | None, size: int) -> None:
    """For any window and head size, the error is at most twice that of the plain bf16 attention."""
    half, cu = (place := Place(backend)).inputs(LENGTHS, size)
    exact = [t.detach().float().requires_grad_() for t in half]
    truth = reference(*exact, cu, 700, causal, window)
    plain = reference(*half, cu, 700, causal, window)
    out = place(half, cu, 700, causal, window)
    assert error(out, truth) <= 2 * error(plain, truth) + 1e-4
    for ours, theirs, wanted in zip(grads(out, half), grads(plain, half), grads(truth, exact), strict=True):
        assert error(ours, wanted) <= 2 * error(theirs, wanted) + 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_auto_takes_no_slow_path_on_a_gpu() -> None:
    assert choose(torch.device("cuda")) in ("flash", "torch_varlen")


@pytest.fixture
def fresh() -> Iterator[None]:
    """The choices of back ends are cached."""
    caches = (choose, flash.kernel, torch_varlen.kernel)
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_auto_on_a_gpu_without_kernels_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_installed", lambda name: False)
    for name in ("auto", "flash", "torch_varlen"):
        with pytest.raises(Failure, match="flash-attn|torch >="):
            available(name, torch.device("cuda"))


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("installed", "capability", "generation"),
    [({2, 3, 4}, 10, 4), ({2, 3, 4}, 9, 3), ({2, 4}, 9, 2), ({2, 3, 4}, 8, 2), ({4}, 9, None), (set(), 9, None)],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_newest_flash_attn_is_called_as_its_generation_wants(
    installed: set[int], capability: int, generation: int | None, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for the packages, which cannot run here: the right one is chosen and gets the right mask."""
    calls: list[dict[str, Any]] = []
    names = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}

    def stand_in(name: str) -> ModuleType:
        found = [g for g, n in names.items() if n == name and g in installed]
        if not found:
            raise ImportError(name)

        def kernel(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Any:
            calls.append(more)
            return (q, None) if found[0] == 4 else q

        module = ModuleType(name)
        module.flash_attn_varlen_func = kernel  # type: ignore[attr-defined]
        return module

    monkeypatch.setattr(flash.importlib, "import_module", stand_in)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    device = torch.device("cuda")
    if generation is None:
        assert choose(device) == "torch_varlen"
        return
    assert describe("auto", device) == f"flash (flash-attn {generation})"
    x, cu = qkv((100, 3))
    half = [t.bfloat16() for t in x]
    none = None if generation == 4 else -1
    for (causal, window), expected in zip(MASKS, [(none, none), (64, 64), (none, none), (64, 0)], strict=True):
        assert attend(*half, cu, 100, causal=causal, half_window=window, backend="flash") is half[0]
        call = calls.pop()
        assert call["window_size"] == expected
        assert call["causal"] == causal
        assert call.get("deterministic", False) == deterministic
        assert call["cu_seqlens_q"] is call["cu_seqlens_k"] is cu
        assert call["max_seqlen_q"] == call["max_seqlen_k"] == 100
    with pytest.raises(Failure, match="float32"):
        attend(*x, cu, 100, causal=True, half_window=None, backend="flash")


@pytest.mark.usefixtures("fresh")
def test_torch_varlen_is_told_the_mask_by_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    windows: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "torch.nn.attention.varlen.varlen_attn", lambda q, *_, window_size: (windows.append(window_size), q)[1]
    )
    x, cu = qkv((100, 3))
    for causal, window in MASKS:
        attend(*(t.bfloat16() for t in x), cu, 100, causal=causal, half_window=window, backend="torch_varlen")
    assert windows == [(-1, -1), (64, 64), (-1, 0), (64, 0)]
