"""Training of draft heads: several candidates on the same batches, then only the best of them."""

from __future__ import annotations

import copy
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from draftmark_speculative.eagle import DraftHead, HeadConfig
from draftmark_speculative.models import CausalLM

from .acceptance import acceptance
from .text import Sample, frequent_tokens
from .unroll import DenseForward, TextBatch, batches, chain_loss


@dataclass(frozen=True)
class Plan:
    """Settings and duration of a training.

    Attributes:
        minutes: wall-clock time from the start of `main` to the saved head.
        seed: seed of the prompts, the sampled answers, the batches and the initial weights.
        writing: fraction of `minutes` after which no more text is written.
        choosing: fraction of `minutes` after which only the best candidate trains.
        vocab: size of the draft vocabulary: the most frequent tokens of the answers.
        intermediate: width of the head's SwiGLU layer.
        steps, decay: length and weights of the unrolled chain; see `chain_loss`.
        batch_tokens: tokens of a training batch.
        lr: peak learning rate.
        write_batch, prompt_width, new_tokens: answers written together, longest prompt, longest answer.
        own: number of prompts that the target samples itself.
    """

    minutes: float
    seed: int = 0
    writing: float = 0.3
    choosing: float = 0.5
    vocab: int = 16384
    intermediate: int = 1472
    steps: int = 6
    decay: float = 0.9
    batch_tokens: int = 16384
    lr: float = 1e-3
    write_batch: int = 2048
    prompt_width: int = 128
    new_tokens: int = 448
    own: int = 12000


@dataclass(frozen=True)
class Candidate:
    """Variant of a head.

    Attributes:
        features: hidden states of the target that the head reads, as in `HeadConfig.feature_layers`.
        sharpness: the labels are the target's distribution at temperature 1 / sharpness.
    """

    features: tuple[int, ...]
    sharpness: float


class Trainee:
    """A candidate in training: weights in float32, and a copy in the model's dtype that runs.

    Its features are standardised per channel. Some channels of a language model are hundreds of times larger than
    others, so no single learning rate suits all. `finished` multiplies the factors into the head's weights.
    """

    def __init__(self, candidate: Candidate, model: CausalLM, d2t: torch.Tensor, scale: torch.Tensor, plan: Plan):
        self.candidate, self.plan = candidate, plan
        layer, hf = model.layers[0], model.hf.config.get_text_config()
        self.config = HeadConfig(
            model.hidden_size, model.vocab_size, layer.num_qo_heads, layer.num_kv_heads, layer.head_dim,
            plan.intermediate, candidate.features, len(d2t), _rope_theta(hf), hf.rms_norm_eps, model.name,
        )  # fmt: skip
        self.scale = scale if len(candidate.features) > 1 else torch.ones_like(scale)
        torch.manual_seed(plan.seed)
        self.head = DraftHead(self.config)
        self._begin()
        self.head.d2t = d2t.cpu().clone()
        self.head.to(model.device)
        self.weight = self.head.output_rows(model.lm_head).detach()
        self._running = copy.deepcopy(self.head).to(model.dtype)
        self._masters, self._copies = list(self.head.parameters()), list(self._running.parameters())
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        groups = [
            {"params": [p for p in self._masters if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in self._masters if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=plan.lr, betas=(0.9, 0.95), fused=True)

    def _begin(self) -> None:
        """Initialise small random weights, but let the fused feature start near the last hidden state that is read."""
        size = self.config.hidden_size
        with torch.no_grad():
            for parameter in self.head.parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, std=0.02)
            if self.head.feature_proj is not None:
                self.head.feature_proj.weight[:, -size:] += torch.diag(1 / self.scale[-size:].cpu())

    def start_from(self, head: DraftHead) -> None:
        """Load the weights of a finished head of the same shape; its draft vocabulary may differ."""
        state = {**head.state_dict(), "d2t": self.head.d2t}
        if self.head.feature_proj is not None:
            state["feature_proj.weight"] = head.feature_proj.weight / self.scale.cpu()
        self.load(state)

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Load weights in the form of `head.state_dict()`."""
        self.head.load_state_dict(state)
        self._running.load_state_dict(state)

    def step(self, inputs: Sequence[Any], lr: float) -> torch.Tensor:
        """Do one update from `chain_loss`'s inputs (embeddings, features, labels, rows); return the loss tensor."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        loss = chain_loss(self._running, *inputs, self.weight, self.plan.decay)
        loss.backward()
        torch._foreach_copy_([p.grad for p in self._masters], [p.grad for p in self._copies])
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self._copies, self._masters)
        for running in self._copies:
            running.grad = None
        return loss.detach()

    def finished(self, dtype: torch.dtype) -> DraftHead:
        """Return a copy of the head that reads the target's features without standardisation."""
        head = DraftHead(self.config)
        state = {name: tensor.detach().cpu().clone() for name, tensor in self.head.state_dict().items()}
        if head.feature_proj is not None:
            state["feature_proj.weight"] *= self.scale.cpu()
        head.load_state_dict(state)
        return head.to(self.weight.device, dtype).requires_grad_(False).eval()


def _rope_theta(config: Any) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", 10000.0))


class Target:
    """Computes the target's features for the batches once, and keeps them on the device.

    Attributes:
        layers: hidden states that are kept. The last one is among them, because the labels come from it.
    """

    def __init__(self, model: CausalLM, candidates: Sequence[Candidate]) -> None:
        self.model = model
        read = {layer for candidate in candidates for layer in candidate.features}
        self.layers = sorted({*read, len(model.layers)})
        self._taps = model.tap(self.layers)

    @torch.no_grad()
    def prepare(self, samples: Sequence[Sample], plan: Plan, rng: random.Random) -> list[Prepared]:
        """Return all samples in batches, with features."""
        return [self._prepare(batch, plan.steps) for batch in batches(samples, plan.batch_tokens, rng)]

    def _prepare(self, batch: TextBatch, steps: int) -> Prepared:
        rows, length = batch.tokens.shape
        tokens = batch.tokens.to(self.model.device)
        positions = torch.arange(length, device=tokens.device).repeat(rows)
        forward = DenseForward(self.model, rows)
        _, features = self.model.forward_features(tokens.reshape(-1), positions, forward, self._taps, positions[:1])
        guessed = [index.to(tokens.device) for index in batch.guessed(steps)]
        return Prepared(tokens, features.view(rows, length, len(self.layers), -1), guessed)

    @torch.no_grad()
    def labels(self, batch: Prepared, weight: torch.Tensor, sharpness: float) -> torch.Tensor:
        """Return the target's distribution over the draft vocabulary after each token, ``[batch · length, vocab]``."""
        logits = batch.features[:, :, -1].flatten(0, 1) @ weight.T
        return (logits.float() * sharpness).softmax(-1).to(weight.dtype)


@dataclass(frozen=True)
class Prepared:
    """A batch on the device.

    Attributes:
        tokens: int64 ``[batch, length]``.
        features: ``[batch, length, layers, hidden_size]``.
        guessed: indices from `TextBatch.guessed`.
    """

    tokens: torch.Tensor
    features: torch.Tensor
    guessed: list[torch.Tensor]


def scales(batches: Sequence[Prepared]) -> torch.Tensor:
    """Return 1 / (root mean square) of every channel and layer, over answers: a text's first token is an outlier."""
    rows = torch.cat([b.features.flatten(0, 1)[b.guessed[0]] for b in batches[:8]]).float()
    return rows.pow(2).mean(0).sqrt().clamp(min=1e-3).reciprocal()


def train(
    model: CausalLM, samples: Sequence[Sample], held_out: Sequence[Sample], candidates: Sequence[Candidate],
    plan: Plan, began: float, work: Path, out: Path, start_from: Path | None,
) -> tuple[Trainee, dict[str, Any]]:  # fmt: skip
    """Train all candidates up to `plan.choosing`, and then the best one to the end of the time."""
    rng, target = random.Random(plan.seed), Target(model, candidates)
    prepared = target.prepare(samples, plan, rng)
    print(f"{len(prepared)} batches, {time.perf_counter() - began:.0f} s", flush=True)
    d2t, coverage = frequent_tokens(samples, min(plan.vocab, model.vocab_size), model)
    scale = scales(prepared)
    trainees = [Trainee(c, model, d2t, pick(scale, target.layers, c), plan) for c in candidates]
    report: dict[str, Any] = {"coverage": round(coverage, 5), "log": []}
    if start_from is not None:
        for trainee in trainees:
            trainee.start_from(DraftHead.load(start_from))
    state, step = work / "state.pt", 0
    if state.exists():
        trainees, step = resume(state, trainees)
    start = shown = saved = time.perf_counter()
    end, choose_at = began + plan.minutes * 60, began + plan.minutes * 60 * plan.choosing
    seen_tokens, passes, waiting = 0, 0, []
    while (now := time.perf_counter()) < end:
        if not waiting:
            waiting, passes = rng.sample(prepared, len(prepared)), passes + 1
        batch = waiting.pop()
        lr = plan.lr * min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * (now - start) / (end - start)))
        losses = {str(t.candidate): update(t, target, batch, lr) for t in trainees}
        step, seen_tokens = step + 1, seen_tokens + batch.tokens.numel()
        if step % 8 == 0 and model.device.type == "cuda":
            torch.cuda.synchronize()  # the clock decides when to stop, so the host must not run ahead of the device
        if len(trainees) > 1 and now > choose_at:
            trainees = [_best(trainees, model, held_out, plan, report)]
        if now - shown > plan.minutes * 3:
            shown = now
            row = {"step": step, "seconds": round(now - start), "tokens": seen_tokens, "passes": passes,
                   "loss": {name: round(loss.item(), 4) for name, loss in losses.items()}}  # fmt: skip
            report["log"].append(row)
            print(json.dumps(row), flush=True)
        if now - saved > 60:
            saved = now
            save_state(state, trainees, step)
            trainees[0].finished(torch.bfloat16).save(out)
    if len(trainees) > 1:
        trainees = [_best(trainees, model, held_out, plan, report)]
    return trainees[0], {**report, "steps": step, "tokens_seen": seen_tokens, "passes": passes}


def update(trainee: Trainee, target: Target, batch: Prepared, lr: float) -> torch.Tensor:
    """Do one step of a candidate on a batch; return the loss tensor."""
    labels = target.labels(batch, trainee.weight, trainee.candidate.sharpness)
    own = pick(batch.features, target.layers, trainee.candidate) * trainee.scale
    embeddings = target.model.embed(batch.tokens)
    return trainee.step((embeddings, own.to(embeddings.dtype), labels, batch.guessed), lr)


def pick(tensor: torch.Tensor, layers: Sequence[int], candidate: Candidate) -> torch.Tensor:
    """Return the candidate's features of ``[…, layers, hidden_size]``, concatenated."""
    return tensor[..., [layers.index(layer) for layer in candidate.features], :].flatten(-2)


def _best(trainees: Sequence[Trainee], model: CausalLM, held_out: Sequence[Sample], plan: Plan, report: Any) -> Trainee:
    found = [acceptance(model, t.finished(model.dtype), held_out, plan.steps) for t in trainees]
    report["candidates"] = [{**asdict(t.candidate), **row} for t, row in zip(trainees, found, strict=True)]
    for row in report["candidates"]:
        print(json.dumps(row), flush=True)
    return trainees[max(range(len(found)), key=lambda i: found[i]["chain"])]


def save_state(file: Path, trainees: Sequence[Trainee], step: int) -> None:
    """Save all data that `resume` needs."""
    states = [(str(t.candidate), t.head.state_dict(), t.optimizer.state_dict(), t.scale) for t in trainees]
    torch.save({"step": step, "trainees": states}, file)


def resume(file: Path, trainees: Sequence[Trainee]) -> tuple[list[Trainee], int]:
    """Load the saved state into the trainees that the file contains; return them and the step."""
    stored = torch.load(file, weights_only=True)
    by_name = {str(t.candidate): t for t in trainees}
    kept = []
    for name, head, optimizer, scale in stored["trainees"]:
        trainee = by_name[name]
        trainee.load(head)
        trainee.optimizer.load_state_dict(optimizer)
        trainee.scale = scale.to(trainee.weight.device)
        kept.append(trainee)
    print(f"resumed {len(kept)} heads at step {stored['step']}", flush=True)
    return kept, stored["step"]
