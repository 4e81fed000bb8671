"""A serving loop: requests come and go while a batch decodes. A minute on any CPU; on a GPU, every step replays one CUDA graph.

pip install 'kvgen[transformers]'
python examples/serve_loop.py
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import kvgen
from kvgen.integrations.transformers import DecodeLoop, KvgenCache

PLACES, MAX_LEN = 4, 1024
FORMAT = {"key": {"bits": 4, "axis": "channel", "group": 128}, "value": {"bits": 4, "axis": "token", "group": 64}}


@dataclass
class Request:
    """A prompt, and how many tokens to generate."""

    prompt: torch.Tensor
    wanted: int
    found: list[int] = field(default_factory=list)


def main() -> None:
    """Serve ten requests with four places."""
    warnings.simplefilter("ignore", kvgen.FallbackWarning)  # nothing is tuned for so small a model
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, dtype=torch.bfloat16,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="kvgen").eval().to(device)
    cache = KvgenCache(model.config, FORMAT, PLACES, MAX_LEN)
    loop = DecodeLoop(model, cache)  # compile=True fuses norms, rotary embedding and MLP

    waiting = [Request(torch.randint(3, 1000, (100 + 60 * n,)), 20 + 5 * n) for n in range(10)]
    serving: dict[int, Request] = {}
    started, steps, tokens = time.perf_counter(), 0, 0
    while waiting or serving:
        while waiting and loop.free:
            request = waiting.pop(0)
            serving[loop.add(request.prompt)] = request  # prefills, and chooses the first token
        newest = loop.tokens.tolist()
        for place, request in list(serving.items()):
            request.found.append(newest[place])
            if len(request.found) >= request.wanted:  # or an end-of-sequence token
                loop.remove(place)
                del serving[place]
                tokens += len(request.found)
                print(f"step {steps:3}: place {place} finished a prompt of {len(request.prompt)} with {len(request.found)} tokens")
        if serving:
            loop.step()
            steps += 1
    print(f"{tokens} tokens in {steps} steps of up to {PLACES} sequences, {time.perf_counter() - started:.1f} s on {device}")


if __name__ == "__main__":
    main()
