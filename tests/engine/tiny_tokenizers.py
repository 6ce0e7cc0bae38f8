"""Small real tokenizers, trained on the spot: byte-level as GPT-2's, and with a space marker as
Llama's."""

from __future__ import annotations

import json

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. STOP! Stop? stop sign; stopping.",
    "Grüße aus München: äöü ß, naïve café, 日本語のテキスト, 한국어, emoji 😀👩‍👩‍👧 and ∑∫√.",
] * 4
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<s>{{ m['role'] }}: {{ m['content'] }}</s>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<s>{% endif %}"
)


def byte_level(vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """Characters outside ASCII fall into several byte tokens; a text begins with ``<s>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )


def space_marker() -> PreTrainedTokenizerFast:
    """Words begin with a marker, the first one's space is dropped, unknown characters are byte
    tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))],
        limit_alphabet=40,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # The trainer keeps byte tokens only if it takes them for special tokens, which they are not.
    parts = json.loads(tokenizer.to_str())
    parts["added_tokens"] = [t for t in parts["added_tokens"] if not t["content"].startswith("<0x")]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(parts)),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
