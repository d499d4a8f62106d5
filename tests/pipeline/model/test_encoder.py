"""The encoder: transformers' ModernBERT to the last digit that float32 holds, isolated, causal, strict about folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForMaskedLM, ModernBertModel

from command_line import Failure
from pipeline.model import Encoder, LossModel, PackedBatch, from_config_fields, reference
from pipeline.model.attention import packed as attention
from pipeline.model.attention.backend import Backend
from tests.pipeline.modernbert import LENGTHS, VOCABULARY, config, documents, error, labelled, one_by_one, ours, theirs

KINDS: dict[str, dict[str, Any]] = {
    "base": {},
    "all_biases": {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True},
    "no_decoder_bias": {"decoder_bias": False},
    "untied": {"tie_word_embeddings": False},
    "window_of_16": {"local_attention": 16, "global_attn_every_n_layers": 2},
    "all_global": {"global_attn_every_n_layers": 1},
    "one_theta": {"local_rope_theta": None},
    "gelu_new_eps": {"hidden_activation": "gelu_new", "classifier_activation": "silu", "norm_eps": 1e-3},
    "heads_of_32": {"num_attention_heads": 2, "num_hidden_layers": 3},
}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(kind: str, tmp_path: Path) -> None:
    """Packed in one batch by us, one by one by transformers: logits within 1e-5, gradients of all weights within 1e-4."""
    model = theirs(config(**KINDS[kind]))
    encoder = ours(model, tmp_path)
    lengths = LENGTHS if kind == "base" else (1, 65, 130, 7)
    docs = documents(lengths)
    batch = labelled(docs)
    expected = one_by_one(model, docs)
    logits = encoder.logits(encoder(batch, causal=False))
    assert error(logits, expected) < 1e-5

    loss = torch.nn.functional.cross_entropy(expected[batch.label_positions], batch.labels, reduction="sum")
    loss.backward()
    total = LossModel(encoder)(batch, causal=False)
    total.backward()
    assert error(total, loss) < 1e-5
    wanted = dict(model.named_parameters())
    for name, parameter in encoder.named_parameters():
        assert error(parameter.grad, wanted[name].grad) < 1e-4, name  # type: ignore[arg-type]


def dense_causal(encoder: Encoder, batch: PackedBatch) -> Tensor:
    """The causal encoder once more, independent of `attend`: [T, T] masks, complex-number RoPE, everything in float64."""
    of = encoder.config
    weights = {name: p.detach().double() for name, p in encoder.named_parameters()}
    total, heads, size = batch.tokens, of.num_attention_heads, of.hidden_size // of.num_attention_heads
    document = torch.searchsorted(batch.cu_seqlens[1:].long(), torch.arange(total), right=True)
    distance = torch.arange(total)[:, None] - torch.arange(total)[None, :]
    everywhere = (document[:, None] == document[None, :]) & (distance >= 0)

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + of.norm_eps).sqrt() * weights[f"{name}.weight"]

    def turn(x: Tensor, theta: float) -> Tensor:
        angle = batch.position_ids[:, None] * theta ** (-torch.arange(0, size, 2).double() / size)
        z = (
            torch.complex(x[..., : size // 2], x[..., size // 2 :])
            * torch.polar(torch.ones_like(angle), angle)[:, None]
        )
        return torch.cat([z.real, z.imag], -1)

    x = norm(weights["model.embeddings.tok_embeddings.weight"][batch.input_ids], "model.embeddings.norm")
    for i in range(of.num_hidden_layers):
        p, is_global = f"model.layers.{i}", i % of.global_attn_every_n_layers == 0
        h = x if i == 0 else norm(x, f"{p}.attn_norm")
        q, k, v = (h @ weights[f"{p}.attn.Wqkv.weight"].T).view(total, 3, heads, size).unbind(1)
        theta = of.global_rope_theta if is_global else of.local_rope_theta
        scores = torch.einsum("inh,jnh->nij", turn(q, theta), turn(k, theta)) / size**0.5
        seen = everywhere if is_global else everywhere & (distance <= of.local_attention // 2)
        share = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + torch.einsum("nij,jnh->inh", share, v).flatten(1) @ weights[f"{p}.attn.Wo.weight"].T
        value, gate = (norm(x, f"{p}.mlp_norm") @ weights[f"{p}.mlp.Wi.weight"].T).chunk(2, -1)
        gelu = value * 0.5 * (1 + torch.erf(value / 2**0.5))
        x = x + (gelu * gate) @ weights[f"{p}.mlp.Wo.weight"].T
    return norm(x, "model.final_norm")


def test_causal_mode_equals_an_independent_dense_reference(tmp_path: Path) -> None:
    encoder = ours(theirs(config()), tmp_path)
    batch = PackedBatch.from_documents(documents())
    assert error(encoder(batch, causal=True), dense_causal(encoder, batch)) < 1e-5


@pytest.mark.skipif(
    not hasattr(transformers, "ModernBertDecoderConfig"), reason="this transformers has no ModernBertDecoder yet"
)
def test_causal_mode_equals_transformers_decoder(tmp_path: Path) -> None:
    """Its local layers turn by the global theta and see 63 keys back where ours see 64: both are set alike here."""
    of = config(local_rope_theta=160_000.0)
    encoder = ours(theirs(of), tmp_path)
    fields = {k: v for k, v in of.to_dict().items() if k not in ("model_type", "architectures", "layer_types")}
    theirs_of = transformers.ModernBertDecoderConfig(**fields, attn_implementation="eager")
    decoder = transformers.ModernBertDecoderForCausalLM(theirs_of).eval()
    for layer in decoder.model.layers:
        layer.attn.sliding_window = 65
    decoder.config.sliding_window = 65
    mapped: dict[str, Tensor] = {}
    for name, tensor in encoder.state_dict().items():
        if name.endswith("Wqkv.weight"):
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                mapped[name.replace("Wqkv", f"{part}_proj")] = rows
        else:
            mapped[name.replace("head.", "lm_head.", 1) if name.startswith("head.") else name] = tensor
    mapped["decoder.weight"] = mapped["model.embeddings.tok_embeddings.weight"]
    decoder.load_state_dict(mapped, strict=True)
    docs = documents((1, 2, 64, 65, 66, 129, 200))
    logits = encoder.logits(encoder(PackedBatch.from_documents(docs), causal=True))
    assert error(logits, one_by_one(decoder, docs)) < 1e-5


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return ours(theirs(config()), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("causal", [False, True])
def test_no_leak_in_hidden_states_and_gradients(encoder: Encoder, causal: bool) -> None:
    docs = documents((5, 64, 65, 130, 1, 90))
    other = [list(d) for d in docs]
    other[2] = [3 + (t + 7) % (VOCABULARY - 3) for t in other[2]]
    results = []
    for variant in (docs, other):
        batch = PackedBatch.from_documents(variant)
        ids = encoder.model.embeddings.tok_embeddings(batch.input_ids).detach().requires_grad_()
        hidden = forward_from(encoder, ids, batch, causal)
        weight = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(4))
        results.append((hidden.detach(), torch.autograd.grad((hidden * weight).sum(), ids)[0]))
    cu = PackedBatch.from_documents(docs).cu_seqlens
    kept = torch.ones(int(cu[-1]), dtype=torch.bool)
    kept[cu[2] : cu[3]] = False
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[kept], b[kept])
        assert not torch.equal(a[~kept], b[~kept])


def forward_from(encoder: Encoder, embedded: Tensor, batch: PackedBatch, causal: bool) -> Tensor:
    """The encoder from given token embeddings, so that gradients by position can be asked for."""
    handle = encoder.model.embeddings.tok_embeddings.register_forward_hook(lambda *_: embedded)
    try:
        return encoder(batch, causal=causal)
    finally:
        handle.remove()


@pytest.mark.parametrize("causal", [False, True])
def test_order_and_company_of_documents_do_not_matter(encoder: Encoder, causal: bool) -> None:
    """Neither for hidden states nor for gradients, by position."""
    docs = documents((5, 64, 65, 130, 1, 90))
    weights = [torch.randn(len(d), encoder.config.hidden_size) for d in docs]

    def run(order: list[int]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        batch, lengths = PackedBatch.from_documents([docs[i] for i in order]), [len(docs[i]) for i in order]
        embedded = encoder.model.embeddings.tok_embeddings(batch.input_ids).detach().requires_grad_()
        hidden = forward_from(encoder, embedded, batch, causal)
        (grad,) = torch.autograd.grad((hidden * torch.cat([weights[i] for i in order])).sum(), embedded)
        return tuple(dict(zip(order, x.detach().split(lengths), strict=True)) for x in (hidden, grad))  # type: ignore[return-value]

    whole, some = run(list(range(6))), run([3, 0, 5, 1])  # permuted, and two deleted
    for one, other in zip(whole, some, strict=True):
        for i, part in other.items():
            assert error(part, one[i]) < 1e-6


def test_the_future_is_unseen_in_causal_mode_only(encoder: Encoder) -> None:
    docs = documents((40, 150, 30))
    changed = [list(d) for d in docs]
    changed[1][-1] = 3 + (changed[1][-1] + 5) % (VOCABULARY - 3)
    last = 40 + 150 - 1
    with torch.no_grad():
        for causal in (True, False):
            a, b = (encoder(PackedBatch.from_documents(d), causal) for d in (docs, changed))
            before = torch.arange(40, last)
            assert torch.equal(a[before], b[before]) == causal
            assert not torch.equal(a[last], b[last])


def test_future_tokens_have_exactly_zero_gradient(encoder: Encoder) -> None:
    batch = PackedBatch.from_documents(documents((20, 150, 10)))
    embedded = encoder.model.embeddings.tok_embeddings(batch.input_ids).detach().requires_grad_()
    for causal in (True, False):
        hidden = forward_from(encoder, embedded, batch, causal)
        (grad,) = torch.autograd.grad(hidden[20 + 80].sum(), embedded)
        reached = (grad.abs().sum(-1) > 0).nonzero().flatten().tolist()
        assert reached == list(range(20, 20 + (81 if causal else 150)))


def test_a_local_layer_sees_64_tokens_and_not_the_65th(tmp_path: Path) -> None:
    """One local layer alone (all weights of the global layer 0's attention output are zero)."""
    model = theirs(config(num_hidden_layers=2))
    torch.nn.init.zeros_(model.model.layers[0].attn.Wo.weight)
    encoder = ours(model, tmp_path)
    batch = PackedBatch.from_documents(documents((300,)))
    embedded = encoder.model.embeddings.tok_embeddings(batch.input_ids).detach().requires_grad_()
    for causal in (False, True):
        hidden = forward_from(encoder, embedded, batch, causal)
        (grad,) = torch.autograd.grad((hidden[150] * torch.randn(64)).sum(), embedded)
        reached = (grad.abs().sum(-1) > 0).nonzero().flatten().tolist()
        assert reached == list(range(150 - 64, 150 + (1 if causal else 65)))


def test_bf16_errs_at_most_twice_as_much_as_transformers(tmp_path: Path) -> None:
    """Logits in MLM mode, of weights that bf16 holds exactly."""
    model = theirs(config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    docs = documents((5, 64, 65, 130, 200))
    batch = PackedBatch.from_documents(docs)
    with torch.no_grad():
        truth = one_by_one(model, docs)
        half = ours(model, tmp_path).bfloat16()
        mine = half.logits(half(batch, causal=False))
        plain = one_by_one(model.bfloat16(), docs)
    assert mine.dtype == plain.dtype == torch.bfloat16
    assert error(mine, truth) <= 2 * error(plain, truth)


@pytest.mark.parametrize("causal", [False, True])
def test_bf16_errs_at_most_twice_as_much_as_the_plain_bf16(
    encoder: Encoder, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain: the same weights in bf16 with one scaled_dot_product_attention a document."""
    batch = labelled(documents())

    def run(dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        model = Encoder(encoder.config, attention="sdpa").to(dtype)
        model.load_state_dict(encoder.state_dict())
        hidden = model(batch, causal)
        assert hidden.dtype == dtype
        loss = LossModel(model)(batch, causal)
        assert loss.dtype == torch.float32
        return hidden.detach(), list(torch.autograd.grad(loss, list(model.parameters())))

    rounded = {name: p.bfloat16().float() for name, p in encoder.state_dict().items()}
    encoder = Encoder(encoder.config, attention="sdpa")
    encoder.load_state_dict(rounded)
    truth, half = run(torch.float32), run(torch.bfloat16)
    monkeypatch.setitem(attention.BACKENDS, "sdpa", Backend(reference))
    plain = run(torch.bfloat16)
    assert error(half[0], truth[0]) <= 2 * error(plain[0], truth[0])
    for ours_, theirs_, wanted in zip(half[1], plain[1], truth[1], strict=True):
        assert error(ours_, wanted) <= 2 * error(theirs_, wanted) + 1e-3


def test_norms_compute_in_float32_under_bf16() -> None:
    """A sum in bf16 cannot hold 256 values of 1 beside a large one."""
    norm = torch.nn.LayerNorm(4096, bias=False)
    x = (torch.randn(64, 4096) * 3 + 20).bfloat16()
    exact = norm(x.float())
    assert error(norm.bfloat16()(x), exact) < 2**-8  # only the last rounding


def test_activation_checkpointing_changes_nothing(encoder: Encoder) -> None:
    batch = labelled(documents((5, 64, 65, 130)))
    results = []
    for on in (False, True):
        encoder.activation_checkpointing = on
        loss = LossModel(encoder)(batch, causal=True)
        results.append([loss, *torch.autograd.grad(loss, list(encoder.parameters()))])
    encoder.activation_checkpointing = False
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- folders ---


def test_saved_folder_loads_in_transformers_with_the_same_logits(encoder: Encoder, tmp_path: Path) -> None:
    encoder.save_pretrained(tmp_path)
    model, info = AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True, attn_implementation="eager")
    assert not any(info.values())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    docs = documents((3, 70))
    logits = encoder.logits(encoder(PackedBatch.from_documents(docs), causal=False))
    assert error(one_by_one(model.eval(), docs), logits) < 1e-5
    again = Encoder.from_pretrained(tmp_path, attention="sdpa")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), encoder.parameters(), strict=True))


def test_sharded_safetensors(tmp_path: Path) -> None:
    model = theirs(config())
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert not (tmp_path / "sharded" / "model.safetensors").exists()
    one, many = ours(model, tmp_path / "one"), Encoder.from_pretrained(tmp_path / "sharded", attention="sdpa")
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), many.parameters(), strict=True))
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    name = next(iter(index["weight_map"]))
    index["weight_map"][name] = "../one/model.safetensors"
    (tmp_path / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Failure, match="outside its folder"):
        Encoder.from_pretrained(tmp_path / "sharded")


def test_half_precision_weights_are_read_into_float32(tmp_path: Path) -> None:
    theirs(config()).bfloat16().save_pretrained(tmp_path)
    encoder = Encoder.from_pretrained(tmp_path)
    assert {p.dtype for p in encoder.parameters()} == {torch.float32}


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_loading_is_strict(change: str, tmp_path: Path) -> None:
    theirs(config()).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.Wo.weight"
    if change == "missing":
        del weights[name]
    elif change == "unexpected":
        weights[name := "model.layers.9.mlp.Wo.weight"] = torch.zeros(2)
    else:
        weights[name] = weights[name][:, :5].contiguous()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Failure, match=name):
        Encoder.from_pretrained(tmp_path)


def test_an_absent_head_is_initialised_and_named(tmp_path: Path) -> None:
    model = theirs(config())
    bare = ModernBertModel(model.config)
    bare.load_state_dict(model.model.state_dict())
    bare.save_pretrained(tmp_path)
    encoder = Encoder.from_pretrained(tmp_path, attention="sdpa")
    assert set(encoder.initialised) == {"head.dense.weight", "head.norm.weight", "decoder.bias"}
    docs = documents((9, 70))
    hidden = encoder(PackedBatch.from_documents(docs), causal=False)
    expected = [bare.eval()(torch.tensor([d]), torch.ones(1, len(d))).last_hidden_state[0] for d in docs]
    assert error(hidden, torch.cat(expected)) < 1e-5
    assert encoder.head.dense.weight.std() > 0


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="no such folder"):
        Encoder.from_pretrained(tmp_path / "absent")
    with pytest.raises(Failure, match=r"config\.json"):
        Encoder.from_pretrained(tmp_path)
    theirs(config()).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(Failure, match="damaged"):
        Encoder.from_pretrained(tmp_path)


def test_weights_that_are_not_finite_are_not_saved(encoder: Encoder, tmp_path: Path) -> None:
    broken = Encoder(encoder.config)
    broken.load_state_dict(encoder.state_dict())
    with torch.no_grad():
        broken.head.dense.weight[0, 0] = torch.inf
    with pytest.raises(Failure, match=r"head\.dense\.weight"):
        broken.save_pretrained(tmp_path / "out")


def test_random_weights_depend_on_the_seed_alone() -> None:
    a, b, c = (Encoder.random(config(), seed) for seed in (1, 1, 2))
    same = [torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True)]
    assert all(same)
    assert not torch.equal(a.output_weight, c.output_weight)


def test_unknown_config_fields_are_refused() -> None:
    with pytest.raises(Failure, match="hidden_sise"):
        from_config_fields({"hidden_sise": 64})


def test_saving_over_a_folder_of_several_files_replaces_them(tmp_path: Path) -> None:
    theirs(config()).save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    encoder = Encoder.from_pretrained(tmp_path, attention="sdpa")
    torch.nn.init.constant_(encoder.head.dense.weight, 7.0)
    encoder.save_pretrained(tmp_path)
    again = Encoder.from_pretrained(tmp_path, attention="sdpa")
    assert torch.equal(again.head.dense.weight, encoder.head.dense.weight)
    assert torch.equal(AutoModelForMaskedLM.from_pretrained(tmp_path).head.dense.weight, encoder.head.dense.weight)


def test_a_tied_folder_may_store_either_name(tmp_path: Path) -> None:
    theirs(config()).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    expected = weights.pop("model.embeddings.tok_embeddings.weight")
    save_file({**weights, "decoder.weight": expected}, file, metadata={"format": "pt"})
    assert torch.equal(Encoder.from_pretrained(tmp_path, attention="sdpa").output_weight, expected)


def test_an_unknown_back_end_is_refused() -> None:
    with pytest.raises(ValueError, match="attention is 'spda'; it must be auto, flash, torch_varlen, sdpa"):
        Encoder(config(), attention="spda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("backend", ["flash", "torch_varlen"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu(backend: str, causal: bool, compiled: bool) -> None:
    """bf16 hidden states and gradients near the CPU's in float32; no part of it waits for the device."""
    device = torch.device("cuda")
    try:
        attention.available(backend, device, 16)
    except Failure as reason:
        pytest.skip(str(reason))
    exact = Encoder.random(config(), seed=0, attention="sdpa")
    half = Encoder.random(config(), seed=0, attention=backend).to(device, torch.bfloat16)
    if compiled:
        half.compile_blocks(fill_to=1500)
    batch = labelled(documents())
    there = batch.pinned().to(device)
    LossModel(half)(there, causal).backward()  # warm-up
    half.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = LossModel(half)(batch.pinned().to(device), causal)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = LossModel(exact)(batch, causal)
    expected.backward()
    assert error(loss.cpu(), expected) < 2e-2
    for (name, mine), (_, theirs_) in zip(half.named_parameters(), exact.named_parameters(), strict=True):
        assert mine.grad is not None, name
        assert theirs_.grad is not None, name
        assert error(mine.grad.cpu(), theirs_.grad) < 0.1, name
