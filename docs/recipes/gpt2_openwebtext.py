"""Train GPT-2 on OpenWebText with Hugging Face's Trainer, with CPR or with weight decay.

    python gpt2_openwebtext.py --out runs/gpt2s
    python gpt2_openwebtext.py --out runs/gpt2s-adamw --optimizer adamw --weight-decay 0.1
    torchrun --nproc-per-node 8 gpt2_openwebtext.py --out runs/gpt2m --size medium
    python gpt2_openwebtext.py --out runs/tiny --size tiny --text docs --tokenizer bytes --no-bf16

The same command resumes from the last complete checkpoint. The folder of a run then has the options
(settings.json), the losses of its steps (trainer_state.json), the dynamics of its matrices
(dynamics.csv) and its result (result.json); compare_runs.py makes a table and a figure of several.

The defaults are the paper's: 200,000 steps with 5,000 steps of learning-rate warm-up, then a cosine to
a tenth of the learning rate, bfloat16, and Kappa-IP with an interval of a tenth of the warm-up. The tiny
model is for a try of a minute on a CPU.

No perplexity of the paper has been reproduced with this script. Differences to the paper:

- The model is the GPT-2 of transformers: it has learned positions instead of rotary embeddings of half
  of each head's dimensions, normal instead of uniform initial weights, and torch's attention.
- Embeddings and the tied output layer are neither bounded nor decayed; the paper's text leaves out only
  biases and normalizations. Query, key and value of a layer are one matrix and share one bound.
- The inner width of the medium model is 4,096, which gives the paper's 354 M parameters; the paper's
  table has 4,048.
- The batch of the table (32, 24) is read as that of each of 8 GPUs, so 256 and 192 a step; fewer GPUs
  accumulate gradients. Those of the larger models, which the paper only timed, are ours.
- The table has no learning rate for these runs; 1e-3 is that of the paper's image classification.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import language_options as options

# Slow imports are in the functions, so that --help is fast.
if TYPE_CHECKING:
    from datasets import DatasetDict
    from torch import Tensor
    from transformers import EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, Trainer

SIZES = {
    "tiny": {"layers": 2, "heads": 2, "width": 64, "block": 128, "batch": 8, "batch_per_device": 8},
    "small": {"layers": 12, "heads": 12, "width": 768, "batch": 256, "batch_per_device": 32},
    "medium": {"layers": 24, "heads": 16, "width": 1024, "batch": 192, "batch_per_device": 24},
    "large": {"layers": 36, "heads": 20, "width": 1280, "batch": 64, "batch_per_device": 8},
    "xl": {"layers": 36, "heads": 25, "width": 1600, "batch": 32, "batch_per_device": 4},
}
"""Models of the paper, with its batches for small and medium."""
_BLOCK = 1024


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the options; ``--size`` sets those of the model that are not given."""
    about, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the run")
    add("--text", type=Path, help="folder of .txt or .md files to train on instead, one document each")
    add(
        "--dataset",
        default="Skylion007/openwebtext",
        help="name on the hub, or a local folder",
    )
    add(
        "--tokenizer",
        default="openai-community/gpt2",
        help="name on the hub, a folder, or bytes: ByT5's, which needs no download",
    )
    add("--size", choices=SIZES, default="small")
    add("--layers", type=options.count)
    add("--heads", type=options.count)
    add("--width", type=options.count)
    add("--block", type=options.count, help="tokens in a sample")
    add("--batch", type=options.count, help="samples per step, all devices together")
    add("--batch-per-device", type=options.count, help="samples per device and pass")
    add("--steps", type=options.count, default=200_000)
    add("--warmup", type=int, help="steps of linear warm-up (default: a fortieth of the steps)")
    add("--lr", type=options.positive, default=1e-3)
    add("--eval-every", type=options.count, default=1000, help="steps between evaluations")
    add("--save-every", type=options.count, default=1000, help="steps between checkpoints")
    add("--seed", type=int, default=1234)
    add("--processes", type=int, help="processes that tokenize")
    add("--bf16", action=argparse.BooleanOptionalAction, default=True, help="mixed precision")
    options.add_optimizer_options(parser, "ip, with an interval of a tenth of the warm-up")
    args = parser.parse_args(argv)
    if args.warmup is None:
        args.warmup = args.steps // 40
    options.complete_optimizer_options(parser, args, f"ip{max(1, args.warmup // 10)}")
    for key, value in ({"block": _BLOCK} | SIZES[args.size]).items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    options.complete_batch(parser, args)
    if not 0 <= args.warmup < args.steps:
        parser.error(f"--warmup: expected less than the {args.steps} steps, got {args.warmup}")
    if args.width % args.heads:
        parser.error(f"--heads: expected a divisor of the width {args.width}, got {args.heads}")
    return args


def blocks_of_text(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> DatasetDict:
    """Return all documents joined and cut into samples of equal length; 0.05 % are held out."""
    from datasets import Features, List, Value, load_dataset

    if args.text is not None:
        files = [str(path) for path in sorted(args.text.rglob("*")) if path.suffix in (".txt", ".md")]
        if not files:
            sys.exit(f"--text {args.text}: no .txt or .md files found")
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


def best_tokens(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the most probable next tokens, so that the evaluation keeps no logits."""
    return logits.argmax(-1)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of next tokens that are right."""
    return {"accuracy": float((prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]).mean())}


def main(argv: list[str] | None = None) -> Trainer | None:
    """Train from the last checkpoint, if any, and return the trainer; None if the run is finished."""
    args = parse(argv)
    file = args.out / "result.json"
    if file.exists():
        options.start_run(args)  # refuses other options
        print(f"{args.out} is finished: {file.read_text()}")
        return None
    options.require("transformers", "accelerate", "datasets")

    from dynamics import Recorder
    from transformers import AutoTokenizer, ByT5Tokenizer, Trainer, TrainingArguments, set_seed

    options.refuse_missing_bf16(args.bf16)
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
        eval_steps=args.eval_every,
        logging_steps=max(1, min(100, args.eval_every, args.steps // 2)),
    )
    options.refuse_data_parallel(settings)
    set_seed(args.seed)
    name = args.tokenizer
    tokenizer = ByT5Tokenizer() if name == "bytes" else AutoTokenizer.from_pretrained(name)
    with settings.main_process_first(desc="tokenize"):  # the others read its cache
        blocks = blocks_of_text(args, tokenizer)
    model = new_model(args, tokenizer)

    adam = {"betas": (0.9, 0.99), "eps": 1e-9}
    optimizer = options.build_optimizer(args, model, args.steps, **adam)
    recorder = Recorder(args.out, model, optimizer)
    trainer = Trainer(
        model=model,
        args=settings,
        data_collator=collate,
        train_dataset=blocks["train"],
        eval_dataset=blocks["test"],
        processing_class=tokenizer,
        optimizers=(optimizer, None),  # the Trainer builds the scheduler of its settings
        callbacks=[recorder],
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=best_tokens,
    )
    if trainer.is_world_process_zero():
        options.start_run(args)
    trainer.train(resume_from_checkpoint=options.last_checkpoint(args.out, args.steps))
    last = trainer.evaluate()
    trainer.save_state()
    if trainer.is_world_process_zero():
        result = {
            "loss": last["eval_loss"],
            "perplexity": math.exp(min(last["eval_loss"], 700.0)),  # a diverged one stays finite
            "accuracy": last["eval_accuracy"],
            "seconds_per_step": recorder.seconds_per_step,
        }
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(", ".join(f"{key} {value:.4g}" for key, value in result.items()), f"written to {args.out}")
    return trainer


if __name__ == "__main__":
    main()
