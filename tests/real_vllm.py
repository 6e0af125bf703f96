"""A real vLLM on a CPU, its model of two layers made on the spot: the wire format is the real one.

Its words mean nothing. Nothing here is imported from vLLM: it runs under a Python of its own.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pytest_dsv41.engines import get_engine

NGRAM = (
    "--speculative-config",
    '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4,"prompt_lookup_min":1}',
)
"""Speculation by what stood in the prompt: nothing more to load."""

ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
"""Nothing is loaded from elsewhere, and nothing is told."""
_MODEL = """
import sys
from pathlib import Path
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
folder, text = Path(sys.argv[1]), Path(sys.argv[2]).read_text()
import torch
torch.manual_seed(0)
bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator([text], vocab_size=512, special_tokens=["<s>", "</s>"])
bpe.save(str(folder / "bpe.json"))
tokenizer = PreTrainedTokenizerFast(
    tokenizer_file=str(folder / "bpe.json"), bos_token="<s>", eos_token="</s>"
)
tokenizer.chat_template = "{% for m in messages %}{{m['role']}}: {{m['content']}}\\n{% endfor %}a:"
tokenizer.save_pretrained(folder)
LlamaForCausalLM(
    LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=1024,
        bos_token_id=0, eos_token_id=1,
    )
).save_pretrained(folder)
"""


@contextmanager
def serving(python: str, folder: Path, *more: str) -> Iterator[str]:
    """The address of a server of a model made in `folder`, started with `more` and ended after."""
    text = Path(__file__).resolve().parents[1] / "LICENSE"
    subprocess.run(
        [python, "-c", _MODEL, str(folder), str(text)], check=True, env=ENVIRONMENT, timeout=300
    )
    with served(python, folder, "--dtype", "bfloat16", *more) as url:
        yield url


@contextmanager
def served(python: str, model: Path, *more: str) -> Iterator[str]:
    """The address of a server of the model in a folder, on a free port, as `tiny`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port),
        "--max-model-len", "1024", "--max-num-seqs", "4",
        "--enforce-eager", "--enable-prompt-tokens-details", *more,
    ]  # fmt: skip
    log = model / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv, stdout=out, stderr=out, env=ENVIRONMENT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 900
        while get_engine("vllm").health(url) != "up":
            if process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"no server: {log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
