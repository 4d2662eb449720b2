"""Records to blocks to ranks: nothing is cut from its prompt, nothing is lost unsaid, every rank has its own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from helpers import family_config
from helpers.families import build_model, family_names
from helpers.memory import MB, peak_of
from helpers.ranks import run_ranks
from trimtab.errors import InputError
from trimtab.train import packing, readers
from trimtab.train.assistant_spans import IGNORED
from trimtab.train.loading import mask_by_positions
from trimtab.train.models import keeps_documents_apart
from trimtab.train.packing import Blocks, Packer, RankBlocks, best_fit, prepare_data, turns
from trimtab.train.presets import SPECIALS, byte_tokenizer
from trimtab.train.report import DataReport
from trimtab.train.sources import find_groups

EOS = 256
TOKENIZER = byte_tokenizer()


def conversation(size: int, mark: str = "a") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": mark}, {"role": "assistant", "content": mark * size}]}


def prepare(
    folder: Path, rows: list[dict[str, Any]] | None = None, draws: int | None = None, names: Any = None, **more: Any
) -> tuple[Blocks, list[DataReport]]:
    """The blocks of some rows, or of what is named."""
    if rows is not None:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        names = [str(folder / "rows.jsonl")]
    out = folder / f"blocks-{len(list(folder.iterdir()))}"
    packer = Packer(**{"tokenizer": byte_tokenizer(), "seq_len": 64, "seed": 0, **more})
    reports = prepare_data(find_groups(names), packer, out, draws)
    return Blocks(out), reports


def documents(block: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int]]]:
    """The documents of a block, as ids and labels."""
    starts = [*(block["position_ids"] == 0).nonzero().flatten().tolist(), len(block["input_ids"])]
    ids, labels = block["input_ids"].tolist(), block["labels"].tolist()
    return [(ids[a:b], labels[a:b]) for a, b in itertools.pairwise(starts)]


@given(st.lists(st.integers(1, 20)))
def test_best_fit_puts_each_item_where_the_least_room_is_left(lengths: list[int]) -> None:
    bins = best_fit(lengths, 20)
    assert sorted(n for items in bins for n in items) == list(range(len(lengths)))
    sizes = sorted(sum(lengths[n] for n in items) for items in bins)
    assert all(0 < size <= 20 for size in sizes)
    assert all(a + b > 20 for a, b in itertools.pairwise(sizes))  # no two would fit in one


@pytest.mark.parametrize("window", [1, 1 << 20])
def test_every_answer_lies_behind_its_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(packing, "WINDOW_TOKENS", window)
    rows = [conversation(size, chr(97 + size % 26)) for size in range(1, 60)]
    blocks, (report,) = prepare(tmp_path, rows, seq_len=96)
    tok, found = byte_tokenizer(), []
    for block in blocks:  # type: ignore[attr-defined]
        assert all(len(block[name]) == 96 for name in ("input_ids", "labels", "position_ids"))
        for ids, labels in documents(block):
            assert labels[0] == IGNORED  # what the document before it would predict
            if any(label != IGNORED for label in labels):
                found.append(tok.decode(ids))
                assert tok.decode([label for label in labels if label != IGNORED]).endswith("<|end|>")
            else:
                assert ids == (block["input_ids"].tolist() * 2)[: len(ids)]  # no padding of one token
    assert sorted(found) == sorted(tok.apply_chat_template(row["messages"], tokenize=False)[:-1] for row in rows)
    assert report.summary().startswith(f"59 conversation(s), {sum(map(len, map(tok.encode, found))):,} tokens, ")
    if window > 1:
        assert len(blocks) <= 1.1 * sum(map(len, map(tok.encode, found))) / 96 + 1


def test_what_does_not_fit_is_cut_or_left_out_and_counted(tmp_path: Path) -> None:
    long, prompt = conversation(100), conversation(5)
    prompt["messages"][0]["content"] = "x" * 100
    others = [{"messages": long["messages"][:1]}, {"text": ""}, {"prompt": "1", "completion": "2"}]
    rows = [conversation(5), long, prompt, *others]
    (blocks, (report,)), (_, (dropped,)) = prepare(tmp_path, rows), prepare(tmp_path, rows, too_long="drop")
    assert report.summary() == (
        "2 conversation(s) and 1 completion(s), 150 tokens, 52 of them learned, in 2 block(s); cut to a block: 1; left "
        "out: 1 without a token to learn among its first 64, 1 without an answer to learn, 1 empty"
    )
    assert ", 2 longer than 64 tokens" in dropped.summary().replace("left out:", ",")
    cut = max(documents(blocks[1]) + documents(blocks[0]), key=lambda document: len(document[0]))
    assert cut[0] == byte_tokenizer().apply_chat_template(long["messages"])["input_ids"][:64]
    shown = "\n".join(report.details(byte_tokenizer()))
    assert "<|start|>user\na<|end|>\n<|start|>assistant\n⟦aaaaa<|end|>⟧" in shown
    assert "1⟦2<|eos|>⟧" in shown
    assert f"{tmp_path / 'rows.jsonl'}: 2 conversation(s), 147 tokens" in shown


@pytest.mark.parametrize("rows", [[{"text": ""}], [{"messages": [{"role": "user", "content": "a"}]}]])
def test_data_without_anything_to_learn_is_refused(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(InputError, match=r"the data is empty, 1 file\(s\), .*rows.jsonl …: nothing, 0 tokens"):
        prepare(tmp_path, rows)


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(InputError, match="EOS"):
        prepare(tmp_path, [{"text": "x"}], tokenizer=tokenizer)


def test_texts_are_wrapped_with_eos_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE_CHARS", 100)
    texts = ["".join(f"line {n}\n" for n in range(200)), "zwö"]
    for n, text in enumerate(texts):
        (tmp_path / f"{n}.txt").write_text(text)
    blocks, (report,) = prepare(tmp_path, names=[str(tmp_path)], seed=1)
    total = sum(len(text.encode()) + 1 for text in texts)
    ids = torch.cat([block["input_ids"] for block in blocks]).tolist()  # type: ignore[attr-defined]
    labels = torch.cat([block["labels"] for block in blocks]).tolist()  # type: ignore[attr-defined]
    assert sorted(bytes(i % EOS for i in ids[:total]).split(b"\0")) == sorted([b"", *(t.encode() for t in texts)])
    assert labels == ids[:total] + [IGNORED] * (len(ids) - total)
    assert f"2 text(s), {total:,} tokens, {total:,} of them learned, in {-(-total // 64)} block(s)" in report.summary()


def letters(scheme: str) -> Tokenizer:
    """Joins letters. bytes: over borders of words and lines, as GPT-2's; the others put a space before a text, as
    Llama-2's and Mixtral's."""
    if scheme == "bytes":
        vocab = {c: n for n, c in enumerate("abcdĠĊ<>|eos")} | {"ab": 20, "Ġab": 21}
        core = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("Ġ", "ab")]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        vocab = {c: n for n, c in enumerate("abcd\u2581\n<|eos>")} | {"\u2581a": 20, "ab": 21}
        core = Tokenizer(models.BPE(vocab=vocab, merges=[("\u2581", "a"), ("a", "b")]))
        if scheme == "normalizer":
            replaced = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            core.normalizer = normalizers.Sequence(replaced)
        else:
            core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.add_special_tokens(["<|eos|>"])
    return core


@pytest.mark.parametrize("scheme", ["bytes", "normalizer", "always", "first"])
@pytest.mark.parametrize("kind", ["text", "completion", "prompt", "answer", "question"])
def test_a_long_record_is_tokenized_in_pieces_and_has_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, kind: str
) -> None:
    """Over lines, spaces and words that never end; memory as much as the text needs."""
    template = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}<|eos|>{% endfor %}"
    template += "{% if add_generation_prompt %}a{% endif %}"
    longest = [0]

    class Seeing(PreTrainedTokenizerFast):
        def __call__(self, text: str, **options: Any) -> Any:
            longest[0] = max(longest[0], len(text))
            return super().__call__(text, **options)

    tok = Seeing(tokenizer_object=letters(scheme), eos_token="<|eos|>", chat_template=template)
    long = "ab abab cd\nab\n" * 300 + "ab acd bcd " * 300 + "dc" * 2_000 + "ab abab cd\nab " * 2_000
    one, two = (long, "ab") if kind in ("prompt", "question") else ("ab", long)
    row: dict[str, Any] = {"text": long} if kind == "text" else {"prompt": one, "completion": two}
    if kind in ("answer", "question"):
        row = {"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": two}]}
    found = []
    for size in (1 << 18, 1_000):
        monkeypatch.setattr(readers, "PIECE_CHARS", size)
        blocks, (report,) = prepare(tmp_path, [row], tokenizer=tok, seq_len=50_000)
        found.append(([block["input_ids"].tolist() + block["labels"].tolist() for block in blocks], report.summary()))
        longest[0], seen = 0, longest[0]
    assert found[0] == found[1]
    assert seen <= 2_000


def long_records(size: int) -> dict[str, dict[str, Any]]:
    half = "x y z w " * (size // 16)
    turns = [{"role": role, "content": half[: size // 40]} for _ in range(20) for role in ("user", "assistant")]
    answer = [{"role": "user", "content": "x"}, {"role": "assistant", "content": half + half}]
    return {
        "text": {"text": half + half}, "completion": {"prompt": half, "completion": half},
        "answer": {"messages": answer}, "turns": {"messages": turns},
    }  # fmt: skip


def held_by_long_records(folder: Path) -> dict[str, int]:
    """Bytes that are held at most while a record of each kind is read, behind a short one."""
    prepare(folder, list(long_records(160).values()))  # loads the code
    held = {}
    for kind, row in long_records(LONG).items():
        (folder / kind).mkdir()
        held[kind] = peak_of(lambda: prepare(folder / kind, [conversation(1), row]))  # noqa: B023
    return held


LONG = 6 * MB


def test_one_long_record_takes_memory_in_proportion(tmp_path: Path) -> None:
    (held,) = run_ranks(held_by_long_records, 1, tmp_path, deadline=200)
    assert max(held.values()) <= 12 * LONG, held


def test_text_is_read_as_far_as_the_steps_reach(tmp_path: Path) -> None:
    """But for a mixture with conversations, whose shares are those of the data."""
    rows = [{"text": "x" * 63}] * 10
    blocks, (report,) = prepare(tmp_path, rows, draws=3)
    assert len(blocks) == 3
    assert "left out: 7 beyond the steps of the run" in report.summary()
    assert len(prepare(tmp_path, [*rows, conversation(1)], draws=3)[0]) == 11
    assert len(prepare(tmp_path, [conversation(1), *rows], draws=3)[0]) == 11
    (tmp_path / "seldom.txt").write_text("It is.")
    seldom = [f"{tmp_path / 'rows.jsonl'}=1", f"{tmp_path / 'seldom.txt'}=0.01"]
    assert prepare(tmp_path, names=seldom, draws=3)[0].sizes == [11, 1]


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=4))
def test_groups_take_turns_by_weight(weights: list[float]) -> None:
    weights = [weight / sum(weights) for weight in weights]
    drawn = list(itertools.islice(turns(weights), 300))
    for n, weight in enumerate(weights):
        assert all(abs(drawn[:k].count(n) - weight * k) < len(weights) for k in (1, 10, 100, 300))


class Numbered(Blocks):
    """Blocks that are their own number."""

    def __init__(self, *sizes: int) -> None:
        self.sizes, self.weights, self.packed = list(sizes), [0.75, 0.25][: len(sizes)], True

    def of(self, group: int, index: int) -> Any:
        return group * 100 + index


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 30))
def test_ranks_share_one_global_batch_and_go_on_where_they_were(size: int, batch: int, skip: int) -> None:
    def blocks(batch: int, rank: int, size: int, skip: int, count: int) -> list[Any]:
        rows = RankBlocks(Numbered(7, 3), batch=batch, rank=rank, size=size, seed=3, skip=skip)
        return list(itertools.islice(rows, count))

    alone = blocks(batch * size, 0, 1, 0, batch * size * 9)
    shares = [blocks(batch, rank, size, 0, batch * 9) for rank in range(size)]
    for step in range(9):
        together = [row for share in shares for row in share[step * batch : (step + 1) * batch]]
        assert together == alone[step * batch * size : (step + 1) * batch * size]
    assert blocks(batch, size - 1, size, skip, 10) == blocks(batch, size - 1, size, 0, skip + 10)[skip:]


def test_each_epoch_has_every_block_in_an_order_of_its_own() -> None:
    drawn = list(itertools.islice(RankBlocks(Numbered(50), batch=1, rank=0, size=1, seed=3), 150))  # type: ignore
    epochs = [tuple(drawn[start : start + 50]) for start in (0, 50, 100)]
    assert len(set(epochs)) == 3
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)


CAUSAL = [name for name in family_names() if "openai_privacy" not in name and "qwen3_omni" not in name]


@pytest.mark.parametrize("name", CAUSAL)
def test_the_loss_of_a_block_is_that_of_its_conversations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by one, in float64, in windows shorter than they are; families that let documents see each other are not
    packed, and what follows a conversation in its block does not matter to it. An index takes all of its keys: of a
    few equal ones it would take those that come first, which depends on the block's length."""
    monkeypatch.setitem(family_config.SMALL, "index_topk", 64)
    monkeypatch.setitem(family_config.FAMILY["qwen4_exp"], "indexer_budget", 64)
    model = build_model(name, dtype=torch.float64)
    model.set_experts_implementation("eager")
    packs = keeps_documents_apart(model)
    if packs:
        mask_by_positions(model)
    vocabulary = min(int(model.get_input_embeddings().num_embeddings), 60)
    documents = [torch.randint(1, vocabulary, (1, n), generator=torch.Generator().manual_seed(n)) for n in (11, 5, 17)]

    @torch.no_grad()
    def hidden(ids: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        found = model(input_ids=ids, use_cache=False, **more)
        return getattr(found, "logits", None) if hasattr(found, "logits") else found.last_hidden_state  # type: ignore

    apart = [hidden(ids) for ids in documents]
    if packs:
        positions = torch.cat([torch.arange(ids.shape[1])[None] for ids in documents], 1)
        rows = hidden(torch.cat(documents, 1), position_ids=positions).split([ids.shape[1] for ids in documents], 1)
    else:
        rows = [hidden(torch.cat([ids, ids], 1))[:, : ids.shape[1]] for ids in documents]  # type: ignore[assignment]
    losses = [
        F.cross_entropy(torch.cat(each, 1)[0].double(), torch.cat(documents, 1)[0] % each[0].shape[-1])
        for each in (apart, rows)
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)


@given(st.text().filter(lambda text: not any(special in text for special in SPECIALS)))
def test_a_token_is_a_byte(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_auto_tokenizer_opens_it(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    opened = AutoTokenizer.from_pretrained(tmp_path)
    assert opened("ab<|end|>é")["input_ids"] == [97, 98, 258, 0xC3, 0xA9]
    assert opened.eos_token_id == 256
    assert opened.chat_template == TOKENIZER.chat_template
    assert "trimtab" not in "".join(path.read_text() for path in tmp_path.iterdir())
