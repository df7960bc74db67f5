"""llama.cpp's own server, asked over HTTP as its clients do."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lily_py.bench.llama_cpp import BINARIES, Setting, find_program
from lily_py.bench.process import ArmError

_LONGEST_START = 300.0


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        ids: generated tokens.
        ttft: seconds from sending the request to the first of them.
        cached: prompt tokens that the server didn't compute, as it says.
    """

    ids: list[int]
    ttft: float
    cached: int


def missing_reason() -> str | None:
    """Say why the server can't be measured here, or None if it can."""
    if find_program("llama-server"):
        return None
    return f"no llama-server on the PATH or in the folder that {BINARIES} names"


def server_command(program: str, setting: Setting, file: Path, context: int, threads: int) -> list[str]:
    """Return the server's command, without its address: one slot, everything else at its defaults."""
    return [
        program, "-m", str(file), "-c", str(context), "-np", "1", "-t", str(threads), "-tb", str(threads),
        "-fa", "on" if setting.flash_attention else "off",
        "-b", str(max(2048, setting.batch)), "-ub", str(setting.batch),
        "--repack" if setting.repack else "--no-repack", "--no-webui", "--host", "127.0.0.1",
    ]  # fmt: skip


@contextmanager
def running(command: Sequence[str]) -> Iterator[LlamaServer]:
    """Run a server while the block lasts.

    Raises:
        ArmError: it doesn't come up.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    log = subprocess.DEVNULL
    try:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=log)
    except OSError as error:
        raise ArmError(f"{command[0]}: can't be started ({error.strerror or error})") from error
    try:
        server = LlamaServer(port)
        end = time.monotonic() + _LONGEST_START
        while not server.is_ready():
            if process.poll() is not None:
                raise ArmError(f"{' '.join(command)}: ended with status {process.returncode}")
            if time.monotonic() > end:
                raise ArmError(f"{' '.join(command)}: isn't ready after {_LONGEST_START:.0f} s")
            time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait()


class LlamaServer:
    """A server on this machine.

    Args:
        port: that it listens on.
    """

    def __init__(self, port: int) -> None:
        self._port = port

    def is_ready(self) -> bool:
        """Whether it has loaded its model."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False
        finally:
            connection.close()

    def complete(self, prompt: Sequence[int], count: int, *, reuse: bool) -> Completion:
        """Return the greedy continuation of a prompt.

        Args:
            prompt: token ids.
            count: tokens to generate.
            reuse: go on from what earlier prompts left behind (its ``cache_prompt``).

        Raises:
            ArmError: it refuses, or generates another number of tokens.
        """
        body = {
            "prompt": list(prompt),
            "n_predict": count,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": reuse,
            "return_tokens": True,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        start = time.perf_counter()
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise ArmError(
                f"llama-server: {error!r}; it ends at a GGUF file without a vocabulary: write it again with "
                "`lily bench export-gguf`"
            ) from error
        finally:
            connection.close()
        seconds = time.perf_counter() - start
        if response.status != http.client.OK:
            raise ArmError(f"llama-server: {response.status}: {text[:400]}")
        answer = json.loads(text)
        ids, timings = answer["tokens"], answer["timings"]
        if len(ids) != count:
            raise ArmError(f"llama-server: generated {len(ids)} tokens instead of {count}")
        # The tokens after the first one are what it counts as predicted.
        return Completion(ids, seconds - timings["predicted_ms"] / 1e3, int(timings["cache_n"]))
