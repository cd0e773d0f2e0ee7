"""The engine OpenVINO GenAI, on a model that optimum-intel exports, or on a GGUF file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from .peer import Peer, Setup, UnavailableError, need, padded, timed

LOOKUP = 5
"""Draft tokens, as in OpenVINO's sample."""


class OpenVINO(Peer):
    """OpenVINO GenAI with its default settings, on a model that optimum-intel exports.

    By default, keys and values have 8 bits. Products are in bfloat16, also if weights are stored in float16.
    """

    FORMATS = {  # noqa: RUF012  # integers are symmetric like ours; 4-bit integers are in groups of 128
        "float32": "fp32",
        "bfloat16": "fp16",
        "int8": "int8 --sym",
        "int4": "int4 --sym --group-size 128 --group-size-fallback adjust",
    }

    def __init__(self, setup: Setup):
        self.np = need("numpy")
        self.openvino = need("openvino", "openvino-genai")
        self.genai = need("openvino_genai", "openvino-genai")
        self.is_file = setup.model.endswith(".gguf")
        if not self.is_file and setup.dtype not in self.FORMATS:
            raise UnavailableError(f"OpenVINO has no {setup.dtype}; it has {', '.join(self.FORMATS)}")
        self.version = self.genai.__version__
        self.modes = ("plain", "prompt lookup", *(("draft model",) if setup.draft_model else ()))
        self.setup = setup
        self.folder = Path(setup.export)
        self.options = dict[str, Any](INFERENCE_NUM_THREADS=setup.threads, PERFORMANCE_HINT="LATENCY")
        if setup.dtype == "float32":
            self.options["INFERENCE_PRECISION_HINT"] = "f32"
        self.pipelines: dict[str, Any] = {}
        self.request: Any = None

    def load(self) -> None:
        """See `Peer`."""
        self._export(self.setup.model, self.folder)
        self._pipeline("plain")

    def decode(self, ids: list[int], count: int) -> tuple[float, list[int]]:
        """See `Peer`."""
        result = self._run([ids], count + 1, "plain")
        return result.perf_metrics.get_tpot().mean / 1e3 * count, list(result.tokens[0])

    def prompt(self, ids: list[int]) -> float:
        """See `Peer`."""
        return timed(lambda: self._run([ids], 1, "plain"))[0]

    def verify(self, ids: list[int], rows: int, times: int) -> list[float] | None:
        """See `Peer`. GenAI does not offer it, so the same model runs directly in OpenVINO's runtime."""
        if self.request is None:
            file = self.folder / "openvino_model.xml"
            model = self.openvino.Core().compile_model(file, "CPU", self.options)
            self.request = model.create_infer_request()

        def once() -> float:
            self.request.reset_state()
            self._infer(ids, 0)
            return timed(lambda: self._infer(ids[:rows], len(ids)))[0]

        return [once() for _ in range(1 + times)][1:]

    def answers(self, prompts: list[list[int]], count: int, mode: str) -> list[list[int]]:
        """See `Peer`. Padding on the left marks where shorter prompts begin; it is not computed."""
        return [list(tokens) for tokens in self._run(prompts, count, mode).tokens]

    def _run(self, prompts: list[list[int]], count: int, mode: str) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        config.apply_chat_template = False
        if mode == "prompt lookup":
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP, 3
        elif mode == "draft model":
            config.num_assistant_tokens = LOOKUP
        ids, mask = (
            self.openvino.Tensor(self.np.array(rows, dtype=self.np.int64)) for rows in padded(prompts)
        )
        return self._pipeline(mode).generate(self.genai.TokenizedInputs(ids, mask), config)

    def _pipeline(self, mode: str) -> Any:
        """Return the pipeline of a mode. It is loaded on first use."""
        if mode not in self.pipelines:
            scheduler = self.genai.SchedulerConfig()
            scheduler.enable_prefix_caching = False  # else prompts of earlier rounds would be in the cache
            scheduler.max_num_batched_tokens = 1 << 16  # so that any prompt is one pass
            scheduler.cache_size = 1  # GB
            options = dict(self.options)
            if mode == "prompt lookup":
                options["prompt_lookup"] = True
            elif mode == "draft model":
                drafts = self.folder.with_name(f"{self.folder.name}-draft")
                self._export(self.setup.draft_model, drafts)
                options["draft_model"] = self.genai.draft_model(str(drafts), "CPU")
            self.pipelines[mode] = self.genai.LLMPipeline(
                str(self.folder), "CPU", scheduler_config=scheduler, **options
            )
        return self.pipelines[mode]

    def _infer(self, ids: list[int], past: int) -> None:
        np, end = self.np, past + len(ids)
        inputs = {
            "input_ids": np.array([ids], dtype=np.int64),
            "attention_mask": np.ones((1, end), dtype=np.int64),
            "position_ids": np.arange(past, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        self.request.infer(inputs)

    def _export(self, model: str, folder: Path) -> None:
        """Export a model, if that was not done before.

        The export goes to another name and is renamed when complete, so `folder` is never partial.
        """
        if folder.is_dir():
            return
        unfinished = folder.with_suffix(".unfinished")
        if model.endswith(".gguf"):
            unfinished.mkdir(exist_ok=True)
            link = unfinished / "model.gguf"  # OpenVINO writes what it makes of a file beside the file
            link.unlink(missing_ok=True)
            link.symlink_to(Path(model).resolve())
            try:
                self.genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
            except RuntimeError as error:  # types of blocks, or a family, that it does not read
                raise UnavailableError(f"OpenVINO does not read {model}: {error}") from error
        else:
            need("optimum.intel", "optimum-intel[openvino,nncf]")
            command = ["-m", "optimum.commands.optimum_cli", "export", "openvino", "--model", model]
            weights = f"--task text-generation-with-past --weight-format {self.FORMATS[self.setup.dtype]}"
            command += [*weights.split(), str(unfinished)]
            subprocess.run([sys.executable, *command], check=True, stdout=sys.stderr)
        unfinished.rename(folder)
