"""Fine-tune a language model with LoRA: peft, Hugging Face's Trainer and AdamCPR.

    python lora_finetuning.py --data pairs.jsonl --out runs/mistral

Every line of the data is an object with a ``prompt`` and an ``answer``; the loss is that of the answers.
The same command resumes from the last complete checkpoint. The defaults are the paper's run on
``pqa_artificial`` of PubMedQA (100,000 pairs, one epoch; docs/how-to/libraries.md creates the file):
Mistral 7B Instruct, rank 128 and alpha 1 on all projections, learning rate 5e-4 with 50 steps of
warm-up, then a cosine, 128 pairs per step, and bounds from the weights after 100 steps (Kappa-WS).

CPR regularizes the trainable parameters: the matrices A and B of each projection, each with its own
bound. B starts at 0, where a bound in proportion to the initial weights (``KappaKI0``) would keep it;
Kappa-WS sets the bound once B has grown.

No result of the paper has been reproduced with this script. The paper does not state its prompts, Adam's
betas or a gradient norm; here the prompts are those of the file, and the others are the defaults of
torch and transformers.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Slow imports are in the functions, so that --help is fast.
if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    about, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="jsonl file of prompts and answers")
    add("--out", type=Path, required=True, help="folder for checkpoints")
    add("--model", default="mistralai/Mistral-7B-Instruct-v0.2", help="name on the hub, or a folder")
    add("--rank", type=int, default=128)
    add("--alpha", type=float, default=1.0)
    add("--lr", type=float, default=5e-4)
    add("--warmup", type=int, default=50, help="steps of linear warm-up")
    add("--warm-start", type=int, default=100, metavar="N", help="bounds from the weights after N steps")
    add("--epochs", type=float, default=1.0)
    add("--batch", type=int, default=128, help="pairs per step, all devices together")
    add("--batch-per-device", type=int, default=4, help="pairs per device and pass")
    add("--max-length", type=int, default=1024, help="tokens; longer pairs are left out")
    add("--save-every", type=int, default=100, help="steps between checkpoints")
    add("--seed", type=int, default=0)
    add("--bf16", action=argparse.BooleanOptionalAction, default=True, help="mixed precision")
    args = parser.parse_args(argv)
    pairs_per_pass = args.batch_per_device * int(os.environ.get("WORLD_SIZE", "1"))
    if args.batch % pairs_per_pass:
        parser.error(
            f"--batch: expected a multiple of {pairs_per_pass}, the pairs per pass, got {args.batch}"
        )
    args.accumulate = args.batch // pairs_per_pass
    if not args.data.is_file():
        parser.error(f"--data {args.data}: the file does not exist")
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


def pairs(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Return the tokens of prompts and answers; the label -100 excludes the prompts from the loss."""
    from datasets import load_dataset

    def encode(pair: dict[str, str]) -> dict[str, list[int]]:
        prompt = tokenizer(pair["prompt"])["input_ids"]
        answer = tokenizer(pair["answer"], add_special_tokens=False)["input_ids"]
        answer = [*answer, tokenizer.eos_token_id]
        return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}

    data = load_dataset("json", data_files=str(args.data), split="train")
    encoded = data.map(encode, remove_columns=data.column_names)
    short = encoded.filter(lambda pair: len(pair["input_ids"]) <= args.max_length)
    print(f"{len(short)} pairs, {len(encoded) - len(short)} longer ones left out")
    if len(short) == 0:
        sys.exit(f"--data {args.data}: no pair has at most {args.max_length} tokens; raise --max-length")
    return short


def last_checkpoint(folder: Path) -> str | None:
    """Return the newest complete checkpoint: the Trainer writes trainer_state.json last."""
    complete = [path.parent.name for path in folder.glob("checkpoint-*/trainer_state.json")]
    steps = [name.removeprefix("checkpoint-") for name in complete]  # checkpoint-best has no step
    newest = max((int(step) for step in steps if step.isdecimal()), default=None)
    return None if newest is None else str(folder / f"checkpoint-{newest}")


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

    from transformers import (
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    from nnunet_cpr import AdamCPR, KappaWS

    refuse_missing_bf16(args.bf16)
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
    refuse_data_parallel(settings)
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    with settings.main_process_first(desc="tokenize"):  # the others read its cache
        data = pairs(args, tokenizer)
    model = lora_model(args)
    model.print_trainable_parameters()

    optimizer = AdamCPR(model, lr=args.lr, kappa=KappaWS(args.warm_start))
    trainer = Trainer(
        model=model,
        args=settings,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        train_dataset=data,
        processing_class=tokenizer,
        optimizers=(optimizer, None),  # the Trainer builds the scheduler of its settings
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(args.out))
    trainer.save_model()  # the adapter, in the folder itself
    if trainer.is_world_process_zero():
        print(optimizer.cpr.metrics())
    return trainer


if __name__ == "__main__":
    main()
