"""A file with SMDM's names and shapes, against a slow reading of its forward pass written from its source."""

import math

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from unmask.errors import UserError
from unmask.models.backbone import SIZES, BackboneConfig
from unmask.models.importers.smdm import _translated, load_smdm
from unmask.models.networks import Denoiser

V, EPS = 13, 1e-5


def tokenizer(size=V):
    return Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))


def checkpoint(shape, vocab=V, source=0):
    """SMDM's names and shapes, with random weights; norms around one."""
    D, H, K, E = shape.width, shape.heads, shape.K, shape.E
    sizes = {"transformer.wte": (vocab + 1, D), "transformer.ln_f": (D,), "lm_head": (vocab, D)}
    for i in range(shape.layers):
        sizes |= {
            f"transformer.h.{i}.norm_1": (D,),
            f"transformer.h.{i}.attn.attn": ((H + 2 * K) * E, D),
            f"transformer.h.{i}.attn.proj": (D, H * E),
            f"transformer.h.{i}.norm_2": (D,),
            f"transformer.h.{i}.mlp.swiglu.w1": (shape.intermediate, D),
            f"transformer.h.{i}.mlp.swiglu.w2": (shape.intermediate, D),
            f"transformer.h.{i}.mlp.swiglu.w3": (D, shape.intermediate),
        }
    source = None if source is None else torch.Generator().manual_seed(source)
    return {
        f"{name}.weight": torch.randn(size, generator=source) * 0.4 + (len(size) == 1) for name, size in sizes.items()
    }


def norm(x, weight):
    return torch.stack([row / math.sqrt(float((row**2).mean()) + EPS) * weight for row in x])


def turned(x, position):
    """One head's vector [E]: the pairs (x_j, x_{j + E/2}) turned by position * 10000^(-2j/E)."""
    half, out = len(x) // 2, x.clone()
    for j in range(half):
        angle = position / 10_000 ** (2 * j / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        out[j] = x[j] * cos - x[j + half] * sin
        out[j + half] = x[j + half] * cos + x[j] * sin
    return out


def read_slowly(weights, shape, tokens):
    """Logits [L, V] of one sequence, one head and one pair of positions after the other."""
    w = {name.removesuffix(".weight"): tensor.double() for name, tensor in weights.items()}
    x, L, E, share = w["transformer.wte"][tokens], len(tokens), shape.E, shape.heads // shape.K
    for i in range(shape.layers):
        layer = f"transformer.h.{i}"
        qkv = norm(x, w[f"{layer}.norm_1"]) @ w[f"{layer}.attn.attn"].T
        mixed = []
        for head in range(shape.heads):
            group = qkv[:, (head // share) * (share + 2) * E :][:, : (share + 2) * E].view(L, share + 2, E)
            query = [turned(group[n, head % share], n) for n in range(L)]
            key, value = [turned(group[n, share], n) for n in range(L)], group[:, share + 1]
            logits = torch.tensor([[float(q @ k) / math.sqrt(E) for k in key] for q in query], dtype=torch.float64)
            mixed.append(logits.softmax(-1) @ value)
        x = x + torch.cat(mixed, dim=-1) @ w[f"{layer}.attn.proj"].T
        y = norm(x, w[f"{layer}.norm_2"])
        gate, up = y @ w[f"{layer}.mlp.swiglu.w1"].T, y @ w[f"{layer}.mlp.swiglu.w2"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[f"{layer}.mlp.swiglu.w3"].T
    return norm(x, w["transformer.ln_f"]) @ w["lm_head"].T


@torch.no_grad()
def test_the_same_function_as_smdm(tmp_path):
    for kv_heads in [0, 2]:
        shape = BackboneConfig(width=24, layers=2, heads=4, intermediate=20, max_length=16, kv_heads=kv_heads)
        weights = checkpoint(shape)
        save_file(weights, tmp_path / "mdm.safetensors")
        model = load_smdm(tmp_path / "mdm.safetensors", shape, tokenizer())
        tokens = torch.tensor([3, V, 0, 12, V, 7, 7])  # V is the mask token, there as here
        assert model.denoiser.mask_token_id == V
        wanted = read_slowly(weights, shape, tokens)
        assert wanted.std() > 0.3
        assert torch.allclose(model.denoiser.double()(tokens[None])[0], wanted, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_cut_vocabulary(tmp_path):
    shape = BackboneConfig(width=24, layers=1, heads=4, intermediate=20, max_length=16)
    save_file(checkpoint(shape), tmp_path / "mdm.safetensors")
    few = Tokenizer(models.WordLevel({"w5": 0, "w2": 1, "w11": 2}, unk_token="w5"))
    whole = load_smdm(tmp_path / "mdm.safetensors", shape, tokenizer()).denoiser
    part = load_smdm(tmp_path / "mdm.safetensors", shape, tokenizer(), few).denoiser
    wanted = whole(torch.tensor([[5, V, 11, V]]))[..., [5, 2, 11]]
    assert torch.allclose(part(torch.tensor([[0, 3, 2, 3]])), wanted, atol=1e-6)


@torch.no_grad()
def test_a_byte_that_it_has_no_token_for_is_the_mean_of_the_tokens(tmp_path):
    """Of the embeddings without that of the mask; and of the rows of the head."""
    shape = BackboneConfig(width=24, layers=1, heads=4, intermediate=20, max_length=16)
    weights = {name: tensor.bfloat16() for name, tensor in checkpoint(shape).items()}
    save_file(weights, tmp_path / "mdm.safetensors")
    words = {f"w{i}": i for i in range(V)}
    whole = Tokenizer(models.BPE(words, []))
    more = Tokenizer(models.BPE({**words, "a": V}, []))
    denoiser = load_smdm(tmp_path / "mdm.safetensors", shape, whole, more).denoiser
    embedding, head = weights["transformer.wte.weight"].float(), weights["lm_head.weight"].float()
    assert torch.allclose(denoiser.backbone.embedding.weight[V], embedding[:V].mean(0), atol=1e-6)
    assert torch.equal(denoiser.backbone.embedding.weight[V + 1], embedding[V])
    assert torch.allclose(denoiser.head.weight[V], head.mean(0), atol=1e-6)


def test_the_names_and_shapes_of_the_170m_checkpoint():
    """As Diff_LLaMA_170M has them: 18 layers of width 768, 12 heads, 3072 inside, 32,000 tokens and the mask."""
    with torch.device("meta"):  # shapes without numbers: a gigabyte of them would take a quarter of a minute
        weights = checkpoint(SIZES["170m"], vocab=32_000, source=None)
        denoiser = Denoiser(SIZES["170m"], 32_000)
        assert len(weights) == 3 + 18 * 7
        assert weights["transformer.wte.weight"].shape == (32_001, 768)
        assert weights["transformer.h.17.attn.attn.weight"].shape == (2304, 768)
        assert weights["transformer.h.17.mlp.swiglu.w1.weight"].shape == (3072, 768)
        wanted = denoiser.state_dict()
        translated = _translated(weights, wanted, SIZES["170m"], list(range(32_000)), "mdm-170M.safetensors")
    assert {name: tensor.shape for name, tensor in translated.items()} == {
        name: tensor.shape for name, tensor in wanted.items()
    }
    in_blocks = sum(parameter.numel() for parameter in denoiser.backbone.blocks.parameters())
    assert in_blocks + 768 == 169_897_728  # as SMDM counts it, the last norm included


def test_what_is_no_such_file_is_one_line(tmp_path):
    shape = BackboneConfig(width=24, layers=2, heads=4, intermediate=20, max_length=16)
    good = checkpoint(shape)

    def refused(weights, shape=shape, size=V):
        save_file(weights, tmp_path / "mdm.safetensors")
        with pytest.raises(UserError, match=r"^[^\n]*mdm.safetensors[^\n]*$") as error:
            load_smdm(tmp_path / "mdm.safetensors", shape, tokenizer(size))
        return str(error.value)

    assert "no SMDM checkpoint of 2 layers: it lacks 1 weights: lm_head.weight" in refused(
        {name: tensor for name, tensor in good.items() if name != "lm_head.weight"}
    )
    assert "1 layers: it has 7 weights that have no place: " in refused(good, BackboneConfig(24, 1, 4, 20))
    assert "is of another size: its backbone.blocks.0.gate_up" in refused(good, BackboneConfig(24, 2, 4, 22))
    assert "set model.size" in refused(good, BackboneConfig(32, 2, 4, 20))
    assert "fewer than its tokenizer" in refused(good, size=V + 1)
    assert "no embedding of the mask token" in refused(good | {"transformer.wte.weight": torch.zeros(V, 24)})
    (tmp_path / "mdm.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is no safetensors file"):
        load_smdm(tmp_path / "mdm.safetensors", shape, tokenizer())
