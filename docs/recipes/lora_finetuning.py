"""LoRA fine-tuning of a language model: peft and Hugging Face's Trainer with AdamCPR.

    python lora_finetuning.py --data pairs.jsonl --out runs/mistral

Every line of the data is an object with a ``prompt`` and an ``answer``; the loss is that of the answers.
The same command again continues from the last complete checkpoint. The defaults are the paper's run on
PubMedQA's ``pqa_artificial`` (100,000 pairs, one epoch; docs/recipes.md makes the file): Mistral 7B
Instruct, rank 128 and alpha 1 on all projections, learning rate 5e-4 with 50 steps of warm-up, then a
cosine, 128 pairs a step, and bounds from the weights after 100 steps (Kappa-WS).

CPR takes what is trained: the matrices A and B of each projection, each with a bound of its own, and not
the frozen weights under them. B starts at 0, so a bound in proportion to the start (``KappaKI0``) would
keep it there; Kappa-WS takes its bound once B has grown.

No result of the paper has been reproduced with this script. The paper does not say how it writes its
prompts, nor Adam's betas or a gradient norm; prompts go in here as they stand in the file, the rest is
as torch and transformers have it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The heavy imports stand in the functions, so that --help answers at once.
if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command's options."""
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
    in_one_pass = args.batch_per_device * int(os.environ.get("WORLD_SIZE", "1"))
    if args.batch % in_one_pass:
        parser.error(f"--batch {args.batch} is no multiple of the {in_one_pass} pairs of one pass")
    args.accumulate = args.batch // in_one_pass
    if not args.data.is_file():
        parser.error(f"--data {args.data}: there is no such file")
    return args


def refuse_missing_bf16(bf16: bool) -> None:
    """Without a GPU that has it the Trainer ends with advice on an option that this script lacks."""
    from transformers.utils import is_torch_bf16_gpu_available

    if bf16 and not is_torch_bf16_gpu_available():
        sys.exit("there is no GPU with bfloat16 here; train in float32 with --no-bf16")


def refuse_data_parallel(settings: TrainingArguments) -> None:
    """Without torchrun the Trainer splits the model over all GPUs and multiplies the batch by them."""
    if settings.n_gpu > 1:
        sys.exit(
            f"{settings.n_gpu} GPUs, one process: start this with torchrun --nproc-per-node "
            f"{settings.n_gpu}, or show it one GPU with CUDA_VISIBLE_DEVICES=0"
        )


def pairs(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Tokens of prompts and answers; the label -100 keeps the prompts out of the loss."""
    from datasets import load_dataset

    def encode(pair: dict[str, str]) -> dict[str, list[int]]:
        prompt = tokenizer(pair["prompt"])["input_ids"]
        answer = tokenizer(pair["answer"], add_special_tokens=False)["input_ids"]
        answer = [*answer, tokenizer.eos_token_id]
        return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}

    data = load_dataset("json", data_files=str(args.data), split="train")
    encoded = data.map(encode, remove_columns=data.column_names)
    short = encoded.filter(lambda pair: len(pair["input_ids"]) <= args.max_length)
    print(f"{len(short)} pairs, {len(encoded) - len(short)} left out as too long")
    if len(short) == 0:
        sys.exit(f"{args.data}: no pair of at most {args.max_length} tokens; see --max-length")
    return short


def last_checkpoint(folder: Path) -> str | None:
    """The newest complete one: trainer_state.json is what the Trainer writes last."""
    complete = [path.parent.name for path in folder.glob("checkpoint-*/trainer_state.json")]
    steps = [name.removeprefix("checkpoint-") for name in complete]  # of a checkpoint-best it is none
    newest = max((int(step) for step in steps if step.isdecimal()), default=None)
    return None if newest is None else str(folder / f"checkpoint-{newest}")


def lora_model(args: argparse.Namespace) -> Any:
    """The frozen model with matrices A and B beside its projections, those in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
    lora = LoraConfig(
        r=args.rank, lora_alpha=args.alpha, target_modules=PROJECTIONS, task_type="CAUSAL_LM"
    )
    return get_peft_model(base, lora)


def main(argv: list[str] | None = None) -> Trainer:
    """Fine-tune, from the last checkpoint on if there is one.

    Returns:
        The trainer when it is done.
    """
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
    with settings.main_process_first(desc="tokenize"):  # the other processes read what it cached
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
        optimizers=(optimizer, None),  # without a scheduler the Trainer makes the one of its settings
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(args.out))
    trainer.save_model()  # the adapter, into the folder itself
    if trainer.is_world_process_zero():
        print(optimizer.cpr.metrics())
    return trainer


if __name__ == "__main__":
    main()
