"""Train GPT-2 small or medium on OpenWebText with Hugging Face's Trainer and AdamCPR.

    python gpt2_openwebtext.py --out runs/gpt2s
    python gpt2_openwebtext.py --out runs/local --text folder_of_text_files
    torchrun --nproc-per-node 8 gpt2_openwebtext.py --out runs/gpt2m --size medium

The same command resumes from the last complete checkpoint. The defaults are the paper's: 200,000 steps
with 5,000 steps of learning-rate warm-up, then a cosine to a tenth of the learning rate, bfloat16, and
Kappa-IP with an interval of 500 steps, a tenth of the warm-up; ``--warm-start N`` selects Kappa-WS.

No perplexity of the paper has been reproduced with this script. Differences to the paper:

- The model is the GPT-2 of transformers: it has learned positions instead of rotary embeddings of half
  of each head's dimensions, normal instead of uniform initial weights, and torch's attention.
- Embeddings and the tied output layer are not regularized; the paper's text leaves out only biases and
  normalizations. Query, key and value of a layer are one matrix and share one bound.
- The inner width of the medium model is 4,096, which gives the paper's 354 M parameters; the paper's
  table has 4,048.
- The batch of the table (32, 24) is read as that of each of 8 GPUs; fewer GPUs accumulate gradients.
- The table has no learning rate for these runs; 1e-3 is that of the paper's image classification.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Slow imports are in the functions, so that --help is fast.
if TYPE_CHECKING:
    from datasets import DatasetDict
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments

SIZES = {
    "small": {"layers": 12, "heads": 12, "width": 768, "batch": 32},
    "medium": {"layers": 24, "heads": 16, "width": 1024, "batch": 24},
}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the options; ``--size`` sets those of the model's size that are not given."""
    about, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for checkpoints")
    add("--text", type=Path, help="folder of .txt files to train on instead, one document each")
    add(
        "--dataset",
        default="Skylion007/openwebtext",
        help="name on the hub, or a local folder",
    )
    add("--tokenizer", default="openai-community/gpt2", help="name on the hub, or a folder")
    add("--size", choices=SIZES, default="small")
    add("--layers", type=int)
    add("--heads", type=int)
    add("--width", type=int)
    add("--block", type=int, default=1024, help="tokens in a sample")
    add("--batch", type=int, help="samples per device and pass")
    add("--accumulate", type=int, help="passes per step (default: 8 over the number of processes)")
    add("--steps", type=int, default=200_000)
    add("--warmup", type=int, default=5000, help="steps of linear warm-up")
    add("--lr", type=float, default=1e-3)
    add("--warm-start", type=int, metavar="N", help="bounds from the weights after N steps (Kappa-WS)")
    add("--save-every", type=int, default=1000, help="steps between checkpoints")
    add("--seed", type=int, default=1234)
    add("--processes", type=int, help="processes that tokenize")
    add("--bf16", action=argparse.BooleanOptionalAction, default=True, help="mixed precision")
    args = parser.parse_args(argv)
    for key, value in SIZES[args.size].items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    if args.accumulate is None:
        args.accumulate = max(1, 8 // int(os.environ.get("WORLD_SIZE", "1")))
    return args


def refuse_missing_bf16(bf16: bool) -> None:
    """Exit without a GPU with bfloat16; the Trainer's error names an option that this script lacks."""
    from transformers.utils import is_torch_bf16_gpu_available

    if bf16 and not is_torch_bf16_gpu_available():
        sys.exit("--bf16: no GPU with bfloat16 is available; train in float32 with --no-bf16")


def refuse_data_parallel(settings: TrainingArguments) -> None:
    """Exit if one process sees several GPUs, because the Trainer would multiply the batch by them."""
    if settings.n_gpu > 1:
        sys.exit(
            f"expected one GPU per process, got {settings.n_gpu}; start with torchrun --nproc-per-node "
            f"{settings.n_gpu}, or select one GPU with CUDA_VISIBLE_DEVICES=0"
        )


def blocks_of_text(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
    """Return all documents joined and cut into samples of equal length; 0.05 % are held out."""
    from datasets import Features, List, Value, load_dataset

    if args.text is not None:
        files = [str(path) for path in sorted(args.text.rglob("*.txt"))]
        if not files:
            sys.exit(f"--text {args.text}: no .txt files found")
        documents = load_dataset("text", data_files=files, sample_by="document", split="train")
    else:
        documents = load_dataset(args.dataset, split="train")

    def cut(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        texts = tokenizer(batch["text"], return_attention_mask=False, verbose=False)["input_ids"]
        tokens = list(chain.from_iterable([*text, tokenizer.eos_token_id] for text in texts))
        whole = len(tokens) // args.block * args.block
        return {"input_ids": [tokens[i : i + args.block] for i in range(0, whole, args.block)]}

    if len(documents) < 2:
        sys.exit(f"expected at least 2 documents, one of them to hold out, got {len(documents)}")
    parts = documents.train_test_split(test_size=0.0005, seed=args.seed)
    blocks = parts.map(
        cut,
        batched=True,
        num_proc=args.processes,
        remove_columns=documents.column_names,
        features=Features({"input_ids": List(Value("int32"))}),  # half the size of int64
    )
    for name, task in (("train", "train on"), ("test", "hold out")):
        if len(blocks[name]) == 0:
            sys.exit(
                f"too little text to {task}: {len(parts[name])} of {len(documents)} documents have less "
                f"than one sample of {args.block} tokens; add text, or use a smaller --block"
            )
    return blocks


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a batch whose labels are its tokens; the model shifts them."""
    import torch

    tokens = torch.tensor([sample["input_ids"] for sample in samples])
    return {"input_ids": tokens, "labels": tokens}


def new_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return a GPT-2 with initial weights; its dropout rates default to 0.1, as in the paper."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=args.block,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=args.heads,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return GPT2LMHeadModel(config)


def last_checkpoint(folder: Path) -> str | None:
    """Return the newest complete checkpoint: the Trainer writes trainer_state.json last."""
    complete = [path.parent.name for path in folder.glob("checkpoint-*/trainer_state.json")]
    steps = [name.removeprefix("checkpoint-") for name in complete]  # checkpoint-best has no step
    newest = max((int(step) for step in steps if step.isdecimal()), default=None)
    return None if newest is None else str(folder / f"checkpoint-{newest}")


def main(argv: list[str] | None = None) -> Trainer:
    """Train from the last checkpoint, if there is one, and return the trainer."""
    args = parse(argv)

    from transformers import AutoTokenizer, Trainer, TrainingArguments, set_seed

    from nnunet_cpr import AdamCPR, KappaIP, KappaWS

    refuse_missing_bf16(args.bf16)
    settings = TrainingArguments(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulate,
        max_grad_norm=1.0,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=args.warmup,
        bf16=args.bf16,
        seed=args.seed,
        save_steps=args.save_every,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=args.save_every,
        logging_steps=min(100, args.save_every),
    )
    refuse_data_parallel(settings)
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    with settings.main_process_first(desc="tokenize"):  # the others read its cache
        blocks = blocks_of_text(args, tokenizer)
    model = new_model(args, tokenizer)

    kappa = KappaWS(args.warm_start) if args.warm_start else KappaIP(max(1, args.warmup // 10))
    optimizer = AdamCPR(model, lr=args.lr, betas=(0.9, 0.99), eps=1e-9, kappa=kappa)
    trainer = Trainer(
        model=model,
        args=settings,
        data_collator=collate,
        train_dataset=blocks["train"],
        eval_dataset=blocks["test"],
        processing_class=tokenizer,
        optimizers=(optimizer, None),  # the Trainer builds the scheduler of its settings
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(args.out))
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"perplexity {math.exp(loss):.2f}", optimizer.cpr.metrics())
    return trainer


if __name__ == "__main__":
    main()
