from itertools import product

import pytest
import torch

from unmask.errors import UserError
from unmask.models.backbone import SIZES, Backbone, BackboneConfig, attended, pad_heads, rotary_angles, rotate
from unmask.models.packing import Layout, Spans, packed_length, spare_rows

NUM_TOKENS = 7
MASK = NUM_TOKENS - 1
SHAPES = [{"absolute_positions": True}, {"kv_heads": 1, "head_width": 6, "qk_norm": True}]


def backbone(**options):
    """Weights drawn larger than the initialisation: with tiny ones, much that is wrong stays below the tolerance."""
    torch.manual_seed(0)
    config = BackboneConfig(width=16, layers=2, heads=2, intermediate=24, max_length=12, **options)
    trunk = Backbone(config, NUM_TOKENS).double()
    with torch.no_grad():
        for parameter in trunk.parameters():
            parameter.normal_(std=0.5)
    return trunk


def tokens(*shape, seed=0):
    return torch.randint(NUM_TOKENS, shape, generator=torch.Generator().manual_seed(seed))


def padded(sequences, side, filler):
    """[B, L] with `filler` [B, L] on the padding, and its attention."""
    length = max(len(sequence) for sequence in sequences)
    canvas, attention_mask = filler[:, :length].clone(), torch.zeros(len(sequences), length, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        where = slice(0, len(sequence)) if side == "right" else slice(length - len(sequence), length)
        canvas[row, where], attention_mask[row, where] = sequence, True
    return canvas, attention_mask


@torch.no_grad()
def test_a_sequence_is_the_same_alone_and_in_a_batch_padded_on_either_side():
    sequences = [tokens(length, seed=length) for length in (5, 1, 9, 4)]
    for options, side in product(SHAPES, ("left", "right")):
        trunk = backbone(**options)
        canvas, attention_mask = padded(sequences, side, tokens(4, 9, seed=50))
        batch = trunk(canvas, attention_mask)
        for row, sequence in enumerate(sequences):
            alone = trunk(sequence[None])[0]
            assert torch.allclose(batch[row, attention_mask[row]], alone, rtol=0, atol=1e-12)


@torch.no_grad()
def test_padding_has_no_influence():
    for options in SHAPES:
        trunk = backbone(**options)
        sequences = [tokens(length, seed=length) for length in (3, 8)]
        for side in ("left", "right"):
            one, attention_mask = padded(sequences, side, tokens(2, 8, seed=1))
            other, _ = padded(sequences, side, (tokens(2, 8, seed=1) + 1) % NUM_TOKENS)
            assert torch.equal(trunk(one, attention_mask)[attention_mask], trunk(other, attention_mask)[attention_mask])


@torch.no_grad()
def test_full_attention_is_no_attention():
    for options in SHAPES:
        trunk, x = backbone(**options), tokens(2, 6)
        assert torch.allclose(trunk(x, torch.ones_like(x, dtype=torch.bool)), trunk(x), rtol=0, atol=1e-12)


@torch.no_grad()
def test_every_position_reacts_to_every_token_and_no_row_to_another():
    trunk, x = backbone(), tokens(2, 6)
    before = trunk(x)
    for n in range(6):
        changed = x.clone()
        changed[0, n] = (x[0, n] + 1) % NUM_TOKENS
        moved = (trunk(changed) - before).abs().amax(-1)
        assert (moved[0] > 1e-6).all()
        assert torch.equal(moved[1], torch.zeros_like(moved[1]))


@torch.no_grad()
def test_the_order_of_the_tokens_matters():
    trunk, x = backbone(), torch.tensor([[0, 1, 2, 3, 4]])
    swapped = torch.tensor([[1, 0, 2, 3, 4]])
    assert (trunk(swapped) - trunk(x))[0, 2:].abs().amax(-1).min() > 1e-6


@torch.no_grad()
def test_rotary_alone_cannot_tell_the_positions_of_an_all_mask_canvas_apart():
    canvas = torch.full((1, 9), MASK)
    rotary = backbone(absolute_positions=False)(canvas)[0]
    assert torch.allclose(rotary, rotary[:1].expand_as(rotary), rtol=0, atol=1e-12)
    absolute = backbone(absolute_positions=True)(canvas)[0]
    distances = torch.cdist(absolute, absolute) + torch.eye(9)
    assert distances.min() > 1e-3


def test_rotary_sees_distances_only():
    """Without absolute positions, a shift of all positions changes nothing; without rotation, nothing would depend
    on the distance either, which `test_the_order_of_the_tokens_matters` excludes."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 6, 1, 1, 8, dtype=torch.float64, generator=generator)
    products = []
    for shift in (0, 5):
        rotary = rotary_angles(torch.arange(6)[None] + shift, BackboneConfig(8, 1, 1, 8))
        turned = (rotate(states, *rotary)[0, :, 0, 0] for states in (query, key))  # [L, E] each
        products.append(next(turned) @ next(turned).T)
    assert torch.allclose(*products, rtol=0, atol=1e-5)  # the angles are float32
    assert (products[0] - query[0, :, 0, 0] @ key[0, :, 0, 0].T).abs().max() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("options", SHAPES, ids=["absolute", "grouped"])
def test_who_sees_whom_and_where(options):
    """All seeing all in order is the usual pass; sequences that do not see each other are each alone; and with its
    positions and what it sees, a token may stand anywhere.  More tokens than the context holds are no matter."""
    trunk, B, L = backbone(**options), 2, 8
    given, places = tokens(B, L), torch.arange(L).expand(B, L)
    everybody = torch.ones(B, L, L, dtype=torch.bool)
    assert torch.allclose(trunk.at(given, places, everybody), trunk(given), atol=1e-12)
    twice = torch.block_diag(torch.ones(L, L), torch.ones(L, L)).bool().expand(B, -1, -1)
    other = tokens(B, L, seed=1)
    found = trunk.at(torch.cat([given, other], 1), torch.cat([places, places], 1), twice)
    assert torch.allclose(found, torch.cat([trunk(given), trunk(other)], 1), atol=1e-12)
    attend = torch.rand(B, L, L, generator=torch.Generator().manual_seed(2)) < 0.6
    attend |= torch.eye(L, dtype=torch.bool)
    order = torch.randperm(L, generator=torch.Generator().manual_seed(3))
    shuffled = trunk.at(given[:, order], places[:, order], attend[:, order][:, :, order])
    assert torch.allclose(shuffled, trunk.at(given, places, attend)[:, order], atol=1e-12)
    unseen = attend.clone()
    unseen[:, :, 5] = False
    unseen[:, 5, 5] = True
    changed = given.clone()
    changed[:, 5] = (changed[:, 5] + 1) % NUM_TOKENS
    same = torch.isclose(trunk.at(given, places, unseen), trunk.at(changed, places, unseen)).all(-1)
    assert same.tolist() == [[n != 5 for n in range(L)]] * B


def test_too_long_a_sequence_is_named_in_one_line():
    trunk = backbone()
    trunk(tokens(1, 12))
    with pytest.raises(UserError, match=r"13 tokens .* context of 12"):
        trunk(tokens(1, 13))


def test_a_size_has_the_parameters_of_its_name():
    """Names are whole millions, cut or rounded (6.29M is "6m"): 0.6M off, and 6% for the small."""
    for name, shape in SIZES.items():
        named = int(name.removesuffix("m")) * 1e6
        assert abs(shape.num_weights() - named) <= min(0.6e6, 0.06 * named)
    with torch.device("meta"):
        trunk = Backbone(SIZES["170m"], NUM_TOKENS)
    matrices = sum(p.numel() for p in trunk.parameters() if p.ndim == 2)
    assert matrices == SIZES["170m"].num_weights(NUM_TOKENS)


def test_the_paper_s_size():
    config = SIZES["170m"]
    assert (config.layers, config.width, config.intermediate, config.heads) == (18, 768, 3072, 12)


def test_sizes_below_one_are_refused():
    for field in ["width", "max_length"]:
        shape = {"width": 16, "layers": 2, "heads": 2, "intermediate": 24, "max_length": 12}
        with pytest.raises(ValueError, match=f"{field} must be between 1 and .*, got 0"):
            BackboneConfig(**{**shape, field: 0})


def test_a_width_that_does_not_split_into_rotary_pairs_is_refused():
    for width, heads in [(16, 3), (6, 2)]:
        with pytest.raises(ValueError, match=rf"width {width} must be a multiple of 2 \* heads = {2 * heads}"):
            BackboneConfig(width=width, layers=1, heads=heads, intermediate=8)


@torch.no_grad()
def test_grouped_queries_are_heads_whose_keys_and_values_are_repeated():
    """H = 4 queries, K = 2 keys: the same as four keys of which neighbours are equal."""
    shape = {"width": 16, "layers": 2, "heads": 4, "intermediate": 24, "max_length": 12}
    torch.manual_seed(0)
    grouped = Backbone(BackboneConfig(**shape, kv_heads=2), NUM_TOKENS).double()
    for parameter in grouped.parameters():
        parameter.normal_(std=0.5)
    plain = Backbone(BackboneConfig(**shape), NUM_TOKENS).double()
    weights = grouped.state_dict()
    for name in [name for name in weights if "query_key_value" in name]:
        query, key, value = weights[name].split([16, 8, 8])
        repeated = [part.view(2, 4, 16).repeat_interleave(2, dim=0).reshape(16, 16) for part in (key, value)]
        weights[name] = torch.cat([query, *repeated])
    plain.load_state_dict(weights)
    canvas = tokens(3, 9)
    assert torch.allclose(grouped(canvas), plain(canvas), rtol=0, atol=1e-12)


def test_a_wrong_number_of_keys_is_refused():
    for options, said in [
        ({"kv_heads": 3}, "heads 4 must be a multiple of kv_heads = 3"),
        ({"kv_heads": -1}, "kv_heads must be between 0 and"),
        ({"head_width": 5}, "head_width must be even"),
    ]:
        with pytest.raises(ValueError, match=said):
            BackboneConfig(width=16, layers=1, heads=4, intermediate=24, **options)


# --- packing ----------------------------------------------------------------------------------------------------------


def rows_of(side="left"):
    """Tokens [3, 8] of lengths 8, 3 and 5, and their attention."""
    sequences = [tokens(1, n, seed=n)[0] for n in (8, 3, 5)]
    return padded(sequences, side, tokens(3, 8, seed=9))


def masked_layout(x, attention_mask):
    """The layout of a compiled program: padding stays and is masked."""
    positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
    return Layout(positions, attention_mask[:, None, None, :], None, tuple(x.shape))


@pytest.mark.parametrize(("side", "spare"), [("left", 0), ("left", 19), ("right", 19)])
@pytest.mark.parametrize("options", SHAPES, ids=["absolute", "grouped"])
def test_packing_changes_nothing_but_the_padding(side, options, spare, monkeypatch):
    """Nor do places that fill a row up, as on a GPU."""
    monkeypatch.setattr("unmask.models.packing.packed_length", lambda num_tokens, device: num_tokens + spare)
    trunk, (x, attention_mask) = backbone(**options), rows_of(side)
    packed, layout = trunk(x, attention_mask), Layout.of(x, attention_mask, torch.float64)
    assert layout.positions.shape == (1, 16 + spare), "half of the places would be padding"
    assert layout.attend.ends.diff().tolist() == [8, 3, 5, *{0: [], 3: [3], 19: [8, 8, 3]}[spare]]
    assert (packed[~attention_mask] == 0).all()
    masked = trunk(x, masked_layout(x, attention_mask))
    assert torch.allclose(packed[attention_mask], masked[attention_mask], rtol=0, atol=1e-12)
    gradients = []
    for out in (packed, masked):
        trunk.zero_grad()
        out[attention_mask].square().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in trunk.parameters()]))
    assert torch.allclose(*gradients, rtol=0, atol=1e-10)
    assert gradients[0].abs().max() > 1e-3


def test_a_known_number_of_tokens_gives_the_same_layout():
    x, attention_mask = rows_of()
    waiting, knowing = (Layout.of(x, attention_mask, torch.float64, count) for count in (None, 16))
    assert torch.equal(waiting.at, knowing.at)
    assert torch.equal(waiting.positions, knowing.positions)
    assert waiting.attend.ends.tolist() == knowing.attend.ends.tolist() == [0, 8, 11, 16]
    assert waiting.attend.ends.dtype == torch.int32, "which the kernel wants"


def test_on_a_gpu_rows_come_in_few_lengths():
    gpu, counts = torch.device("cuda"), range(1, 70_000)
    lengths = [packed_length(count, gpu) for count in counts]
    assert all(0 <= length - count < max(1, count / 64) for count, length in zip(counts, lengths, strict=True))
    assert len({length for length in lengths if 40_000 < length <= 60_000}) < 60
    assert packed_length(12_345, torch.device("cpu")) == 12_345


def test_on_a_gpu_rows_hold_few_numbers_of_sequences():
    """The spare places in sequences that are full but for the last, and empty ones up to a multiple of 64."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    for rows, spare in ((64, 0), (1, 17), (40, 264 * 30), (450, 900)):
        more = spare_rows(rows, 264, spare, gpu)
        assert (rows + more) % 64 == 0
        assert 0 <= more - -(-spare // 264) < 64, "all spare places have room"
        assert spare_rows(rows, 264, spare, cpu) == -(-spare // 264)


def test_empty_sequences_change_nothing(monkeypatch):
    empty = 5
    x, attention_mask = rows_of()
    trunk = backbone()
    plain = trunk(x, attention_mask)
    monkeypatch.setattr("unmask.models.packing.spare_rows", lambda *given: empty)
    layout = Layout.of(x, attention_mask, torch.float64)
    assert layout.attend.ends.diff().tolist() == [8, 3, 5, *[0] * empty]
    assert torch.equal(trunk(x, layout), plain)


def test_take_and_put_are_inverse_where_nothing_is_padded():
    x, attention_mask = rows_of()
    layout = Layout.of(x, attention_mask, torch.float64)
    values = torch.arange(24.0).view(3, 8)
    taken = layout.take(values)
    assert torch.equal(taken[0], values[attention_mask])
    assert torch.equal(layout.put(taken), values * attention_mask)


def test_spans_keep_sequences_apart_and_may_be_empty():
    query, key, value = torch.randn(3, 1, 6, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mixed = attended(query, key, value, Spans(torch.tensor([0, 2, 2, 6]), 4))
    for start, end in ((0, 2), (2, 6)):
        q, k, v = (states[:, start:end] for states in (query, key, value))
        assert torch.allclose(mixed[:, start:end], attended(q, k, v, None), rtol=0, atol=1e-12)
    nothing = torch.zeros(1, 0, 2, 4)
    assert attended(nothing, nothing, nothing, Spans(torch.tensor([0]), 4)).shape == (1, 0, 2, 4)


def test_heads_filled_up_to_eights_attend_as_before():
    """What CUDA's variable-length attention asks for; a selector a quarter as wide as SmolLM2 has heads of 36."""
    for width in [36, 40]:
        states = torch.randn(3, 1, 5, 2, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        filled = pad_heads(*states)
        assert all(part.shape[-1] == -(-width // 8) * 8 for part in filled)
        wanted = attended(*states, None)
        assert torch.allclose(attended(*filled, None)[..., :width], wanted, atol=1e-12)


def test_nothing_is_packed_inside_a_compiled_program():
    x, attention_mask = rows_of()
    seen = []

    def forward(x, attention_mask):
        seen.append(Layout.of(x, attention_mask, torch.float64))
        return seen[-1].positions

    torch.compile(forward, backend="eager")(x, attention_mask)
    assert seen[0].at is None
    assert seen[0].attend is not None


def test_the_residual_stream_is_in_autocasts_dtype():
    trunk, (x, attention_mask) = backbone().float(), rows_of()
    for given in (attention_mask, None):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = trunk(x, given)
        assert half.dtype == torch.bfloat16
        full = trunk(x, given)
        assert full.dtype == torch.float32
        assert (half[attention_mask] - full[attention_mask]).abs().max() < 0.1 * full.abs().max()
