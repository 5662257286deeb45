"""Fine-tune a language model with LoRA: peft and Hugging Face's Trainer, with CPR or with weight decay.

    python lora_finetuning.py --data pubmedqa --out runs/mistral
    python lora_finetuning.py --data pubmedqa --out runs/mistral-adamw --optimizer adamw
    python lora_finetuning.py --data pairs.jsonl --out runs/mine

The data are PubMedQA's artificial questions, or a file whose lines are objects with a ``prompt`` and an
``answer``; the loss is that of the answers. The same command resumes from the last complete checkpoint.
The folder of a run then has the adapter, the options (settings.json) and the losses
(trainer_state.json). lm_eval measures the accuracy of a model with and without it; the commands are in
docs/reference/paper-experiments.md.

The defaults are the paper's run on 100,000 questions, one epoch: Mistral 7B Instruct, rank 128 and
alpha 1 on all projections, learning rate 5e-4 with 50 steps of warm-up, then a cosine, 128 pairs per
step, and bounds from the weights after 100 steps (Kappa-WS).

CPR regularizes the trainable parameters: the matrices A and B of each projection, each with its own
bound. B starts at 0, where a bound in proportion to the initial weights (``KappaKI0``) would keep it;
Kappa-WS sets the bound once B has grown.

No result of the paper has been reproduced with this script. The paper does not state its prompts, Adam's
betas or a gradient norm; here the prompts are those below, and the others are the defaults of torch and
transformers.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import language_options as options

# Slow imports are in the functions, so that --help is fast.
if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, Trainer

PUBMEDQA = "pubmedqa"
_QUESTIONS = 100_000
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    about, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", required=True, metavar="FILE", help="pubmedqa, or a jsonl file of prompts and answers")
    add("--out", type=Path, required=True, help="folder of the run")
    add("--model", default="mistralai/Mistral-7B-Instruct-v0.2", help="name on the hub, or a folder")
    add("--rank", type=options.count, default=128)
    add("--alpha", type=options.positive, default=1.0)
    add("--lr", type=options.positive, default=5e-4)
    add("--warmup", type=int, default=50, help="steps of linear warm-up")
    add("--epochs", type=options.positive, default=1.0)
    add("--batch", type=options.count, default=128, help="pairs per step, all devices together")
    add("--batch-per-device", type=options.count, default=4, help="pairs per device and pass")
    add("--max-length", type=options.count, default=1024, help="tokens; longer pairs are left out")
    add("--save-every", type=options.count, default=100, help="steps between checkpoints")
    add("--seed", type=int, default=0)
    add("--bf16", action=argparse.BooleanOptionalAction, default=True, help="mixed precision")
    options.add_optimizer_options(parser, "ws, at twice the warm-up")
    args = parser.parse_args(argv)
    options.complete_optimizer_options(parser, args, f"ws{max(1, 2 * args.warmup)}")
    options.complete_batch(parser, args)
    if args.data != PUBMEDQA and not Path(args.data).is_file():
        parser.error(f"--data {args.data}: the file does not exist")
    return args


def questions() -> Dataset:
    """Return prompts and answers of the first artificial questions of PubMedQA."""
    from datasets import load_dataset

    def ask(row: dict[str, Any]) -> dict[str, str]:
        context = " ".join(row["context"]["contexts"])
        prompt = f"[INST] {context}\n\n{row['question']} Answer yes, no or maybe. [/INST]"
        return {"prompt": prompt, "answer": row["final_decision"]}

    rows = load_dataset("qiaojin/PubMedQA", "pqa_artificial", split=f"train[:{_QUESTIONS}]")
    return rows.map(ask, remove_columns=rows.column_names)


def pairs(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return the tokens of prompts and answers; the label -100 excludes the prompts from the loss."""
    from datasets import load_dataset

    def encode(pair: dict[str, str]) -> dict[str, list[int]]:
        prompt = tokenizer(pair["prompt"])["input_ids"]
        answer = tokenizer(pair["answer"], add_special_tokens=False)["input_ids"]
        answer = [*answer, tokenizer.eos_token_id]
        return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}

    is_file = args.data != PUBMEDQA
    data = load_dataset("json", data_files=args.data, split="train") if is_file else questions()
    encoded = data.map(encode, remove_columns=data.column_names)
    short = encoded.filter(lambda pair: len(pair["input_ids"]) <= args.max_length)
    print(f"{len(short)} pairs, {len(encoded) - len(short)} longer ones left out")
    if len(short) == 0:
        sys.exit(f"--data {args.data}: no pair has at most {args.max_length} tokens; raise --max-length")
    return short


def lora_model(args: argparse.Namespace) -> Any:
    """Return the frozen model with float32 matrices A and B beside its projections."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    lora = LoraConfig(
        r=args.rank, lora_alpha=args.alpha, target_modules=PROJECTIONS, task_type="CAUSAL_LM"
    )
    return get_peft_model(base, lora)


def main(argv: list[str] | None = None) -> Trainer:
    """Fine-tune from the last checkpoint, if there is one, and return the trainer."""
    args = parse(argv)
    options.require("transformers", "accelerate", "datasets", "peft")

    from transformers import (
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    options.refuse_missing_bf16(args.bf16)
    settings = TrainingArguments(
        output_dir=str(args.out),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_per_device,
        gradient_accumulation_steps=args.accumulate,
        lr_scheduler_type="cosine",
        warmup_steps=args.warmup,
        bf16=args.bf16,
        seed=args.seed,
        save_steps=args.save_every,
        save_total_limit=2,
        logging_steps=10,
    )
    options.refuse_data_parallel(settings)
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    with settings.main_process_first(desc="tokenize"):  # the others read its cache
        data = pairs(args, tokenizer)
    model = lora_model(args)
    model.print_trainable_parameters()

    steps = math.ceil(args.epochs * len(data) / args.batch)
    optimizer = options.build_optimizer(args, model, steps)
    trainer = Trainer(
        model=model,
        args=settings,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        train_dataset=data,
        processing_class=tokenizer,
        optimizers=(optimizer, None),  # the Trainer builds the scheduler of its settings
    )
    if trainer.is_world_process_zero():
        options.start_run(args)
    trainer.train(resume_from_checkpoint=options.last_checkpoint(args.out))
    trainer.save_model()  # the adapter, in the folder itself
    trainer.save_state()
    if trainer.is_world_process_zero():
        print(f"adapter and losses written to {args.out}")
    return trainer


if __name__ == "__main__":
    main()
