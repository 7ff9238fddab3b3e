import json

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from unmask.models.importers.vocabulary import cut_tokenizer, ids_in, vocabulary_of

TEXTS = ["Natalia sold 48 clips in April, and half as many in May.", "She sold 48 / 2 = 24 clips in May.\n#### 24"]
OTHERS = ["", " ", "zebra quagga", "Größe 日本語 🙂", "\x00\x7f\t\r\n  x  ", "<|end|> and <|end|>", "\U0010ffff"]


@pytest.fixture(scope="module")
def byte_level():
    """Trained on far more than TEXTS, with single digits, special tokens, and something put around every text."""
    words = [f"{first}{second}{third}" for first in "aeiou" for second in "lmnrst" for third in ("old", "ing", "ips")]
    corpus = [*TEXTS, *OTHERS, " ".join(words), "quagga zebra " * 9] * 3
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    special = ["<|start|>", "<|end|>", "<|unused|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[5:]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(corpus, trainer)
    made.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    return made


def pieces(tokenizer, text):
    words = vocabulary_of(tokenizer)
    return [words[index] for index in tokenizer.encode(text, add_special_tokens=False).ids]


def test_the_texts_are_split_as_before_into_fewer_tokens(byte_level):
    cut = cut_tokenizer(byte_level, TEXTS, ["<|end|>"])
    assert cut.get_vocab_size() < byte_level.get_vocab_size() - 50
    assert sorted(cut.get_vocab().values()) == list(range(cut.get_vocab_size()))
    for text in TEXTS:
        assert pieces(cut, text) == pieces(byte_level, text)
        assert any(len(piece) > 3 for piece in pieces(cut, text))
    assert pieces(cut, "zebra") != pieces(byte_level, "zebra")  # rare here: it falls into smaller pieces


def test_every_text_comes_back(byte_level):
    cut = cut_tokenizer(byte_level, TEXTS, ["<|end|>"])
    for text in TEXTS + OTHERS:
        ids = cut.encode(text).ids
        assert cut.decode(ids, skip_special_tokens=False) == text
        assert all(0 <= index < cut.get_vocab_size() for index in ids)


def test_special_tokens_stay_and_the_first_ones_come_first(byte_level):
    cut = cut_tokenizer(byte_level, TEXTS, ["<|end|>"])
    assert cut.token_to_id("<|end|>") == 0
    assert cut.token_to_id("<|unused|>") is not None
    assert cut.encode("a<|end|>").ids[-1] == 0
    assert cut.encode("a").ids == [cut.token_to_id("a")]  # nothing is put around a text


def test_a_cut_survives_its_file(byte_level, tmp_path):
    cut = cut_tokenizer(byte_level, TEXTS, ["<|end|>"])
    cut.save(str(tmp_path / "tokenizer.json"))
    again = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert vocabulary_of(again) == vocabulary_of(cut)
    assert [again.encode(text).ids for text in TEXTS + OTHERS] == [cut.encode(text).ids for text in TEXTS + OTHERS]


def test_gaps_between_ids_are_closed_by_a_cut_and_refused_without_one(byte_level):
    """A token's place in the list of tokens is not its id then."""
    state = json.loads(byte_level.to_str())
    vocab = state["model"]["vocab"]
    state["model"]["vocab"] = {token: index + 7 * (index > 100) for token, index in vocab.items()}
    gaps = Tokenizer.from_str(json.dumps(state))
    assert max(gaps.get_vocab().values()) == len(vocab) + 6
    cut = cut_tokenizer(gaps, TEXTS, ["<|end|>"])
    assert cut.get_vocab() == cut_tokenizer(byte_level, TEXTS, ["<|end|>"]).get_vocab()
    assert [pieces(cut, text) for text in TEXTS] == [pieces(byte_level, text) for text in TEXTS]
    with pytest.raises(ValueError, match="with gaps: cut it"):
        vocabulary_of(gaps)


def test_ids_in_the_whole_vocabulary(byte_level):
    cut = cut_tokenizer(byte_level, TEXTS, ["<|end|>"])
    ids = ids_in(byte_level, vocabulary_of(cut))
    whole = vocabulary_of(byte_level)
    new = [token for token, index in zip(vocabulary_of(cut), ids, strict=True) if index is None]
    assert new == list('!"$%')  # bytes that it was trained without
    assert all(whole[i] == token for token, i in zip(vocabulary_of(cut), ids, strict=True) if i is not None)
    with pytest.raises(ValueError, match="1 tokens, such as 'nowhere', are not tokens of the pretrained tokenizer"):
        ids_in(byte_level, ["a", "nowhere"])


def test_a_tokenizer_that_falls_back_to_bytes():
    """As Llama's: spaces are written as ▁, and what has no token as <0xNN>; two merges may give the same token."""
    merges = [("▁", "c"), ("a", "t"), ("▁c", "at"), ("c", "at"), ("▁", "cat"), ("d", "o")]
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"catdog"[:4], "o", "g"]
    words += [left + right for left, right in merges if left + right != "▁cat"] + ["▁cat"]
    words = list(dict.fromkeys(words))
    made = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    cut = cut_tokenizer(made, ["cat cat"], ["</s>"])
    assert pieces(cut, "cat cat") == ["▁cat", "▁cat"]
    assert cut.token_to_id("do") is None
    assert cut.token_to_id("</s>") == 0
    for text in ("cat dog", "ö 🙂", "dog\n"):
        assert cut.decode(cut.encode(text).ids, skip_special_tokens=False) == text


def test_a_byte_level_tokenizer_whose_model_says_that_it_falls_back(byte_level):
    """It never does, since every byte has a token: the same vocabulary is cut from it."""
    state = json.loads(byte_level.to_str())
    state["model"]["byte_fallback"] = True
    odd = Tokenizer.from_str(json.dumps(state))
    cut = cut_tokenizer(byte_level, TEXTS, ["<|end|>"])
    assert vocabulary_of(cut_tokenizer(odd, TEXTS, ["<|end|>"])) == vocabulary_of(cut)
    assert ids_in(odd, vocabulary_of(cut)) == ids_in(byte_level, vocabulary_of(cut))


def test_every_way_to_a_token_is_kept():
    """abc comes from ab and c here, though a merge of a and bc stands before that one."""
    merges = [("a", "b"), ("a", "bc"), ("ab", "c"), ("b", "c")]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "abc", "bc", "none"]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges, unk_token="none"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert pieces(made, "abc") == ["abc"]
    cut = cut_tokenizer(made, ["abc"])
    assert pieces(cut, "abc") == ["abc"]
    assert cut.token_to_id("none") is not None, "its model names it"


def test_a_tokenizer_that_cuts_texts_off_or_fills_them_up(byte_level):
    """What it does to batches is not what its texts are."""
    made = Tokenizer.from_str(byte_level.to_str())
    made.enable_truncation(3)
    made.enable_padding(length=50)
    cut = cut_tokenizer(made, TEXTS, ["<|end|>"])
    assert cut.get_vocab() == cut_tokenizer(byte_level, TEXTS, ["<|end|>"]).get_vocab()
    assert [pieces(cut, text) for text in TEXTS] == [pieces(byte_level, text) for text in TEXTS]


def test_what_cannot_be_cut_is_refused(byte_level):
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ValueError, match=r"only a plain byte-pair encoding can be cut, .* is a WordLevel"):
        cut_tokenizer(words, ["a"])
    marked = Tokenizer(models.BPE({"a": 0, "##b": 1}, [], continuing_subword_prefix="##"))
    with pytest.raises(ValueError, match="only a plain byte-pair encoding can be cut"):
        cut_tokenizer(marked, ["a"])
    with pytest.raises(ValueError, match="has no token '<eos>'"):
        cut_tokenizer(byte_level, TEXTS, ["<eos>"])
