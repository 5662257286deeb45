from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

# Set before the import of Hugging Face's libraries: no test may access the hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of thirty documents of random words, the same in every session."""
    words = random.Random(0)
    vocabulary = ["".join(words.choices("abcdefghij", k=words.randint(2, 7))) for _ in range(80)]
    folder = tmp_path_factory.mktemp("text")
    for i in range(30):
        (folder / f"{i:02}.txt").write_text(" ".join(words.choices(vocabulary, k=120)) + "\n")
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> Path:
    """Return a byte-level BPE tokenizer of 300 tokens, trained on the documents."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    bpe = tokenizers.ByteLevelBPETokenizer()
    files = [str(path) for path in sorted(text_folder.glob("*.txt"))]
    bpe.train(files, vocab_size=300, special_tokens=["<|end|>"], show_progress=False)
    folder = tmp_path_factory.mktemp("tokenizer")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|end|>", bos_token="<|end|>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def dataset_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache of datasets for this process and its children."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder))
    datasets.disable_progress_bars()
    return folder
