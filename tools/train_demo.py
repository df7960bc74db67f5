"""Train lily's demo model and write it as an MLX 4-bit folder.

    pip install torch==2.13.0 transformers==5.24.0 tokenizers safetensors jinja2
    python tools/train_demo.py --out src/lily_py/demo --work build/demo --minutes 50

A hybrid of the family's architecture (gated delta net, gated attention, experts, a shared expert, an MTP
head) learns generated conversations through its own chat template, in three phases: copying and sums in
short rows, then every kind of task in rows that hold whole tool conversations, then the MTP head alone on
the frozen trunk. `--work` holds the newest checkpoint; `--export-only` writes the folder from it, also
while a training runs. With `--steps` in place of `--minutes` a run repeats exactly on one machine and
thread count.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads starve each other on a busy machine

import numpy as np
import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))

from demo.data import MIX, WARM_UP, Sampler
from demo.export import export, round_to_stored
from demo.network import DemoNetwork, text_config
from demo.questions import held_out
from demo.text import Template, encode, pack, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Rows:
    """Packed tokens [N, T] int32 and their classes [N, T]: 0 padding, 1 prompt, 2 answer."""

    ids: np.ndarray
    classes: np.ndarray

    def batch(self, index: np.ndarray, prompt_weight: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids int64 and loss weights float32 of the rows at `index`."""
        weights = np.array([0.0, prompt_weight, 1.0], np.float32)[self.classes[index]]
        return torch.from_numpy(self.ids[index].astype(np.int64)), torch.from_numpy(weights)


def make_rows(sampler: Sampler, mix: dict[str, float], count: int, length: int, tokenizer: Tokenizer) -> Rows:
    """Generate `count` conversations of `mix` and pack them; every kind must survive the packing."""
    template = Template()
    conversations = [sampler.conversation(mix) for _ in range(count)]
    touched = [c for c in conversations if c.keys & sampler.held_out]
    if touched:
        raise RuntimeError(f"{len(touched)} training conversations contain held-out questions")
    items = encode(tokenizer, [template.render(c) for c in conversations])
    kinds = [c.kind for c in conversations]
    ids, classes, dropped = pack(items, kinds, length, tokenizer.token_to_id("<|endoftext|>"))
    print(
        f"{count} conversations in {len(ids)} rows of {length}, {ids.size / 1e6:.1f} M tokens, answers "
        f"{(classes == 2).mean():.2f}, padding {(classes == 0).mean():.3f}, dropped {dict(dropped)}",
        flush=True,
    )
    if sum(dropped.values()) > count // 100:
        raise RuntimeError("more than 1 % of the conversations exceed the rows: use longer rows")
    return Rows(ids, classes)


def optimizer(parameters: list[torch.nn.Parameter], rate: float, decay: float) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices alone."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)


def evaluate(network: DemoNetwork, rows: Rows) -> tuple[float, float]:
    """Return (nats a token, MTP agreement) on the answers of validation rows."""
    network.eval()
    results = []
    for i in range(0, min(len(rows.ids), 24), 4):
        ids, weight = rows.batch(np.arange(i, min(i + 4, len(rows.ids))), 0.0)
        results.append(network.agreement(ids, weight))
    network.train()
    return float(np.mean([r[0] for r in results])), float(np.mean([r[1] for r in results]))


def report(what: str, measured: tuple[float, float]) -> None:
    """Print what `evaluate` measured."""
    print(f"{what}: {measured[0]:.4f} nats a token on answers, MTP agreement {measured[1]:.4f}", flush=True)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, default=ROOT / "src/lily_py/demo", help="folder of the MLX checkpoint")
    p.add_argument("--work", type=Path, default=ROOT / "build/demo", help="folder of the training checkpoint")
    p.add_argument(
        "--questions", type=Path, default=ROOT / "tests/demo/questions.json", help="what to keep out"
    )
    p.add_argument("--minutes", type=float, default=50, help="training time")
    p.add_argument("--steps", type=int, help="train this many steps whatever the time")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--rate", type=float, default=2.5e-3, help="learning rate")
    p.add_argument("--batch-tokens", type=int, default=2560, help="tokens a step")
    p.add_argument("--row", type=int, default=640, help="tokens a row; the warm-up has rows of half this")
    p.add_argument("--conversations", type=int, default=120_000)
    p.add_argument("--warm-up", type=float, default=0.15, help="share of the training for copying and sums")
    p.add_argument("--mtp", type=float, default=0.13, help="share of the training for the MTP head")
    p.add_argument(
        "--prompt-weight", type=float, default=0.0, help="loss weight of tokens that aren't answers"
    )
    p.add_argument("--hidden", type=int, default=128)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--experts", type=int, default=8)
    p.add_argument("--active", type=int, default=2)
    p.add_argument("--inner", type=int, default=128, help="width of an expert")
    p.add_argument("--vocab", type=int, default=1024)
    p.add_argument("--resume", action="store_true", help="begin with the weights in --work")
    p.add_argument("--export-only", action="store_true", help="write --out from the checkpoint in --work")
    return p.parse_args()


def save(network: DemoNetwork, tokenizer: Tokenizer, a: argparse.Namespace) -> None:
    """Write the checkpoint in one move, so that a killed run leaves the one before."""
    new = a.work / "checkpoint.tmp"
    torch.save({"weights": network.state_dict(), "tokenizer": tokenizer.to_str()}, new)
    new.replace(a.work / "checkpoint.pt")


def train(
    network: DemoNetwork, tokenizer: Tokenizer, phases: list[Rows], validation: Rows, a: argparse.Namespace
) -> None:
    """Run the three phases and leave the result in `network` and in the work folder."""
    trunk, head = list(network.trunk.parameters()), list(network.mtp.parameters())
    for_trunk, for_head = optimizer(trunk, a.rate, 0.05), optimizer(head, a.rate, 0.02)
    shuffle = np.random.default_rng(a.seed)
    begin = saved = time.time()
    step = tokens = 0
    phase, order = -1, np.empty(0, np.int64)
    while (done := step / a.steps if a.steps else (time.time() - begin) / (60 * a.minutes)) < 1:
        wanted = 0 if done < a.warm_up else 1 if done < 1 - a.mtp else 2
        if wanted != phase:
            phase, order = wanted, order[:0]
            print(f"phase {phase}", flush=True)
        rows = phases[phase]
        length = rows.ids.shape[1]
        size = a.batch_tokens // length
        if phase < 2:
            part = done / (1 - a.mtp)
            rate = a.rate * min(1, (step + 1) / 100) * (1 if part < 0.45 else max(0.02, (1 - part) / 0.55))
            active, chosen, loss_of = for_trunk, trunk, network.trunk_loss
        else:
            rate = a.rate * max(0.03, (1 - done) / a.mtp)
            active, chosen, loss_of = for_head, head, network.mtp_loss
        for group in active.param_groups:
            group["lr"] = rate
        if len(order) < size:
            order = shuffle.permutation(len(rows.ids))
        ids, weight = rows.batch(order[:size], a.prompt_weight)
        order = order[size:]
        loss = loss_of(ids, weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(chosen, 1.0)
        active.step()
        active.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + ids.numel()
        if step % 50 == 0:
            passed = time.time() - begin
            line = f"{passed / 60:5.1f} min  step {step:5d}  {tokens / 1e6:6.2f} M tokens"
            print(
                f"{line}  {tokens / passed:6.0f} tok/s  loss {float(loss):.4f}  rate {rate:.1e}", flush=True
            )
        if time.time() - saved > 150:
            saved = time.time()
            save(network, tokenizer, a)
            report("so far", evaluate(network, validation))
    save(network, tokenizer, a)
    print(f"{step} steps, {tokens / 1e6:.1f} M tokens, {(time.time() - begin) / 60:.1f} minutes", flush=True)


def main() -> None:
    """Train, export and report."""
    a = arguments()
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    a.work.mkdir(parents=True, exist_ok=True)
    network = DemoNetwork(text_config(a.vocab, a.hidden, a.layers, a.experts, a.active, a.inner))
    if a.export_only:
        stored = torch.load(a.work / "checkpoint.pt", weights_only=True)
        network.load_state_dict(stored["weights"])
        print(f"{export(network, Tokenizer.from_str(stored['tokenizer']), a.out) / 1e6:.2f} MB in {a.out}")
        return
    sampler = Sampler(a.seed, held_out(a.questions))
    template = Template()
    tokenizer = train_tokenizer((template.render(sampler.conversation(MIX)) for _ in range(8000)), a.vocab)
    if a.resume:
        stored = torch.load(a.work / "checkpoint.pt", weights_only=True)
        network.load_state_dict(stored["weights"])
        tokenizer = Tokenizer.from_str(stored["tokenizer"])
    short = make_rows(sampler, WARM_UP, a.conversations // 4, a.row // 2, tokenizer)
    whole = make_rows(sampler, MIX, a.conversations, a.row, tokenizer)
    validation = make_rows(sampler, MIX, 400, a.row, tokenizer)
    sizes = [sum(p.numel() for p in part.parameters()) / 1e6 for part in (network.trunk, network.mtp)]
    print(
        f"{sizes[0]:.2f} M parameters, MTP head {sizes[1]:.2f} M, vocabulary {tokenizer.get_vocab_size()}",
        flush=True,
    )
    train(network, tokenizer, [short, whole, whole], validation, a)
    report("full precision", evaluate(network, validation))
    print(f"{export(network, tokenizer, a.out) / 1e6:.2f} MB in {a.out}")
    round_to_stored(network)
    report("as stored", evaluate(network, validation))


if __name__ == "__main__":
    main()
