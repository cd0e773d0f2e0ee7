"""`LLM`: what a user imports. Generate, chat, stream."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import NoReturn, Self, Unpack, overload

import torch
from torch import nn

from soothsay.chat_layout import conversation
from soothsay.config import DType, EngineConfig, EngineOptions, KVDType, check_names, checks_names
from soothsay.core.cache import kv_bytes
from soothsay.core.constraint import Constraint
from soothsay.core.params import SamplingParams
from soothsay.core.request import Request
from soothsay.core.tenant import EVERYBODY, Tenant
from soothsay.drafters.base import Drafter
from soothsay.drafters.learned_files import LearnedFiles
from soothsay.drafters.learning.learning_drafter import can_learn
from soothsay.drafters.registry import DrafterSpec, build_drafter
from soothsay.engine.engine import Engine
from soothsay.engine.guard import check_torch
from soothsay.engine.sizing import complete_config
from soothsay.errors import DrafterError, ModelError, RequestError
from soothsay.model.native.library import check_kernels
from soothsay.model.ops.lora import Adapters
from soothsay.model.pipeline.pipeline import Stages, load_pipeline
from soothsay.model.transformer import Transformer
from soothsay.model.weights.adapter_files import opened_adapters
from soothsay.model.weights.checkpoint import open_checkpoint
from soothsay.model.weights.generation_config import sampling_in_folder
from soothsay.model.weights.load import load_model
from soothsay.model.weights.numeric_mode import described_mode
from soothsay.progress import tell_progress
from soothsay.request_builder import Prompt, RequestBuilder, check_params, for_each, listed
from soothsay.result import Result, Stream, Submitted, refusal
from soothsay.tokenizer import NO_TOKENIZER, Message, Tokenizer, with_layout

MISPLACED = {field.name: f"give SamplingParams({field.name}=...)" for field in fields(SamplingParams)}
"""What to write in place of an argument that is a sampling parameter."""


class LLM:
    """A language model with its engine and its drafters.

    It computes with the threads that PyTorch has in this process, by default one for each physical core:
    `torch.set_num_threads(4)` sets their number.

    Args:
        model: a Hugging Face directory, a `.gguf` file, the name of a bundled model, `owner/name` on the hub,
            or a `Transformer`. `directory:TYPE` and `owner/name:TYPE` choose a GGUF file by its type, such as
            `Q4_K_M`.
        drafter: what proposes draft tokens, unless a request names another. It never changes the output. It
            is a name with options, such as `"suffix"` or `"draft-model(model=path)"`, or a composition such
            as `"suffix > mtp"`, or a class of drafters. `"auto"` chooses at each step whatever is fastest,
            plain decoding included. `"none"` and None: plain decoding. docs/drafters.md lists all.
        dtype: element type of the linear layers: `"auto"`, `"float32"`, `"bfloat16"`, `"int8"` or `"int4"`;
            see `soothsay.model.weights.load.load_model`.
        kv_dtype: how keys and values are kept: `"auto"`, or `"int8"`, with a scale for each token and head:
            about half the memory and the time of attention; docs/model-files.md says what it costs.
        tokenizer: takes the place of the model's own.
        chat_template: a file with a Jinja template, which takes the place of the model's own ones.
        device: where the model runs, as PyTorch names it. `"auto"`: what the environment variable
            `SOOTHSAY_DEVICE` says, or else the CPU; see docs/gpu.md.
        generation_config: where the defaults of sampling parameters are from: `"auto"`, the model's own
            generation_config.json or GGUF file, or else what its family recommends; a folder with a
            generation_config.json; or `"none"`.
        kernels: `"auto"`, the fastest that run here; or an instruction set such as `"avx2"` or `"portable"`;
            or `"stock"`, PyTorch's own operations. Bits of logits depend on it.
        keep: a directory for what drafters learn. Files of earlier runs are used; `save_learned` writes them.
            None: everything is forgotten at the end.
        adapters: LoRA adapters of the model, by the names that requests give: directories as PEFT writes
            them, or `owner/name` on the hub; see docs/adapters.md.
        stages: for a model that is too large for one machine: the number of processes of this machine that
            share its layers, or the addresses of `soothsay stage` on others; see docs/many-machines.md.
        config: the engine's numbers. A keyword sets one of them, such as `max_context=4096`, or `learn=0.1`
            for drafters that learn while they serve; see `EngineConfig`.

    Raises:
        ModelError: the model cannot be loaded.
        DrafterError: the drafter is unknown, or does not fit the model, or `keep` cannot be a directory.
        StageError: a process of `stages` has ended. Calls of `generate` raise it too.
        RuntimeError: torch has other defaults than float32 and the CPU.

    Example:
        >>> from soothsay import LLM, SamplingParams
        >>> llm = LLM("sibyl")  # or `with LLM("sibyl") as llm:`, which closes it
        >>> llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=5)).token_ids
        [17, 266, 5524, 17, 266]
        >>> params = SamplingParams(temperature=0, max_tokens=20)
        >>> hello, bye = llm.generate([llm.chat_prompt(text) for text in ("Hello!", "Bye!")], params)
        >>> for piece in llm.stream(llm.chat_prompt("Hello!"), params):
        ...     print(piece.text, end="", flush=True)
        Do you need help with...
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Transformer,
        *,
        drafter: DrafterSpec | None = "auto",
        dtype: DType = "auto",
        kv_dtype: KVDType = "auto",
        tokenizer: Tokenizer | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        device: str = "auto",
        generation_config: str | os.PathLike[str] = "auto",
        kernels: str = "auto",
        keep: str | os.PathLike[str] | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        stages: Stages = 1,
        config: EngineConfig | None = None,
        **engine_options: Unpack[EngineOptions],
    ):
        check_torch()
        known = [*(LLM.__init__.__kwdefaults__ or ()), *EngineConfig.__dataclass_fields__]
        threads = {"threads": "torch.set_num_threads sets those of the process"}
        check_names("LLM", engine_options, known, threads)
        config = (config or EngineConfig()).with_options(**engine_options)
        eos_ids: tuple[int, ...] = ()
        path = None
        self.sampling_defaults: dict[str, float] = {}
        """The sampling parameters that the model's author recommends, by the names of `SamplingParams`."""
        if generation_config not in ("auto", "none"):
            self.sampling_defaults = sampling_in_folder(generation_config)
        opened = opened_adapters({} if adapters is None else adapters, model, device, stages)
        if isinstance(model, Transformer):
            target, self._name = model, "of a Transformer"
            tokenizer = with_layout(tokenizer, chat_template)
        else:
            check_kernels(kernels)  # before a download
            checkpoint = open_checkpoint(model)
            self._name = repr(os.fspath(model))
            path = checkpoint.path
            tokenizer = with_layout(tokenizer or checkpoint.tokenizer(), chat_template)
            eos_ids = checkpoint.eos_ids if tokenizer is None else tokenizer.end_ids(checkpoint.eos_ids)
            if generation_config == "auto":
                self.sampling_defaults = checkpoint.sampling_defaults()
            if stages == 1:
                context = config.max_context
                target = load_model(checkpoint, dtype, device, kernels, context, kv_dtype=kv_dtype)
                loaded = {name: one.load(target, checkpoint) for name, one in opened.items()}
                target.own.adapters = Adapters(loaded, target.kernels, [*target.blocks])
            elif device in ("auto", "cpu"):
                target = load_pipeline(model, stages, dtype, kernels, config.max_context, kv_dtype)
            else:
                raise ModelError(f"a model in several stages runs on CPUs only, not on {device}")
        if tokenizer is not None and tokenizer.layout.problem is not None:
            warnings.warn(f"{tokenizer.layout.problem}: it is not used", stacklevel=2)
        self.tokenizer = tokenizer
        self.config = complete_config(config, target)
        context, longest = self.config.max_context or 0, target.spec.max_positions
        if context > longest and target.spec.counts_positions:
            warnings.warn(
                f"max_context={context:,} is more than the {longest:,} tokens that the model was made for: "
                "beyond these its answers may be poor",
                stacklevel=2,
            )
        kept = None if keep is None else LearnedFiles(keep)
        self.engine = Engine(target, tokenizer, self.config, path, kept)
        self._builder = RequestBuilder(target.spec, self.config, tokenizer, eos_ids)
        self._drafters: dict[DrafterSpec, Drafter] = {}
        self.drafter: DrafterSpec = "none" if drafter is None else drafter
        tell_progress("loading drafters")
        built = self._drafter(self.drafter)
        if config.learn and not can_learn(built):
            warnings.warn(
                f"learn={config.learn} has no effect: drafter {built.name!r} has no trained part here",
                stacklevel=2,
            )

    def __enter__(self) -> Self:
        self.engine.lock.check()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be pickled or copied; load the model in each process that needs it")

    def __repr__(self) -> str:
        if self.engine.lock.closed:
            return f"<LLM {self._name}, closed>"
        return f"<LLM {self._name}, drafter={self.drafter!r}: {self.numeric_mode}>"

    def close(self) -> None:
        """End all requests, and free the memory of the model and its drafters. Idempotent.

        Requests that run end as cancelled. Later calls of other methods raise `RuntimeError`. A model or a
        drafter to which the caller still refers keeps its memory.
        """
        self.engine.close()
        self._drafters.clear()

    @property
    def model(self) -> Transformer:
        """The target model."""
        self.engine.lock.check()
        return self.engine.model

    @property
    def numeric_mode(self) -> str:
        """What the bits of answers depend on besides the weights: kernels, number formats and versions."""
        model, adapters = self.model, self.model.own.adapters.named
        parts = nn.ModuleList([model, *(part for own in adapters.values() for part in own.parts.values())])
        mode = described_mode(parts, model.kernels, model.dtype, model.kv_dtype, model.bits)
        return ", ".join([mode, *(f"adapter {name} {own.digest[:16]}" for name, own in adapters.items())])

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that requests may choose."""
        return tuple(self.model.own.adapters.named)

    def about(self) -> dict[str, str]:
        """How the model runs here, in words: number formats, threads, KV pool, drafters, sampling."""
        model, tokens = self.model, self.config.kv_tokens or 0
        gib = kv_bytes(model.spec.kv_shapes, model.kv_dtype) * tokens / 2**30
        drafter = self._drafter(self.drafter)
        parts = [part.name for part in getattr(drafter, "parts", ())]
        defaults = [f"{name} {value:g}" for name, value in self.sampling_defaults.items()]
        return {
            "dtype": model.formats or str(model.dtype).removeprefix("torch."),
            "threads": f"{torch.get_num_threads()}",
            "kv_cache": f"{gib:,.2f} GiB for {tokens:,} tokens",
            "drafter": f"{drafter.name}" + (f": {', '.join(parts)}" if parts else ""),
            **({"sampling": f"{', '.join(defaults)}, by default"} if defaults else {}),
        }

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The parameters of requests that bring none: `SamplingParams()` with the model's own defaults.

        Example:
            >>> from dataclasses import replace
            >>> params = replace(llm.default_sampling_params, max_tokens=1000)
        """
        return SamplingParams(**self.sampling_defaults)  # type: ignore[arg-type]

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer. A checkpoint names them; a bare `Transformer` has none until set."""
        return self._builder.eos_ids

    @eos_ids.setter
    def eos_ids(self, ids: tuple[int, ...]) -> None:
        self._builder.eos_ids = ids

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str too; it means one prompt
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: DrafterSpec | None = None,
        adapter: str | None = None,
        traced: bool = False,
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        drafter: DrafterSpec | Sequence[DrafterSpec] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        traced: bool = False,
    ) -> list[Result]: ...

    @checks_names(MISPLACED)
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        drafter: DrafterSpec | Sequence[DrafterSpec] | None = None,
        adapter: str | Sequence[str | None] | None = None,
        traced: bool = False,
    ) -> Result | list[Result]:
        """Answer one prompt, or many together.

        Args:
            prompts: text, or token ids (a sequence or an array of integers), or a list of such prompts.
            params: how to sample, for all prompts, or a list with one for each. Default:
                `default_sampling_params`. Given parameters are used as they are: the model's defaults fill
                nothing in.
            drafter: the drafter for all prompts, or a list with one for each. Default: that of the `LLM`.
            adapter: the name of the adapter for all prompts, or a list with one for each. None: the model
                alone.
            traced: whether choices have a `StepTrace` of each step in their `traces`.

        Returns:
            A `Result` for one prompt, a list of them for a list. In a list, a request that cannot be served
            or at which the engine fails has the finish reason "error" and the message. The other requests are
            answered.

        Raises:
            RequestError: the one prompt cannot be served.
            StepError: the engine failed at the one prompt.
            TypeError: a prompt or its parameters are of a wrong type.
        """
        many, alone = listed(prompts)
        own_params = [self._params(one) for one in for_each(params, len(many), "params")]
        own_drafters = for_each(drafter, len(many), "drafters")
        own_adapters = for_each(adapter, len(many), "adapters")
        answers = list[Submitted | RequestError]()
        try:
            for asked in zip(many, own_params, own_drafters, own_adapters, strict=True):
                try:
                    answers.append(self._submit(*asked, traced))
                except RequestError as error:
                    if alone:
                        raise
                    answers.append(error)
            results = [
                refusal(one) if isinstance(one, RequestError) else one.result(failing=alone)
                for one in answers
            ]
        except BaseException:  # an interrupt or a wrong argument leaves no request in the engine
            for one in answers:
                if isinstance(one, Submitted):
                    one.cancel()
            raise
        return results[0] if alone else results

    def chat(
        self,
        messages: str | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        drafter: DrafterSpec | None = None,
        adapter: str | None = None,
        traced: bool = False,
        continue_final_message: bool = False,
        **variables: object,
    ) -> Result:
        """Answer a conversation, in the layout of the model's chat template.

        Args:
            messages: dicts with `role` and `content`, which is a text or a list of text parts; or a text,
                which is one message of a user.
            params: see `generate`.
            drafter: see `generate`.
            adapter: see `generate`.
            traced: see `generate`.
            continue_final_message: whether the answer continues the last message, which it has begun.
            variables: variables of the chat template, such as `tools=[...]` or `enable_thinking=False`.

        Raises `TypeError` for what is no message, and for what is meant for `params`, and what `generate`
        raises for one prompt.

        `chat_prompt` makes the prompt of a conversation, for `stream`, or for `generate` with many of them.

        Example:
            >>> params = SamplingParams(temperature=0, max_tokens=5)
            >>> asked = [[{"role": "user", "content": text}] for text in ("Hello!", "Who are you?")]
            >>> answers = llm.generate([llm.chat_prompt(messages) for messages in asked], params)
            >>> answers[0].text == llm.chat(asked[0], params).text
            True
        """
        prompt = self.chat_prompt(messages, continue_final_message=continue_final_message, **variables)
        return self.generate(prompt, params, drafter=drafter, adapter=adapter, traced=traced)

    @checks_names(MISPLACED)
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: DrafterSpec | None = None,
        adapter: str | None = None,
        traced: bool = False,
    ) -> Stream:
        """Answer one prompt piece by piece. The stream works with `for` and with `async for`.

        Arguments are those of `generate`, for one prompt. Raises `RequestError` if the prompt cannot be
        served or `params.n` is not 1. Iterating raises `StepError` if the engine fails at the prompt.

        Example:
            >>> messages = [{"role": "user", "content": "Hello!"}]
            >>> params = SamplingParams(temperature=0, max_tokens=5)
            >>> for piece in llm.stream(llm.chat_prompt(messages), params):
            ...     print(piece.text, end="", flush=True)
            Do you need help with
        """
        params = self._params(params)
        if params.n != 1:
            raise RequestError(
                f"a stream has one answer; call stream {params.n} times, or generate with n={params.n}"
            )
        return self._submit(prompt, params, drafter, adapter, traced).streams[0]

    def chat_prompt(
        self,
        messages: str | Sequence[Message],
        *,
        continue_final_message: bool = False,
        **variables: object,
    ) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        `variables` are those of the chat template, such as `enable_thinking=False`.
        """
        for name in variables:
            if name in MISPLACED:
                raise TypeError(f"{name!r} is no variable of a template; {MISPLACED[name]}")
            if meant := get_close_matches(name, inspect.signature(self.chat).parameters, n=1, cutoff=0.8):
                raise TypeError(f"there is no argument {name!r}; did you mean {meant[0]!r}?")
        if self.tokenizer is None:
            raise RequestError(f"{NO_TOKENIZER}. Give token ids to generate instead")
        return self.tokenizer.encode_chat(
            conversation(messages), continue_final_message=continue_final_message, **variables
        )

    def save_learned(self) -> int:
        """Write what drafters have learned to the directory `keep`. Returns the number of files.

        Raises `DrafterError` if there is no such directory, or something cannot be written.
        """
        if self.engine.kept is None:
            raise DrafterError(
                "there is no directory for what drafters learn; make the LLM with keep=DIRECTORY"
            )
        return self.engine.save_learned()

    def forget_learned(self) -> None:
        """Let drafters forget what they have learned, here and in the directory `keep`.

        Raises `RequestError` while there are requests.
        """
        self.engine.forget_learned()

    def requests(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        drafter: DrafterSpec | None = None,
        max_nodes: int | None = None,
        priority: int = 0,
        traced: bool = False,
        tenant: Tenant = EVERYBODY,
        adapter: str | None = None,
    ) -> list[Request]:
        """Check a prompt and build its `n` requests, for callers that run `engine` themselves.

        The requests do not wait in the engine yet.

        Args:
            prompt: text or token ids.
            params: how to sample.
            drafter: in place of the model's default.
            max_nodes: largest number of draft tokens in a step. 0: plain decoding. None: what drafter and
                engine allow.
            priority: requests with a lower number are served first, as in vLLM; within a number, in order of
                arrival.
            traced: whether the requests keep a `StepTrace` of each step in their `traces`.
            tenant: whose requests they are. Tenants share no prefixes, drafts, statistics or grammars.
            adapter: the name of the adapter that answers; None: the model alone does.

        Raises:
            RequestError: the prompt cannot be served, or there is no such adapter.
            DrafterError: the drafter is unknown, or does not fit the model.
            RuntimeError: the process was forked after the model was loaded, or torch has other defaults than
                float32 and the CPU.
        """
        self.engine.lock.check()
        check_torch()
        checked = self._builder.check(prompt, params)
        if adapter is not None and adapter not in self.adapters:
            have = ", ".join(self.adapters) or "no adapters"
            raise RequestError(f"there is no adapter {adapter!r:.200}; this model has {have}")
        if max_nodes is not None and max_nodes < 0:
            raise RequestError(f"max_nodes={max_nodes} is not possible: it must be at least 0, or None")
        own_drafter = self._drafter(self.drafter if drafter is None else drafter)
        if max_nodes == 0:
            own_drafter = self._drafter("none")
        return self._builder.build(
            checked,
            own_drafter,
            max_nodes=max_nodes,
            priority=priority,
            traced=traced,
            tenant=tenant,
            adapter=adapter,
        )

    def constraint(self, params: SamplingParams, tenant: Tenant = EVERYBODY) -> Constraint | None:
        """Compile the grammar of `params`, for one answer. None: `params` have no grammar.

        A grammar that was compiled for the tenant before is not compiled again.

        Raises `RequestError` if the grammar cannot be compiled, or an answer could not end.
        """
        return self._builder.constraint(params, tenant)

    def _params(self, given: SamplingParams | None) -> SamplingParams:
        """The parameters of a request. Raises `TypeError` if they are none."""
        if given is None:
            return self.default_sampling_params
        check_params(given)
        return given

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        drafter: DrafterSpec | None,
        adapter: str | None,
        traced: bool,
    ) -> Submitted:
        """Check a prompt and add its `n` requests to the engine."""
        requests = self.requests(prompt, params, drafter=drafter, adapter=adapter, traced=traced)
        streams = [Stream(self.engine, request) for request in requests]  # which end them if adding fails
        for request in requests:
            self.engine.add(request)
        return Submitted(requests[0].tokens[: requests[0].num_prompt].tolist(), streams)

    def _drafter(self, spec: DrafterSpec) -> Drafter:
        """Return the drafter that `spec` names. Each spec is built once."""
        if not isinstance(spec, str) and not callable(spec):  # a drafter, or nothing that makes one
            return build_drafter(spec, self.engine.target)
        if spec not in self._drafters:
            self._drafters[spec] = build_drafter(spec, self.engine.target)
        return self._drafters[spec]
